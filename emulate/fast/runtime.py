"""The scheduler's functions as C symbols that kernels call, compiled once a machine."""

from typing import Any

from numba.core import types
from numba.core.compiler_lock import global_compiler_lock

from emulate import cache
from emulate.fast import collectives, copies, hub, switch
from emulate.fast.units import Assembler, ObjectCode, load_or_compile

_INT = types.int64
_EXPORTS = {
    "emulate_barrier": (collectives.barrier, 2, _INT),
    "emulate_named_barrier": (collectives.named_barrier, 5, types.none),
    "emulate_grid_sync": (collectives.grid_sync, 1, types.none),
    "emulate_partial_mask": (collectives.partial_mask, 3, types.none),
    "emulate_meet": (collectives.meet, 4, types.none),
    "emulate_product_record": (collectives.product_record, 2, _INT),
    "emulate_product_issue": (collectives.product_issue, 3, types.none),
    "emulate_product_commit": (collectives.product_commit, 3, types.none),
    "emulate_product_wait": (collectives.product_wait, 4, types.none),
    "emulate_retry": (hub.retry_later, 2, types.none),
    "emulate_progress": (hub.happened, 0, types.none),
    "emulate_leave": (hub.leave, 1, types.none),
    "emulate_copy_record": (copies.copy_record, 2, _INT),
    "emulate_copy_issue": (copies.copy_issue, 2, types.none),
    "emulate_copy_commit": (copies.copy_commit, 1, types.none),
    "emulate_copy_wait": (copies.copy_wait, 3, types.none),
    "emulate_flight_record": (copies.flight_record, 1, _INT),
    "emulate_flight_issue": (copies.flight_issue, 1, types.none),
    "emulate_hub": (hub.hub, 1, _INT),
}
_addresses: dict[str, int] = {}


def install() -> None:
    """Compile or load the runtime; does nothing the second time."""
    if _addresses:
        return
    with global_compiler_lock:
        switch.install()
        symbols = list(_EXPORTS)
        key = cache.key("runtime", *symbols)
        addresses, _, _ = load_or_compile(key, symbols, _compile)
        _addresses.update(zip(symbols, addresses, strict=True))


def address(symbol: str) -> int:
    """The address of one of the runtime's functions."""
    return _addresses[symbol]


def _compile() -> tuple[ObjectCode, dict[str, Any]]:
    assembler = Assembler("emulate_runtime")
    for symbol, (function, arity, result) in _EXPORTS.items():
        body = getattr(function, "py_func", function)
        assembler.export(symbol, assembler.compile(body, (_INT,) * arity, result))
    return assembler.finish(), {}
