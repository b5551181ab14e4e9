"""What there is to change about an op: told by its effects, not by its name."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from nbmoe_kernels.device import effects
from nbmoe_kernels.device.op import STUBS, Op, Scope, Timing

_ORDERING = (
    effects.Fence,
    effects.ProxyFence,
    effects.NamedBarrier,
    effects.MbarInit,
    effects.MbarInval,
    effects.MbarArrive,
    effects.MbarWait,
    effects.Atomic,
)
_WAIT = re.compile(r"(\w+)\.wait(\d+)")


def is_synchronisation(op: Op) -> bool:
    """Whether the op exists to order or to complete something."""
    if op.group is not None and op.timing is not Timing.ASYNC:
        return ".commit" in op.group or ".wait" in op.group or ".fence" in op.group
    if any(isinstance(effect, _ORDERING) for effect in op.effects or ()):
        return op.timing is not Timing.ASYNC
    # A warp op that moves nothing: a barrier, or a fence of the tensor cores.
    is_barrier = op.scope is not Scope.THREAD and not op.params and op.result is None
    return is_barrier and op.effects == () and not op.name.startswith("set_max_registers")


def counts(op: Op) -> Iterator[str]:
    """Parameters that count arrivals, bytes or threads."""
    for effect in op.effects or ():
        numbers: tuple[Any, ...] = ()
        if isinstance(effect, effects.NamedBarrier | effects.MbarInit):
            numbers = (effect.count,)
        elif isinstance(effect, effects.MbarArrive):
            numbers = (effect.count, effect.expect)
        elif isinstance(effect, effects.Atomic) and op.timing is Timing.WAIT:
            numbers = ("value",)
        elif isinstance(effect, effects.Atomic) and effect.kind == "rmw" and op.result is None:
            numbers = ("value",)
        yield from (n for n in numbers if isinstance(n, str) and n in op.arguments)


def parities(op: Op) -> Iterator[str]:
    """Parameters that are the parity of a phase."""
    for effect in op.effects or ():
        if isinstance(effect, effects.MbarWait) and isinstance(effect.parity, str):
            yield effect.parity


def siblings(op: Op) -> Iterator[tuple[str, str, Any]]:
    """Ops that could stand in this one's place by mistake: kind of edit, in words, the op."""
    wait = _WAIT.fullmatch(op.group or "")
    make = _wait_factories().get(wait[1]) if wait else None
    if wait and make is not None:
        for open_groups in (int(wait[2]) + 1, int(wait[2]) - 1):
            if open_groups >= 0:
                yield "count", f"{open_groups} open groups instead of {wait[2]}", make(open_groups)
    for effect in op.effects or ():
        if isinstance(effect, effects.Atomic):
            if effect.order != "relaxed":
                yield from _renamed(op, effect.order, "relaxed")
            if effect.scope != "cta":
                yield from _renamed(op, effect.scope, "cta")


def _wait_factories() -> dict[str, Callable[[int], Any]]:
    from nbmoe_kernels.device.bulk import bulk_wait
    from nbmoe_kernels.device.memory import cp_async_wait
    from nbmoe_kernels.device.wgmma import wgmma_wait

    return {"cp": cp_async_wait, "bulk": bulk_wait, "wgmma": wgmma_wait}


def _renamed(op: Op, old: str, new: str) -> Iterator[tuple[str, str, Any]]:
    """The op whose name has another order or scope; names spell them out."""
    _make_atomics(op, old, new)
    stub: Any = STUBS.get(op.name.replace(f"_{old}_", f"_{new}_", 1))
    if stub is not None and stub.op is not op:
        yield "weaken", f"{new} instead of {old}", stub


def _make_atomics(op: Op, old: str, new: str) -> None:
    from nbmoe_kernels.device import atomics

    parts = op.name.replace(f"_{old}_", f"_{new}_", 1).split("_")
    head, (order, scope, space, dtype) = parts[:-4], parts[-4:]
    options = {"space": space, "order": order, "scope": scope}
    if head == ["wait", "ge"]:
        atomics.wait_ge(dtype, **options)
    elif head in (["load"], ["store"]):
        (atomics.load if head == ["load"] else atomics.store)(dtype, **options)
    elif head == ["atom", "cas"]:
        atomics.compare_and_swap(dtype, **options)
    elif head[0] in ("atom", "red"):
        make = atomics.atomic if head[0] == "atom" else atomics.reduction
        make(head[1], dtype, **options)
