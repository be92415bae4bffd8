"""`python -m kvctl.console`: `kvctl console`, as a supervisor starts it."""

import sys

from kvctl.app import main

if __name__ == "__main__":
    sys.exit(main(["console", *sys.argv[1:]]))
