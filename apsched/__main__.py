"""``python -m apsched``."""

# PYTHON_ARGCOMPLETE_OK

import sys

from apsched.cli import main

if __name__ == "__main__":
    sys.exit(main())
