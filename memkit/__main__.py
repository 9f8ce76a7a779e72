"""`python -m memkit` is the `memkit` command."""

import sys

from memkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
