"""Block quantization of rows in slots, and of rows without slots."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from nbmoe import reference
from nbmoe.errors import ArgTypeError, ConfigError, ScaleError
from nbmoe.layouts import TILE_ROWS, ceil_div
from nbmoe.ops.launch import executor, flat, host_view, store
from nbmoe.ops.quantized import (
    GROUPED_TILES,
    SlotResult,
    check_blocks,
    check_prepared_gpu,
    result_shapes,
    results,
    take_buffers,
    take_format,
    take_layout,
)
from nbmoe.reference.quantize import check_tensor_factor
from nbmoe.validate import BF16, F32, U32, Call
from nbmoe.validate.call import MAX_DIMENSION
from nbmoe.validate.grouped import check_slot_count, check_slots, take_slots
from nbmoe.validate.routing import check_indices
from nbmoe.validate.scales import check_factors


def grouped_quantize_dynamic_block_scaled(
    input: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    sf_tensor: Any = None,
    *,
    sf_vector_size: int = 16,
    scales_type: str = "float8_e4m3fn",
    out_type: str = "uint8",
    scale_rule: str = "rceil",
    indices: Any = None,
    indices_divisor: int = 1,
    layout: str = "packed",
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Quantizes the rows of each slot to NVFP4, MXFP4 or MXFP8, gathering on the way.

    | format | sf_vector_size | scales_type | out_type | sf_tensor |
    |---|---|---|---|---|
    | NVFP4 | 16 | "float8_e4m3fn" | "uint8" | (E,) |
    | MXFP4 | 32 | "float8_e8m0fnu" | "uint8" | None |
    | MXFP8 | 32 | "float8_e8m0fnu" | "float8_e4m3fn" | None |

    Used scale tiles are written whole: padding rows and columns are byte 0. Rows from
    row_offsets[-1] on and tiles that no slot uses are not written; they are 0 in buffers that this
    function allocates on the host.

    Args:
        input: (R, K) bfloat16, K % sf_vector_size == 0. NaN is legal and stays in its block.
        row_offsets: (S + 1,) uint32 prefix sums: slot s owns rows row_offsets[s] up to
            row_offsets[s + 1] [rows].
        scales_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 get codes 0 and scales 0.
        sf_tensor: (E,) float32 inverse input scales, by expert id.
        sf_vector_size: Elements that share a scale [elements].
        scales_type: Element type of the scales.
        out_type: Element type of the codes; "uint8" holds two e2m1 codes.
        scale_rule: How MX formats choose a scale, "rceil", "even" or "floor"; see
            `nbmoe.codecs.encode_e8m0`.
        indices: (M,) uint32 gather: output row i reads input row indices[i] // indices_divisor.
        indices_divisor: Sources an input row, the routing's top-k.
        layout: "packed" for codes and scales, "prepared" for what `prepare_tokens` makes of them.
        out: `(codes, scales)` to write; scales may have more tiles than needed. With the layout
            "prepared" the array that `prepare_tokens` takes.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids, indices and factors.

    Returns:
        Codes (rows, K/2) uint8, low nibble first, or (rows, K) float8_e4m3fn, and scales
        (tiles, ceil(K / (4 sf_vector_size)), 32, 4, 4), uint8 for NVFP4 and float8_e8m0fnu for MX,
        with rows = M or R and tiles = ceil(rows/128) + min(S, rows). With the layout "prepared",
        PreparedTokens.

    Raises:
        ArgTypeError, RangeError: a number is of the wrong type or outside its range.
        UnsupportedError: `sf_vector_size` is neither 16 nor 32, or `input` is float16.
        ConfigError: size, types and rule name no format, an MX format comes with sf_tensor, or
            there is no such layout.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets, ids or indices contradict each other.
        ScaleError: scales_offsets or NVFP4's sf_tensor is None, or a factor is not finite and
            positive.
    """
    call = Call("grouped_quantize_dynamic_block_scaled", validate)
    fmt = take_format(call, sf_vector_size, scales_type, out_type, scale_rule)
    divisor = call.integer("indices_divisor", indices_divisor, 1)
    x = call.array("input", input, BF16, "(R, K)")
    slots = take_slots(
        call, "row_offsets", row_offsets, "scales_offsets", scales_offsets, expert_ids
    )
    check_tensor_factor(call.api, "sf_tensor", fmt, sf_tensor)
    factors = call.optional("sf_tensor", sf_tensor, F32, "(E,)")
    gather = call.optional("indices", indices, U32, "(M,)")
    k = x.shape[1]
    call.multiple("input", "K", k, fmt.block, "pad K with zeros")
    if factors is not None:
        check_slot_count(call, slots, "sf_tensor", factors.shape[0])

    rows = x.shape[0] if gather is None else gather.shape[0]
    result = SlotResult(call, fmt, take_layout(call, layout), rows, slots.count, k)
    tiles = result.take(out, GROUPED_TILES)
    check_blocks(call, "input", "K", k, tiles)
    chosen = call.place(backend, stream)
    if layout == "prepared":
        check_prepared_gpu(call, "input", chosen)
    if call.checks("metadata"):
        experts, experts_of = MAX_DIMENSION, "any model"
        if factors is not None:
            check_factors(call, "sf_tensor", call.data(factors), "expert")
            experts, experts_of = factors.shape[0], "sf_tensor"
        if gather is not None:
            used = int(call.data(slots.starts)[-1])
            check_indices(call, "indices", call.data(gather), used, divisor, x.shape[0])
        check_slots(call, slots, rows, "input", tiles, experts, experts_of)

    outputs = result.outputs()
    if rows == 0:
        return result.owners(outputs)
    if chosen.name == "reference":
        quantized = reference.grouped_quantize_dynamic_block_scaled(
            host_view(x),
            host_view(slots.starts),
            host_view(slots.offsets),
            host_view(slots.ids),
            None if factors is None else host_view(factors),
            sf_vector_size=fmt.block,
            scales_type=scales_type,
            out_type=out_type,
            scale_rule=scale_rule,
            indices=None if gather is None else host_view(gather),
            indices_divisor=divisor,
        )
        result.store(slots.starts, slots.offsets, quantized, outputs)
        return result.owners(outputs)

    from nbmoe_kernels.quantize_grouped import launch_quantize_grouped

    launch_quantize_grouped(
        executor(chosen, call),
        *flat(chosen, *outputs, x, slots.starts, slots.offsets, slots.ids, factors, gather),
        format=fmt.name,
        scale_rule=scale_rule,
        num_active=slots.count,
        num_rows=rows,
        num_cols=k,
        num_tiles=tiles,
        indices_divisor=divisor,
        has_indices=gather is not None,
        layout=layout,
        panel_rows=result.panel_rows,
        stream=call.stream,
    )
    return result.owners(outputs)


def quantize_dynamic_block_scaled(
    input: Any,
    *,
    tensor_sf: float | None = 1.0,
    sf_vector_size: int = 16,
    scales_type: str = "float8_e4m3fn",
    out_type: str = "uint8",
    scale_rule: str = "rceil",
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> tuple[Any, Any]:
    """Quantizes all rows of a matrix to NVFP4, MXFP4 or MXFP8.

    Scales are always tiled, on every GPU, and tiles are written whole: padding is byte 0.

    Args:
        input: (M, K) bfloat16, K % sf_vector_size == 0. NaN is legal and stays in its block.
        tensor_sf: Inverse tensor scale of NVFP4; MX formats have none and take 1 or None.
        sf_vector_size: Elements that share a scale [elements]; this and the next two name the
            format as in `grouped_quantize_dynamic_block_scaled`.
        scales_type: Element type of the scales.
        out_type: Element type of the codes; "uint8" holds two e2m1 codes.
        scale_rule: How MX formats choose a scale, "rceil", "even" or "floor".
        out: `(codes, scales)` to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`.

    Returns:
        Codes (M, K/2) uint8, low nibble first, or (M, K) float8_e4m3fn, and scales
        (ceil(M/128), ceil(K / (4 sf_vector_size)), 32, 4, 4), uint8 for NVFP4 and float8_e8m0fnu
        for MX.

    Raises:
        ArgTypeError, RangeError: a number is of the wrong type or outside its range.
        UnsupportedError: `sf_vector_size` is neither 16 nor 32, or `input` is float16.
        ConfigError: size, types and rule name no format, or an MX format comes with a tensor_sf
            other than 1.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        ScaleError: tensor_sf is not finite and positive.
    """
    call = Call("quantize_dynamic_block_scaled", validate)
    fmt = take_format(call, sf_vector_size, scales_type, out_type, scale_rule)
    factor = _take_factor(call, tensor_sf)
    if not fmt.has_tensor_scale and factor != 1:
        rule = f"1: {fmt.name} has block scales only"
        raise ConfigError(call.message("tensor_sf", rule, tensor_sf))
    x = call.array("input", input, BF16, "(M, K)")
    rows, k = x.shape
    call.multiple("input", "K", k, fmt.block, "pad K with zeros")
    shapes = result_shapes(fmt, rows, k, ceil_div(rows, TILE_ROWS))
    symbols = "(ceil(M/128), ceil(K/{}), 32, 4, 4)"
    take_buffers(call, fmt, out, ("codes", "scales"), shapes, symbols)
    check_blocks(call, "input", "K", k, shapes[1][0])
    chosen = call.place(backend, stream)

    codes, scales = results(call, fmt, shapes)
    if rows == 0:
        return codes.owner, scales.owner
    if chosen.name == "reference":
        result = reference.quantize_dynamic_block_scaled(
            host_view(x),
            tensor_sf=factor,
            sf_vector_size=fmt.block,
            scales_type=scales_type,
            out_type=out_type,
            scale_rule=scale_rule,
        )
        store(codes, result[0])
        store(scales, result[1])
        return codes.owner, scales.owner

    from nbmoe_kernels.quantize_grouped import launch_quantize_rows

    launch_quantize_rows(
        executor(chosen, call),
        *flat(chosen, codes, scales, x, None),
        num_rows=rows,
        num_cols=k,
        tensor_scale=factor,
        format=fmt.name,
        scale_rule=scale_rule,
        stream=call.stream,
    )
    return codes.owner, scales.owner


def _take_factor(call: Call, value: Any) -> float:
    rule = "a finite float32 above 0"
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgTypeError(call.message("tensor_sf", rule, f"{type(value).__name__} {value!r}"))
    with np.errstate(all="ignore"):
        factor = float(np.float32(value))
    if not (np.isfinite(factor) and factor > 0):
        hint = "is the input scale missing from the checkpoint?"
        raise ScaleError(call.message("tensor_sf", rule, value, hint))
    return factor
