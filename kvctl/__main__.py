"""`python -m kvctl`."""

import sys

from kvctl.app import main

if __name__ == "__main__":
    sys.exit(main())
