"""Grouped matmul with SwiGLU and requantization in its epilogue: the first half of an expert."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.errors import ScaleError
from nbmoe.layouts import TILE_SHAPE, ceil_div
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.validate import CODES, F32, SCALES, Call
from nbmoe.validate.grouped import BLOCK, TILE_K, check_product, take_product
from nbmoe.validate.routing import used_tiles
from nbmoe.validate.scales import check_factors


def grouped_matmul_blocked_swiglu(
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    *,
    expert_scales: Any,
    c_input_scales: Any,
    estimated_total_m: int | None = None,
    a_row_scales: Any = None,
    match_bf16: bool = True,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> tuple[Any, Any]:
    """Multiplies by gate and up weights, applies SwiGLU, and quantizes the result to NVFP4.

    Equals `grouped_matmul_block_scaled`, then `z = g * sigmoid(g) * u` in float32, then the NVFP4
    block quantization of z without another rounding. Scale tiles are written and left alone as by
    `grouped_quantize_dynamic_block_scaled`.

    Args:
        hidden: (M, K/2) uint8 packed codes, K % 16 == 0.
        weight: (E, 2D, K/2) uint8 packed codes, D % 16 == 0, rows in the order of
            `nbmoe.layouts.sigma_permute`: gate 0, up 0, gate 1, ...
        a_scales: (tiles, ceil(K/64), 32, 4, 4) uint8 scale tiles of `hidden`.
        b_scales: (E, ceil(2D/128), ceil(K/64), 32, 4, 4) uint8 scale tiles of `weight`, their rows
            permuted likewise.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        a_scale_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 get codes 0 and scales 0.
        expert_scales: (E,) float32 factors, by expert id.
        c_input_scales: (S,) float32 inverse input scales of the down projection, by slot.
        estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
        a_row_scales: (M,) bfloat16 factors of rows.
        match_bf16: Whether g and u are rounded to bfloat16 first, as separate kernels would.
        out: `(codes, scales)` to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`; levels as for `grouped_matmul_block_scaled`.

    Returns:
        Codes (M, D/2) uint8, low nibble first, and scales (tiles, ceil(D/64), 32, 4, 4) uint8 with
        the tiles of `a_scales`.

    Raises:
        ArgTypeError, RangeError: `estimated_total_m` is no int >= 0, `match_bf16` no bool.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other.
        ScaleError: a scale is missing, NaN, negative or, as a factor, 0.
    """
    call = Call("grouped_matmul_blocked_swiglu", validate)
    match_bf16 = call.boolean("match_bf16", match_bf16)
    p = take_product(
        call,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales,
        a_row_scales,
        estimated_total_m,
    )
    call.multiple("weight", "N = 2D", p.n, 2 * BLOCK, "gate and up rows, D % 16 == 0 each")
    slots, moe_dim = p.slots, p.n // 2
    factors = call.array("c_input_scales", c_input_scales, F32, "(S,)", missing=ScaleError)
    call.shape("c_input_scales", (slots.count,), f"(S,) = ({slots.count},), one a slot")
    codes_shape = (p.num_rows, moe_dim // 2)
    scales_shape = (p.a_scales.shape[0], ceil_div(moe_dim, TILE_K), *TILE_SHAPE)
    buffers = call.out_tuple(out, ("c_packed", "c_swiglu_scales"))
    if buffers is not None:
        call.output("out[0]", buffers[0], CODES, "(M, D/2)", codes_shape)
        symbols = "(tiles of a_scales, ceil(D/64), 32, 4, 4)"
        call.output("out[1]", buffers[1], SCALES, symbols, scales_shape)
    chosen = call.place(backend, stream)
    check_product(call, p)
    if call.checks("metadata"):
        check_factors(call, "c_input_scales", call.data(factors), "slot")

    codes = call.outputs.get("out[0]") or allocate(call, "c_packed", codes_shape, CODES)
    scales = call.outputs.get("out[1]") or allocate(call, "c_swiglu_scales", scales_shape, SCALES)
    if p.num_rows == 0:
        return codes.owner, scales.owner
    if chosen.name == "reference":
        starts, offsets = host_view(slots.starts), host_view(slots.offsets)
        result = reference.grouped_matmul_blocked_swiglu(
            host_view(p.hidden),
            host_view(p.weight),
            host_view(p.a_scales),
            host_view(p.b_scales),
            starts,
            offsets,
            host_view(slots.ids),
            expert_scales=host_view(p.expert_scales),
            c_input_scales=host_view(factors),
            a_row_scales=None if p.a_row_scales is None else host_view(p.a_row_scales),
            match_bf16=match_bf16,
        )
        store(codes, result[0], [(0, int(starts[-1]))])
        store(scales, result[1], used_tiles(starts, offsets))
        return codes.owner, scales.owner

    from nbmoe_kernels.heuristics import grouped_matmul_config
    from nbmoe_kernels.matmul_grouped_swiglu_sm80 import launch_matmul_grouped_swiglu

    launch_matmul_grouped_swiglu(
        executor(chosen, call),
        *flat(
            chosen,
            codes,
            scales,
            p.hidden,
            p.weight,
            p.a_scales,
            p.b_scales,
            slots.starts,
            slots.offsets,
            slots.ids,
            p.expert_scales,
            factors,
            p.a_row_scales,
        ),
        num_active=slots.count,
        num_tiles=p.a_scales.shape[0],
        n=p.n,
        k=p.k,
        has_row_scales=p.a_row_scales is not None,
        match_bf16=match_bf16,
        config=grouped_matmul_config(p.n, p.k, slots.count, p.estimated_total_m),
        stream=call.stream,
    )
    return codes.owner, scales.owner
