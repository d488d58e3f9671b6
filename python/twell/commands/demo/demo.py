"""``twell demo``: train a small ReLU-gated transformer with L1, then compare its FFN layers sparse and dense."""

import contextlib
import copy
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from twell import testing
from twell._runtime.device import SM_90
from twell.commands.demo.compare import LOSS_TOLERANCE, LayerComparison, agreement_table, compare_layer, sparsity_table
from twell.commands.demo.corpus import Corpus, even_windows, read_corpus
from twell.commands.demo.model import ByteModel, ModelShape, Output, Reading, Schedule, train
from twell.commands.request import RequestError, pick_device
from twell.functional import Strategy, pack, sparse_gated_ffn

INTERRUPTED = 130
EVALUATION_BATCH = 8  # windows of held-back text per pass


@dataclass(frozen=True)
class Preset:
    """Defaults for one kind of machine; `tokens` of held-back text are compared."""

    shape: ModelShape
    batch: int
    learning_rate: float
    l1: float
    seconds: float
    tokens: int
    report_every: int


CPU = Preset(ModelShape(4, 128, 1024, 128), 8, 3e-3, 3e-3, 60, 4096, 1)
GPU = Preset(ModelShape(6, 512, 2048, 256), 32, 2e-3, 1e-3, 90, 4096, 10)
SM90 = Preset(ModelShape(6, testing.PAPER_HIDDEN, testing.PAPER_NEURONS, 512), 32, 6e-4, 1e-4, 150, 16384, 10)


@dataclass(frozen=True)
class DemoRequest:
    """The arguments of `twell demo`. None: the machine's preset (`text`: the standard library's source)."""

    text: Path | None = None
    device: str | None = None
    seconds: float | None = None
    steps: int | None = None
    seed: int = 0
    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    context: int | None = None
    l1: float | None = None
    compression: int = 8


def pick_preset(device: torch.device) -> Preset:
    if device.type != "cuda":
        return CPU
    return SM90 if torch.cuda.get_device_capability(device) == SM_90 else GPU


def pick_shape(request: DemoRequest, preset: Preset) -> ModelShape:
    """The sizes of the request, by default the preset's. Raises RequestError if they cannot be built."""
    default = preset.shape
    shape = ModelShape(
        request.layers if request.layers is not None else default.layers,
        request.hidden if request.hidden is not None else default.hidden,
        request.intermediate if request.intermediate is not None else default.intermediate,
        request.context if request.context is not None else default.context,
    )
    if shape.hidden % 32:
        raise RequestError(f"--hidden: expected a multiple of 32 (the size of an attention head), got {shape.hidden}")
    if shape.intermediate % 8 or shape.intermediate > 65536:
        raise RequestError(f"--intermediate: expected a multiple of 8 up to 65536, got {shape.intermediate}")
    return shape


def schedule_of(request: DemoRequest, preset: Preset) -> Schedule:
    """The training schedule. --steps without --seconds bounds it alone, so that the run can be repeated."""
    seconds = request.seconds if request.seconds is not None or request.steps is not None else preset.seconds
    l1 = request.l1 if request.l1 is not None else preset.l1
    return Schedule(preset.batch, preset.learning_rate, l1, seconds, request.steps, preset.report_every)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[float, str], None]]:
    """Show a share and a text: as a bar on a terminal, redrawn in place; elsewhere a plain line at each tenth."""
    terminal = sys.stdout.isatty()
    shown = -1

    def show(share: float, figures: str) -> None:
        nonlocal shown
        text = f"{100 * share:3.0f} %  {figures}"
        if terminal:
            width = min(40, shutil.get_terminal_size().columns - len(text) - 4)
            done = round(width * share)
            bar = f"[{'#' * done}{'.' * (width - done)}] " if width >= 8 else ""
            print(f"\r\x1b[K{bar}{text}", end="", flush=True)
        elif (tenth := int(10 * share)) > shown:
            shown = tenth
            print(f"  {text}", flush=True)

    try:
        yield show
    finally:
        if terminal:
            print()


def figures_of(r: Reading) -> str:
    return (
        f"step {r.step:5,}  loss {r.loss:.3f}  non-zeros/token {r.non_zeros:6.1f}  {r.tokens_per_second:8,.0f} tokens/s"
    )


@torch.no_grad()
def token_losses(model: ByteModel, tokens: Tensor, strategy: Strategy, compression: int) -> Tensor:
    """Cross-entropy of each predicted byte, fp32 [windows, length - 1], with every FFN run by `strategy`."""
    before = [(mlp.strategy, mlp.compression) for mlp in model.mlps]
    for mlp in model.mlps:
        mlp.strategy, mlp.compression = strategy, compression
    losses = []
    for part in torch.split(tokens, EVALUATION_BATCH):
        output: Output = model(part[:, :-1])
        losses.append(F.cross_entropy(output.logits.float().transpose(1, 2), part[:, 1:], reduction="none"))
    for mlp, (old_strategy, old_compression) in zip(model.mlps, before, strict=True):
        mlp.strategy, mlp.compression = old_strategy, old_compression
    return torch.cat(losses)


@torch.no_grad()
def ffn_inputs(model: ByteModel, tokens: Tensor) -> list[Tensor]:
    """Inputs of each FFN layer of `model` on tokens [windows, length]: [windows * length, hidden] per layer."""
    seen: list[list[Tensor]] = [[] for _ in model.mlps]

    def hook_of(layer: int) -> Callable[[torch.nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: seen[layer].append(inputs[0].flatten(0, -2))

    hooks = [mlp.register_forward_pre_hook(hook_of(i)) for i, mlp in enumerate(model.mlps)]
    for part in torch.split(tokens, EVALUATION_BATCH):
        model(part)
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in seen]


def preflight(shape: ModelShape, device: torch.device, compression: int) -> None:
    """Run the sparse path once, to find a missing kernel before the training."""
    x = torch.zeros(8, shape.hidden, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(shape.intermediate, shape.hidden, dtype=torch.bfloat16, device=device)
    sparse_gated_ffn(x, weight, weight, weight.t(), strategy="row", compression=compression)
    pack(x, weight, compression=compression).unpack()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def model_failures(dense_loss: float, sparse_loss: float) -> list[str]:
    if abs(sparse_loss - dense_loss) <= LOSS_TOLERANCE:
        return []
    return [
        f"held-back loss through TwELL: expected within {LOSS_TOLERANCE} of dense's {dense_loss:.4f}, "
        f"got {sparse_loss:.4f}"
    ]


def _describe_machine(device: torch.device, checked: torch.device) -> Iterator[str]:
    if device.type == "cpu":
        yield f"Machine: CPU, {torch.get_num_threads()} threads; torch {torch.__version__}"
    else:
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        yield f"Machine: {name} (sm_{capability[0]}{capability[1]}); torch {torch.__version__}"
        if checked != device:
            yield "This GPU trains the model; the comparison runs on the CPU, since TwELL's kernels need an sm_90 GPU."


def _describe_text(corpus: Corpus) -> Iterator[str]:
    files = corpus.train_files + corpus.held_files
    size = (corpus.train_bytes + corpus.held_bytes) / 1e6
    cut = " (the rest of the folder exceeds the limit of 64 MiB and is left out)" if corpus.truncated else ""
    yield f"Text: {corpus.root}, {files:,} files, {size:.1f} MB{cut}"
    yield (
        f"Held back, never trained on: {corpus.held_files:,} whole files, {corpus.held_bytes:,} bytes; "
        f"{corpus.train_bytes:,} bytes to train on"
    )


def _describe_model(model: ByteModel, schedule: Schedule) -> Iterator[str]:
    shape = model.shape
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    yield (
        f"Model: bytes in and out, {shape.layers} layers, hidden {shape.hidden}, {shape.intermediate} neurons per "
        f"layer, context {shape.context}; {millions:.1f} M parameters"
    )
    limits = [f"{schedule.steps:,} steps"] if schedule.steps is not None else []
    limits += [f"{schedule.seconds:g} s"] if schedule.seconds is not None else []
    yield (
        f"Training for {' or '.join(limits)} on cross-entropy + {schedule.l1:g} x L1 of the hidden state, "
        f"{schedule.batch * shape.context:,} bytes per step"
    )


def _notes(reports: Sequence[LayerComparison], checked: torch.device) -> Iterator[str]:
    yield "up/down skipped: share of the (token, neuron) pairs whose up and down weight rows are not read."
    yield "tiles overflowing: share of tiles, 256 neurons of a token, with more non-zeros than fit."
    floor = f"1/{1 / testing.ROW_FLOOR:.0f}"
    yield "Errors are relative, against the FFN in float64 on the same bf16 values; dense is PyTorch in bf16. A row's"
    yield f"  error is relative to its norm, but at least to {floor} of the root mean square norm."
    if reports[0].sparse_ms is None:
        yield "No times: this ran on the CPU, where TwELL is exact but not fast. Speed needs an sm_90 GPU (H100, H200)."
    else:
        yield (
            f"Times: the whole FFN (gate, up and down) on {reports[0].non_zeros.numel():,} tokens, eager, on "
            f"{torch.cuda.get_device_name(checked)};"
        )
        yield "  medians of CUDA events, dense and sparse in turn."


def run(request: DemoRequest) -> int:
    """Run the demo and print its progress.

    Returns the exit code: 0, 1 on disagreement, divergence or a missing kernel, 130 if nothing was trained.
    Raises RequestError before any training if the request cannot be met.
    """
    device = pick_device(request.device)
    preset = pick_preset(device)
    shape = pick_shape(request, preset)
    schedule = schedule_of(request, preset)
    corpus = read_corpus(request.text, request.seed, minimum=8 * (shape.context + 1))
    checked = device if preset is SM90 else torch.device("cpu")
    try:
        preflight(shape, checked, request.compression)
    except RuntimeError as error:
        print(f"twell demo: the sparse path does not run on {checked}: {error}", file=sys.stderr)
        return 1

    torch.manual_seed(request.seed)
    model = ByteModel(shape).to(device)
    for lines in (_describe_machine(device, checked), _describe_text(corpus), _describe_model(model, schedule)):
        print(*lines, sep="\n")

    def notice() -> None:
        print("\nStopping after this step to evaluate the model so far; Ctrl-C again quits.", flush=True)

    with progress() as show:
        history = train(model, corpus.train, schedule, request.seed, lambda r: show(r.progress, figures_of(r)), notice)
    if not history.steps:
        print("Interrupted before the first step.", file=sys.stderr)
        return INTERRUPTED
    ended = "interrupted" if history.interrupted else "done"
    print(f"Training {ended}: {history.steps:,} steps, {history.tokens:,} bytes, {history.seconds:.1f} s")

    started = time.perf_counter()
    model = copy.deepcopy(model).to(device=checked, dtype=torch.bfloat16)
    tokens = even_windows(corpus.held, max(1, preset.tokens // shape.context), shape.context + 1).to(checked)
    reports: list[LayerComparison] = []
    with progress() as show:
        stages = shape.layers + 2
        show(0, "held-back text through dense layers")
        dense_loss = token_losses(model, tokens, "dense", request.compression).mean().item()
        if not math.isfinite(dense_loss):
            print(
                f"Training diverged: the held-back loss is {dense_loss}. Try another --l1 or --seed.", file=sys.stderr
            )
            return 1
        show(1 / stages, "held-back text through TwELL")
        sparse_loss = token_losses(model, tokens, "row", request.compression).mean().item()
        for layer, (x, mlp) in enumerate(zip(ffn_inputs(model, tokens[:, :-1]), model.mlps, strict=True)):
            show((layer + 2) / stages, f"layer {layer} sparse, dense and in float64")
            reports.append(compare_layer(layer, x, mlp, request.compression))
        show(1, "compared")

    count = tokens[:, :-1].numel()
    print(
        f"\nThe trained FFN layers on {count:,} bytes of the held-back text, through TwELL (compression "
        f"{request.compression}) and dense, in bf16\n"
    )
    print("Sparsity of the gate", *sparsity_table(reports), sep="\n")
    print("\nErrors of the output against float64, and times", *agreement_table(reports), sep="\n")
    print("", *_notes(reports, checked), sep="\n")
    print(f"\nHeld-back loss of the whole model, nats per byte: dense {dense_loss:.4f}, TwELL {sparse_loss:.4f}")

    failures = [f"layer {r.layer}: {f}" for r in reports for f in r.failures] + model_failures(dense_loss, sparse_loss)
    print(f"\nEvaluation took {time.perf_counter() - started:.1f} s")
    if failures:
        print("\nFAILED: sparse and dense disagree", *(f"  {failure}" for failure in failures), sep="\n")
        return 1
    skipped = sum(r.skipped for r in reports) / len(reports)
    print(
        f"\nAgreed: TwELL skipped {100 * skipped:.0f} % of the up and down projections of {len(reports)} layers, and "
        f"is as exact as dense PyTorch (up to {max(r.comparison.factor for r in reports):.3g} times its errors pass).\n"
        "Next: `twell analyze MODEL --text FILE` says, without a GPU, whether a model of yours would run faster."
    )
    return 0
