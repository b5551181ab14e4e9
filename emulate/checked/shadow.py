"""Shadow memory: a row of facts for every granule of every region.

Regions have addresses of their own, so that a log entry is one number; a page belongs to one
region. A granule is as long as the region's smallest access so far: a region starts with its
array's element and is refined when shorter accesses come.
"""

from dataclasses import dataclass

import numpy as np

from emulate.checked.touch import ASYNC, INIT, PAGE_BITS, REGION_BASE, REGION_ROW, REGION_SHIFT

PAGE = 1 << PAGE_BITS
READERS = 4
STRICT_READERS = 12
_GAP = 2
"""Free pages between regions."""


@dataclass(eq=False)
class Region:
    """Memory that is checked.

    Attributes:
        name: what messages call it.
        number: row of the region table.
        base: its first address.
        nbytes: its size.
        shift: log2 of the granule.
        memory: the bytes' real address.
        row: the first of its rows.
        is_shared: shared memory of a block.
        origin: real address of the allocation, which counts as aligned to anything.
    """

    name: str
    number: int
    base: int
    nbytes: int
    shift: int
    memory: int
    row: int
    is_shared: bool
    origin: int = 0


class Shadow:
    """All regions of a launch."""

    def __init__(self, readers: int) -> None:
        self.width = 4 + 3 * readers
        self.rows = np.empty((1 << 12, self.width), np.int32)
        self.pages = np.zeros(64, np.int32)
        self.regions = np.zeros((16, 3), np.int64)
        self.list: list[Region] = []
        self._free: dict[int, list[Region]] = {}
        self._next_page = 1
        self._next_row = 0

    def add(
        self, name: str, memory: int, nbytes: int, granule: int, *, init: bool, shared: bool
    ) -> Region:
        """A new region; its first address is the real one's modulo 1024."""
        reused = self._free.get(nbytes) if shared else None
        if reused:
            region = reused.pop()
            region.name = name
            region.memory = region.origin = memory
            self._clear(region, init)
            return region
        shift = max(granule.bit_length() - 1, 0)
        base = (self._next_page << PAGE_BITS) + memory % 1024
        pages = (base % PAGE + nbytes + PAGE - 1) >> PAGE_BITS
        number = len(self.list)
        region = Region(name, number, base, nbytes, shift, memory, 0, shared, memory)
        self._grow_tables(number + 1, self._next_page + pages + _GAP)
        self.pages[self._next_page : self._next_page + pages] = number
        self._next_page += pages + _GAP
        self.list.append(region)
        self._place(region)
        self._clear(region, init)
        return region

    def occupy(self, region: Region, agent: int, epoch: int, site: int) -> None:
        """Somebody has just read and written all of a region, by whatever engine."""
        rows = self.rows[region.row : region.row + self._count(region)]
        rows[:, :3] = rows[:, 4:7] = agent, epoch, site
        rows[:, 3] = INIT | ASYNC

    def release(self, region: Region) -> None:
        """A shared region's CTA is over."""
        self._free.setdefault(region.nbytes, []).append(region)

    def find(self, address: int) -> Region:
        """The region of an address of this module."""
        return self.list[int(self.pages[address >> PAGE_BITS])]

    def refine(self, region: Region, shift: int) -> None:
        """Make a region's granules shorter: 1 << shift bytes."""
        if shift >= region.shift:
            return
        old = self.rows[region.row : region.row + self._count(region)].copy()
        factor = 1 << (region.shift - shift)
        region.shift = shift
        self._place(region)
        count = self._count(region)
        self.rows[region.row : region.row + count] = np.repeat(old, factor, axis=0)[:count]

    def _count(self, region: Region) -> int:
        return -(-region.nbytes // (1 << region.shift))

    def _place(self, region: Region) -> None:
        """Give a region rows of its own; those that it had are lost."""
        count = self._count(region)
        region.row = self._next_row
        self._next_row += count
        if self._next_row > len(self.rows):
            grown = np.empty((max(2 * len(self.rows), self._next_row), self.width), np.int32)
            grown[: region.row] = self.rows[: region.row]
            self.rows = grown
        self.regions[region.number, REGION_BASE] = region.base
        self.regions[region.number, REGION_ROW] = region.row
        self.regions[region.number, REGION_SHIFT] = region.shift

    def _clear(self, region: Region, init: bool) -> None:
        rows = self.rows[region.row : region.row + self._count(region)]
        rows[:] = -1
        rows[:, 3] = INIT if init else 0

    def _grow_tables(self, regions: int, pages: int) -> None:
        if regions > len(self.regions):
            grown = np.zeros((2 * regions, 3), np.int64)
            grown[: len(self.regions)] = self.regions
            self.regions = grown
        if pages > len(self.pages):
            longer = np.zeros(2 * pages, np.int32)
            longer[: len(self.pages)] = self.pages
            self.pages = longer
