"""Grouped quantize: gathers rows and quantizes them to NVFP4 with their expert's factor."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.errors import ScaleError, UnsupportedError
from nbmoe.layouts import TILE_SHAPE, activation_tiles, ceil_div
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.validate import BF16, CODES, F32, SCALES, U32, Call
from nbmoe.validate.grouped import (
    BLOCK,
    TILE_K,
    check_slot_count,
    check_slots,
    take_slots,
)
from nbmoe.validate.routing import check_indices, used_tiles
from nbmoe.validate.scales import check_factors


def grouped_quantize_dynamic_block_scaled(
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    sf_tensor: Any,
    *,
    sf_vector_size: int = 16,
    indices: Any = None,
    indices_divisor: int = 1,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> tuple[Any, Any]:
    """Quantizes the rows of each slot to NVFP4 with its expert's factor, gathering on the way.

    Used scale tiles are written whole: padding rows and columns are byte 0. Rows from
    row_offsets[-1] on and tiles that no slot uses are not written; they are 0 in buffers that this
    function allocates on the host.

    Args:
        input: (R, K) bfloat16, K % 16 == 0. NaN is legal and stays in its row.
        row_offsets: (S + 1,) uint32 prefix sums: slot s owns rows row_offsets[s] up to
            row_offsets[s + 1] [rows].
        scales_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 get codes 0 and scales 0.
        sf_tensor: (E,) float32 inverse input scales, by expert id.
        sf_vector_size: Elements that share a scale [elements], 16.
        indices: (M,) uint32 gather: output row i reads input row indices[i] // indices_divisor.
        indices_divisor: Sources an input row, the routing's top-k.
        out: `(codes, scales)` to write; scales may have more tiles than needed.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids, indices and factors.

    Returns:
        Codes (rows, K/2) uint8, low nibble first, and scales (tiles, ceil(K/64), 32, 4, 4) uint8,
        with rows = M or R and tiles = ceil(rows/128) + min(S, rows).

    Raises:
        ArgTypeError, RangeError: a number is of the wrong type or outside its range.
        UnsupportedError: `sf_vector_size` is not 16, or `input` is float16.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets, ids or indices contradict each other.
        ScaleError: scales_offsets or sf_tensor is None, or a factor is not finite and positive.
    """
    call = Call("grouped_quantize_dynamic_block_scaled", validate)
    if call.integer("sf_vector_size", sf_vector_size, 1) != BLOCK:
        rule = "16, the block of NVFP4"
        raise UnsupportedError(call.message("sf_vector_size", rule, sf_vector_size))
    divisor = call.integer("indices_divisor", indices_divisor, 1)
    x = call.array("input", input, BF16, "(R, K)")
    slots = take_slots(
        call, "row_offsets", row_offsets, "scales_offsets", scales_offsets, expert_ids
    )
    factors = call.array("sf_tensor", sf_tensor, F32, "(E,)", missing=ScaleError)
    gather = call.optional("indices", indices, U32, "(M,)")
    k = x.shape[1]
    call.multiple("input", "K", k, BLOCK, "pad K with zeros")
    check_slot_count(call, slots, "sf_tensor", factors.shape[0])

    rows = x.shape[0] if gather is None else gather.shape[0]
    codes_shape = (rows, k // 2)
    tiles = activation_tiles(rows, slots.count)
    scales_shape = (tiles, ceil_div(k, TILE_K), *TILE_SHAPE)
    buffers = call.out_tuple(out, ("codes", "scales"))
    if buffers is not None:
        call.output("out[0]", buffers[0], CODES, "(rows, K/2)", codes_shape)
        formula = "(ceil(rows/128) + min(S, rows), ceil(K/64), 32, 4, 4)"
        call.output("out[1]", buffers[1], SCALES, formula, scales_shape, longer=True)
        tiles = call.outputs["out[1]"].shape[0]
    chosen = call.place(backend, stream)
    if call.checks("metadata"):
        check_factors(call, "sf_tensor", call.data(factors), "expert")
        if gather is not None:
            used = int(call.data(slots.starts)[-1])
            check_indices(call, "indices", call.data(gather), used, divisor, x.shape[0])
        check_slots(call, slots, rows, "input", tiles, factors.shape[0], "sf_tensor")

    codes = call.outputs.get("out[0]") or allocate(call, "codes", codes_shape, CODES)
    scales = call.outputs.get("out[1]") or allocate(call, "scales", scales_shape, SCALES)
    if rows == 0:
        return codes.owner, scales.owner
    if chosen.name == "reference":
        starts, offsets = host_view(slots.starts), host_view(slots.offsets)
        result = reference.grouped_quantize_dynamic_block_scaled(
            host_view(x),
            starts,
            offsets,
            host_view(slots.ids),
            host_view(factors),
            indices=None if gather is None else host_view(gather),
            indices_divisor=divisor,
        )
        store(codes, result[0], [(0, int(starts[-1]))])
        store(scales, result[1], used_tiles(starts, offsets))
        return codes.owner, scales.owner

    from nbmoe_kernels.quantize_grouped import launch_quantize_grouped

    launch_quantize_grouped(
        executor(chosen, call),
        *flat(chosen, codes, scales, x, slots.starts, slots.offsets, slots.ids, factors, gather),
        num_active=slots.count,
        num_cols=k,
        num_tiles=tiles,
        indices_divisor=divisor,
        has_indices=gather is not None,
        stream=call.stream,
    )
    return codes.owner, scales.owner
