"""What the compilation of one kernel finds out on the way."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Build:
    """The facts about a kernel that its machine code does not show.

    Attributes:
        boundscheck: indices of arrays are checked.
        static_bytes: shared memory of static arrays [bytes].
        local_bytes: local arrays [bytes].
        exchange_bytes: operands and results of the largest collective, for 32 lanes [bytes].
    """

    boundscheck: bool = True
    static_bytes: int = 0
    local_bytes: int = 0
    exchange_bytes: int = 0

    def allocate_shared(self, nbytes: int, alignment: int) -> int:
        """The offset of a new static array in the CTA's shared memory."""
        offset = -(-self.static_bytes // alignment) * alignment
        self.static_bytes = offset + nbytes
        return offset

    def need_exchange(self, nbytes: int) -> None:
        """Note the size of a collective's operands and results."""
        self.exchange_bytes = max(self.exchange_bytes, nbytes)


_current: list[Build] = []


def current() -> Build:
    """The build that is being compiled."""
    return _current[-1]


@contextlib.contextmanager
def building(build: Build) -> Iterator[Build]:
    """Make a build current; Numba's compiler lock is held meanwhile."""
    _current.append(build)
    try:
        yield build
    finally:
        _current.pop()
