"""Gated activation and block quantization in one pass: what stands between two matmuls."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.activation import GatedActivation, take_activation
from nbmoe.formats import BlockFormat, block_format
from nbmoe.ops.launch import compiling, executor, flat, host_view
from nbmoe.ops.quantized import (
    SlotResult,
    check_blocks,
    check_prepared_gpu,
    take_layout,
    take_name,
)
from nbmoe.reference.quantize import check_scale_rule, check_tensor_factor
from nbmoe.validate import BF16, F32, Call
from nbmoe.validate.call import MAX_DIMENSION
from nbmoe.validate.grouped import check_slots, take_slots
from nbmoe.validate.scales import check_factors

TILES = "(ceil(M/128) + min(S, M), ceil(D/{}), 32, 4, 4)"


def fused_silu_quantize(
    gate_up: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    input_scales: Any = None,
    *,
    format: str | BlockFormat = "nvfp4",
    interleaved: bool = False,
    activation: GatedActivation | None = None,
    scale_rule: str = "rceil",
    layout: str = "packed",
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Activates every gate, times its up value, and quantizes the float32 result in blocks.

    After a `grouped_matmul_block_scaled` this gives the bytes of `grouped_matmul_blocked_swiglu`.
    Scale tiles are written and left alone as by `grouped_quantize_dynamic_block_scaled`.

    Args:
        gate_up: (M, 2D) bfloat16, gate columns then up columns, D a multiple of the block.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        a_scale_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 get codes 0 and scales 0.
        input_scales: (S,) float32 inverse input scales of the next matmul, by slot; None for MX.
        format: Format of the result, "nvfp4", "mxfp4" or "mxfp8".
        interleaved: Whether the columns are gate 0, up 0, gate 1, ... instead.
        activation: What to apply, None for `g * sigmoid(g) * u`. A gated_activation_fn is compiled
            as by `gated_activation`.
        scale_rule: How MX formats choose a scale, "rceil", "even" or "floor".
        layout: "packed" for codes and scales, "prepared" for what `prepare_tokens` makes of them.
        out: `(codes, scales)` to write; scales may have more tiles than needed. With the layout
            "prepared" the array that `prepare_tokens` takes.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids and input scales.

    Returns:
        Codes (M, D/2) uint8, low nibble first, or (M, D) float8_e4m3fn, and scales
        (ceil(M/128) + min(S, M), ceil(D / (4 block)), 32, 4, 4), uint8 for NVFP4 and float8_e8m0fnu
        for MX. With the layout "prepared", PreparedTokens.

    Raises:
        ArgTypeError: `activation` is no GatedActivation, or another argument of the wrong type.
        ConfigError: format, rule or layout is unknown, MX formats come with input_scales, or Numba
            cannot compile the gated_activation_fn.
        UnsupportedError: `gate_up` is float16.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other.
        ScaleError: a_scale_offsets or NVFP4's input_scales is None, or a scale is not finite and
            positive.
    """
    call = Call("fused_silu_quantize", validate)
    fmt = block_format(format, call.api)
    check_scale_rule(call.api, fmt, take_name(call, "scale_rule", scale_rule))
    chosen_activation = take_activation(call.api, activation)
    interleaved = call.boolean("interleaved", interleaved)
    x = call.array("gate_up", gate_up, BF16, "(M, 2D)")
    slots = take_slots(
        call, "expert_start", expert_start, "a_scale_offsets", a_scale_offsets, expert_ids
    )
    check_tensor_factor(call.api, "input_scales", fmt, input_scales)
    factors = call.optional("input_scales", input_scales, F32, "(S,)")
    if factors is not None:
        call.shape("input_scales", (slots.count,), f"(S,) = ({slots.count},), one a slot")
    rows, n = x.shape
    call.multiple("gate_up", "2D", n, 2 * fmt.block, f"D % {fmt.block} == 0")
    result = SlotResult(call, fmt, take_layout(call, layout), rows, slots.count, n // 2)
    tiles = result.take(out, TILES, columns="D")
    check_blocks(call, "gate_up", "2D", n, tiles, of=2)
    chosen = call.place(backend, stream)
    if layout == "prepared":
        check_prepared_gpu(call, "gate_up", chosen)
    if call.checks("metadata"):
        check_slots(call, slots, rows, "gate_up", tiles, MAX_DIMENSION, "any model")
        if factors is not None:
            check_factors(call, "input_scales", call.data(factors), "slot")

    outputs = result.outputs()
    if rows == 0:
        return result.owners(outputs)
    if chosen.name == "reference":
        quantized = reference.fused_silu_quantize(
            host_view(x),
            host_view(slots.starts),
            host_view(slots.offsets),
            host_view(slots.ids),
            None if factors is None else host_view(factors),
            format=fmt,
            interleaved=interleaved,
            activation=chosen_activation,
            scale_rule=scale_rule,
        )
        result.store(slots.starts, slots.offsets, quantized, outputs)
        return result.owners(outputs)

    from nbmoe_kernels.gated_quantize import launch_gated_quantize

    with compiling(call, chosen_activation):
        launch_gated_quantize(
            executor(chosen, call),
            *flat(chosen, *outputs, x, slots.starts, slots.offsets, slots.ids, factors),
            format=fmt.name,
            scale_rule=scale_rule,
            activation=chosen_activation.kernel_activation,
            alpha=chosen_activation.alpha,
            limit=chosen_activation.limit,
            num_active=slots.count,
            num_rows=rows,
            num_cols=n // 2,
            num_tiles=tiles,
            is_interleaved=interleaved,
            layout=layout,
            panel_rows=result.panel_rows,
            stream=call.stream,
        )
    return result.owners(outputs)
