"""P10: bad operands of the block-scaled matmuls, in all pairs of formats (tables M and W)."""

from collections.abc import Iterator

import numpy as np
import pytest

from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    LayoutError,
    RoutingError,
    ScaleError,
    ShapeError,
)
from nbmoe.formats import MXFP4, MXFP8, NVFP4, PAIRS, BlockFormat
from nbmoe.layouts import ceil_div, deinterleave_scales
from nbmoe.operand import named_dtype
from tests.bad_inputs.case import Case, Recorder, both, check, edit, put, remake, shorter, table
from tests.bad_inputs.common_out import replace_out
from tests.bad_inputs.sizes import EXPERTS, ROWS, TILES
from tests.bad_inputs.valid import VALID, Arguments
from tests.bad_inputs.valid_matmul import pair_name

MATMUL = "grouped_matmul_block_scaled"
SWIGLU = "grouped_matmul_blocked_swiglu"
BF16 = named_dtype("bfloat16")
ENTRIES = {f"{op}:{pair_name(a, b)}": (a, b) for op in (MATMUL, SWIGLU) for a, b in PAIRS}
FULL = {"validate": "full"}


def scale_byte(expert: int, row: int, block: int, byte: int) -> object:
    """A change that overwrites one used weight scale."""

    def change(arguments: Arguments) -> None:
        at = (expert, row // 128, block // 4, row % 32, row % 128 // 32, block % 4)
        arguments["b_scales"].view(np.uint8)[at] = byte

    return change


def fewer_experts(arguments: Arguments) -> None:
    """Three experts and three slots, one of them of the fourth expert."""
    names = ("weight", "b_scales", "expert_scales", "bias", "expert_ids")
    for name in (*names, "expert_start", "a_scale_offsets", "c_input_scales"):
        if name in arguments:
            arguments[name] = arguments[name][:-1].copy()
    arguments["expert_ids"][2] = 3


def shorter_experts(arguments: Arguments) -> None:
    """Fewer experts than slots."""
    for name in ("weight", "b_scales", "expert_scales", "bias"):
        arguments[name] = arguments[name][:-1].copy()


def weight_cases(entry: str, a: BlockFormat, b: BlockFormat) -> Iterator[Case]:
    """Activations and weights whose sizes do not fit each other or the format."""
    arguments = VALID[entry]()
    rows, k = len(arguments["hidden"]), arguments["hidden"].shape[1] * a.per_byte
    n, width = arguments["weight"].shape[1:]
    symbol = "K/2" if b.per_byte == 2 else "K"
    change = remake("weight", lambda x: x[..., :-8].copy())
    got = rf"\(4, {n}, {width - 8}\)"
    yield Case("M1", change, ShapeError, "weight", got, f"{symbol} = {width}")
    bad_k = k - a.block // 2
    change = remake("hidden", lambda x: x[:, : bad_k // a.per_byte].copy())
    yield Case("Q8", change, ShapeError, "hidden", f"K = {bad_k}", f"K % {a.block} == 0.*pad K")
    change = remake("hidden", lambda x: x[:, :0].copy())
    yield Case("Q9", change, ShapeError, "hidden", "K = 0", "K > 0")
    change = remake("weight", lambda x: x.swapaxes(1, 2).copy())
    yield Case("M2", change, ShapeError, "weight", rf"\(4, {width}, {n}\)", "K-major")
    change = remake("weight", lambda x: x[:, :0].copy())
    yield Case("M5", change, ShapeError, "weight", "N = 0", "N > 0")
    change = remake("weight", lambda x: x[:, :12].copy())
    yield Case("M6", change, ShapeError, "weight", "N = 12", "N % 8 == 0")
    change = remake("weight", lambda x: x[:0].copy())
    yield Case("E0", change, ShapeError, "weight", r"\(0,", "E >= 1")
    yield Case("E3", shorter("weight"), ShapeError, "b_scales", r"shape \(4,", r"\(3, ")
    yield Case("M4-slots", shorter_experts, ShapeError, "weight", "3 entries", "4 slots")
    got, says = r"expert_ids\[2\] = 3", "below 3, the experts of weight"
    yield Case("M4", fewer_experts, RoutingError, "expert_ids", got, says)
    hidden = remake("hidden", lambda x: np.zeros((rows, 1, x.shape[1]), x.dtype))
    yield Case("C8-middle", hidden, ShapeError, "hidden", r"shape \(130, 1, ", "squeeze")
    for name, bad in (("bias", (EXPERTS, n - 8)), ("bias", (EXPERTS - 1, n)), ("bias", (1, n))):
        got, says = rf"\({bad[0]}, {bad[1]}\)", rf"\(E, N\) = \(4, {n}\)"
        yield Case(f"bias-{bad[0]}", put(bias=np.zeros(bad, BF16)), ShapeError, name, got, says)
    yield Case("bias-f32", put(bias=np.zeros((4, n), np.float32)), DTypeError, "bias", "float32")


def scale_cases(entry: str, a: BlockFormat, b: BlockFormat) -> Iterator[Case]:
    """Scale tiles of another shape or block, and scales that no weight has."""
    arguments = VALID[entry]()
    k = arguments["hidden"].shape[1] * a.per_byte
    n = arguments["weight"].shape[1]
    blocks = f"blocks of {b.block}"
    arg, got = "b_scales", r"shape \(\d, \d, 32, 4, 4\)"
    change = remake(arg, lambda x: x[0].copy())
    yield Case("M7", change, ShapeError, arg, got, r"\(E, ceil\(N/128\)")
    plain = remake(arg, lambda x: deinterleave_scales(x.view(np.uint8), n, k // b.block))
    got = r"row-major scales of shape \(4, "
    yield Case("M8", plain, LayoutError, arg, got, "prepare_weight_scales")
    # NVFP4 has twice the columns of tiles that blocks of 32 have.
    columns = ceil_div(k, 64 if b.block == 32 else 128)
    if columns != ceil_div(k, b.tile_columns):
        lead = arguments[arg].shape[:2]
        wrong = np.zeros((*lead, columns, 32, 4, 4), arguments[arg].dtype)
        yield Case("M9", put(b_scales=wrong), ShapeError, arg, rf"\(4, \d, {columns}, ", blocks)
    for name, axis in (("down", 1), ("across", 2)):
        change = remake(arg, lambda x, axis=axis: np.concatenate([x, x], axis=axis))
        yield Case(f"M9-{name}", change, ShapeError, arg, r"shape \(4, ", blocks)
    change = remake(arg, lambda x: x[..., :2].copy())
    yield Case("M9-tile", change, ShapeError, arg, r"32, 4, 2\)", r"32, 4, 4\)")
    arg = "a_scales"
    yield Case("M17", remake(arg, lambda x: x[:1].copy()), ShapeError, arg, r"shape \(1,", "least")
    change = remake(arg, lambda x: np.concatenate([x, x], axis=1))
    yield Case("M17-columns", change, ShapeError, arg, r"shape \(", f"blocks of {a.block}")
    change = remake(arg, lambda x: x[np.newaxis].copy())
    yield Case("M7-a", change, ShapeError, arg, r"shape \(1, \d", "tiles, ceil")
    if entry.startswith(MATMUL):
        got, says = r"tiles 2\.\.3 for slot 3", "within the 2"
        change = remake(arg, lambda x: x[:2].copy())
        yield Case("G15-tiles", change, RoutingError, "a_scale_offsets", got, says)
    yield from byte_cases(b)


def byte_cases(b: BlockFormat) -> Iterator[Case]:
    """Scale bytes of a weight that are NaN or negative."""
    arg = "b_scales"
    if b is not NVFP4:
        got, says = "NaN byte 0xff for expert 2, row 33, block 1", "e8m0 scales below 0xff"
        yield Case("M12", scale_byte(2, 33, 1, 0xFF), ScaleError, arg, got, says)
        return
    says = "finite e4m3 scales >= 0"
    for row, at, byte, kind in (
        ("M10", (2, 33, 1), 0x7F, "NaN"),
        ("M10-sign", (0, 1, 2), 0xFF, "NaN"),
        ("M11", (3, 0, 0), 0xB8, "negative"),
        ("M11-zero", (3, 0, 0), 0x80, "negative"),
    ):
        got = f"{kind} byte {byte:#04x} for expert {at[0]}, row {at[1]}, block {at[2]}"
        yield Case(row, scale_byte(*at, byte), ScaleError, arg, got, says)


def format_cases(entry: str, a: BlockFormat, b: BlockFormat) -> Iterator[Case]:
    """Formats that are unknown, contradict the arrays or each other."""
    for arg in ("format", "weight_format"):
        change, got = put(**{arg: "fp4"}), "'fp4'"
        yield Case(f"K2-{arg}", change, ConfigError, arg, got, "'nvfp4', 'mxfp4', 'mxfp8'")
        for bad in (4, ["nvfp4"]):
            got = type(bad).__name__
            yield Case(f"K2-{arg}-{got}", put(**{arg: bad}), ArgTypeError, arg, got, "a name or")
    for other in (NVFP4, MXFP4, MXFP8):
        if (a, other) not in PAIRS:
            change, got = put(weight_format=other.name), f"{a.name} x {other.name}"
            yield Case(f"F15-{other}", change, ConfigError, "weight_format", got, "a pair of")
    if a is MXFP8:
        change = put(format="mxfp4")
        yield Case("F14", change, ConfigError, "format", "hidden of float8_e4m3fn", "mxfp4 with")
    elif a is MXFP4:
        change, got = put(format="nvfp4", weight_format="nvfp4"), "a_scales of float8_e8m0fnu"
        yield Case("F14", change, ConfigError, "format", got, "nvfp4 with a_scales of")
    else:
        wrong = remake("b_scales", lambda x: x.view(named_dtype("float8_e8m0fnu")))
        got = "b_scales of float8_e8m0fnu"
        yield Case("F14", wrong, ConfigError, "weight_format", got, "nvfp4 with b_scales of")
        wrong = remake("weight", lambda x: x.view(named_dtype("float8_e4m3fn")))
        got = "weight of float8_e4m3fn"
        yield Case("M3-typed", wrong, ConfigError, "weight_format", got, "nvfp4 with weight of")
    if b is MXFP8:
        packed = remake("weight", lambda x: x[..., : x.shape[2] // 2].copy().view(np.uint8))
        hint = "weight_format='mxfp4'"
        yield Case("M3", packed, ConfigError, "weight_format", "packed FP4 for K", hint)
    if a is not NVFP4:
        row_scales = put(a_row_scales=np.ones(ROWS, BF16))
        says = "only NVFP4 has row scales"
        yield Case("W4", row_scales, ConfigError, "a_row_scales", f"some beside {a.name}", says)


def row_scale_cases() -> Iterator[Case]:
    """Row scales of another length or type, or not finite."""
    arg, nan = "a_row_scales", np.array(0x7FC0, np.uint16).view(BF16)
    infinity = np.array(0xFF80, np.uint16).view(BF16)
    yield Case("W5", shorter(arg), ShapeError, arg, r"\(129,\)", "M from hidden")
    f32 = put(a_row_scales=np.ones(ROWS, np.float32))
    yield Case("W6", f32, DTypeError, arg, "float32", "bfloat16")
    for row, value, got in (("W7", nan, "0x7fc0"), ("W7-inf", infinity, "0xff80")):
        got = rf"a_row_scales\[5\] = bits {got}"
        yield Case(row, edit(arg, 5, value), ScaleError, arg, got, "finite", extra=FULL)


def cases(entry: str, a: BlockFormat, b: BlockFormat) -> Iterator[Case]:
    """Tables M and W, as far as both matmuls have them."""
    yield from weight_cases(entry, a, b)
    yield from scale_cases(entry, a, b)
    yield from format_cases(entry, a, b)
    if a is NVFP4:
        yield from row_scale_cases()
        none = put(expert_scales=None)
        says = "expert_scales is required"
        yield Case("M16", none, ScaleError, "expert_scales", "None", says)


@pytest.mark.parametrize(("entry", "case"), table({e: cases(e, *ab) for e, ab in ENTRIES.items()}))
def test_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def swiglu_cases(entry: str, a: BlockFormat) -> Iterator[Case]:
    """What only the fused matmul has: pairs of rows, options, quantized results."""
    arguments = VALID[entry]()
    n = 2 * a.block + 8

    def fewer_rows(arguments: Arguments) -> None:
        for name in ("weight", "bias"):
            arguments[name] = np.ascontiguousarray(arguments[name][:, :n])
        arguments["b_scales"] = arguments["b_scales"][:, :1].copy()

    got, says = f"N = 2D = {n}", f"D % {a.block} == 0"
    yield Case("S2", fewer_rows, ShapeError, "weight", got, says)
    for bad in (1, None, "yes"):
        got = f"{type(bad).__name__} {bad!r}"
        yield Case(f"W11-{bad}", put(match_bf16=bad), ArgTypeError, "match_bf16", got, "a bool")
    codes, scales = arguments["out"]
    moe_dim = codes.shape[1] * a.per_byte
    other = np.zeros((ROWS, 3 * moe_dim), codes.dtype)
    got, says = rf"\({ROWS}, {3 * moe_dim}\)", r"\(M, D"
    yield Case("W3", replace_out(0, other), ShapeError, "out[0]", got, says)
    if a.per_byte == 2:
        unpacked = np.zeros((ROWS, moe_dim), codes.dtype)
        yield Case("W9", replace_out(0, unpacked), ShapeError, "out[0]", rf", {moe_dim}\)", "D/2")
    twice = replace_out(1, np.concatenate([scales, scales]))
    says = "tiles of a_scales"
    yield Case("W10", twice, ShapeError, "out[1]", rf"\({2 * TILES}, ", says)
    if a is NVFP4:
        none = put(c_input_scales=None)
        says = "c_input_scales is required"
        yield Case("W12", none, ScaleError, "c_input_scales", "None", says)
    else:
        given = put(c_input_scales=np.ones(4, np.float32))
        yield Case("Q19", given, ConfigError, "c_input_scales", "an array", "mxfp4 and mxfp8")


SWIGLUS = {e: swiglu_cases(e, a) for e, (a, _) in ENTRIES.items() if e.startswith(SWIGLU)}


@pytest.mark.parametrize(("entry", "case"), table(SWIGLUS))
def test_swiglu_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.startswith(MATMUL)])
def test_result_refused(entry: str, recorder: Recorder) -> None:
    """M21: a buffer with a row less; M20, other types, is in the common table."""
    got = rf"\({ROWS - 1}, \d+\)"
    check(entry, Case("M21", both(shorter("out")), ShapeError, "out", got, r"\(M, N\)"), recorder)
