"""`python -m nbmoe`."""

import sys

from nbmoe.cli import main

if __name__ == "__main__":
    sys.exit(main())
