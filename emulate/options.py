"""How a launch is to be run."""

from dataclasses import dataclass
from typing import Literal, SupportsIndex

MAX_THREADS = 1024
"""Threads of a block, on every GPU."""
MAX_SHARED_BYTES = 227 * 1024
"""Shared memory of a CTA on Hopper, the largest of any GPU [bytes]."""
SHARED_BYTES = {
    (7, 0): 96 * 1024,
    (7, 5): 64 * 1024,
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): MAX_SHARED_BYTES,
    (10, 0): MAX_SHARED_BYTES,
    (10, 3): MAX_SHARED_BYTES,
    (12, 0): 99 * 1024,
    (12, 1): 99 * 1024,
}
"""Shared memory that a CTA can have, by compute capability [bytes]; CUDA Programming Guide, table
of technical specifications."""
MAX_STATIC_BYTES = 48 * 1024
"""Shared memory of static arrays, on every GPU; more has to be dynamic [bytes]."""
MAX_RESIDENT_THREADS = 1 << 16
"""CUDA threads that are alive at one time; each has 64 KiB of address space."""
WINDOW_THREADS = 1024
"""CTAs of up to so many threads run side by side before the next ones are started."""


@dataclass(frozen=True)
class Options:
    """Options of a launch; see `emulate.launch`.

    Attributes:
        boundscheck: indices of arrays are checked.
        copies: when async work completes: at the call (``eager``), as late as the program allows
            (``lazy``) or at a time that the seed decides (``random``).
        seed: random order of threads; ``None`` is first in, first out.
        resident: CTAs that are alive at one time: a number, ``all``, or ``None`` for as many as
            the others wait for.
        cc: compute capability whose limits apply.
    """

    boundscheck: bool = True
    copies: Literal["eager", "lazy", "random"] = "eager"
    seed: int | None = None
    resident: int | Literal["all"] | None = None
    cc: tuple[int, int] = (9, 0)

    def __post_init__(self) -> None:
        if self.copies not in ("eager", "lazy", "random"):
            raise ValueError(f'copies: expected "eager", "lazy" or "random", got {self.copies!r}')
        if self.cc not in SHARED_BYTES:
            raise ValueError(f"cc: expected one of {sorted(SHARED_BYTES)}, got {self.cc!r}")
        if self.resident is not None and self.resident != "all":
            if not isinstance(self.resident, int) or self.resident < 1:
                raise ValueError(
                    f'resident: expected a positive number, "all" or None, got {self.resident!r}'
                )


@dataclass(frozen=True)
class Shape:
    """The checked shape of a launch.

    Attributes:
        grid, block: extents in x, y, z.
        shared_bytes: dynamic shared memory of a CTA [bytes].
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int

    @property
    def blocks(self) -> int:
        """CTAs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]


GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)


def check_shape(grid: object, block: object, shared_bytes: object) -> Shape:
    """The launch's shape.

    Raises:
        ValueError: a grid or block that no GPU takes, or too much shared memory.
    """
    grid3 = _extents("grid", grid, GRID_LIMITS)
    block3 = _extents("block", block, BLOCK_LIMITS)
    shape = Shape(grid3, block3, _shared_bytes(shared_bytes))
    if shape.threads > MAX_THREADS:
        raise ValueError(
            f"block: expected at most {MAX_THREADS} threads, got {block!r} = {shape.threads}"
        )
    return shape


def _extents(name: str, value: object, limits: tuple[int, ...]) -> tuple[int, int, int]:
    given = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(given) <= 3 or not all(isinstance(n, SupportsIndex) for n in given):
        raise ValueError(f"{name}: expected an integer or up to three of them, got {value!r}")
    extents = [int(n) for n in given] + [1] * (3 - len(given))
    for extent, limit in zip(extents, limits, strict=True):
        if not 1 <= extent <= limit:
            raise ValueError(f"{name}: expected extents from 1 to {limits}, got {value!r}")
    return extents[0], extents[1], extents[2]


def _shared_bytes(value: object) -> int:
    if not isinstance(value, SupportsIndex) or not 0 <= int(value) <= MAX_SHARED_BYTES:
        raise ValueError(f"shared_bytes: expected 0 to {MAX_SHARED_BYTES}, got {value!r}")
    return int(value)


def resident_blocks(options: Options, shape: Shape) -> tuple[int, int]:
    """CTAs that may be alive at one time, and those that start before anybody waits.

    Raises:
        ValueError: the CTAs that are to be alive together have too many threads.
    """
    most = max(MAX_RESIDENT_THREADS // shape.threads, 1)
    if options.resident is None:
        window = max(WINDOW_THREADS // shape.threads, 1)
        return min(shape.blocks, most), min(shape.blocks, window)
    wanted = shape.blocks if options.resident == "all" else min(options.resident, shape.blocks)
    if wanted > most:
        raise ValueError(
            f"resident: {wanted} blocks of {shape.threads} threads are more than "
            f"{MAX_RESIDENT_THREADS} threads at one time"
        )
    return wanted, wanted


def shared_limit(cc: tuple[int, int]) -> int:
    """Shared memory that a CTA can have [bytes]."""
    return SHARED_BYTES[cc]
