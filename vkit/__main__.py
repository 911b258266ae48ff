"""`python -m vkit`."""

import sys

from vkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
