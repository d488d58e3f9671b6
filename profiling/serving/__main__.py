"""Serving without a server's machine: replay the recorded steps of a scheduler, and run `generate` of transformers.

    python -m profiling.serving replay --out replay.json                             # on a GPU, three minutes
    python -m profiling.serving generate --config 16x2048x5632 --out generate.json   # on a GPU, four minutes

Each command has --help. A model is one of ``profiling.bench model``, drawn, or a folder with --text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from profiling.serving import generate, replay


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in (("replay", replay), ("generate", generate)):
        command = commands.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = vars(parser.parse_args(argv))
    return int(arguments.pop("run")(argparse.Namespace(**arguments)))


if __name__ == "__main__":
    raise SystemExit(main())
