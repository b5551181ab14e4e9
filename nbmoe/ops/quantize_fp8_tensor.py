"""FP8 quantize with one scale for a matrix: the caller's, or that of its largest magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbmoe import reference
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.reference.quantize_fp8 import multiplier
from nbmoe.validate import BF16, F32, Call, Elements
from nbmoe.validate.elements import FP8
from nbmoe.validate.fp8 import (
    MIN_SCALE_UB,
    check_offsets,
    num_slots,
    number,
    take_offsets,
    take_scale,
)
from nbmoe.validate.scales import check_factors

FLOATS = Elements(("bfloat16", "uint16", "float16", "float32"), "float16 or float32", 16)
WORKSPACE_SIZE = 1024
"""Partial maxima that the kernels keep, one a block."""
WORKSPACE = Elements(("float32", "uint32"), "scratch, whatever it holds", 4)


def quantize_static_scaled_float8(
    x: Any,
    scale: Any,
    *,
    scale_is_inverted: bool = True,
    row_offsets: Any = None,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Quantizes a matrix to e4m3 with a scale that is known beforehand.

    Args:
        x: (M, K) bfloat16, float16 or float32. A NaN gives the code 0x7F.
        scale: A number, finite and above 0, or an array (1,) float32 of the same place as `x`.
        scale_is_inverted: True: `scale` is what dequantization multiplies by, as checkpoints store
            it, and values are multiplied by its float32 inverse (0 where that is infinite). False:
            values are multiplied by `scale` itself.
        row_offsets: (S + 1,) uint32 prefix sums; rows from row_offsets[-1] on are not touched.
        out: (M, K) float8_e4m3fn to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks row_offsets, and a scale in an array.

    Returns:
        Codes (M, K) float8_e4m3fn.

    Raises:
        ArgTypeError: `scale` is no number and no array, or `scale_is_inverted` no bool.
        ScaleError: `scale` is None, or in float32 not finite and positive.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: row_offsets are no prefix sums of at most M rows.
    """
    call = Call("quantize_static_scaled_float8", validate)
    inverted = call.boolean("scale_is_inverted", scale_is_inverted)
    values = call.array("x", x, FLOATS, "(M, K)")
    given, factor = take_scale(call, "scale", scale)
    if given is not None and inverted:
        given = float(multiplier(np.float32(given)))
    offsets = take_offsets(call, row_offsets)
    m, k = values.shape
    call.positive("x", "K", k)
    if out is not None:
        call.output("out", out, FP8, "(M, K)", (m, k))
    chosen = call.place(backend, stream)
    check_offsets(call, offsets, m)
    if factor is not None and call.checks("metadata"):
        check_factors(call, "scale", call.data(factor), "tensor")

    codes = call.outputs.get("out") or allocate(call, "out", (m, k), FP8)
    if m == 0:
        return codes.owner
    if chosen.name == "reference":
        starts = None if offsets is None else host_view(offsets)
        scalar: Any = given if factor is None else host_view(factor)[0]
        result = reference.quantize_static_scaled_float8(
            host_view(values),
            scalar,
            scale_is_inverted=inverted and given is None,
            row_offsets=starts,
        )
        store(codes, result, None if starts is None else [(0, int(starts[-1]))])
        return codes.owner

    from nbmoe_kernels.quantize_fp8_tensor import launch_quantize_fp8_static

    launch_quantize_fp8_static(
        executor(chosen, call),
        *flat(chosen, codes, values, factor, offsets),
        element={"float16": "f16", "float32": "f32"}.get(values.dtype, "bf16"),
        num_slots=num_slots(offsets),
        num_rows=m,
        num_cols=k,
        multiplier=given,
        scale_is_inverted=inverted,
        stream=call.stream,
    )
    return codes.owner


def quantize_tensor_dynamic_scaled_float8(
    x: Any,
    *,
    scale_ub: float = 1200.0,
    row_offsets: Any = None,
    workspace: Any = None,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> tuple[Any, Any]:
    """Quantizes a matrix to e4m3 with one scale, of its largest magnitude.

    Scale and codes as in `quantize_dynamic_scaled_float8`. Unlike there, a row's codes depend on
    the other rows, since they share the scale.

    Args:
        x: (M, K) bfloat16.
        scale_ub: Largest magnitude that the scale takes into account, at least 2**-100.
        row_offsets: (S + 1,) uint32 prefix sums; rows from row_offsets[-1] on are neither looked
            at nor touched.
        workspace: (1024,) float32 or longer, scratch that may hold anything before; without it a
            call allocates one.
        out: `(codes, scale)` to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks row_offsets.

    Returns:
        Codes (M, K) float8_e4m3fn, and the scale (1,) float32, 0 if there are no rows.

    Raises:
        ArgTypeError, RangeError: `scale_ub` is no number or outside its range.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        UnsupportedError: `x` is float16.
        RoutingError: row_offsets are no prefix sums of at most M rows.
    """
    call = Call("quantize_tensor_dynamic_scaled_float8", validate)
    bound = number(call, "scale_ub", scale_ub, MIN_SCALE_UB)
    values = call.array("x", x, BF16, "(M, K)")
    offsets = take_offsets(call, row_offsets)
    m, k = values.shape
    call.positive("x", "K", k)
    buffers = call.out_tuple(out, ("codes", "scale"))
    if buffers is not None:
        call.output("out[0]", buffers[0], FP8, "(M, K)", (m, k))
        call.output("out[1]", buffers[1], F32, "(1,)", (1,))
    if workspace is not None:
        shape = (WORKSPACE_SIZE,)
        call.output("workspace", workspace, WORKSPACE, "(1024,)", shape, longer=True)
    chosen = call.place(backend, stream)
    check_offsets(call, offsets, m)

    codes = call.outputs.get("out[0]") or allocate(call, "codes", (m, k), FP8)
    scale = call.outputs.get("out[1]") or allocate(call, "scale", (1,), F32)
    if chosen.name == "reference":
        starts = None if offsets is None else host_view(offsets)
        result = reference.quantize_tensor_dynamic_scaled_float8(
            host_view(values), scale_ub=bound, row_offsets=starts
        )
        store(codes, result[0], None if starts is None else [(0, int(starts[-1]))])
        store(scale, result[1])
        return codes.owner, scale.owner

    from nbmoe_kernels.quantize_fp8_tensor import launch_quantize_fp8_tensor

    partials = call.outputs.get("workspace") or allocate(
        call, "workspace", (WORKSPACE_SIZE,), WORKSPACE
    )
    launch_quantize_fp8_tensor(
        executor(chosen, call),
        *flat(chosen, codes, scale, partials, values, offsets),
        num_slots=num_slots(offsets),
        num_rows=m,
        num_cols=k,
        scale_ub=bound,
        stream=call.stream,
    )
    return codes.owner, scale.owner
