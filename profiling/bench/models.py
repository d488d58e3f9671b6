"""``python -m profiling.bench model``: a trained model on text, or the paper's configurations with random weights."""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from profiling.bench import report
from profiling.bench.energy import EnergyMeter, open_meter
from profiling.bench.models_random import PAPER, LlamaSizes, Pattern, build, draw, draw_ids, paper_nnz, parse_sizes
from profiling.bench.models_run import OPS, ModelRow, Settings, Subject, fitting_micro_batch, run_op
from profiling.bench.report import Column, Progress, require_writable
from twell import testing
from twell.commands import saved_model
from twell.commands.request import DEVICE_HELP, RequestError, at_least, number_above, number_from, pick_device

NAME = "profiling.bench model"

DESCRIPTION = """\
Time a whole model with sparse feed-forward layers beside the same model with dense ones, in eager mode and through
torch.compile: one run, one machine, interleaved. Only right results are timed: outputs, or the gradients of all
weights, are compared with those in fp32, and an error of more than 1.1 times that of dense eager gives a red row
without speed and exit status 1. With few tokens more is allowed: 1.14 times for 8,192 tokens, 1.39 for 128.
"""

EPILOG = """\
models:
  MODEL         a folder from save_pretrained with ReLU layers, run on --text, with the model's own sparsity
  --config      0.5B, 1B, 1.5B, 2B: sizes of the paper, with random weights, one after the other. Thresholds give each
                layer non-zeros around the paper's mean: 39, 34 (interpolated), 29 and 24. --skew, --dead and --topic
                set the pattern; the resulting non-zeros and unions of 128 tokens are printed by layer.
                LAYERSxHIDDENxNEURONS[xHEADS[xVOCAB]] is any other configuration

operations:
  forward       the decoder without its LM head on --batch sequences of --sequence tokens, bf16, as in the paper
  logits        the same with the LM head
  train         an optimizer step on --accumulate passes of --micro-batch sequences: forward, cross-entropy plus 2e-5
                times L1, backward, in bf16 autocast over fp32 weights, and AdamW of rate 0, which keeps the sparsity

variants:
  dense         strategy "dense": cuBLAS products and, in eager mode, one kernel for relu(gate) * up
  sparse        strategy "auto", settled before anything is timed or compiled
  eager, compiled   without and with torch.compile of each decoder layer

columns:
"""

COMPILE = "default", "none"
_BACKEND = "inductor"


class _Report(report.Run):
    """The results of a run so far, and their file."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device, meter: EnergyMeter | None) -> None:
        super().__init__(NAME, arguments.json, self.facts)
        self.arguments, self.device, self.meter = arguments, device, meter
        self.subjects: list[dict[str, Any]] = []
        self.idle_watts: float | None = None
        self.machine = ""

    def facts(self) -> dict[str, Any]:
        """What the file holds besides rows."""
        more: dict[str, Any] = {"machine": self.machine, "models": self.subjects}
        more["arguments"] = given(self.arguments) | {"compile": _compiled(self.arguments, self.device)}
        if self.meter is not None:
            more["energy"] = {"method": self.meter.method, "idle_watts": self.idle_watts}
        return more


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments for a file: names instead of paths."""
    values = {name: value for name, value in vars(arguments).items() if name != "json"}
    values["model"] = None if arguments.model is None else arguments.model.name
    values["text"] = [path.name for path in arguments.text or ()]
    values["config"] = [shape.name for shape in arguments.config or ()]
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG + "\n".join(f"  {column.name:<12}  {column.help}" for column in COLUMNS)
    what = parser.add_argument_group("model")
    add = what.add_argument
    add("model", type=Path, nargs="?", metavar="MODEL", help="folder of a saved model with its tokenizer")
    add("--config", type=parse_sizes, nargs="+", metavar="SIZE", help=f"{', '.join(PAPER)} or sizes: see below")
    add("--text", type=Path, nargs="+", metavar="PATH", help="text files or folders for MODEL")
    number = number_above(0)
    add("--nnz", type=number, nargs="+", metavar="Z", help="mean non-zeros per token, for all --config or for each")
    add("--skew", type=number_from(0, 10), metavar="S", help="spread of the neurons' readiness to fire (1.0)")
    add("--dead", type=number_from(0, 1), metavar="D", help="share of neurons that never fire (0.3)")
    add("--topic", type=number_from(0, 1), metavar="R", help="correlation of a document's tokens; 0 is hardest (0.5)")
    add("--seed", type=at_least(0), metavar="N", default=0, help="seed of weights and tokens (%(default)s)")

    run_as = parser.add_argument_group("operations")
    add = run_as.add_argument
    add("--ops", nargs="+", choices=OPS, default=list(OPS), help="operations (default: all)")
    add("--batch", type=at_least(1), metavar="B", default=64, help="sequences of a forward pass (%(default)s)")
    add("--sequence", type=at_least(2), metavar="S", default=2048, help="tokens of a sequence (%(default)s)")
    add("--micro-batch", type=at_least(1), metavar="B", help="sequences of a training pass (8, or fewer to fit memory)")
    add("--accumulate", type=at_least(1), metavar="A", default=2, help="passes of a training step (%(default)s)")

    how = parser.add_argument_group("measurement")
    add = how.add_argument
    add("--device", help=DEVICE_HELP)
    add("--compile", metavar="BACKEND", help="default, none, or a backend of torch.compile (default; none on a CPU)")
    add("--rounds", type=at_least(1), metavar="N", default=5, help="timed calls of each variant (%(default)s)")
    add("--energy", action="store_true", help="energy per token, by NVML: each variant alone")
    add("--json", type=Path, metavar="FILE", help="write the data")


def _check(arguments: argparse.Namespace) -> None:
    """Raise RequestError for arguments that contradict each other."""
    if (arguments.model is None) == (arguments.config is None):
        got = "neither" if arguments.model is None else "both"
        raise RequestError(f"expected either the folder of a model or --config, got {got}")
    if arguments.model is not None:
        if arguments.text is None:
            raise RequestError("--text: expected text to run the model on, got none")
        for name in ("nnz", "skew", "dead", "topic"):
            if getattr(arguments, name) is not None:
                raise RequestError(f"--{name} is for --config: a trained model has its own sparsity")
    elif arguments.text is not None:
        raise RequestError("--text is for MODEL: --config draws its tokens")
    elif arguments.nnz is not None and len(arguments.nnz) not in (1, len(arguments.config)):
        raise RequestError(
            f"--nnz: expected one value or one for each of {len(arguments.config)} configurations, "
            f"got {len(arguments.nnz)}"
        )
    require_writable(arguments.json)
    # the import takes seconds
    if arguments.compile not in (None, *COMPILE) and arguments.compile not in torch._dynamo.list_backends(None):
        # backends for debugging are accepted, too
        known = ", ".join((*COMPILE, *torch._dynamo.list_backends()))
        raise RequestError(f"--compile must be one of {known}, got {arguments.compile!r}")


def _needed(arguments: argparse.Namespace) -> int:
    """Sequences for all operations: two batches of each, so that no two successive calls are the same."""
    counts = [_step_sequences(arguments) if op == "train" else arguments.batch for op in arguments.ops]
    return 2 * max(counts)


def _step_sequences(arguments: argparse.Namespace) -> int:
    return int((arguments.micro_batch or 8) * arguments.accumulate)


def _subjects(arguments: argparse.Namespace, device: torch.device) -> Iterator[Callable[[], Subject]]:
    """A function for each model that makes it."""
    if arguments.model is not None:
        yield lambda: _saved(arguments, device)
    for i, shape in enumerate(arguments.config or ()):
        nnz = arguments.nnz and arguments.nnz[min(i, len(arguments.nnz) - 1)]
        yield lambda shape=shape, nnz=nnz: _drawn(arguments, shape, nnz, device)  # type: ignore[misc]


def _saved(arguments: argparse.Namespace, device: torch.device) -> Subject:
    """The model of a folder, in float32, and its tokens."""
    options = argparse.Namespace(
        model=arguments.model,
        text=arguments.text,
        tokens=_needed(arguments) * arguments.sequence,
        sequence=arguments.sequence,
        device=str(device),
        dtype="float32",
        activation=None,
    )
    loaded = saved_model.load(options)
    text = saved_model.read(loaded, options, least=options.tokens)
    return Subject(arguments.model.resolve().name, loaded.model, torch.tensor(text.sequences, device="cpu"))


def _drawn(arguments: argparse.Namespace, shape: LlamaSizes, nnz: float | None, device: torch.device) -> Subject:
    """A model with random weights, and its tokens."""
    chosen = {name: getattr(arguments, name) for name in ("skew", "dead", "topic")}
    pattern = Pattern(nnz or paper_nnz(shape), **{name: value for name, value in chosen.items() if value is not None})
    ids = draw_ids(shape, _needed(arguments), arguments.sequence, pattern.topic, seed=arguments.seed)
    try:
        model = build(shape, arguments.sequence, device)
    except ValueError as error:
        raise RequestError(f"--config {shape.name}: {error}") from None
    draw(model, ids, pattern, arguments.seed)
    return Subject(shape.name, model, ids, str(pattern))


def _compiled(arguments: argparse.Namespace, device: torch.device) -> str:
    """The value of --compile, or its default."""
    return str(arguments.compile or ("none" if device.type == "cpu" else "default"))


def _settings(arguments: argparse.Namespace, subject: Subject) -> Settings:
    """The settings, with as many passes in a training step as its sequences need."""
    sequences, micro_batch = _step_sequences(arguments), arguments.micro_batch or 8
    if arguments.micro_batch is None and subject.device.type == "cuda":
        memory = torch.cuda.get_device_properties(subject.device).total_memory
        micro_batch = fitting_micro_batch(subject.config, subject.parameters, micro_batch, arguments.sequence, memory)
    compiled = _compiled(arguments, subject.device)
    return Settings(
        batch=arguments.batch,
        micro_batch=micro_batch,
        accumulate=sequences // micro_batch,
        rounds=arguments.rounds,
        backend={"default": _BACKEND, "none": ""}.get(compiled, compiled),
    )


def run(arguments: argparse.Namespace) -> int:
    """Time the request. Return 0, 1 if a row is red, 2 if a file could not be written, 130 for Ctrl-C.

    The rows so far are printed and, if there are any, written, after Ctrl-C, too. Raises RequestError if the request
    cannot be met, ImportError without transformers, or without pynvml if it is needed.
    """
    _check(arguments)
    device = pick_device(arguments.device)
    meter = open_meter(device) if arguments.energy else None
    this = _Report(arguments, device, meter)
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        this.machine = testing.machine_line(device)
        this.measure(lambda: _measure(this))
    _print(this)
    return this.status()


def _measure(this: _Report) -> None:
    """Run all operations on all models; write the data after each."""
    arguments, progress = this.arguments, Progress(NAME)
    # train comes last: it casts the weights
    ops = [op for op in OPS if op in arguments.ops]
    if this.meter is not None:
        progress.step("idle power")
        torch.zeros(1, device=this.device)
        try:
            this.idle_watts = this.meter.idle_watts()
        except Exception as error:
            # NVML's own errors, too
            raise RequestError(f"--energy: {error}") from error
    makers = list(_subjects(arguments, this.device))
    names = [arguments.model.name] if arguments.model is not None else [s.name for s in arguments.config]
    for name, make in zip(names, makers, strict=True):
        progress.step(f"{name}: weights and tokens")
        subject = make()
        subject.analyze()
        this.subjects.append(subject.facts())
        for op in ops:
            rows = run_op(subject, op, _settings(arguments, subject), this.meter, progress.step)
            this.machine = testing.machine_line(this.device)
            this.add(rows)
        del subject


# Output


def _spread(row: ModelRow) -> str:
    return "-" if row.p10_ms is None else f"{row.p10_ms:.1f}-{row.p90_ms:.1f}"


def _ran(row: ModelRow) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(row.strategies.items())) or "-"


COLUMNS = (
    Column("model", lambda row: row.config, True, "folder or configuration"),
    Column("op", lambda row: row.op, True, "see above"),
    Column("variant", lambda row: row.variant, True, "see above"),
    Column("tokens", report.number("tokens", ","), False, "tokens of a call"),
    Column("pass", report.number("micro_batch", "d"), False, "sequences of a pass"),
    Column("ms", report.number("ms", ".1f"), False, "median of a call"),
    Column("p10-p90", _spread, False, "10th and 90th percentile of a call; minimum and maximum of up to 5 rounds"),
    Column("tokens/ms", report.number("tokens_per_ms", ".0f"), False, "tokens over the median"),
    Column("over-dense", report.number("speedup", ".2f"), False, "speed-up over the faster dense variant"),
    Column("mJ/token", report.number("mj_per_token", ".3f"), False, "energy of the whole board, successive calls"),
    Column(
        "net", report.number("mj_per_token_idle_corrected", ".3f"), False, "the same minus the energy of an idle board"
    ),
    Column("peak-GB", report.number("peak_bytes", ".1f", 1e9), False, "peak memory above weights and optimizer state"),
    Column("total-GB", report.number("peak_total_bytes", ".1f", 1e9), False, "the same with them"),
    Column(
        "of-fp32",
        report.number("frobenius", ".1e"),
        False,
        "relative error against fp32, in norm; for train the weights' geometric mean",
    ),
    Column(
        "error",
        report.number("error", ".2f"),
        False,
        "the same over dense eager's: above 1.1 (more for few tokens) is red",
    ),
    Column(
        "worst",
        report.number("worst", ".2f"),
        False,
        "largest error of a token over dense eager's largest; for train the largest such ratio of a weight's "
        "gradient: above 3 (more for few tokens) is red",
    ),
    Column("layers-run", _ran, False, "strategies of the layers"),
)


def _print(this: _Report) -> None:
    if this.rows:
        report.print_table(report.used(COLUMNS, this.rows), this.rows)
    for facts in this.subjects:
        print("\n".join(_sparsity_lines(facts)))
    if this.meter is not None:
        idle = "" if this.idle_watts is None else f"; idle {this.idle_watts:.0f} W"
        print(f"energy: of the whole board{idle}")
    print(this.machine)


def _sparsity_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The sparsity of a model, in lines."""
    drawn = f"; random weights: {facts['pattern']}" if facts["pattern"] else ""
    count = facts["parameters"]
    size = f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.2f} million"
    yield f"{facts['config']}: {facts['layers']} layers, {size} parameters{drawn}"
    active, unions = facts["non_zeros"], facts["unions"]
    yield f"  non-zeros per token, mean {_mean(active):.1f}, by layer: {', '.join(map(_count, active))}"
    if not any(map(math.isnan, unions)):
        share = ", ".join(f"{v:.0%}" for v in unions)
        yield f"  neurons that 128 consecutive tokens fire, mean {_mean(unions):.1%}, by layer: {share}"
    listed = [each for each in facts["candidates"] if each is not None]
    if listed:
        share = ", ".join(f"{v:.0%}" for v in listed)
        yield f"  candidates of the int8 screen, mean {_mean(listed):.1%}, by layer: {share}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
