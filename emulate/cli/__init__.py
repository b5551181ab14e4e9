"""The command line: `python -m emulate`."""

from emulate.cli.main import main

__all__ = ["main"]
