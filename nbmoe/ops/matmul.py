"""Grouped matmul: each slot's rows times its expert's weight, both NVFP4, in bfloat16."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.validate import BF16, Call
from nbmoe.validate.grouped import check_product, take_product


def grouped_matmul_block_scaled(
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    expert_scales: Any,
    *,
    estimated_total_m: int | None = None,
    a_row_scales: Any = None,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Multiplies each slot's rows by its expert's weight: A @ W[e].T, scaled, rounded once.

    The accumulation is Hopper's, in the order of `nbmoe.layouts.K_STEPS`, whatever the backend and
    the tile sizes. Rows from expert_start[-1] on are not written; they are 0 in a buffer that this
    function allocates on the host.

    Args:
        hidden: (M, K/2) uint8 packed codes, K % 16 == 0.
        weight: (E, N, K/2) uint8 packed codes, N % 8 == 0.
        a_scales: (tiles, ceil(K/64), 32, 4, 4) uint8 scale tiles of `hidden`.
        b_scales: (E, ceil(N/128), ceil(K/64), 32, 4, 4) uint8 scale tiles of `weight`.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        a_scale_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 are 0.
        expert_scales: (E,) float32 factors, by expert id.
        estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
        a_row_scales: (M,) bfloat16 factors of rows.
        out: (M, N) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids, factors and weight scales;
            "full" also refuses row scales that are not finite.

    Returns:
        (M, N) bfloat16.

    Raises:
        ArgTypeError, RangeError: `estimated_total_m` is no int >= 0.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other.
        ScaleError: a scale is missing, NaN, negative or, as a factor, 0.
    """
    call = Call("grouped_matmul_block_scaled", validate)
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
    shape = (p.num_rows, p.n)
    if out is not None:
        call.output("out", out, BF16, "(M, N)", shape)
    chosen = call.place(backend, stream)
    check_product(call, p)

    output = call.outputs.get("out") or allocate(call, "out", shape, BF16)
    if p.num_rows == 0:
        return output.owner
    if chosen.name == "reference":
        starts = host_view(p.slots.starts)
        result = reference.grouped_matmul_block_scaled(
            host_view(p.hidden),
            host_view(p.weight),
            host_view(p.a_scales),
            host_view(p.b_scales),
            starts,
            host_view(p.slots.offsets),
            host_view(p.slots.ids),
            host_view(p.expert_scales),
            a_row_scales=None if p.a_row_scales is None else host_view(p.a_row_scales),
        )
        store(output, result, [(0, int(starts[-1]))])
        return output.owner

    from nbmoe_kernels.heuristics import grouped_matmul_config
    from nbmoe_kernels.matmul_grouped_sm80 import launch_matmul_grouped

    launch_matmul_grouped(
        executor(chosen, call),
        *flat(
            chosen,
            output,
            p.hidden,
            p.weight,
            p.a_scales,
            p.b_scales,
            p.slots.starts,
            p.slots.offsets,
            p.slots.ids,
            p.expert_scales,
            p.a_row_scales,
        ),
        num_active=p.slots.count,
        num_tiles=p.a_scales.shape[0],
        n=p.n,
        k=p.k,
        has_row_scales=p.a_row_scales is not None,
        config=grouped_matmul_config(p.n, p.k, p.slots.count, p.estimated_total_m),
        stream=call.stream,
    )
    return output.owner
