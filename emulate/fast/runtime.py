"""The scheduler's functions as C symbols that kernels call, compiled once a machine."""

from typing import Any

from numba.core import types
from numba.core.compiler_lock import global_compiler_lock

from emulate import cache
from emulate.fast import scheduler, switch
from emulate.fast.units import Assembler, ObjectCode, load_or_compile

_INT = types.int64
_EXPORTS = {
    "emulate_barrier": (scheduler.barrier, 2, _INT),
    "emulate_meet": (scheduler.meet, 3, types.none),
    "emulate_retry": (scheduler.retry_later, 1, types.none),
    "emulate_leave": (scheduler.leave, 1, types.none),
    "emulate_copy_record": (scheduler.copy_record, 1, _INT),
    "emulate_copy_issue": (scheduler.copy_issue, 1, types.none),
    "emulate_copy_commit": (scheduler.copy_commit, 0, types.none),
    "emulate_copy_wait": (scheduler.copy_wait, 2, types.none),
    "emulate_hub": (scheduler.hub, 1, _INT),
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
