"""The warp functions and arithmetic of `numba.cuda`, for all engines.

`numba.cuda` has shuffles, votes and matches of its own. Here they are ops like any other (but not
in the table of `nbmoe_kernels`): one twin for all engines, the rendezvous is the engine's. They
take whole warps: a mask that leaves lanes out is an `UnsupportedOp`.

`functions` makes what interpreted kernels call; `emulate.fast.stock` does it for compiled ones.
"""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from emulate.errors import UnsupportedOp
from nbmoe_kernels.device.op import Op, Scope, Timing, parse_params

FULL_MASK = 0xFFFFFFFF
_LANES = 32


def _shuffle_idx(value: Any, lane: Any) -> Any:
    result = np.empty_like(value)
    for i in range(32):
        result[i] = value[np.int64(lane[i]) & 31]
    return result


def _shuffle_up(value: Any, lane: Any) -> Any:
    result = np.empty_like(value)
    for i in range(32):
        source = i - (np.int64(lane[i]) & 31)
        result[i] = value[source] if source >= 0 else value[i]
    return result


def _shuffle_down(value: Any, lane: Any) -> Any:
    result = np.empty_like(value)
    for i in range(32):
        source = i + (np.int64(lane[i]) & 31)
        result[i] = value[source] if source < 32 else value[i]
    return result


def _shuffle_xor(value: Any, lane: Any) -> Any:
    result = np.empty_like(value)
    for i in range(32):
        result[i] = value[i ^ (np.int64(lane[i]) & 31)]
    return result


def _ballot(predicate: Any) -> Any:
    mask = np.uint32(0)
    for i in range(32):
        if predicate[i] != 0:
            mask = np.uint32(mask | np.uint32(np.uint32(1) << np.uint32(i)))
    return np.full(32, mask)


def _match_any(value: Any) -> Any:
    result = np.zeros(32, np.uint32)
    for i in range(32):
        for j in range(32):
            if value[j] == value[i]:
                result[i] = np.uint32(result[i] | np.uint32(np.uint32(1) << np.uint32(j)))
    return result


def _syncwarp() -> None:
    pass


def _op(name: str, params: str, result: str, instruction: str, twin: Any) -> Op:
    return Op(
        name,
        Scope.WARP,
        parse_params(params),
        (result, 0) if result else None,
        instruction,
        twin,
        Timing.NOW,
        None,
        (),
        (7, 0),
    )


SHUFFLES: dict[tuple[str, int], Op] = {}
"""By name and bytes of the value."""
for _name, _mode, _twin in (
    ("shfl_sync", "idx", _shuffle_idx),
    ("shfl_up_sync", "up", _shuffle_up),
    ("shfl_down_sync", "down", _shuffle_down),
    ("shfl_xor_sync", "bfly", _shuffle_xor),
):
    for _size, _dtype in ((4, "u32"), (8, "u64")):
        SHUFFLES[_name, _size] = _op(
            f"cuda_{_name}_{_dtype}",
            f"{_dtype} value, u32 lane",
            _dtype,
            f"shfl.sync.{_mode}.b32",
            _twin,
        )
BALLOT = _op("cuda_vote_sync", "u32 predicate", "u32", "vote.sync.ballot.b32", _ballot)
MATCH: dict[int, Op] = {
    size: _op(f"cuda_match_sync_u{8 * size}", f"u{8 * size} value", "u32", "match.any", _match_any)
    for size in (4, 8)
}
SYNCWARP = _op("cuda_syncwarp", "", "", "bar.warp.sync", _syncwarp)


def ops() -> Iterator[Op]:
    """All of them."""
    yield from SHUFFLES.values()
    yield BALLOT
    yield from MATCH.values()
    yield SYNCWARP


def check_mask(name: str, mask: Any) -> None:
    """Raise unless a mask names all lanes.

    Raises:
        UnsupportedOp: it leaves some out.
    """
    if int(mask) & FULL_MASK != FULL_MASK:
        raise UnsupportedOp(mask_message(name, int(mask)))


def mask_message(name: str, mask: int) -> str:
    """What a partial mask's error says."""
    return (
        f"cuda.{name}: mask 0x{mask & FULL_MASK:08x} leaves lanes out; only the full mask "
        "0xffffffff has an implementation"
    )


def functions(
    call: Callable[[Op, tuple[Any, ...]], Any], lane: Callable[[], int], lanes: Callable[[], int]
) -> dict[str, Callable[..., Any]]:
    """What interpreted kernels call, by the name in `numba.cuda`.

    Args:
        call: runs an op for the current thread and returns its result.
        lane: the current thread's lane.
        lanes: lanes of the current thread's warp.
    """

    def shuffle(name: str) -> Callable[..., Any]:
        def shuffle_function(mask: Any, value: Any, lane: Any) -> Any:
            check_mask(name, mask)
            bits, kind = _bits(name, value)
            op = SHUFFLES[name, bits.itemsize]
            result = call(op, (bits, np.uint32(int(lane) & FULL_MASK)))
            return np.array([result], bits.dtype).view(kind)[0]

        return shuffle_function

    def ballot(name: str, mask: Any, predicate: Any) -> int:
        check_mask(name, mask)
        return int(call(BALLOT, (np.uint32(1 if predicate else 0),)))

    def match_any_sync(mask: Any, value: Any) -> Any:
        check_mask("match_any_sync", mask)
        bits, _ = _bits("match_any_sync", value)
        return np.uint32(call(MATCH[bits.itemsize], (bits,))).view(np.int32)

    def match_all_sync(mask: Any, value: Any) -> Any:
        check_mask("match_all_sync", mask)
        bits, _ = _bits("match_all_sync", value)
        same = int(call(MATCH[bits.itemsize], (bits,))) == FULL_MASK
        return np.int32(-1 if same else 0), same

    def syncwarp(mask: Any = FULL_MASK) -> None:
        check_mask("syncwarp", mask)
        call(SYNCWARP, ())

    return {
        **{name: shuffle(name) for name, _ in SHUFFLES},
        "all_sync": lambda mask, predicate: ballot("all_sync", mask, predicate) == FULL_MASK,
        "any_sync": lambda mask, predicate: ballot("any_sync", mask, predicate) != 0,
        "eq_sync": lambda mask, predicate: ballot("eq_sync", mask, predicate) in (0, FULL_MASK),
        "ballot_sync": lambda mask, predicate: np.uint32(
            ballot("ballot_sync", mask, predicate)
        ).view(np.int32),
        "match_any_sync": match_any_sync,
        "match_all_sync": match_all_sync,
        "syncwarp": syncwarp,
        "activemask": lambda: np.uint32((1 << lanes()) - 1),
        "lanemask_lt": lambda: np.uint32((1 << lane()) - 1),
        "popc": lambda x: _typed(x)(int(_unsigned(x)).bit_count()),
        "brev": _brev,
        "clz": lambda x: _typed(x)(_width(x) - int(_unsigned(x)).bit_length()),
        "ffs": lambda x: np.uint32((int(x) & -int(x)).bit_length()),
        "fma": fma,
        "selp": lambda test, a, b: a if test else b,
        "cbrt": lambda x: _typed(x)(np.cbrt(x)),
    }


def _typed(value: Any) -> Any:
    # A Python number has Numba's type: 64 bits.
    return type(value) if isinstance(value, np.generic) else type(np.asarray(value)[()])


def _width(value: Any) -> int:
    return 8 * int(np.asarray(value).itemsize)


def _unsigned(value: Any) -> Any:
    bits = np.asarray(value)
    return bits.view(f"u{bits.itemsize}")[()]


def _bits(name: str, value: Any) -> tuple[Any, Any]:
    """The bits of a value as an unsigned number, and the value's type."""
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "iuf" or array.itemsize not in (4, 8):
        raise TypeError(f"cuda.{name}: expected a 32- or 64-bit number, got {array.dtype}")
    return array.view(f"u{array.itemsize}")[()], array.dtype


def _brev(value: Any) -> Any:
    width = max(_width(value), 32)
    bits = int(_unsigned(value)) & ((1 << width) - 1)
    reverse = int(f"{bits:0{width}b}"[::-1], 2)
    return np.uint32(reverse) if width == 32 else np.uint64(reverse)


def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding, in float32 if all are, else in float64."""
    with np.errstate(all="ignore"):
        return _fma(a, b, c)


def _fma(a: Any, b: Any, c: Any) -> Any:
    single = all(type(x) is np.float32 for x in (a, b, c))
    kind = np.float32 if single else np.float64
    x, y, z = kind(a), kind(b), kind(c)
    if not all(math.isfinite(float(v)) for v in (x, y, z)):
        return kind(x * y + z)
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    if exact == 0:
        return kind(x * y + z)  # the product is exact, and the sum has the right zero
    try:
        nearest = float(exact)
    except OverflowError:
        return kind(math.copysign(math.inf, exact))
    if single and math.isfinite(nearest):
        nearest = _to_odd(nearest, exact)
    return kind(nearest)


def _to_odd(nearest: float, exact: Fraction) -> float:
    # Rounded to odd in float64, the next rounding to float32 is the only one.
    rest = exact - Fraction(nearest)
    odd = int(np.float64(nearest).view(np.int64)) & 1
    if rest == 0 or odd:
        return nearest
    return math.nextafter(nearest, math.inf if rest > 0 else -math.inf)
