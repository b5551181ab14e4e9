"""Grouped matmuls of bfloat16 rows: bfloat16 weights, or MXFP4 ones decoded on the way."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.arrays import Array
from nbmoe.formats import MXFP4
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.prepared_product import multiply
from nbmoe.ops.product import optional_view
from nbmoe.validate import BF16, Call
from nbmoe.validate.elements import codes_of
from nbmoe.validate.grouped import check_groups, check_slot_count, take_groups
from nbmoe.validate.product import (
    check_weight_tiles,
    take_bias,
    take_total_m,
    take_weight_scales,
    take_weight_sizes,
)
from nbmoe.validate.product_prepared import are_prepared, take_prepared
from nbmoe.validate.scales import check_weight_scales


def grouped_matmul_ragged(
    hidden: Any,
    weight: Any,
    expert_start: Any,
    expert_ids: Any,
    *,
    bias: Any = None,
    estimated_total_m: int | None = None,
    routed_before: bool = False,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Multiplies each slot's rows by its expert's weight, all bfloat16: A @ W[e].T (+ bias).

    The accumulation is Hopper's, in the order of `nbmoe.layouts.K_STEPS`. Rows from
    expert_start[-1] on are not written; they are 0 in a buffer that this function allocates on the
    host. Both operands may be prepared, see `grouped_matmul_block_scaled`.

    Args:
        hidden: (M, K) bfloat16, K % 8 == 0; or PreparedTokens.
        weight: (E, N, K) bfloat16, N % 8 == 0; or PreparedWeights.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 are 0.
        bias: (E, N) bfloat16, by expert id, added in float32.
        estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
        routed_before: Whether `expert_start` and `expert_ids` were complete before the kernel in
            front of this call on its stream began; then a matmul of prepared operands starts to
            read weights while that kernel runs. Changes no byte.
        out: (M, N) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets and ids.

    Returns:
        (M, N) bfloat16, rounded once from float32.

    Raises:
        ArgTypeError, RangeError: `estimated_total_m` is no int >= 0.
        ArgTypeError: only one of `hidden` and `weight` is prepared.
        ConfigError: prepared operands are of other formats.
        UnsupportedError: too many slots for prepared operands.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other.
    """
    call = Call("grouped_matmul_ragged", validate)
    routed_before = call.boolean("routed_before", routed_before)
    if are_prepared(call, hidden, weight):
        prepared = take_prepared(
            call,
            hidden,
            weight,
            expert_start,
            expert_ids,
            pairs=(("bf16", "bf16"),),
            unused={},
            bias=bias,
            estimated_total_m=estimated_total_m,
        )
        return multiply(call, prepared, out, backend, stream, routed_before)
    a = call.array("hidden", hidden, BF16, "(M, K)")
    b = call.array("weight", weight, BF16, "(E, N, K)")
    call.multiple("hidden", "K", a.shape[1], 8, "pad K with zeros")
    return _multiply(
        call, a, b, None, expert_start, expert_ids, bias, estimated_total_m, out, backend, stream
    )


def grouped_matmul_w4a16(
    hidden: Any,
    weight: Any,
    b_scales: Any,
    expert_start: Any,
    expert_ids: Any,
    *,
    bias: Any = None,
    estimated_total_m: int | None = None,
    routed_before: bool = False,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Multiplies bfloat16 rows by MXFP4 weights, which become bfloat16 on their way.

    Equals `mxfp4_dequant` of the weight, then `grouped_matmul_ragged`, byte for byte. Both operands
    may be prepared, see `grouped_matmul_block_scaled`.

    Args:
        hidden: (M, K) bfloat16, K % 32 == 0; or PreparedTokens of bfloat16.
        weight: (E, N, K/2) uint8 packed codes, N % 8 == 0; or PreparedWeights of MXFP4.
        b_scales: (E, ceil(N/128), ceil(K/128), 32, 4, 4) float8_e8m0fnu or uint8 scale tiles; None
            beside prepared operands.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 are 0.
        bias: (E, N) bfloat16, by expert id, added in float32.
        estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
        routed_before: Whether `expert_start` and `expert_ids` were complete before the kernel in
            front of this call on its stream began; then a matmul of prepared operands starts to
            read weights while that kernel runs. Changes no byte.
        out: (M, N) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids and weight scales.

    Returns:
        (M, N) bfloat16, rounded once from float32.

    Raises:
        ArgTypeError, RangeError: `estimated_total_m` is no int >= 0.
        ArgTypeError: only one of `hidden` and `weight` is prepared.
        ConfigError: prepared operands are of other formats.
        UnsupportedError: too many slots for prepared operands.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other.
        ScaleError: the weight scales are missing or NaN.
    """
    call = Call("grouped_matmul_w4a16", validate)
    routed_before = call.boolean("routed_before", routed_before)
    if are_prepared(call, hidden, weight):
        prepared = take_prepared(
            call,
            hidden,
            weight,
            expert_start,
            expert_ids,
            pairs=(("bf16", "mxfp4"),),
            unused={"b_scales": b_scales},
            bias=bias,
            estimated_total_m=estimated_total_m,
        )
        return multiply(call, prepared, out, backend, stream, routed_before)
    a = call.array("hidden", hidden, BF16, "(M, K)")
    b = call.array("weight", weight, codes_of(MXFP4), "(E, N, K/2)")
    b_sf = take_weight_scales(call, "b_scales", b_scales, MXFP4)
    call.multiple("hidden", "K", a.shape[1], MXFP4.block, "pad K with zeros")
    return _multiply(
        call, a, b, b_sf, expert_start, expert_ids, bias, estimated_total_m, out, backend, stream
    )


def _multiply(
    call: Call,
    a: Array,
    b: Array,
    b_scales: Array | None,
    expert_start: Any,
    expert_ids: Any,
    bias: Any,
    estimated_total_m: int | None,
    out: Any,
    backend: str | None,
    stream: Any,
) -> Any:
    fmt = None if b_scales is None else MXFP4
    groups = take_groups(call, "expert_start", expert_start, expert_ids)
    total_m = take_total_m(call, estimated_total_m, a.shape[0])
    num_rows, k = a.shape
    num_experts, n = take_weight_sizes(call, b, k, fmt)
    if fmt is not None:
        check_weight_tiles(call, "b_scales", num_experts, n, k, fmt)
    check_slot_count(call, groups, "weight", num_experts)
    added = take_bias(call, bias, num_experts, n)
    if out is not None:
        call.output("out", out, BF16, "(M, N)", (num_rows, n))
    chosen = call.place(backend, stream)
    if call.checks("metadata"):
        check_groups(call, groups, num_rows, "hidden", num_experts, "weight")
        if b_scales is not None:
            check_weight_scales(call, "b_scales", call.data(b_scales), n, k, MXFP4)

    output = call.outputs.get("out") or allocate(call, "out", (num_rows, n), BF16)
    if num_rows == 0:
        return output.owner
    if chosen.name == "reference":
        weights = [host_view(b)] if b_scales is None else [host_view(b), host_view(b_scales)]
        multiply: Any = reference.grouped_matmul_ragged
        if b_scales is not None:
            multiply = reference.grouped_matmul_w4a16
        starts, ids = host_view(groups.starts), host_view(groups.ids)
        result = multiply(host_view(a), *weights, starts, ids, bias=optional_view(added))
        store(output, result, [(0, int(starts[-1]))])
        return output.owner

    from nbmoe_kernels.heuristics import grouped_matmul_config
    from nbmoe_kernels.matmul_grouped_sm80 import launch_matmul_grouped

    b_format = "bf16" if fmt is None else fmt.name
    scales = (None, b_scales)
    launch_matmul_grouped(
        executor(chosen, call),
        *flat(chosen, output, a, b, *scales, groups.starts, None, groups.ids, None, None, added),
        num_active=groups.count,
        num_rows=num_rows,
        n=n,
        k=k,
        has_row_scales=False,
        has_expert_scales=False,
        has_bias=added is not None,
        config=grouped_matmul_config("bf16", b_format, n, k, groups.count, total_m),
        stream=call.stream,
    )
    return output.owner
