"""``python -m profiling.bench``."""

import sys

from profiling.bench import main

sys.exit(main())
