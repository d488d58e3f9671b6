"""Serving without a server's machine: record the steps of a scheduler, replay them, and run an engine of transformers.

    make test-serving ARGS=--collect-only                                          # makes the environment of vLLM
    build/serving-env/bin/python -m profiling.serving record --out profiling/traces/vllm_cpu.json
    python -m profiling.serving replay --out replay.json                             # on a GPU, three minutes
    python -m profiling.serving generate --config 16x2048x5632 --out generate.json   # on a GPU, four minutes

Each command has --help. A model is one of ``profiling.bench model``, drawn, or a folder with --text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from profiling.serving import generate, record, replay


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in (("record", record), ("replay", replay), ("generate", generate)):
        command = commands.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = vars(parser.parse_args(argv))
    return int(arguments.pop("run")(argparse.Namespace(**arguments)))


if __name__ == "__main__":
    raise SystemExit(main())
