"""What the compilation of one kernel finds out on the way."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass

from nbmoe_kernels.device.op import Op, Scope


@dataclass
class Build:
    """The facts about a kernel that its machine code does not show.

    Attributes:
        boundscheck: indices of arrays are checked.
        static_bytes: shared memory of static arrays [bytes].
        local_bytes: local arrays [bytes].
        warp_exchange, warpgroup_exchange: operands, results and tiles of the largest op [bytes].
        warp_product, warpgroup_product: record of the largest async op [bytes].
        min_cc, min_cc_op: compute capability that the ops need, and the op that needs it.
    """

    boundscheck: bool = True
    static_bytes: int = 0
    local_bytes: int = 0
    warp_exchange: int = 0
    warpgroup_exchange: int = 0
    warp_product: int = 0
    warpgroup_product: int = 0
    min_cc: tuple[int, int] = (0, 0)
    min_cc_op: str = ""

    def allocate_shared(self, nbytes: int, alignment: int) -> int:
        """The offset of a new static array in the CTA's shared memory."""
        offset = -(-self.static_bytes // alignment) * alignment
        self.static_bytes = offset + nbytes
        return offset

    def need_exchange(self, scope: Scope, nbytes: int) -> None:
        """Note the size of a collective's operands and results."""
        if scope is Scope.WARP:
            self.warp_exchange = max(self.warp_exchange, nbytes)
        else:
            self.warpgroup_exchange = max(self.warpgroup_exchange, nbytes)

    def need_product(self, scope: Scope, exchange: int, record: int) -> None:
        """Note the sizes of an async op of a unit."""
        self.need_exchange(scope, exchange)
        if scope is Scope.WARP:
            self.warp_product = max(self.warp_product, record)
        else:
            self.warpgroup_product = max(self.warpgroup_product, record)

    def need_cc(self, op: Op) -> None:
        """Note the compute capability that an op needs."""
        if op.min_cc > self.min_cc:
            self.min_cc, self.min_cc_op = op.min_cc, op.name


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


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """No cyclic collection while Numba compiles: it makes many objects and few of them die."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
