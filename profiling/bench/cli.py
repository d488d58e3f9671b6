"""The command ``python -m profiling.bench OP``: its arguments, the run, the table and the file."""

import argparse
import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from profiling.bench import DESCRIPTION, report
from profiling.bench.energy import EnergyMeter, open_meter
from profiling.bench.layers import DECODED, DTYPES, INVARIANT, OPS, SCREENED, STRATEGIES, Options
from profiling.bench.protocol import Ceilings, Device, Gpu
from profiling.bench.rows import COLUMNS, LayerRow
from profiling.bench.runner import Job, Runner
from profiling.bench.workloads import EXPLAINED, NAMED, parse
from twell import testing
from twell._activation import NAMES, activation_of
from twell._runtime import geometry, specs
from twell.commands.request import RequestError, at_least, exit_status, number_above, pick_device

COMMAND = "profiling.bench"
# Operations with arguments of their own, and their modules.
_OTHERS = {"model": "models", "moe": "moe", "float8": "float8", "sae": "sae"}

# Weight rows read from L2 by all multiprocessors of an H200 (132, 1,980 MHz): 7.2 to 7.5 TB/s in a streaming read.
L2_TBS = 7.3

# Default tokens, hidden size and neurons. With those for a CPU the default command takes half a minute on two cores.
SIZES = 16384, testing.PAPER_HIDDEN, testing.PAPER_NEURONS
CPU_SIZES = 512, 256, 1408
DECODED_BY_DEFAULT = (1, 8, 16, 64, 128, 256)
COMPILE = ("default", "max-autotune-no-cudagraphs", "none")

EPILOG = f"""\
operations:
  ffn           forward pass of the whole layer by each of --strategy; all calls share the weights, so small weights
                stay in L2
  decode        the same on each number of tokens of --m-decode, from the middle of the workload, with several
                copies of the weights in turn, whose gates exceed L2; errors are those of {DECODED} tokens. Dense is
                compiled for each number of tokens, by the mode of --compile
  train         forward and backward, with the gradients of x and of all weights, by each of --strategy; "row" and
                "union" are the same. If the hybrid format does not hold the non-zeros, dense is timed instead.
                Gradients, also of L1, are checked on the same tokens, except for those that rounding would decide
  train_overflow
                a step of the sparse path if the hybrid format does not hold the non-zeros
  model         a whole model: python -m profiling.bench model --help
  moe           a layer of routed experts: python -m profiling.bench moe --help
  float8        a layer of e4m3 weights: python -m profiling.bench float8 --help
  sae           a sparse autoencoder: python -m profiling.bench sae --help

"auto" is a twell.AutoStrategy; a few calls settle it before it is timed.

workloads:
  {", ".join(NAMED)}
                drawn, by name
  {",".join(f"{key}=" for key in EXPLAINED)}
                drawn; nnz is required, the others default to 0
{{parameters}}
  real:FOLDER, real:FOLDER/3
                recorded layers (python -m profiling.record), all of a folder or one, of their own sizes

columns:
{{columns}}
"""


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
    parser.add_argument("ops", nargs="*", type=_words((*OPS, *_OTHERS)), metavar="OP", help="operations to time (ffn)")

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
    few += "; -m means the same if decode is the only operation"
    add("--m-decode", nargs="+", type=_counts, metavar="M", help=f"tokens of decode ({few})")

    how = parser.add_argument_group("measurement")
    add = how.add_argument
    add("--device", help="cuda, cuda:INDEX or cpu, whose times mean nothing (default: cuda)")
    add("--compile", choices=COMPILE, help="torch.compile's mode for the dense layer (default; none on a CPU)")
    seconds = "time per workload, all variants; eager calls take as long again (%(default)s)"
    add("--seconds", type=number_above(0), default=3.0, metavar="S", help=seconds)
    add("--no-eager", action="store_true", help="graphs alone, without eager calls of ffn and train")
    add("--memory", action="store_true", help="peak memory of inference; training always measures it")
    add("--energy", action="store_true", help="energy per token, by NVML: each variant alone")
    add("--json", type=Path, metavar="FILE", help="file for the data")


def _explained(name: str, text: str) -> str:
    """A column's name and meaning, in lines of up to 120 characters."""
    lines, words = [f"  {name:<13}"], text.split()
    for word in words:
        if len(lines[-1]) + 1 + len(word) > 118:
            lines.append(" " * 15)
        lines[-1] += f" {word}"
    return "\n".join(lines)


def request(arguments: argparse.Namespace) -> tuple[Options, list[Job]]:
    """What to measure; the defaults that depend on the device go into ``arguments``.

    Raises RequestError if the arguments contradict each other or the machine.
    """
    arguments.device = str(pick_device(arguments.device or "cuda"))
    on_cpu = arguments.device == "cpu"
    by_default, hidden, neurons = CPU_SIZES if on_cpu else SIZES
    k, n = arguments.hidden or hidden, arguments.neurons or neurons
    arguments.compile = arguments.compile or ("none" if on_cpu else "default")
    tokens, options = _options(arguments, by_default)
    report.require_writable(arguments.json)
    swallowed = [text for text in arguments.workload or () if set(text.split(",")) <= set(OPS)]
    if swallowed:
        raise RequestError(f"{swallowed[0]} is an operation: expected it before --workload")
    sources = parse(arguments.workload)
    if arguments.workload:
        for source in sources:
            source.check(n)
    elif not (sources := [source for source in sources if source.possible(n)]):
        raise RequestError(f"{n} neurons are too few for the named workloads: expected --workload")
    return options, [Job(source, m, k, n, arguments.dtype) for source in sources for m in tokens]


def _options(arguments: argparse.Namespace, by_default: int) -> tuple[tuple[int, ...], Options]:
    """The numbers of tokens, by default ``by_default`` alone, and the options."""
    ops = _flat(arguments.ops) or ("ffn",)
    if other := next((name for name in _OTHERS if name in ops), ""):
        raise RequestError(f"{other} must be the only operation: python -m profiling.bench {other} --help")
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
        activation = activation_of(arguments.activation, arguments.threshold, True)
        activation.level(DTYPES[arguments.dtype])
    except ValueError as error:
        raise RequestError(str(error)) from error
    return tokens, Options(
        ops,
        (_flat(arguments.strategy) or ("auto",)) + (SCREENED,) * arguments.screen + (INVARIANT,) * arguments.invariant,
        arguments.compression,
        decoded,
        activation=activation,
        memory=arguments.memory,
        eager=not arguments.no_eager,
        seconds=arguments.seconds,
    )


def _flat(lists: list[list[Any]] | None) -> tuple[Any, ...]:
    """All items, each once."""
    return tuple(dict.fromkeys(item for each in lists or () for item in each))


def _facts(
    arguments: argparse.Namespace,
    options: Options,
    jobs: Sequence[Job],
    ceilings: Ceilings,
    machine: str,
    meter: EnergyMeter | None,
) -> dict[str, Any]:
    """What a file holds besides rows."""
    kept = ("dtype", "compression", "activation", "threshold", "device", "compile", "memory", "no_eager")
    asked = {name: getattr(arguments, name) for name in (*kept, "energy", "seconds")}
    asked |= {"ops": options.ops, "workload": list(dict.fromkeys(job.source.name for job in jobs))}
    asked |= {"m": list(dict.fromkeys(job.m for job in jobs)), "k": jobs[0].k, "n": jobs[0].n}
    asked |= {"strategy": options.strategies, "m_decode": options.decoded, "l2_tbs": L2_TBS}
    rates = {"tflops": ceilings.flops / 1e12, "memory_tbs": ceilings.memory / 1e12}
    rates["l2_tbs_assumed"] = ceilings.l2 / 1e12
    energy = {} if meter is None else {"energy_method": meter.method, "idle_watts": meter.idle}
    return {"machine": machine, "arguments": asked, "ceilings": rates, **energy}


@torch.no_grad()
def run(arguments: argparse.Namespace) -> int:
    """Time the request. Return 0, 1 if a row is red, 2 if a file could not be written, 130 for Ctrl-C.

    The rows so far are printed and written, after Ctrl-C, too. Raises RequestError if the request cannot be met.
    """
    options, jobs = request(arguments)
    with ExitStack() as stack:
        device: Device = Device()
        if arguments.device != "cpu":
            stack.enter_context(torch.cuda.device(torch.device(arguments.device)))
            device = Gpu(torch.device("cuda", torch.cuda.current_device()))
        meter = open_meter(device.torch_device) if arguments.energy else None
        ceilings, machine = device.ceilings(DTYPES[arguments.dtype], L2_TBS)
        this = report.Run(COMMAND, arguments.json, lambda: _facts(arguments, options, jobs, ceilings, machine, meter))
        options = replace(options, compiled=_compiled(arguments.compile))
        runner = Runner(options, device, ceilings, report.Progress(COMMAND), meter)

        def work() -> None:
            for job in jobs:
                for group in runner.run(job):
                    this.add(group)

        this.measure(work)
    _print(this, arguments, ceilings)
    if meter is not None:
        print(f"energy: of the whole board{'' if meter.idle is None else f'; idle {meter.idle:.0f} W'}")
    print(machine)
    return this.status()


def _compiled(mode: str) -> Callable[..., torch.Tensor] | None:
    """The dense layer through torch.compile; None if the mode is "none"."""
    if mode == "none":
        return None
    # each number of tokens and each size of a recorded layer is compiled separately
    torch._dynamo.config.recompile_limit = 256
    compiled: Callable[..., torch.Tensor] = torch.compile(
        testing.dense_output, fullgraph=True, dynamic=False, mode=None if mode == "default" else mode
    )
    return compiled


def _print(this: report.Run, arguments: argparse.Namespace, ceilings: Ceilings) -> None:
    """Print the table and the lines below it."""
    found: list[LayerRow] = this.rows
    if found:
        report.print_table(report.used(COLUMNS, found), found)
    elif this.complete:
        print("nothing to time: no pattern is too large for the hybrid format")
    if arguments.device == "cpu":
        print("on a CPU, whose times mean nothing; -m, -k and -n change the sizes")
    above = f" above {arguments.threshold:g}" if arguments.threshold else ""
    print(f"{arguments.dtype}, compression {arguments.compression}, {arguments.activation}{above}; columns: --help")
    print(
        f"ceilings: {ceilings.flops / 1e12:.3g} TFLOP/s and {ceilings.memory / 1e12:.3g} TB/s of memory measured now, "
        f"{ceilings.l2 / 1e12:.3g} TB/s of L2 assumed"
    )


def parser() -> argparse.ArgumentParser:
    """The parser of all operations except for ``model`` and ``moe``."""
    top = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=DESCRIPTION)
    add_arguments(top)
    return top


def run_other(name: str, argv: Sequence[str]) -> int:
    """Run ``python -m profiling.bench model`` or ``moe``, which have their own arguments."""
    module = importlib.import_module(f"profiling.bench.{_OTHERS[name]}")
    top = argparse.ArgumentParser(prog=f"python -m {module.NAME}", description=module.DESCRIPTION)
    module.add_arguments(top)
    status: int = module.run(top.parse_args(argv))
    return status


def main(argv: Sequence[str]) -> int:
    """Run the command; see ``profiling.bench.main``."""
    if argv and argv[0] in _OTHERS:
        return exit_status(f"{COMMAND} {argv[0]}", lambda: run_other(argv[0], argv[1:]))
    return exit_status(COMMAND, lambda: run(parser().parse_intermixed_args(argv)))
