"""The measured table of Hopper configs: which shape was fastest for which problem.

`nbmoe tune` writes ``hopper_table.json``; ``NBMOE_HOPPER_TABLE=FILE`` names another one. The table
only guides a choice: what it says is checked like any other candidate.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig

VARIABLE = "NBMOE_HOPPER_TABLE"
PACKAGED = Path(__file__).with_name("hopper_table.json")
_EDGES = (3, 8, 16, 32, 64)
"""Means of rows up to which problems count as alike."""
_NEAR = 1 / 8
"""How far two larger means may be apart: the fitting widths change with them."""
_FAR = 4.0
"""Factors of two between sizes from which on a measurement says nothing."""


@dataclass(frozen=True)
class Shape:
    """The fields of a `HopperMatmulConfig` that were measured."""

    widths: tuple[int, ...]
    warpgroups: int
    stage_blocks: int
    stages: int
    blocks_per_sm: int
    registers: tuple[int, int] | None
    warp_products: bool = False

    def config(self, a_format: str, b_format: str, max_slots: int) -> HopperMatmulConfig:
        """The config of this shape for a pair of formats."""
        from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig

        return HopperMatmulConfig(a_format, b_format, **vars(self), max_slots=max_slots)

    @classmethod
    def of(cls, config: HopperMatmulConfig) -> Shape:
        """The shape of a config."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Measurement:
    """The fastest shape of a problem, and its time."""

    a_format: str
    b_format: str
    n: int
    k: int
    num_active: int
    rows: int
    shape: Shape
    microseconds: float


def table_path() -> Path:
    """The file that choices use."""
    return Path(os.environ.get(VARIABLE) or PACKAGED)


def lookup(
    a_format: str, b_format: str, n: int, k: int, num_active: int, rows: int
) -> Shape | None:
    """The shape of the nearest measured problem of a pair of formats, None if none is near.

    Args:
        a_format: kind of the tokens.
        b_format: kind of the weights.
        n: weight rows of an expert.
        k: columns.
        num_active: expert slots.
        rows: of a slot that has any, on average.
    """

    def distance(m: Measurement) -> float:
        sizes = ((m.n, n), (m.k, k), (m.num_active, max(num_active, 1)), (m.rows, rows))
        return sum(abs(math.log2(one / other)) for one, other in sizes)

    alike = [
        m
        for m in read_table(table_path())
        if (m.a_format, m.b_format) == (a_format, b_format) and are_alike(m.rows, rows)
    ]
    nearest = min(alike, key=distance, default=None)
    return nearest.shape if nearest is not None and distance(nearest) <= _FAR else None


def are_alike(rows: int, others: int) -> bool:
    """Whether what was measured at one mean holds at another."""
    low, high = sorted((rows, others))
    if high <= _EDGES[-1]:
        return all((low <= edge) == (high <= edge) for edge in _EDGES)
    return low > _EDGES[-1] and high - low <= _NEAR * high


@functools.cache
def read_table(path: Path) -> tuple[Measurement, ...]:
    """The measurements of a file.

    Raises:
        ValueError: it cannot be read, or is not a table.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        return tuple(_measurement(entry) for entry in entries)
    except (OSError, KeyError, TypeError, ValueError) as error:
        where = f"{VARIABLE}={path}" if path != PACKAGED else str(path)
        raise ValueError(f"{where}: not a table of Hopper configs: {error!r}") from error


def _measurement(entry: dict[str, Any]) -> Measurement:
    shape = dict(entry["shape"])
    shape["widths"] = tuple(shape["widths"])
    shape["registers"] = tuple(shape["registers"]) if shape["registers"] else None
    return Measurement(**{**entry, "shape": Shape(**shape)})


def write_table(path: Path, about: dict[str, str], measurements: tuple[Measurement, ...]) -> None:
    """Writes a table.

    Args:
        path: the file.
        about: card, date and command.
        measurements: what was found.
    """
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in about.items()]
    entries = ",\n".join(f"  {json.dumps(asdict(m))}" for m in measurements)
    text = "\n".join(["{", *lines, ' "entries": [', entries, " ]", "}", ""])
    path.write_text(text, encoding="utf-8")
    read_table.cache_clear()
