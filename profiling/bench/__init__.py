"""``python -m profiling.bench``: check kernels, layers and models, then time them beside dense PyTorch."""

import sys
from collections.abc import Sequence

DESCRIPTION = """\
Time kernels, layers and models beside dense PyTorch: one run, one machine, interleaved. Only right results are timed:
an error against float64 of more than 1.1 times dense PyTorch's, in norm or in the worst row, or other bits on replay,
gives a red row without speed and exit status 1. Sums of few terms may have larger errors, since chance decides these.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it with the arguments ``argv`` (default: sys.argv).

    Returns the exit code: 0, 1 for a red row, 2 for a request that cannot be met, 130 for Ctrl-C. Bad arguments raise
    SystemExit(2).
    """
    from profiling.bench import cli

    return cli.main(list(sys.argv[1:] if argv is None else argv))
