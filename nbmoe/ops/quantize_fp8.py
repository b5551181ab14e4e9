"""FP8 quantize: bf16 rows to e4m3 codes with a scale a group or a row."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.errors import ConfigError, RangeError
from nbmoe.layouts import ceil_div
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.quantize_fp8_prepared import LAYOUTS, check_prepared_options, quantize_prepared
from nbmoe.ops.quantized import take_name
from nbmoe.reference.quantize_fp8 import SCALES_TYPES
from nbmoe.scale_specs import padded_rows
from nbmoe.validate import BF16, Call
from nbmoe.validate.elements import FP8
from nbmoe.validate.fp8 import (
    MIN_SCALE_UB,
    SCALES,
    check_offsets,
    num_slots,
    number,
    take_offsets,
)

SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e8m0fnu": 1}


def quantize_dynamic_scaled_float8(
    input: Any,
    *,
    group_size_or_per_token: int = -1,
    scale_ub: float = 1200.0,
    scales_type: str = "float32",
    amax_floor: float = 0.0,
    row_offsets: Any = None,
    layout: str = "packed",
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Quantizes each row to e4m3 in groups of consecutive values with a scale each.

    A scale is min(amax, scale_ub) / 448, rounded to its type; a code is x times the scale's
    float32 inverse, clamped to 448 and rounded to nearest even. A scale of 0, or one whose inverse
    is infinite, gives zeros. A NaN makes its scale NaN and all codes under it 0x7F.

    Args:
        input: (M, K) bfloat16.
        group_size_or_per_token: Values that share a scale, -1 for a whole row; the last group of
            a row may be shorter [elements].
        scale_ub: Largest magnitude that a float32 or bfloat16 scale takes into account, at least
            2**-100; larger values saturate.
        scales_type: "float32", "bfloat16" or "float8_e8m0fnu". The last is the smallest power of
            two that is not below max(amax, amax_floor) / 448 nor below 1e-10.
        amax_floor: Smallest magnitude that an e8m0 scale takes into account.
        row_offsets: (S + 1,) uint32 prefix sums; rows from row_offsets[-1] on are neither
            quantized nor touched in `out`, nor are their scales or the scales' padding.
        layout: "packed", or "prepared" for what the matmuls of compute capability 9.0 read
            (`nbmoe.prepared.fp8`): the same codes and scales, groups of 128 and float32 only.
        out: `(codes, scales)` to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks row_offsets.

    Returns:
        Codes (M, K) float8_e4m3fn, and scales (ceil(K/group), Mpad) of `scales_type`, transposed:
        a row of scales is padded with 0 to a multiple of 16 bytes. Or `PreparedFp8Tokens`.

    Raises:
        ArgTypeError, RangeError: a number is of the wrong type or outside its range.
        ConfigError: `scales_type` or `layout` is unknown or does not go with the rest, or
            `amax_floor` is given without e8m0 scales or with `row_offsets`.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        UnsupportedError: `input` is float16.
        RoutingError: row_offsets are no prefix sums of at most M rows.
    """
    call = Call("quantize_dynamic_scaled_float8", validate)
    group = call.integer("group_size_or_per_token", group_size_or_per_token, -1)
    if group == 0:
        rule = "-1 for whole rows, or elements >= 1"
        raise RangeError(call.message("group_size_or_per_token", rule, group))
    bound = number(call, "scale_ub", scale_ub, MIN_SCALE_UB)
    if take_name(call, "scales_type", scales_type) not in SCALES_TYPES:
        rule = f"one of {SCALES_TYPES}"
        raise ConfigError(call.message("scales_type", rule, repr(scales_type)))
    floor = number(call, "amax_floor", amax_floor, 0.0)
    if floor and (scales_type != "float8_e8m0fnu" or row_offsets is not None):
        rule = "0 unless scales are float8_e8m0fnu and row_offsets is None"
        raise ConfigError(call.message("amax_floor", rule, floor))
    x = call.array("input", input, BF16, "(M, K)")
    offsets = take_offsets(call, row_offsets)
    m, k = x.shape
    call.positive("input", "K", k)
    if take_name(call, "layout", layout) not in LAYOUTS:
        raise ConfigError(call.message("layout", f"one of {LAYOUTS}", repr(layout)))
    if layout == "prepared":
        check_prepared_options(call, group, scales_type, k)
        return quantize_prepared(call, x, offsets, bound, out, backend, stream)
    group = k if group == -1 else min(group, k)

    scales_shape = (ceil_div(k, group), padded_rows(m, scales_type))
    buffers = call.out_tuple(out, ("codes", "scales"))
    if buffers is not None:
        call.output("out[0]", buffers[0], FP8, "(M, K)", (m, k))
        symbols = "(ceil(K/group), M padded to 16 bytes)"
        call.output("out[1]", buffers[1], SCALES[scales_type], symbols, scales_shape)
    chosen = call.place(backend, stream)
    check_offsets(call, offsets, m)

    codes = call.outputs.get("out[0]") or allocate(call, "codes", (m, k), FP8)
    scales = call.outputs.get("out[1]") or allocate(
        call, "scales", scales_shape, SCALES[scales_type]
    )
    if m == 0:
        return codes.owner, scales.owner
    if chosen.name == "reference":
        starts = None if offsets is None else host_view(offsets)
        result = reference.quantize_dynamic_scaled_float8(
            host_view(x),
            group_size_or_per_token=group,
            scale_ub=bound,
            scales_type=scales_type,
            amax_floor=floor,
            row_offsets=starts,
        )
        written = None if starts is None else int(starts[-1])
        store(codes, result[0], None if written is None else [(0, written)])
        host_view(scales).view(result[1].dtype)[:, :written] = result[1][:, :written]
        return codes.owner, scales.owner

    from nbmoe_kernels.quantize_fp8 import launch_quantize_fp8

    *arrays, no_array = flat(chosen, codes, scales, x, offsets, None)
    launch_quantize_fp8(
        executor(chosen, call),
        *arrays,
        num_slots=num_slots(offsets),
        num_rows=m,
        num_cols=k,
        group=group,
        padded_rows=scales_shape[1],
        scale_bytes=SCALE_BYTES[scales_type],
        scale_ub=bound,
        amax_floor=floor,
        no_array=no_array,
        stream=call.stream,
    )
    return codes.owner, scales.owner
