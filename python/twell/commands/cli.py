"""The command line: ``twell`` and ``python -m twell``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import twell
from twell._runtime import geometry
from twell.commands import analyze, tune
from twell.commands.request import DEVICE_HELP, at_least, exit_status, number_above, number_from

MODELS = (
    ("analyze", analyze, "report the sparsity of a model's layers and the speed-up to expect"),
    ("serve-check", analyze, "another name of twell analyze --serve"),
    ("tune", tune, 'measure this GPU for strategy "auto"'),
)
DEMO = """\
Train a small transformer with a ReLU-gated FFN and an L1 penalty, run its FFNs sparse and dense on held-back text, and
compare both with float64. Ctrl-C ends the training early. Exits with 1 if sparse and dense disagree.
"""
INFO = """\
Show versions, devices, packaged kernels and their launcher, the kernel cache, the table of costs that "auto" reads for
each GPU, and TWELL_* environment variables.
"""


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
    demo.add_argument("--device", help=DEVICE_HELP)
    length = demo.add_argument_group("training", "without --steps time bounds it, and no two runs are the same")
    length.add_argument(
        "--seconds", type=number_above(0), metavar="S", help="training time (default: 60 on a CPU, more on a GPU)"
    )
    length.add_argument(
        "--steps", type=at_least(1), metavar="N", help="training steps; without --seconds the run is repeatable"
    )
    length.add_argument(
        "--seed", type=at_least(0), metavar="N", default=0, help="seed of weights and text (%(default)s)"
    )
    length.add_argument("--l1", type=number_from(0), metavar="C", help="coefficient of the L1 penalty")
    size = demo.add_argument_group("model", "defaults depend on the machine")
    size.add_argument("--layers", type=at_least(1), metavar="N", help="transformer layers")
    size.add_argument("--hidden", type=at_least(32), metavar="K", help="hidden size, a multiple of 32")
    size.add_argument("--intermediate", type=at_least(8), metavar="N", help="neurons of an FFN, a multiple of 8")
    size.add_argument("--context", type=at_least(2), metavar="N", help="bytes of a training window")
    size.add_argument(
        "--compression", type=int, choices=geometry.COMPRESSIONS, default=8, help="256 / C words per tile (%(default)s)"
    )

    for name, module, summary in MODELS:
        command = commands.add_parser(name, help=summary, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(module=module, **{"serve": True} if name == "serve-check" else {})

    info = commands.add_parser("info", help="show versions, devices, kernels and cache", description=INFO)
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--verbose", action="store_true", help="list each packaged kernel")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: sys.argv). Return the exit code: 2 for bad arguments, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        parser().print_help(sys.stderr)
        return 2
    if given[0] in ("bench", "record"):
        parser().error(f"{given[0]} is in a checkout of twell alone: python -m profiling.{given[0]}")
    if given[0] == "convert":
        parser().error("convert is a call: twell.integrations.transformers.load(SRC).save_pretrained(DST)")
    arguments = vars(parser().parse_args(given))
    if arguments["command"] == "serve-check":
        print("twell serve-check is `twell analyze --serve`", file=sys.stderr)
    return exit_status(f"twell {arguments['command']}", lambda: _run(**arguments))


def _run(command: str, module: ModuleType | None = None, **arguments: Any) -> int:
    if command == "info":
        from twell.commands import info

        return info.run(**arguments)
    if module is not None:
        run: Callable[[argparse.Namespace], int] = module.run
        return run(argparse.Namespace(**arguments))
    from twell.commands.demo import demo

    return demo.run(demo.DemoRequest(**arguments))
