"""What ``twell bench OP`` takes, and what it means: ``add_arguments`` and ``request``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twell._runtime import geometry, specs
from twell.commands.bench import rows
from twell.commands.bench.decode import DECODED
from twell.commands.bench.layers import OPS, STRATEGIES, Options
from twell.commands.bench.report import STDOUT, output, require_writable
from twell.commands.bench.rows import COLUMNS
from twell.commands.bench.runner import DTYPES, Job
from twell.commands.bench.workloads import EXPLAINED, NAMED, Source, parse
from twell.commands.request import RequestError, at_least, pick_device

# Weight rows read from L2 by all multiprocessors of an H200 (132, 1,980 MHz): 7.2 to 7.5 TB/s in a streaming read.
L2_TBS = 7.3

OPS_BY_DEFAULT = ("gate_pack", "up_down", "ffn")
# Tokens, hidden size and neurons by default. With those of a CPU the default command takes half a minute on two cores.
SIZES = 16384, 2048, 5632
CPU_SIZES = 512, 256, 1408
DECODED_BY_DEFAULT = (1, 8, 16, 64, 128, 256)
COMPILE = ("default", "max-autotune-no-cudagraphs", "none")

EPILOG = f"""\
operations:
  gate_pack, up_down, up_down_union, down
                the operators by themselves, all but the first on what gate_pack made; down is up_down without a gate
  ffn, sparse_ffn
                the whole layer's forward pass, with gate and without, by each of --strategy; all calls share the
                weights, so that small ones stay in L2, of which decode has copies
  decode        the gated layer on each number of tokens of --m-decode, those around the middle of the workload, with
                copies of the weights, of which the gates alone are larger than L2, visited in turn; errors are those of
                {DECODED} tokens
  train, sparse_train
                forward and backward, with the gradients of x and of all weights, by each of --strategy; "row" and
                "union" are the same. Where more is non-zero than the hybrid format holds, dense is timed in their
                place. Gradients are checked on the same tokens, but those that rounding would decide, with that of L1
  train_forward, train_backward
                the forward pass that keeps what backward needs, and the operators of backward
  train_overflow
                a step of the sparse path where the hybrid format does not hold the non-zeros
  model         a whole model, by itself: twell bench model --help

"auto" is a twell.AutoStrategy that a few calls have settled before it is timed.

workloads:
  {", ".join(NAMED)}
                drawn, by name
  {",".join(f"{key}=" for key in EXPLAINED)}
                drawn; what is left out is 0, but for nnz
{{parameters}}
  real:FOLDER, real:FOLDER/3
                recorded layers (twell record), all of a folder or one; they have sizes of their own

columns:
{{columns}}
"""


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    options: Options
    jobs: tuple[Job, ...]
    device: str
    compile: str
    l2_tbs: float
    energy: bool
    columns: tuple[str, ...]
    wide: bool
    repro: bool
    json: Path | None
    csv: Path | None

    @property
    def silent(self) -> bool:
        """Whether data go to stdout, and nothing else."""
        return STDOUT in (str(self.json), str(self.csv))

    def arguments(self) -> dict[str, Any]:
        """What determines the rows, for a file."""
        options, first = self.options, self.jobs[0]
        return {
            "ops": options.ops,
            "workload": list(dict.fromkeys(job.source.name for job in self.jobs)),
            "m": list(dict.fromkeys(job.m for job in self.jobs)),
            "k": first.k,
            "n": first.n,
            "dtype": first.dtype,
            "compression": options.compression,
            "strategy": options.strategies,
            "m_decode": options.decoded,
            "device": self.device,
            "compile": self.compile,
            "check": options.check,
            "kernels": options.kernels,
            "memory": options.memory,
            "energy": self.energy,
            "seconds": options.seconds,
            "energy_seconds": options.energy_seconds,
            "l2_tbs": self.l2_tbs,
        }


def _words(known: Iterable[str]) -> Callable[[str], list[str]]:
    """What argparse makes a list of names with."""
    names = tuple(known)

    def parse_words(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"expected of {', '.join(names)}, got {name!r}")
        return found

    return parse_words


def _size(most: int) -> Callable[[str], int]:
    """What argparse makes a size with that the sparse kernels take: a multiple of 8 up to ``most``."""

    def parse_size(text: str) -> int:
        value = at_least(1)(text)
        if value % 8 or value > most:
            raise argparse.ArgumentTypeError(f"expected a multiple of 8 up to {most}, got {value}")
        return value

    return parse_size


def _counts(text: str) -> list[int]:
    """What argparse makes a list of integers of at least 1 with."""
    return [at_least(1)(item) for item in text.split(",")]


def _above(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all operations but ``model`` to ``parser``, and explain columns and workloads below them."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG.format(
        parameters="\n".join(f"                  {key + '=':<9}{text}" for key, text in EXPLAINED.items()),
        columns="\n".join(_explained(column.name, column.help) for column in COLUMNS),
    )
    add = parser.add_argument
    default = " ".join(OPS_BY_DEFAULT)
    add("ops", nargs="*", type=_words((*OPS, "model")), metavar="OP", help=f"what to time, see below ({default})")

    defaults = [f"{gpu}; {cpu} on a CPU" for gpu, cpu in zip(SIZES, CPU_SIZES)]
    layer = parser.add_argument_group("layer")
    add = layer.add_argument
    add("-m", "--tokens", nargs="+", type=_counts, metavar="M", help=f"tokens, one number or several ({defaults[0]})")
    add("-k", "--hidden", type=_size(specs.K_CLASSES[-1]), metavar="K", help=f"hidden size ({defaults[1]})")
    add("-n", "--neurons", type=_size(geometry.MAX_NEURONS), metavar="N", help=f"neurons ({defaults[2]})")
    add("--workload", nargs="+", action="extend", metavar="W", help="one or several, see below (default: all by name)")
    add("--dtype", choices=DTYPES, default="bf16", help="of all tensors (%(default)s)")
    add("--compression", type=int, choices=(2, 4, 8), default=8, help="256 / C words a tile are packed (%(default)s)")
    known = ", ".join(STRATEGIES)
    add("--strategy", nargs="+", type=_words(STRATEGIES), metavar="S", help=f"one or several of {known} (auto)")
    few = ",".join(map(str, DECODED_BY_DEFAULT))
    add(
        "--m-decode",
        nargs="+",
        type=_counts,
        metavar="M",
        help=f"tokens of decode ({few}); of decode alone, -m is this",
    )

    how = parser.add_argument_group("measurement")
    add = how.add_argument
    add("--device", help="cuda, cuda:INDEX or cpu, whose times mean nothing (default: cuda)")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="time nothing that is not right (default)")
    add("--compile", choices=COMPILE, help="torch.compile's mode for the dense layer (default; none on a CPU)")
    add("--seconds", type=_above, default=3.0, metavar="S", help="of timing a workload, all variants (%(default)s)")
    add("--l2-tbs", type=_above, default=L2_TBS, metavar="TB/S", help="gather ceiling (%(default)s, an H200's)")
    add("--memory", action="store_true", help="peak memory of inference, too; of training it is always measured")
    add("--energy", action="store_true", help="energy of a token, by NVML: each variant alone")
    add("--energy-seconds", type=_above, default=5.0, metavar="S", help="of each variant for --energy (%(default)s)")
    add("--kernels", action="store_true", help="also print the time of each kernel in a call")

    out = parser.add_argument_group("output")
    add = out.add_argument
    add("--columns", nargs="+", metavar="NAME", help="after those that name the row, also comma-separated")
    add("--wide", action="store_true", help=f"all columns; by default those that fit {rows.TABLE_WIDTH} characters")
    add("--repro", action="store_true", help="print for each row the command that repeats it")
    add("--json", type=output, metavar="FILE", help=f'write the data; "{STDOUT}" is stdout, with nothing else there')
    add("--csv", type=output, metavar="FILE", help="the same as CSV")


def _explained(name: str, text: str) -> str:
    """A column's name and what it is, in lines of up to 120 characters."""
    lines, words = [f"  {name:<13}"], text.split()
    for word in words:
        if len(lines[-1]) + 1 + len(word) > 118:
            lines.append(" " * 15)
        lines[-1] += f" {word}"
    return "\n".join(lines)


def request(arguments: argparse.Namespace) -> Request:
    """What the arguments mean. RequestError where they contradict each other or the machine."""
    by_default, hidden, neurons = CPU_SIZES if str(arguments.device).partition(":")[0] == "cpu" else SIZES
    arguments.hidden, arguments.neurons = arguments.hidden or hidden, arguments.neurons or neurons
    tokens, options = _options(arguments, by_default)
    require_writable((arguments.json, arguments.csv))
    columns = tuple(name for text in arguments.columns or () for name in text.split(","))
    try:
        rows.chosen(columns)
    except ValueError as error:
        raise RequestError(f"--columns: {error}") from None
    sources = _sources(arguments)
    device = str(pick_device(arguments.device or "cuda"))
    if arguments.energy and device == "cpu":
        raise RequestError("--energy is measured by a GPU's driver: expected a CUDA device")
    return Request(
        options,
        tuple(Job(s, m, arguments.hidden, arguments.neurons, arguments.dtype) for s in sources for m in tokens),
        device,
        arguments.compile or ("none" if device == "cpu" else "default"),
        arguments.l2_tbs,
        arguments.energy,
        columns,
        arguments.wide,
        arguments.repro,
        arguments.json,
        arguments.csv,
    )


def _options(arguments: argparse.Namespace, by_default: int) -> tuple[tuple[int, ...], Options]:
    """Numbers of tokens of the workloads, one ``by_default``, and what is timed of them."""
    ops = _flat(arguments.ops) or OPS_BY_DEFAULT
    if "model" in ops:
        raise RequestError("model is timed by itself: twell bench model --help")
    tokens, decoded = _flat(arguments.tokens), _flat(arguments.m_decode)
    if ops == ("decode",) and not decoded:
        tokens, decoded = (), tokens
    tokens = tokens or (by_default,)
    decoded = decoded or tuple(m for m in DECODED_BY_DEFAULT if m <= min(tokens))
    most = min(DECODED, *tokens)
    if arguments.m_decode and "decode" not in ops:
        raise RequestError(f"--m-decode is for decode, which is not among the operations: {', '.join(ops)}")
    if "decode" in ops and max(decoded) > most:
        raise RequestError(f"decode takes 1 to {most} of {min(tokens)} tokens, got {max(decoded)}")
    return tokens, Options(
        ops,
        _flat(arguments.strategy) or ("auto",),
        arguments.compression,
        decoded,
        check=arguments.check,
        kernels=arguments.kernels,
        memory=arguments.memory,
        seconds=arguments.seconds,
        energy_seconds=arguments.energy_seconds,
    )


def _flat(lists: list[list[Any]] | None) -> tuple[Any, ...]:
    """All items, each once."""
    return tuple(dict.fromkeys(item for each in lists or () for item in each))


def _sources(arguments: argparse.Namespace) -> list[Source]:
    swallowed = [text for text in arguments.workload or () if set(text.split(",")) <= set(OPS)]
    if swallowed:
        raise RequestError(f"{swallowed[0]} is an operation: expected before --workload and its names")
    if arguments.workload:
        for source in (sources := parse(arguments.workload)):
            source.check(arguments.neurons)
        return sources
    # of those that have names, all that there can be
    sources = [source for source in parse(None) if source.possible(arguments.neurons)]
    if not sources:
        raise RequestError(f"{arguments.neurons} neurons are too few for the workloads by name: expected --workload")
    return sources
