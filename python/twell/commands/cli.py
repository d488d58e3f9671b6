"""The command line: ``twell`` and ``python -m twell``."""

import argparse
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import twell
from twell.commands import analyze, demo, tune
from twell.commands.request import exit_status

MODULES = (
    ("demo", demo, "train a small model and compare its layers sparse and dense"),
    ("analyze", analyze, "report the sparsity of a model's layers and the speed-up to expect"),
    ("tune", tune, 'measure this GPU for strategy "auto"'),
)
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

    for name, module, summary in MODULES:
        command = commands.add_parser(name, help=summary, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(module=module)

    info = commands.add_parser("info", help="show versions, devices, kernels and cache", description=INFO)
    info.add_argument("--json", action="store_true", help="print JSON, with the names of all packaged kernels")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: sys.argv). Return the exit code: 2 for bad arguments, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        parser().print_help(sys.stderr)
        return 2
    if given[0] in ("bench", "record"):
        parser().error(f"{given[0]} is in a checkout of twell alone: python -m profiling.{given[0]}")
    if given[0] == "serve-check":
        parser().error("serve-check is an option: twell analyze MODEL --serve")
    if given[0] == "convert":
        parser().error("convert is a call: twell.integrations.transformers.load(SRC).save_pretrained(DST)")
    arguments = vars(parser().parse_args(given))
    return exit_status(f"twell {arguments['command']}", lambda: _run(**arguments))


def _run(command: str, module: ModuleType | None = None, **arguments: Any) -> int:
    if module is not None:
        run: Callable[[argparse.Namespace], int] = module.run
        return run(argparse.Namespace(**arguments))
    from twell.commands import info

    return info.run(**arguments)
