"""NVFP4 quantization of rows in slots, each under a bf16 scale of its own."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.errors import ScaleError, ShapeError
from nbmoe.formats import NVFP4
from nbmoe.layouts import activation_tiles
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.quantized import (
    GROUPED_TILES,
    check_blocks,
    result_shapes,
    results,
    store_used,
    take_buffers,
)
from nbmoe.validate import BF16, I32, ROW_SCALES, U32, Call
from nbmoe.validate.call import MAX_DIMENSION
from nbmoe.validate.routing import (
    check_expert_ids,
    check_indices,
    check_scale_offsets,
    check_starts,
)


def grouped_quantize_nvfp4_row_scaled(
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any = None,
    *,
    indices: Any = None,
    indices_divisor: int = 1,
    relu2: bool = False,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> tuple[Any, Any, Any]:
    """Quantizes the rows of each slot to NVFP4, each after division by a scale of its own.

    For a row whose largest magnitude is amax, `row_scale = bf16(max(amax / 2688, 1e-30))` and
    `x = bf16(x * (1 / row_scale))`, then as `grouped_quantize_dynamic_block_scaled` with factors of
    1. The matmuls multiply row scales back in (`a_row_scales`). What is written and left alone is
    as there; row scales of rows that no slot owns are left alone too.

    Args:
        input: (R, K) bfloat16, K % 16 == 0. NaN is legal and stays in its row.
        row_offsets: (S + 1,) uint32 prefix sums: slot s owns rows row_offsets[s] up to
            row_offsets[s + 1] [rows].
        scales_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) int32 of which only -1 matters: such a slot gets codes, scales and row
            scales of 0. None if there is no such slot.
        indices: (M,) uint32 gather: output row i reads input row indices[i] // indices_divisor.
        indices_divisor: Sources an input row, the routing's top-k.
        relu2: Whether x is replaced by bf16(max(x, 0)**2) first.
        out: `(codes, scales, row_scales)` to write; scales may have more tiles than needed.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids and indices.

    Returns:
        Codes (rows, K/2) uint8, low nibble first, scales (tiles, ceil(K/64), 32, 4, 4) uint8 and
        row scales (rows,) bfloat16, with rows = M or R and tiles = ceil(rows/128) + min(S, rows).

    Raises:
        ArgTypeError, RangeError: `indices_divisor` is no int >= 1, or `relu2` no bool.
        UnsupportedError: `input` is float16.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets, ids or indices contradict each other.
        ScaleError: scales_offsets is None.
    """
    call = Call("grouped_quantize_nvfp4_row_scaled", validate)
    divisor = call.integer("indices_divisor", indices_divisor, 1)
    relu2 = call.boolean("relu2", relu2)
    x = call.array("input", input, BF16, "(R, K)")
    starts = call.array("row_offsets", row_offsets, U32, "(S + 1,)")
    offsets = call.array("scales_offsets", scales_offsets, U32, "(S,)", missing=ScaleError)
    ids = call.optional("expert_ids", expert_ids, I32, "(S,)")
    gather = call.optional("indices", indices, U32, "(M,)")
    slots, k = offsets.shape[0], x.shape[1]
    if slots == 0:
        raise ShapeError(call.message("scales_offsets", "(S,) with S >= 1", "shape (0,)"))
    call.shape("row_offsets", (slots + 1,), f"(S + 1,) = ({slots + 1},), S from scales_offsets")
    if ids is not None:
        call.shape("expert_ids", (slots,), f"(S,) = ({slots},), S from scales_offsets")
    call.multiple("input", "K", k, NVFP4.block, "pad K with zeros")

    rows = x.shape[0] if gather is None else gather.shape[0]
    shapes = result_shapes(NVFP4, rows, k, activation_tiles(rows, slots))
    names = ("codes", "scales", "row_scales")
    tiles = take_buffers(call, NVFP4, out, names, shapes, GROUPED_TILES, longer=True)
    check_blocks(call, "input", "K", k, tiles)
    if out is not None:
        call.output("out[2]", out[2], ROW_SCALES, "(rows,)", (rows,))
    chosen = call.place(backend, stream)
    if call.checks("metadata"):
        row_starts = call.data(starts)
        if gather is not None:
            used = int(row_starts[-1])
            check_indices(call, "indices", call.data(gather), used, divisor, x.shape[0])
        check_starts(call, "row_offsets", row_starts, rows, "input")
        if ids is not None:
            check_expert_ids(call, "expert_ids", call.data(ids), MAX_DIMENSION, "any model")
        check_scale_offsets(call, "scales_offsets", row_starts, call.data(offsets), tiles)

    codes, scales = results(call, NVFP4, shapes)
    row_scales = call.outputs.get("out[2]") or allocate(call, "row_scales", (rows,), ROW_SCALES)
    owners = codes.owner, scales.owner, row_scales.owner
    if rows == 0:
        return owners
    if chosen.name == "reference":
        result = reference.grouped_quantize_nvfp4_row_scaled(
            host_view(x),
            host_view(starts),
            host_view(offsets),
            None if ids is None else host_view(ids),
            indices=None if gather is None else host_view(gather),
            indices_divisor=divisor,
            relu2=relu2,
        )
        store_used(starts, offsets, result, codes, scales)
        store(row_scales, result[2], [(0, int(host_view(starts)[-1]))])
        return owners

    from nbmoe_kernels.quantize_grouped import launch_quantize_row_scaled
    from nbmoe_kernels.row_scales import launch_row_scales

    run = executor(chosen, call)
    operands = (row_scales, x, starts, offsets, ids, gather)
    launch_row_scales(
        run,
        *flat(chosen, *operands),
        num_active=slots,
        num_cols=k,
        num_tiles=tiles,
        indices_divisor=divisor,
        has_indices=gather is not None,
        has_ids=ids is not None,
        relu2=relu2,
        stream=call.stream,
    )
    launch_quantize_row_scaled(
        run,
        *flat(chosen, codes, scales, *operands),
        num_active=slots,
        num_rows=rows,
        num_cols=k,
        num_tiles=tiles,
        indices_divisor=divisor,
        has_indices=gather is not None,
        has_ids=ids is not None,
        relu2=relu2,
        stream=call.stream,
    )
    return owners
