"""``python -m twell``."""

import sys

from twell.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
