"""What a device op does to memory and to the order of other accesses.

Every effect names the op's parameters; a number may stand where a parameter's name may. An op with
no effects (``None``) is pure; ``()`` says that it only orders. Twins do the work, effects tell a
checker about it: it never has to know an op by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Number = int | str
"""A number, or the name of the scalar parameter that holds it."""


@dataclass(frozen=True)
class Access:
    """Bytes that an op reads or writes through a pointer parameter.

    Attributes:
        param: the pointer.
        nbytes: how many bytes from the address on.
        write: whether they are written.
        proxy: ``generic`` for the thread's own loads and stores, ``async`` for copies and products
            that an asynchronous engine makes; they see each other's data only past a proxy fence.
        footprint: instead of ``nbytes``: from the call's operands (by argument name) to the byte
            offsets from the array's start, for swizzled or strided operands.
        addresses: instead of ``nbytes``: from the call's operands to addresses in global memory,
            one a byte, for memory that a tensor map at ``param`` names.
        align: what the address must be a multiple of [bytes]; 0 where any address will do.
    """

    param: str
    nbytes: Number = 0
    write: bool = False
    proxy: str = "generic"
    footprint: Callable[[dict[str, Any]], Any] | None = None
    addresses: Callable[[dict[str, Any]], Any] | None = None
    align: int = 0


def reads(param: str, nbytes: Number = 0, **options: Any) -> Access:
    """The op reads ``nbytes`` at pointer parameter ``param``."""
    return Access(param, nbytes, **options)


def writes(param: str, nbytes: Number = 0, **options: Any) -> Access:
    """The op writes ``nbytes`` at pointer parameter ``param``."""
    return Access(param, nbytes, write=True, **options)


@dataclass(frozen=True)
class Atomic:
    """An atomic access of ``nbytes`` at ``param``.

    Attributes:
        kind: ``load``, ``store`` or ``rmw``.
        order: ``relaxed``, ``acquire``, ``release`` or ``acq_rel``.
        scope: ``cta``, ``cluster``, ``gpu`` or ``sys``.
        is_float: a float read-modify-write, whose result depends on the order of arrival.
    """

    param: str
    nbytes: Number
    kind: str = "rmw"
    order: str = "relaxed"
    scope: str = "gpu"
    is_float: bool = False


@dataclass(frozen=True)
class Fence:
    """Orders the thread's accesses before and after it for everyone in ``scope``."""

    order: str = "acq_rel"
    scope: str = "gpu"


@dataclass(frozen=True)
class ProxyFence:
    """Makes the thread's generic accesses to ``space`` visible to the async proxy.

    ``space`` is ``shared``, ``global``, or ``tensormap`` for the bytes of a map.
    """

    space: str = "shared"


@dataclass(frozen=True)
class NamedBarrier:
    """``count`` threads meet at barrier ``barrier``; ``waits`` is false for an arrival alone."""

    barrier: Number
    count: Number
    waits: bool = True


@dataclass(frozen=True)
class GridWait:
    """Waits until the previous kernel of the stream has ended, and sees all that it wrote."""


@dataclass(frozen=True)
class MbarInit:
    """Makes 8 bytes at ``param`` an mbarrier that ``count`` arrivals complete."""

    param: str
    count: Number


@dataclass(frozen=True)
class MbarInval:
    """Ends the life of the mbarrier at ``param``."""

    param: str


@dataclass(frozen=True)
class MbarArrive:
    """Arrives ``count`` times at the mbarrier; ``expect`` more bytes must come for its phase."""

    param: str
    count: Number = 1
    expect: Number = 0


@dataclass(frozen=True)
class MbarComplete:
    """When the op's copy is done, ``nbytes`` of the mbarrier's expected bytes have come."""

    param: str
    nbytes: Number


@dataclass(frozen=True)
class MbarWait:
    """Waits until the phase of parity ``parity`` is complete; acquires what arrivals released."""

    param: str
    parity: Number


Effect = (
    Access
    | Atomic
    | Fence
    | ProxyFence
    | NamedBarrier
    | GridWait
    | MbarInit
    | MbarInval
    | MbarArrive
    | MbarComplete
    | MbarWait
)
