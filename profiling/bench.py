"""The door to ``twell bench`` from a checkout: ``python profiling/bench.py ffn --workload topic29``."""

import sys

from twell.commands.bench import main

if __name__ == "__main__":
    sys.exit(main())
