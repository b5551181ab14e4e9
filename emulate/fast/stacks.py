"""Memory for the stacks of fibers, kept between launches."""

import ctypes
import mmap
import sys
import threading

import numpy as np

from emulate.fast.records import STACK_BYTES

# Address space is not memory: without a reservation, what no fiber touches counts nowhere.
_NORESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


class Stacks:
    """Stacks for ``count`` fibers in one mapping, each aligned to its size.

    Pages that no fiber touches take no memory.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._mapping = mmap.mmap(-1, (count + 1) * STACK_BYTES, flags=_FLAGS)
        # A huge page under every stack would make all of them resident.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.base = -(-start // STACK_BYTES) * STACK_BYTES
        words = np.frombuffer(self._mapping, np.int64)[(self.base - start) // 8 :]
        self._words = words[: count * STACK_BYTES // 8].reshape(count, STACK_BYTES // 8)

    def field(self, offset: int, count: int) -> np.ndarray:
        """A field of the records of the first ``count`` fibers."""
        return self._words[:count, offset // 8]


_lock = threading.Lock()
_free: list[Stacks] = []


def take(count: int) -> Stacks:
    """Stacks for at least ``count`` fibers; give them back afterwards."""
    with _lock:
        for i, stacks in enumerate(_free):
            if stacks.count >= count:
                return _free.pop(i)
        _free.clear()  # smaller ones would never be asked for again
    return Stacks(count)


def give_back(stacks: Stacks) -> None:
    """Keep stacks for the next launch."""
    with _lock:
        _free.append(stacks)
