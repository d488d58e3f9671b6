"""``python -m profiling.bench``: check layers and models, then time them beside dense PyTorch.

The module of a bench has a docstring for --help, the table of its OPTIONS, the SECONDS of a case, ``cases(bench)`` and
the fields that are SHOWN.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from profiling import harness
from twell.commands.request import exit_status

# The module of a bench by its first word; without one of these, of ``layers``.
BENCHES = ("model", "moe", "float8", "sae", "firing", "host", "adapters", "portable", "generate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns 0, 1 for a red row, 2 for a request that cannot be met, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in BENCHES else "layers"
    command = "profiling.bench" if name == "layers" else f"profiling.bench {name}"
    module = importlib.import_module(f"profiling.bench.{name}")
    formatter = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(f"python -m {command}", description=module.__doc__, formatter_class=formatter)
    if name == "layers":
        top.add_argument("ops", nargs="*", type=module.words(module.OPS), default=[["ffn"]], metavar="OP")
    harness.add_options(top, module.OPTIONS, module.SECONDS)

    def run() -> int:
        bench = harness.Bench(command, top.parse_intermixed_args(words))
        return bench.run(module.cases(bench), module.SHOWN)

    return exit_status(command, run)
