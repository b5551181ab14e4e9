"""Runs the command line."""

import sys

from emulate.cli import main

if __name__ == "__main__":
    sys.exit(main())
