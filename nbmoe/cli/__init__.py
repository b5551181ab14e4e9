"""The command line: `python -m nbmoe`, also installed as `nbmoe`."""

from nbmoe.cli.main import main

__all__ = ["main"]
