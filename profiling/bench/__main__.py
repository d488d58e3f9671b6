import sys

from profiling.bench import main

sys.exit(main())
