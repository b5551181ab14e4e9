"""Checks of the operands of grouped matmuls: activations, weights, their scales, and biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbmoe.arrays import Array
from nbmoe.errors import ConfigError, LayoutError, ScaleError, ShapeError
from nbmoe.formats import MXFP4, MXFP8, NVFP4, PAIRS, BlockFormat, block_format
from nbmoe.layouts import TILE_ROWS, TILE_SHAPE, ceil_div
from nbmoe.validate.call import Call
from nbmoe.validate.elements import BF16, BLOCK_CODES, BLOCK_SCALES, F32, ROW_SCALES, scales_of
from nbmoe.validate.grouped import Slots, check_slot_count, check_slots, take_slots
from nbmoe.validate.operand_format import operand_format
from nbmoe.validate.scales import check_factors, check_row_scales, check_weight_scales

TILES = "32, 4, 4)"
A_SCALES = f"(tiles, ceil(K/(4 * block)), {TILES}"
B_SCALES = f"(E, ceil(N/128), ceil(K/(4 * block)), {TILES}"


@dataclass(frozen=True)
class Product:
    """Operands and sizes of a block-scaled grouped matmul, checked."""

    hidden: Array
    weight: Array
    a_scales: Array
    b_scales: Array
    slots: Slots
    expert_scales: Array | None
    a_row_scales: Array | None
    bias: Array | None
    a_format: BlockFormat
    b_format: BlockFormat
    num_rows: int
    num_experts: int
    n: int
    k: int
    estimated_total_m: int


def take_product(
    call: Call,
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    *,
    expert_scales: Any,
    a_row_scales: Any,
    bias: Any,
    format: Any,
    weight_format: Any,
    estimated_total_m: Any,
) -> Product:
    """Takes the operands of a grouped matmul and checks that they fit each other.

    Raises:
        ScaleError: a scale operand that the format needs is None.
        ConfigError: formats contradict the operands, each other, or the row scales.
        ShapeError, LayoutError, DTypeError, ArgTypeError, RangeError: an operand does not fit.
    """
    a = call.array("hidden", hidden, BLOCK_CODES, "(M, K) or (M, K/2)")
    b = call.array("weight", weight, BLOCK_CODES, "(E, N, K) or (E, N, K/2)")
    a_sf = call.array("a_scales", a_scales, BLOCK_SCALES, A_SCALES, missing=ScaleError)
    b_sf = take_weight_scales(call, "b_scales", b_scales)
    slots = take_slots(
        call, "expert_start", expert_start, "a_scale_offsets", a_scale_offsets, expert_ids
    )
    a_format, b_format = _formats(call, a, b, format, weight_format)
    factors: Array | None = None
    if a_format is NVFP4 or expert_scales is not None:
        factors = call.array("expert_scales", expert_scales, F32, "(E,)", missing=ScaleError)
    if a_format is not NVFP4 and a_row_scales is not None:
        rule = "None: only NVFP4 has row scales"
        raise ConfigError(call.message("a_row_scales", rule, f"some beside {a_format.name}"))
    row_scales = call.optional("a_row_scales", a_row_scales, ROW_SCALES, "(M,)")
    total_m = take_total_m(call, estimated_total_m, a.shape[0])

    num_rows, k = a.shape[0], a.shape[1] * a_format.per_byte
    call.multiple("hidden", "K", k, a_format.block, "pad K with zeros")
    num_experts, n = take_weight_sizes(call, b, k, b_format)
    across = ceil_div(k, a_format.tile_columns)
    min_tiles = ceil_div(num_rows, TILE_ROWS)
    columns = f"ceil(K/{a_format.tile_columns})"
    symbols = f"(tiles, {columns}, {TILES}"
    _check_tiles(call, "a_scales", (None, across), symbols, a_format)
    if a_sf.shape[0] < min_tiles:
        rule = f"{symbols} with at least ceil(M/128) = {min_tiles} tiles"
        raise ShapeError(call.message("a_scales", rule, f"shape {a_sf.shape}"))
    check_weight_tiles(call, "b_scales", num_experts, n, k, b_format)
    if factors is not None:
        call.shape("expert_scales", (num_experts,), f"(E,) = ({num_experts},), E from weight")
    check_slot_count(call, slots, "weight", num_experts)
    if row_scales is not None:
        call.shape("a_row_scales", (num_rows,), f"(M,) = ({num_rows},), M from hidden")
    return Product(
        a,
        b,
        a_sf,
        b_sf,
        slots,
        factors,
        row_scales,
        take_bias(call, bias, num_experts, n),
        a_format,
        b_format,
        num_rows,
        num_experts,
        n,
        k,
        total_m,
    )


def take_weight_scales(call: Call, arg: str, scales: Any, fmt: BlockFormat | None = None) -> Array:
    """Takes the tiled scales of a weight, of a format or of any.

    Raises:
        ScaleError: they are None.
        LayoutError: they are row-major, as checkpoints hold them.
        ShapeError, DTypeError, ArgTypeError: as `Call.array`.
    """
    if len(getattr(scales, "shape", ())) == 3:
        hint = "tile them with nbmoe.layouts.interleave_scales or prepare_weight_scales"
        got = f"row-major scales of shape {tuple(scales.shape)}"
        raise LayoutError(call.message(arg, B_SCALES, got, hint))
    elements = BLOCK_SCALES if fmt is None else scales_of(fmt)
    return call.array(arg, scales, elements, B_SCALES, missing=ScaleError)


def take_total_m(call: Call, estimated_total_m: Any, num_rows: int) -> int:
    """Takes the sizing hint, all rows for None.

    Raises:
        ArgTypeError, RangeError: it is no int >= 0.
    """
    if estimated_total_m is None:
        return num_rows
    return call.integer("estimated_total_m", estimated_total_m, 0)


def take_weight_sizes(
    call: Call, weight: Array, k: int, fmt: BlockFormat | None, multiple: int = 8
) -> tuple[int, int]:
    """Checks a weight against the K of the activations.

    Args:
        call: The call.
        weight: (E, N, K), or packed (E, N, K/2).
        k: Elements of a row.
        fmt: The weight's format, None for bfloat16 and plain FP8.
        multiple: What N must be a multiple of.

    Returns:
        E and N.

    Raises:
        ShapeError: they do not fit.
        ConfigError: the weight is packed and its format is not.
    """
    num_experts, n, width = weight.shape
    per_byte = 1 if fmt is None else fmt.per_byte
    symbol = "K/2" if per_byte == 2 else "K"
    if fmt is not None and per_byte == 1 and 2 * width == k:
        hint = "weight_format='mxfp4' multiplies packed weights"
        got = f"a weight of {width} bytes a row, packed FP4 for K = {k}"
        raise ConfigError(call.message("weight_format", f"{fmt.name} weights", got, hint))
    wanted = k // per_byte
    transposed = n == wanted != width
    hint = "weights are K-major: rows are output columns" if transposed else ""
    rule = f"(E, N, {symbol}) with {symbol} = {wanted}"
    call.shape("weight", (None, None, wanted), rule, hint)
    call.multiple("weight", "N", n, multiple)
    if num_experts == 0:
        rule = f"(E, N, {symbol}) with E >= 1"
        raise ShapeError(call.message("weight", rule, f"shape {weight.shape}"))
    return num_experts, n


def take_bias(call: Call, bias: Any, num_experts: int, n: int) -> Array | None:
    """Takes a bias, by expert id and weight row.

    Raises:
        ShapeError, DTypeError, ArgTypeError, LayoutError: it is no (E, N) bfloat16.
    """
    taken = call.optional("bias", bias, BF16, "(E, N)")
    if taken is not None:
        call.shape("bias", (num_experts, n), f"(E, N) = ({num_experts}, {n}), as the weight")
    return taken


def check_weight_tiles(
    call: Call, arg: str, num_experts: int, n: int, k: int, fmt: BlockFormat
) -> None:
    """Checks the shape of the tiled scales of a weight.

    Raises:
        ShapeError: it is that of another weight, or of another block.
    """
    symbols = f"(E, ceil(N/128), ceil(K/{fmt.tile_columns}), {TILES}"
    lead = (num_experts, ceil_div(n, TILE_ROWS), ceil_div(k, fmt.tile_columns))
    _check_tiles(call, arg, lead, symbols, fmt)


def _formats(
    call: Call, a: Array, b: Array, fmt: Any, weight_fmt: Any
) -> tuple[BlockFormat, BlockFormat]:
    a_format = operand_format(call, "format", fmt, "hidden", "a_scales")
    if weight_fmt is None:
        is_packed = 2 * b.shape[2] == a.shape[1] and b.dtype != "float8_e4m3fn"
        weight_fmt = MXFP4 if a_format is MXFP8 and is_packed else a_format
    b_format = block_format(weight_fmt, call.api, "weight_format")
    if (a_format, b_format) not in PAIRS:
        pairs = ", ".join(f"{x.name} x {w.name}" for x, w in PAIRS)
        got = f"{a_format.name} x {b_format.name}"
        raise ConfigError(call.message("weight_format", f"a pair of formats: {pairs}", got))
    return a_format, operand_format(call, "weight_format", b_format, "weight", "b_scales")


def _check_tiles(
    call: Call, arg: str, lead: tuple[int | None, ...], symbols: str, fmt: BlockFormat
) -> None:
    numbers = ", ".join("any" if n is None else str(n) for n in lead)
    rule = f"{symbols} = ({numbers}, {TILES}, for blocks of {fmt.block}"
    call.shape(arg, (*lead, *TILE_SHAPE), rule)


def check_product(call: Call, p: Product) -> None:
    """Checks the routing metadata and the scales ("metadata"), and the row scales ("full").

    Raises:
        RoutingError: routing metadata contradicts itself or the operands.
        ScaleError: a scale is NaN, negative or, as a factor, 0.
    """
    if call.checks("metadata"):
        check_slots(
            call, p.slots, p.num_rows, "hidden", p.a_scales.shape[0], p.num_experts, "weight"
        )
        if p.expert_scales is not None:
            check_factors(call, "expert_scales", call.data(p.expert_scales), "expert")
        check_weight_scales(call, "b_scales", call.data(p.b_scales), p.n, p.k, p.b_format)
    if call.checks("full") and p.a_row_scales is not None:
        check_row_scales(call, "a_row_scales", call.data(p.a_row_scales))
