"""Options that commands share."""

from __future__ import annotations

import argparse

BACKENDS = ("gpu", "emulate", "cudasim", "reference")
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8_block", "fp8_row", "bf16")


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Adds --backend."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        help="who runs the kernels (default: $NBMOE_BACKEND, else a usable GPU, else emulate)",
    )


def count(text: str) -> int:
    """Parses a number that is not negative.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0, 1, 2, …, got {text!r}")
    return value


def positive_counts(text: str) -> tuple[int, ...]:
    """Parses numbers of at least 1 between commas.

    Raises:
        argparse.ArgumentTypeError: It is something else.
    """
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = (0,)
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, as 1,16, got {text!r}")
    return values
