"""Checks that every grouped operation shares: slots, their rows, their scale tiles, the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbmoe.arrays import Array
from nbmoe.errors import LayoutError, ScaleError, ShapeError
from nbmoe.layouts import TILE_ROWS, TILE_SHAPE, ceil_div
from nbmoe.validate.call import Call
from nbmoe.validate.elements import CODES, F32, I32, ROW_SCALES, SCALES, U32
from nbmoe.validate.routing import check_expert_ids, check_scale_offsets, check_starts
from nbmoe.validate.scales import check_factors, check_row_scales, check_weight_scales

A_SCALES = "(tiles, ceil(K/64), 32, 4, 4)"
B_SCALES = "(E, ceil(N/128), ceil(K/64), 32, 4, 4)"
BLOCK = 16
TILE_K = 64


@dataclass(frozen=True)
class Slots:
    """Operands that say which rows and which scale tiles a slot has, and whose they are."""

    starts_name: str
    starts: Array
    offsets_name: str
    offsets: Array
    ids: Array

    @property
    def count(self) -> int:
        """Number of slots."""
        return self.ids.shape[0]


def take_slots(
    call: Call, starts_name: str, starts: Any, offsets_name: str, offsets: Any, ids: Any
) -> Slots:
    """Takes the three operands and checks that they are of one length.

    Raises:
        ScaleError: the scale offsets are None.
        ShapeError: lengths differ.
        ArgTypeError, DTypeError, LayoutError: as `Call.array`.
    """
    expert_ids = call.array("expert_ids", ids, I32, "(S,)")
    row_starts = call.array(starts_name, starts, U32, "(S + 1,)")
    tiles = call.array(offsets_name, offsets, U32, "(S,)", missing=ScaleError)
    slots = expert_ids.shape[0]
    if slots == 0:
        raise ShapeError(call.message("expert_ids", "(S,) with S >= 1", "shape (0,)"))
    call.shape(starts_name, (slots + 1,), f"(S + 1,) = ({slots + 1},), S from expert_ids")
    call.shape(offsets_name, (slots,), f"(S,) = ({slots},), S from expert_ids")
    return Slots(starts_name, row_starts, offsets_name, tiles, expert_ids)


def check_slots(
    call: Call, slots: Slots, rows: int, rows_of: str, tiles: int, experts: int, experts_of: str
) -> None:
    """Checks what the slots say ("metadata").

    Args:
        call: The call.
        slots: Its slots.
        rows: Rows that the slots share out.
        rows_of: Operand with those rows.
        tiles: Tiles of the activation scales.
        experts: E.
        experts_of: Operand with that many experts.

    Raises:
        RoutingError: they contradict each other or the operands.
    """
    starts = call.data(slots.starts)
    check_starts(call, slots.starts_name, starts, rows, rows_of)
    check_expert_ids(call, "expert_ids", call.data(slots.ids), experts, experts_of)
    check_scale_offsets(call, slots.offsets_name, starts, call.data(slots.offsets), tiles)


def check_slot_count(call: Call, slots: Slots, arg: str, experts: int) -> None:
    """Refuses fewer experts than slots, since no expert has two.

    Raises:
        ShapeError: there are fewer.
    """
    if experts < slots.count:
        rule = f"an entry for each expert, at least the {slots.count} slots of expert_ids"
        raise ShapeError(call.message(arg, rule, f"{experts} entries"))


@dataclass(frozen=True)
class Product:
    """Operands and sizes of a grouped matmul, checked."""

    hidden: Array
    weight: Array
    a_scales: Array
    b_scales: Array
    slots: Slots
    expert_scales: Array
    a_row_scales: Array | None
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
    expert_scales: Any,
    a_row_scales: Any,
    estimated_total_m: Any,
) -> Product:
    """Takes the operands of a grouped matmul and checks that they fit each other.

    Raises:
        ScaleError: a scale operand is None.
        ShapeError, LayoutError, DTypeError, ArgTypeError, RangeError: an operand does not fit.
    """
    a = call.array("hidden", hidden, CODES, "(M, K/2)")
    b = call.array("weight", weight, CODES, "(E, N, K/2)")
    a_sf = call.array("a_scales", a_scales, SCALES, A_SCALES, missing=ScaleError)
    if len(getattr(b_scales, "shape", ())) == 3:
        hint = "tile them with nbmoe.layouts.interleave_scales"
        got = f"row-major scales of shape {tuple(b_scales.shape)}"
        raise LayoutError(call.message("b_scales", f"{B_SCALES}", got, hint))
    b_sf = call.array("b_scales", b_scales, SCALES, B_SCALES, missing=ScaleError)
    slots = take_slots(
        call, "expert_start", expert_start, "a_scale_offsets", a_scale_offsets, expert_ids
    )
    factors = call.array("expert_scales", expert_scales, F32, "(E,)", missing=ScaleError)
    row_scales = call.optional("a_row_scales", a_row_scales, ROW_SCALES, "(M,)")
    total_m = a.shape[0]
    if estimated_total_m is not None:
        total_m = call.integer("estimated_total_m", estimated_total_m, 0)

    (num_rows, packed_k), (num_experts, n, _) = a.shape, b.shape
    k = 2 * packed_k
    call.multiple("hidden", "K", k, BLOCK, "pad K with zeros")
    transposed = b.shape[1] == packed_k != b.shape[2]
    hint = "weights are K-major: rows are output columns" if transposed else ""
    call.shape("weight", (None, None, packed_k), f"(E, N, K/2) with K/2 = {packed_k}", hint)
    call.multiple("weight", "N", n, 8)
    if num_experts == 0:
        raise ShapeError(call.message("weight", "(E, N, K/2) with E >= 1", f"shape {b.shape}"))
    across = ceil_div(k, TILE_K)
    min_tiles = ceil_div(num_rows, TILE_ROWS)
    _check_tiles(call, "a_scales", a_sf, (None, across), A_SCALES)
    if a_sf.shape[0] < min_tiles:
        rule = f"{A_SCALES} with at least ceil(M/128) = {min_tiles} tiles"
        raise ShapeError(call.message("a_scales", rule, f"shape {a_sf.shape}"))
    _check_tiles(call, "b_scales", b_sf, (num_experts, ceil_div(n, TILE_ROWS), across), B_SCALES)
    call.shape("expert_scales", (num_experts,), f"(E,) = ({num_experts},), E from weight")
    check_slot_count(call, slots, "weight", num_experts)
    if row_scales is not None:
        call.shape("a_row_scales", (num_rows,), f"(M,) = ({num_rows},), M from hidden")
    return Product(
        a, b, a_sf, b_sf, slots, factors, row_scales, num_rows, num_experts, n, k, total_m
    )


def _check_tiles(
    call: Call, arg: str, scales: Array, lead: tuple[int | None, ...], symbols: str
) -> None:
    numbers = ", ".join("any" if n is None else str(n) for n in lead)
    rule = f"{symbols} = ({numbers}, 32, 4, 4), for blocks of 16"
    call.shape(arg, (*lead, *TILE_SHAPE), rule)


def check_product(call: Call, p: Product) -> None:
    """Checks the routing metadata and the scales ("metadata"), and the row scales ("full").

    Raises:
        RoutingError: routing metadata contradicts itself or the operands.
        ScaleError: a scale is missing, NaN or negative.
    """
    if call.checks("metadata"):
        check_slots(
            call, p.slots, p.num_rows, "hidden", p.a_scales.shape[0], p.num_experts, "weight"
        )
        check_factors(call, "expert_scales", call.data(p.expert_scales), "expert")
        check_weight_scales(call, "b_scales", call.data(p.b_scales), p.n, p.k)
    if call.checks("full") and p.a_row_scales is not None:
        check_row_scales(call, "a_row_scales", call.data(p.a_row_scales))
