"""Where blocks that group slots by expert keep their counters, and how they read the slots.

Shared memory (u32 words), C = capacity: own counters [warp][expert] (16 C), starts (C), counts of
earlier blocks (C), first tiles (C), sums (2, padded to 4), then with many blocks counters of all
slots [expert, none][copy], first those of earlier blocks, then the others' (2 (C + 1) copies).
"""

from dataclasses import dataclass

import numpy as np

from nbmoe_kernels.device.op import device_function

WARPS = 16
THREADS = 32 * WARPS
MAX_EXPERTS = 1024
NOWHERE = np.uint32(0xFFFFFFFF)
_SUM_WORDS = 4
_SHARED_BYTES = 99 * 1024
"""What a block may have on every GPU."""


@dataclass(frozen=True)
class Layout:
    """Where things are in shared memory [words], for up to `capacity` experts."""

    capacity: int
    copies: int

    @property
    def starts(self) -> int:
        """First row of each expert."""
        return WARPS * self.capacity

    @property
    def before(self) -> int:
        """Slots of each expert in earlier blocks."""
        return self.starts + self.capacity

    @property
    def tiles(self) -> int:
        """First tile of each expert."""
        return self.before + self.capacity

    @property
    def sums(self) -> int:
        """Rows of all experts, most rows of one."""
        return self.tiles + self.capacity

    @property
    def counters(self) -> int:
        """Counters of all slots."""
        return self.sums + _SUM_WORDS

    @property
    def nbytes(self) -> int:
        """Size of all."""
        return 4 * (self.counters + 2 * (self.capacity + 1) * self.copies)


def layout_of(capacity: int, many_blocks: bool) -> Layout:
    """The layout; with many blocks as many copies, up to one a lane, as every GPU has room for."""
    copies = 32 if many_blocks else 0
    while Layout(capacity, copies).nbytes > _SHARED_BYTES:
        copies //= 2
    return Layout(capacity, copies)


def experts_capacity(num_experts: int) -> int:
    """Smallest capacity that holds ``num_experts``: 64 times a power of two."""
    capacity = 64
    while capacity < num_experts:
        capacity *= 2
    return capacity


@device_function
def load_expert(ids, slot, num_slots):
    """The slot's expert, `NOWHERE` for one past the last; there is at least one slot."""
    expert = np.uint32(ids[np.uint64(min(slot, np.uint32(num_slots - np.uint32(1))))])
    if slot >= num_slots:
        expert = NOWHERE
    return expert
