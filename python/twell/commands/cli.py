"""The command line: ``twell`` and ``python -m twell``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import twell
from twell.commands import analyze, bench, convert, record
from twell.commands.request import at_least, exit_status

MODELS = (
    ("analyze", analyze, "report how sparse the layers of a model are, and what twell would gain"),
    ("record", record, "write layers of a model as workloads for benchmarks"),
    ("convert", convert, "convert checkpoints between layouts and model types"),
)
DEMO = """\
Train a small byte-level transformer with a ReLU-gated FFN and an L1 penalty, then run its trained FFN layers on
held-back text through TwELL and through dense PyTorch, compare both with float64, print a table and save one picture.
Ctrl-C ends the training early and evaluates what there is. Exits with 1 where sparse and dense disagree.
"""
INFO = "Show versions, devices, packaged kernels, the kernel cache and TWELL_* environment variables."


def _number(text: str, expected: str, accept: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
    if not math.isfinite(value) or not accept(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
    return value


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds above 0", lambda v: v > 0)


def _coefficient(text: str) -> float:
    return _number(text, "a number of at least 0", lambda v: v >= 0)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="twell", description="Exact sparse ReLU feed-forward layers in the TwELL format."
    )
    top.add_argument("--version", action="version", version=f"twell {twell.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="train a small model and compare its FFN sparse and dense", description=DEMO
    )
    demo.add_argument(
        "--text", type=Path, metavar="DIR", help="folder of text files (default: the Python standard library's source)"
    )
    demo.add_argument("--out", type=Path, metavar="PNG", default=Path("twell_demo.png"), help="picture (%(default)s)")
    demo.add_argument("--device", help="cpu, cuda or cuda:INDEX (default: cuda where there is one)")
    length = demo.add_argument_group("training", "without --steps it is bounded by time, and no two runs are the same")
    length.add_argument(
        "--seconds", type=_seconds, metavar="S", help="longest training time (default: 60 on a CPU, more on a GPU)"
    )
    length.add_argument(
        "--steps", type=at_least(1), metavar="N", help="most training steps; without --seconds the run is repeatable"
    )
    length.add_argument("--seed", type=at_least(0), metavar="N", default=0, help="of weights and text (%(default)s)")
    length.add_argument("--l1", type=_coefficient, metavar="C", help="coefficient of the L1 penalty")
    size = demo.add_argument_group("model", "defaults depend on the machine")
    size.add_argument("--layers", type=at_least(1), metavar="N", help="transformer layers")
    size.add_argument("--hidden", type=at_least(32), metavar="K", help="hidden size, a multiple of 32")
    size.add_argument("--intermediate", type=at_least(8), metavar="N", help="neurons of an FFN, a multiple of 8")
    size.add_argument("--context", type=at_least(2), metavar="N", help="bytes of a training window")
    size.add_argument(
        "--compression", type=int, choices=(2, 4, 8), default=8, help="256 / C words a tile are packed (%(default)s)"
    )

    for name, module, summary in MODELS:
        command = commands.add_parser(name, help=summary, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(module=module)

    # parses what follows it by itself, as "bench model" takes other arguments than the rest
    commands.add_parser("bench", help="time kernels, layers and models beside dense PyTorch", add_help=False)

    info = commands.add_parser("info", help="show versions, devices, kernels and cache", description=INFO)
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--verbose", action="store_true", help="list each packaged kernel")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: sys.argv). Returns the exit code: 2 for bad arguments, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["bench"]:
        return bench.main(given[1:])
    arguments = vars(parser().parse_args(given))
    return exit_status(f"twell {arguments['command']}", lambda: _run(**arguments))


def _run(command: str, module: ModuleType | None = None, **arguments: Any) -> int:
    if command == "info":
        from twell.commands import info

        return info.run(**arguments)
    if module is not None:
        run: Callable[[argparse.Namespace], int] = module.run
        return run(argparse.Namespace(**arguments))
    from twell.commands.demo import demo

    return demo.run(demo.Request(**arguments))
