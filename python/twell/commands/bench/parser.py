"""The arguments of ``twell bench OP``: ``add_arguments`` and ``request``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from twell import testing
from twell._activation import NAMES, activation_of
from twell._runtime import geometry, specs
from twell.commands.bench import fp8, rows
from twell.commands.bench.decode import DECODED
from twell.commands.bench.layers import INVARIANT, OPS, SCREENED, STRATEGIES, WITHOUT_GATE, Options
from twell.commands.bench.report import STDOUT, output_path, require_writable
from twell.commands.bench.rows import COLUMNS
from twell.commands.bench.runner import DTYPES, Job
from twell.commands.bench.workloads import EXPLAINED, NAMED, Source, parse
from twell.commands.request import RequestError, at_least, number_above, pick_device

# Weight rows read from L2 by all multiprocessors of an H200 (132, 1,980 MHz): 7.2 to 7.5 TB/s in a streaming read.
L2_TBS = 7.3

OPS_BY_DEFAULT = ("gate_pack", "up_down", "ffn")
# Default tokens, hidden size and neurons. With those for a CPU the default command takes half a minute on two cores.
SIZES = 16384, testing.PAPER_HIDDEN, testing.PAPER_NEURONS
CPU_SIZES = 512, 256, 1408
DECODED_BY_DEFAULT = (1, 8, 16, 64, 128, 256)
COMPILE = ("default", "max-autotune-no-cudagraphs", "none")

EPILOG = f"""\
operations:
  gate_pack, up_down, up_down_union, down
                single operators, all except for the first on packed gates; down is up_down without a gate
  ffn, sparse_ffn
                forward pass of the whole layer, with and without gate, by each of --strategy; all calls share the
                weights, so small weights stay in L2
  decode        the gated layer on each number of tokens of --m-decode, from the middle of the workload, with several
                copies of the weights in turn, whose gates exceed L2; errors are those of {DECODED} tokens. Dense is
                compiled for each number of tokens, by the mode of --compile
  train, sparse_train
                forward and backward, with the gradients of x and of all weights, by each of --strategy; "row" and
                "union" are the same. If the hybrid format does not hold the non-zeros, dense is timed instead.
                Gradients, also of L1, are checked on the same tokens, except for those that rounding would decide
  train_forward, train_backward
                the forward pass with its saved tensors, and the operators of backward
  train_overflow
                a step of the sparse path if the hybrid format does not hold the non-zeros
  model         a whole model: twell bench model --help

"auto" is a twell.AutoStrategy; a few calls settle it before it is timed.

workloads:
  {", ".join(NAMED)}
                drawn, by name
  {",".join(f"{key}=" for key in EXPLAINED)}
                drawn; nnz is required, the others default to 0
{{parameters}}
  real:FOLDER, real:FOLDER/3
                recorded layers (twell record), all of a folder or one, of their own sizes

columns:
{{columns}}
"""


@dataclass(frozen=True)
class BenchRequest:
    """The arguments of ``twell bench OP``, checked."""

    options: Options
    jobs: tuple[Job, ...]
    device: str
    compile: str
    energy: bool
    fp8: bool
    wide: bool
    repro: bool
    json: Path | None
    csv: Path | None

    @property
    def silent(self) -> bool:
        """Whether stdout is for the data alone."""
        return STDOUT in (str(self.json), str(self.csv))

    def arguments(self) -> dict[str, Any]:
        """The arguments that determine the rows, for a file."""
        options, first = self.options, self.jobs[0]
        return {
            "ops": options.ops,
            "workload": list(dict.fromkeys(job.source.name for job in self.jobs)),
            "m": list(dict.fromkeys(job.m for job in self.jobs)),
            "k": first.k,
            "n": first.n,
            "dtype": first.dtype,
            "compression": options.compression,
            "activation": options.activation.name,
            "threshold": options.activation.threshold,
            "strategy": options.strategies,
            "m_decode": options.decoded,
            "device": self.device,
            "compile": self.compile,
            "check": options.check,
            "kernels": options.kernels,
            "memory": options.memory,
            "energy": self.energy,
            "fp8": self.fp8,
            "seconds": options.seconds,
            "energy_seconds": options.energy_seconds,
            "l2_tbs": L2_TBS,
        }


def _words(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated list of names."""
    names = tuple(known)

    def parse_words(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {name!r}")
        return found

    return parse_words


def _size(most: int) -> Callable[[str], int]:
    """An argparse type: a size that the sparse kernels take, a multiple of 8 up to ``most``."""

    def parse_size(text: str) -> int:
        value = at_least(1)(text)
        if value % 8 or value > most:
            raise argparse.ArgumentTypeError(f"expected a multiple of 8 up to {most}, got {value}")
        return value

    return parse_size


def _counts(text: str) -> list[int]:
    """An argparse type: a comma-separated list of integers of at least 1."""
    return [at_least(1)(item) for item in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all operations except for ``model``; explain columns and workloads in the epilog."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG.format(
        parameters="\n".join(f"                  {key + '=':<9}{text}" for key, text in EXPLAINED.items()),
        columns="\n".join(_explained(column.name, column.help) for column in COLUMNS),
    )
    add = parser.add_argument
    default = " ".join(OPS_BY_DEFAULT)
    add("ops", nargs="*", type=_words((*OPS, "model")), metavar="OP", help=f"operations to time ({default})")

    defaults = [f"{gpu}; {cpu} on a CPU" for gpu, cpu in zip(SIZES, CPU_SIZES)]
    layer = parser.add_argument_group("layer")
    add = layer.add_argument
    add("-m", "--tokens", nargs="+", type=_counts, metavar="M", help=f"numbers of tokens ({defaults[0]})")
    add("-k", "--hidden", type=_size(specs.K_CLASSES[-1]), metavar="K", help=f"hidden size ({defaults[1]})")
    add("-n", "--neurons", type=_size(geometry.MAX_NEURONS), metavar="N", help=f"neurons ({defaults[2]})")
    add("--workload", nargs="+", action="extend", metavar="W", help="workloads, see below (default: all by name)")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of all tensors (%(default)s)")
    compression = "256 / C words per tile (%(default)s)"
    add("--compression", type=int, choices=geometry.COMPRESSIONS, default=8, help=compression)
    add("--activation", choices=NAMES, default="relu", help="%(choices)s (%(default)s)")
    add("--threshold", type=float, default=0.0, metavar="T", help="of fatrelu: what gates must exceed (%(default)s)")
    known = ", ".join(STRATEGIES)
    add("--strategy", nargs="+", type=_words(STRATEGIES), metavar="S", help=f"strategies out of {known} (auto)")
    add("--screen", action="store_true", help='also "union" with the int8 screen of the gate, as "auto" may run it')
    add("--invariant", action="store_true", help='also "row" with invariant=True, in inference')
    few = ",".join(map(str, DECODED_BY_DEFAULT))
    add(
        "--m-decode",
        nargs="+",
        type=_counts,
        metavar="M",
        help=f"tokens of decode ({few}); -m means the same if decode is the only operation",
    )

    how = parser.add_argument_group("measurement")
    add = how.add_argument
    add("--device", help="cuda, cuda:INDEX or cpu, whose times mean nothing (default: cuda)")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="time only right results (default)")
    add("--compile", choices=COMPILE, help="torch.compile's mode for the dense layer (default; none on a CPU)")
    add("--fp8", action="store_true", help="also dense in fp8, in ffn and decode; its error is shown, not judged")
    add(
        "--seconds",
        type=number_above(0),
        default=3.0,
        metavar="S",
        help="time per workload, all variants (%(default)s)",
    )
    add("--memory", action="store_true", help="peak memory of inference; training always measures it")
    add("--energy", action="store_true", help="energy per token, by NVML: each variant alone")
    add("--kernels", action="store_true", help="time of each kernel in a call")

    out = parser.add_argument_group("output")
    add = out.add_argument
    add("--wide", action="store_true", help=f"all columns (default: those that fit {rows.TABLE_WIDTH} characters)")
    add("--repro", action="store_true", help="the command that repeats each row")
    add("--json", type=output_path, metavar="FILE", help=f'file for the data; "{STDOUT}" is stdout, without the table')
    add("--csv", type=output_path, metavar="FILE", help="the same as CSV")


def _explained(name: str, text: str) -> str:
    """A column's name and meaning, in lines of up to 120 characters."""
    lines, words = [f"  {name:<13}"], text.split()
    for word in words:
        if len(lines[-1]) + 1 + len(word) > 118:
            lines.append(" " * 15)
        lines[-1] += f" {word}"
    return "\n".join(lines)


def request(arguments: argparse.Namespace) -> BenchRequest:
    """The request of the arguments. Raises RequestError if they contradict each other or the machine."""
    by_default, hidden, neurons = CPU_SIZES if str(arguments.device).partition(":")[0] == "cpu" else SIZES
    arguments.hidden, arguments.neurons = arguments.hidden or hidden, arguments.neurons or neurons
    tokens, options = _options(arguments, by_default)
    require_writable((arguments.json, arguments.csv))
    sources = _sources(arguments)
    device = str(pick_device(arguments.device or "cuda"))
    if arguments.energy and device == "cpu":
        raise RequestError("--energy needs a GPU's driver: expected a CUDA device, got cpu")
    if arguments.fp8:
        _require_fp8(arguments, options.ops, device)
    return BenchRequest(
        options,
        tuple(Job(s, m, arguments.hidden, arguments.neurons, arguments.dtype) for s in sources for m in tokens),
        device,
        arguments.compile or ("none" if device == "cpu" else "default"),
        arguments.energy,
        arguments.fp8,
        arguments.wide,
        arguments.repro,
        arguments.json,
        arguments.csv,
    )


def _require_fp8(arguments: argparse.Namespace, ops: tuple[str, ...], device: str) -> None:
    """Raise RequestError unless the layer can be computed in fp8."""
    if not set(ops) & {"ffn", "decode"}:
        raise RequestError(f"--fp8 is for ffn and decode: expected one of them, got {', '.join(ops)}")
    if arguments.dtype != "bf16":
        raise RequestError(f"with --fp8 --dtype must be bf16, got {arguments.dtype}")
    for name in ("hidden", "neurons"):
        if (size := getattr(arguments, name)) % fp8.MULTIPLE:
            raise RequestError(f"with --fp8 --{name} must be a multiple of {fp8.MULTIPLE}, got {size}")
    if device != "cpu" and (found := torch.cuda.get_device_capability(device)) < fp8.CAPABILITY:
        wanted, got = (".".join(map(str, each)) for each in (fp8.CAPABILITY, found))
        raise RequestError(f"--fp8 needs a GPU with fp8: expected compute capability {wanted} or more, got {got}")


def _options(arguments: argparse.Namespace, by_default: int) -> tuple[tuple[int, ...], Options]:
    """The numbers of tokens, by default ``by_default`` alone, and the options."""
    ops = _flat(arguments.ops) or OPS_BY_DEFAULT
    if "model" in ops:
        raise RequestError("model must be the only operation: twell bench model --help")
    tokens, decoded = _flat(arguments.tokens), _flat(arguments.m_decode)
    if ops == ("decode",) and not decoded:
        tokens, decoded = (), tokens
    tokens = tokens or (by_default,)
    decoded = decoded or tuple(m for m in DECODED_BY_DEFAULT if m <= min(tokens))
    most = min(DECODED, *tokens)
    if arguments.m_decode and "decode" not in ops:
        raise RequestError(f"--m-decode is for decode: expected it among the operations, got {', '.join(ops)}")
    if "decode" in ops and max(decoded) > most:
        raise RequestError(f"--m-decode must be from 1 to {most} of {min(tokens)} tokens, got {max(decoded)}")
    try:
        activation = activation_of(arguments.activation, arguments.threshold, not set(ops) & set(WITHOUT_GATE))
        activation.level(DTYPES[arguments.dtype])
    except ValueError as error:
        raise RequestError(str(error)) from error
    return tokens, Options(
        ops,
        (_flat(arguments.strategy) or ("auto",)) + (SCREENED,) * arguments.screen + (INVARIANT,) * arguments.invariant,
        arguments.compression,
        decoded,
        activation=activation,
        check=arguments.check,
        kernels=arguments.kernels,
        memory=arguments.memory,
        seconds=arguments.seconds,
    )


def _flat(lists: list[list[Any]] | None) -> tuple[Any, ...]:
    """All items, each once."""
    return tuple(dict.fromkeys(item for each in lists or () for item in each))


def _sources(arguments: argparse.Namespace) -> list[Source]:
    swallowed = [text for text in arguments.workload or () if set(text.split(",")) <= set(OPS)]
    if swallowed:
        raise RequestError(f"{swallowed[0]} is an operation: expected it before --workload")
    if arguments.workload:
        for source in (sources := parse(arguments.workload)):
            source.check(arguments.neurons)
        return sources
    # all named ones that are possible with so many neurons
    sources = [source for source in parse(None) if source.possible(arguments.neurons)]
    if not sources:
        raise RequestError(f"{arguments.neurons} neurons are too few for the named workloads: expected --workload")
    return sources
