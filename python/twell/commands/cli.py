"""The command line: ``twell`` and ``python -m twell``."""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

import twell
from twell.commands import analyze, demo, info, tune
from twell.commands.request import exit_status

MODULES: tuple[tuple[str, ModuleType, str], ...] = (
    ("demo", demo, "train a small model and compare its layers sparse and dense"),
    ("analyze", analyze, "report the sparsity of a model's layers and the speed-up to expect"),
    ("tune", tune, 'measure this GPU for strategy "auto"'),
    ("info", info, "show versions, devices, kernels and cache"),
)


def parser() -> argparse.ArgumentParser:
    what = "Exact sparse ReLU feed-forward layers in the TwELL format."
    top = argparse.ArgumentParser(prog="twell", description=what)
    top.add_argument("--version", action="version", version=f"twell {twell.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    for name, module, summary in MODULES:
        command = commands.add_parser(name, help=summary, description=module.DESCRIPTION)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
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
    arguments = parser().parse_args(given)
    return exit_status(f"twell {arguments.command}", lambda: int(arguments.run(arguments)))
