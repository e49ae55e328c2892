"""``python -m apsched``."""

import sys

from apsched.cli import main

if __name__ == "__main__":
    sys.exit(main())
