"""``python -m profiling.draw``."""

import sys

from profiling.draw.charts import main

sys.exit(main())
