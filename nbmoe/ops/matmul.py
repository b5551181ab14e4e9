"""Grouped matmul: each slot's rows times its expert's weight, both block-scaled, in bfloat16."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.formats import BlockFormat
from nbmoe.ops.launch import allocate, host_view, store
from nbmoe.ops.prepared_product import multiply
from nbmoe.ops.product import launch_product, reference_arguments
from nbmoe.validate import BF16, Call
from nbmoe.validate.product import check_product, take_product
from nbmoe.validate.product_prepared import BLOCK_PAIRS, are_prepared, take_prepared


def grouped_matmul_block_scaled(
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    expert_scales: Any = None,
    *,
    format: str | BlockFormat | None = None,
    weight_format: str | BlockFormat | None = None,
    bias: Any = None,
    estimated_total_m: int | None = None,
    a_row_scales: Any = None,
    routed_before: bool = False,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Multiplies each slot's rows by its expert's weight: A @ W[e].T, scaled, rounded once.

    Formats of activations and weights may be NVFP4 twice, MXFP4 twice, MXFP8 twice, or MXFP8 and
    MXFP4 (W4A8). K is a multiple of the block, 16 for NVFP4 and 32 for the others; a scale tile
    covers 4 blocks. Shapes below are of FP8 elements; FP4 formats pack (M, K/2) and (E, N, K/2).

    Codes times block scales become float16 (NVFP4) or bfloat16 (MX). Their accumulation is
    Hopper's, in the order of `nbmoe.layouts.K_STEPS`, whatever the backend and the tile sizes. Rows
    from expert_start[-1] on are not written; they are 0 in a buffer that this function allocates on
    the host.

    `hidden` and `weight` may both be prepared (`nbmoe.prepared`): the kernels of compute capability
    9.0 are fastest with them. Then `a_scales`, `b_scales` and `a_scale_offsets` are None and there
    are at most 1024 slots. The bytes of the result are the same.

    Args:
        hidden: (M, K) codes: uint8, or float8_e4m3fn for MXFP8; or PreparedTokens.
        weight: (E, N, K) codes, N % 8 == 0; or PreparedWeights.
        a_scales: (tiles, ceil(K/(4 * block)), 32, 4, 4) scale tiles of `hidden`: uint8, or
            float8_e4m3fn for NVFP4 and float8_e8m0fnu for MX.
        b_scales: (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles of `weight`.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        a_scale_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 are 0.
        expert_scales: (E,) float32 factors, by expert id. NVFP4 needs them; None means ones.
        format: "nvfp4", "mxfp4" or "mxfp8", the format of `hidden`. None tells it by element
            types: e4m3 codes are MXFP8, e8m0 scales MXFP4, all else NVFP4.
        weight_format: Format of `weight`. None: as `hidden`, or MXFP4 if packed beside MXFP8.
        bias: (E, N) bfloat16, by expert id, added in float32 after all factors.
        estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
        a_row_scales: (M,) bfloat16 factors of rows, for NVFP4.
        routed_before: Whether `expert_start` and `expert_ids` were complete before the kernel in
            front of this call on its stream began; then a matmul of prepared operands starts to
            read weights while that kernel runs. Changes no byte.
        out: (M, N) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids, factors and weight scales;
            "full" also refuses row scales that are not finite.

    Returns:
        (M, N) bfloat16.

    Raises:
        ArgTypeError, RangeError: `estimated_total_m` is no int >= 0.
        ArgTypeError: only one of `hidden` and `weight` is prepared.
        ConfigError: formats contradict operands or each other, row scales came without NVFP4, or
            scales beside prepared operands.
        UnsupportedError: too many slots for prepared operands.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other.
        ScaleError: a scale is missing, NaN, negative or, as a factor, 0.
    """
    call = Call("grouped_matmul_block_scaled", validate)
    routed_before = call.boolean("routed_before", routed_before)
    if are_prepared(call, hidden, weight):
        prepared = take_prepared(
            call,
            hidden,
            weight,
            expert_start,
            expert_ids,
            pairs=BLOCK_PAIRS,
            unused={
                "a_scales": a_scales,
                "b_scales": b_scales,
                "a_scale_offsets": a_scale_offsets,
            },
            expert_scales=expert_scales,
            a_row_scales=a_row_scales,
            bias=bias,
            format=format,
            weight_format=weight_format,
            estimated_total_m=estimated_total_m,
        )
        return multiply(call, prepared, out, backend, stream, routed_before)
    p = take_product(
        call,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales=expert_scales,
        a_row_scales=a_row_scales,
        bias=bias,
        format=format,
        weight_format=weight_format,
        estimated_total_m=estimated_total_m,
    )
    shape = (p.num_rows, p.n)
    if out is not None:
        call.output("out", out, BF16, "(M, N)", shape)
    chosen = call.place(backend, stream)
    check_product(call, p)

    output = call.outputs.get("out") or allocate(call, "out", shape, BF16)
    if p.num_rows == 0:
        return output.owner
    if chosen.name == "reference":
        operands, keywords = reference_arguments(p)
        result = reference.grouped_matmul_block_scaled(*operands, **keywords)
        store(output, result, [(0, int(host_view(p.slots.starts)[-1]))])
        return output.owner

    from nbmoe_kernels.matmul_grouped_sm80 import launch_matmul_grouped

    launch_product(launch_matmul_grouped, chosen, call, p, (output,))
    return output.owner
