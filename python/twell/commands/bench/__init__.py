"""``twell bench``: time kernels, layers and models beside dense PyTorch, none before it is right."""

from __future__ import annotations

import sys
from collections.abc import Sequence

DESCRIPTION = """\
Time kernels, layers and models beside dense PyTorch: one run, one machine, interleaved. Nothing is timed before it is
right: an error against float64 of more than 1.1 times dense PyTorch's, in norm or in the worst row, or other bits on
replay, gives a red row without speed and exit status 1. Where few terms are summed luck decides, so more is allowed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``twell bench`` with what follows these words (default: sys.argv).

    Returns the exit code: 0, 1 for a row that is red, 2 for what cannot be done, 130 for Ctrl-C. Bad arguments raise
    SystemExit(2).
    """
    from twell.commands.bench import cli

    return cli.main(list(sys.argv[1:] if argv is None else argv))
