"""``python -m benchmarks.coalesced``."""

import sys

from benchmarks.coalesced.measure import main

if __name__ == "__main__":
    sys.exit(main())
