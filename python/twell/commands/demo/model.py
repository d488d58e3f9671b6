"""The demo's model: a small Llama-like byte-level transformer with a ReLU-gated FFN, and its time-boxed training."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell.commands.demo.corpus import windows
from twell.nn import SparseGatedMLP

VOCABULARY = 256  # bytes
BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
LR_WARMUP, LR_FLOOR = 0.05, 0.1  # as a share of the run; the final rate as a share of the peak
L1_START, L1_FULL = 0.05, 0.3  # the L1 coefficient grows from 0 to its full value between these shares of the run


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. Each FFN has `intermediate` neurons; a window of text has `context` bytes."""

    layers: int
    hidden: int
    intermediate: int
    context: int

    @property
    def head_size(self) -> int:
        return 64 if self.hidden >= 512 and self.hidden % 64 == 0 else 32

    @property
    def heads(self) -> int:
        return self.hidden // self.head_size


def rotary(length: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE's angles: two fp32 [length, head_size / 2]."""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2, device=device) / head_size)
    angle = torch.arange(length, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the two halves of the last dimension of x [..., length, head_size] by the position's angles."""
    cos, sin = angles
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.head_size = shape.heads, shape.head_size
        self.qkv_proj = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, hidden = x.shape
        qkv: Tensor = self.qkv_proj(x)
        q, k, v = qkv.view(batch, length, 3, self.heads, self.head_size).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, hidden))
        return out


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.mlp = SparseGatedMLP(shape.hidden, shape.intermediate, strategy="dense")


@dataclass(frozen=True)
class Output:
    """logits [batch, length, 256]; l1 and l0 [layers]: means over tokens of sum |h| and of the non-zeros."""

    logits: Tensor
    l1: Tensor
    l0: Tensor


class ByteModel(nn.Module):
    """Token ids [batch, length] -> Output. Initialised from torch's global generator."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.5 / math.sqrt(shape.hidden)
                nn.init.normal_(parameter, std=scale / math.sqrt(2 * shape.layers) if into_residual else scale)

    @property
    def mlps(self) -> list[SparseGatedMLP]:
        return [block.mlp for block in self.blocks if isinstance(block, Block)]

    def forward(self, tokens: Tensor) -> Output:
        x: Tensor = self.embedding(tokens)
        angles = rotary(tokens.shape[1], self.shape.head_size, tokens.device)
        l1, l0 = [], []
        for block in self.blocks:
            assert isinstance(block, Block)
            x = x + block.attention(block.attention_norm(x), angles)
            y, aux = block.mlp(block.mlp_norm(x), return_aux=True)
            x = x + y
            l1.append(aux.l1)
            l0.append(aux.l0)
        return Output(self.head(self.norm(x)), torch.stack(l1), torch.stack(l0))


@dataclass(frozen=True)
class Schedule:
    """The training schedule; ends at `seconds` or `steps`, whichever comes first (None: no such limit)."""

    batch: int
    learning_rate: float
    l1: float
    seconds: float | None
    steps: int | None
    report_every: int  # steps between two readings of the loss, each of which waits for the device

    def progress(self, step: int, elapsed: float) -> float:
        """Share of the run that is done, 0 to 1."""
        by_steps = step / self.steps if self.steps is not None else 0.0
        by_time = elapsed / self.seconds if self.seconds is not None else 0.0
        return min(1.0, max(by_steps, by_time))


def learning_rate_factor(progress: float) -> float:
    """Linear warm-up, then a cosine down to LR_FLOOR."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return min(1.0, (progress + 1e-3) / LR_WARMUP) * (LR_FLOOR + (1 - LR_FLOOR) * cosine)


def l1_factor(progress: float) -> float:
    return min(1.0, max(0.0, (progress - L1_START) / (L1_FULL - L1_START)))


@dataclass(frozen=True)
class Reading:
    """Figures of the running training; non_zeros is the mean per token and layer."""

    step: int
    progress: float
    loss: float
    non_zeros: float
    tokens_per_second: float


@dataclass
class History:
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False


class StopRequest:
    """A flag that the first Ctrl-C sets: training ends after its step, and the model is evaluated."""

    requested = False


@contextlib.contextmanager
def graceful_interrupt(notice: Callable[[], None]) -> Iterator[StopRequest]:
    """Turn the first SIGINT into a request (calling `notice`), the second into KeyboardInterrupt."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        notice()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Set torch to deterministic algorithms (they cost speed on a GPU), and restore the setting afterwards."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def train(
    model: ByteModel,
    text: Tensor,
    schedule: Schedule,
    seed: int,
    report: Callable[[Reading], None],
    notice: Callable[[], None],
) -> History:
    """Train `model` on uint8 `text` [bytes]: cross-entropy + l1 * mean over layers and tokens of sum |h|.

    The windows depend on `seed` alone, and everything else on the step number if `schedule.seconds` is None. On a GPU
    the products run in bf16 by autocast over fp32 weights.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    text = text.to(device)
    length = model.shape.context + 1
    history = History()
    model.train()
    start = time.perf_counter()
    with graceful_interrupt(notice) as stop, deterministic(schedule.seconds is None and device.type == "cuda"):
        while (progress := schedule.progress(history.steps, time.perf_counter() - start)) < 1 and not stop.requested:
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate * learning_rate_factor(progress)
            starts = torch.randint(text.numel() - length + 1, (schedule.batch,), generator=generator, device="cpu")
            tokens = windows(text, starts.to(device), length)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                output: Output = model(tokens[:, :-1])
            loss = F.cross_entropy(output.logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            (loss + schedule.l1 * l1_factor(progress) * output.l1.mean()).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            history.steps += 1
            history.tokens += schedule.batch * model.shape.context
            if history.steps % schedule.report_every == 0 or history.steps in (1, schedule.steps):
                loss_now, non_zeros = loss.item(), output.l0.mean().item()
                elapsed = time.perf_counter() - start
                done = schedule.progress(history.steps, elapsed)
                reading = Reading(history.steps, done, loss_now, non_zeros, history.tokens / elapsed)
                report(reading)
        history.interrupted = stop.requested
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    history.seconds = time.perf_counter() - start
    model.eval()
    return history
