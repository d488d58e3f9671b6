"""``twell demo``: train a small transformer to be sparse, then compare its layers by "row", "union" and "dense"."""

import argparse
import contextlib
import copy
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twell import recipe, testing
from twell.base.files import files_below
from twell.base.text import aligned
from twell.call.functional import Strategy
from twell.commands import timing
from twell.commands.request import DEVICE_HELP, RequestError, at_least, number_above, pick_device
from twell.nn.layers import SparseGatedMLP
from twell.nn.models import set_down_layout, set_strategy
from twell.runtime.device import SM_90

DESCRIPTION = """\
Train a small transformer with ReLU-gated feed-forward layers and an L1 term on text, byte by byte, run its layers
sparse and dense on held-back text, and compare both with float64. Ctrl-C ends the training early. Exits with 1 if
sparse and dense disagree. Times are of CUDA graphs on an H100 or H200.
"""
MOST_BYTES, LEAST_BYTES, HELD_SHARE = 64 << 20, 4096, 0.1
# Seconds of replays for the times of a layer.
TIMED_S = 0.3
LOSS_TOLERANCE = 0.01  # nats per byte between the model run densely and sparse


class Preset(NamedTuple):
    """Of a kind of machine: the model, windows of a step and their training, and the held-back tokens to compare."""

    layers: int
    hidden: int
    neurons: int
    context: int
    batch: int
    rate: float
    l1: float
    seconds: float
    tokens: int


CPU = Preset(4, 128, 1024, 128, 8, 3e-3, 3e-3, 60, 4096)
GPU = Preset(6, 512, 2048, 256, 32, 2e-3, 1e-3, 90, 4096)
HOPPER = Preset(6, testing.PAPER_HIDDEN, testing.PAPER_NEURONS, 512, 32, 6e-4, 1e-4, 150, 16384)


class Block(nn.Module):
    def __init__(self, hidden: int, neurons: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, False), nn.Linear(hidden, hidden, False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.mlp = SparseGatedMLP(hidden, neurons, strategy="dense")

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class ByteModel(nn.Module):
    """Bytes [batch, length] to logits [batch, length, 256]."""

    def __init__(self, sizes: Preset) -> None:
        super().__init__()
        self.of_byte, self.of_place = nn.Embedding(256, sizes.hidden), nn.Embedding(sizes.context, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes.hidden, sizes.neurons) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden), nn.Linear(sizes.hidden, 256, False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=(0.2 if into_residual else 0.5) / sizes.hidden**0.5)

    def forward(self, ids: Tensor) -> Any:
        x: Any = self.of_byte(ids) + self.of_place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(folder: Path | None) -> tuple[Tensor, Tensor]:
    """The bytes of the UTF-8 files of a folder, by default the standard library's, to train on and held back."""
    root, suffix = (Path(sysconfig.get_path("stdlib")), ".py") if folder is None else (folder, "")
    if not root.is_dir():
        raise RequestError(f"--text: expected a folder of text files, got {str(root)!r}")
    data = bytearray()
    for path in files_below(root, suffix):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            path.read_text(encoding="utf-8")
            data += path.read_bytes()
        if len(data) > MOST_BYTES:
            break
    if len(data) < LEAST_BYTES:
        got = f"{len(data):,} in {str(root)!r}"
        raise RequestError(f"--text: expected at least {LEAST_BYTES:,} bytes of UTF-8, got {got}")
    text = torch.frombuffer(data, dtype=torch.uint8)
    at = int(len(text) * (1 - HELD_SHARE))
    return text[:at], text[at:]


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """So many bytes from each start: int64 [starts, length]."""
    return text[starts[:, None] + torch.arange(length, device=starts.device)].long()


def train(model: ByteModel, text: Tensor, sizes: Preset, steps: int | None, seconds: float, seed: int) -> int:
    """Train for so many steps or seconds, whichever end first; the number of steps. Ctrl-C ends it."""
    device, length = next(model.parameters()).device, min(sizes.context + 1, len(text))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.rate, betas=(0.9, 0.95), fused=True)
    recipe.record_aux(model)
    text, began, step = text.to(device), time.perf_counter(), 0
    try:
        while (done := max(step / steps if steps else 0.0, (time.perf_counter() - began) / seconds)) < 1:
            for group in optimizer.param_groups:
                group["lr"] = sizes.rate * min(1.0, (done + 1e-3) / 0.05) * (1.05 - done)
            starts = torch.randint(len(text) - length + 1, (sizes.batch,), generator=generator, device="cpu")
            ids = windows(text, starts.to(device), length)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            fired = torch.stack([layer.aux.l0 for layer in recipe.layers(model).values() if layer.aux]).mean()
            (loss + sizes.l1 * min(1.0, done / 0.3) * recipe.l1_term(model)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 20 == 1:
                figures = f"loss {loss.item():.3f}  {fired.item():5.0f} non-zeros per token"
                print(f"{done:4.0%}  step {step:5}  {figures}", flush=True)
    except KeyboardInterrupt:
        if not step:
            raise
        print("interrupted: the model so far is compared", flush=True)
    recipe.record_aux(model, False)
    return step


@torch.no_grad()
def inputs_of(model: ByteModel, ids: Tensor) -> Iterator[tuple[SparseGatedMLP, Tensor]]:
    """Each feed-forward layer with its input [tokens, K]."""
    found: list[Tensor] = []
    for mlp in recipe.layers(model).values():
        assert isinstance(mlp, SparseGatedMLP)
        handle = mlp.register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(0, -2)))
        model(ids)
        handle.remove()
        yield mlp, found.pop()


@torch.no_grad()
def compared(mlp: SparseGatedMLP, x: Tensor) -> tuple[list[str], list[str]]:
    """Cells of a table of a layer on tokens x, and what is wrong."""
    problem = testing.FFN(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.t())
    fired = F.relu(testing.float64_gate(problem)) != 0
    cells, wrong = [f"{float(fired.sum(1).double().mean()):.1f}", f"{float((~fired.any(0)).double().mean()):.1%}"], []
    strategies: tuple[Strategy, ...] = ("dense", "row", "union")
    for strategy in strategies[1:]:
        mlp.strategy = strategy
        found = testing.compare(problem, mlp(x))
        cells.append(f"{found.ours.frobenius:.2e}")
        wrong += [] if found.ok else [f'"{strategy}": {found}']
    cells.append(f"{found.dense.frobenius:.2e}")
    if x.is_cuda:
        set_down_layout(mlp, "rows")
        recordings = {}
        for strategy in strategies:
            # a graph keeps the strategy of its capture
            mlp.strategy = strategy
            recordings[str(strategy)] = timing.Graph(lambda i: (mlp(x),), 8)
        cells += [f"{timing.spread(each).median:.3f}" for each in timing.measure(recordings, TIMED_S).values()]
    return cells, wrong


@torch.no_grad()
def loss_of(model: ByteModel, ids: Tensor, strategy: Any) -> float:
    """Nats per byte."""
    set_strategy(model, strategy)
    logits = torch.cat([model(part[:, :-1]) for part in torch.split(ids, 8)])
    return float(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", type=Path, metavar="DIR", help="folder of text files (default: the Python standard library's source)")
    add("--device", help=DEVICE_HELP)
    add("--seconds", type=number_above(0), metavar="S", help="training time (default: 60 on a CPU, more on a GPU)")
    add("--steps", type=at_least(1), metavar="N", help="training steps; without --seconds there is no limit of time")
    add("--seed", type=at_least(0), metavar="N", default=0, help="seed of weights and text (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Train, compare and print; 1 if sparse and dense disagree. Raises RequestError if the request cannot be met."""
    device = pick_device(arguments.device)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == SM_90
    sizes = HOPPER if hopper else GPU if device.type == "cuda" else CPU
    text, held = read_text(arguments.text)
    torch.manual_seed(arguments.seed)
    model = ByteModel(sizes).to(device)
    print(f"{sizes.layers} layers of {sizes.hidden:,} to {sizes.neurons:,}, {len(text):,} bytes to train on")
    # a run of steps alone is repeatable
    seconds = arguments.seconds or (math.inf if arguments.steps else sizes.seconds)
    steps = train(model, text, sizes, arguments.steps, seconds, arguments.seed)
    # kernels of other GPUs have no measured costs: compared on the CPU, they are the same functions
    checked = device if hopper else torch.device("cpu")
    model = copy.deepcopy(model).to(checked, torch.bfloat16).eval()
    length = min(sizes.context + 1, len(held))
    count = max(1, min(sizes.tokens // length, len(held) // length))
    ids = windows(held, torch.arange(count, device="cpu") * length, length).to(checked)
    dense, sparse = (loss_of(model, ids, strategy) for strategy in ("dense", "row"))
    set_strategy(model, "dense")
    rows = [["layer", "non-zeros", "never fire", '"row"', '"union"', "dense"]]
    rows[0] += ["dense, ms", '"row", ms', '"union", ms'] if hopper else []
    failures = [] if abs(dense - sparse) <= LOSS_TOLERANCE else ["the losses of the model differ"]
    for i, (mlp, x) in enumerate(inputs_of(model, ids[:, :-1])):
        cells, wrong = compared(mlp, x)
        mlp.strategy = "dense"
        rows.append([str(i), *cells])
        failures += [f"layer {i}, {each}" for each in wrong]
    count = ids[:, 1:].numel()
    print(f"\nAfter {steps} steps, on {count:,} bytes of held-back text: non-zeros of a token, of {sizes.neurons:,}")
    print("neurons, and relative errors of y against float64\n", *aligned(rows), sep="\n")
    print(f"\nHeld-back loss, nats per byte: dense {dense:.4f}, sparse {sparse:.4f}")
    if not hopper:
        print("No times: speed needs an H100 or H200.")
    if failures:
        print("\nFAILED: sparse and dense disagree", *(f"  {failure}" for failure in failures), sep="\n")
        return 1
    print("\nAgreed: sparse layers are as exact as dense PyTorch.")
    print("Next: `twell analyze MODEL --text FILE` says, without a GPU, whether a model of yours would run faster.")
    return 0
