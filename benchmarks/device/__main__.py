"""``python -m benchmarks.device``."""

import sys

from benchmarks.device.measure import main

if __name__ == "__main__":
    sys.exit(main())
