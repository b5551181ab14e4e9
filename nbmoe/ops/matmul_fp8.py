"""FP8 matmuls: e4m3 operands with scales a block of 128, a row or a tensor, in bfloat16."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.arrays import Array
from nbmoe.backend import Backend
from nbmoe.errors import RangeError
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.prepared_fp8 import multiply_fp8
from nbmoe.ops.product import optional_view
from nbmoe.validate import BF16, Call
from nbmoe.validate.call import MAX_BLOCKS_Y
from nbmoe.validate.elements import FP8
from nbmoe.validate.product_fp8 import (
    MULTIPLE_OF_K,
    Fp8Product,
    check_fp8_product,
    check_fp8_scales,
    take_block_scales,
    take_fp8_product,
    take_row_scales,
)
from nbmoe.validate.product_fp8_prepared import are_fp8_prepared, take_fp8_prepared

MAX_ROWS = 2**32 - 1
"""Of all matrices of a batch: kernels count them in 32 bits."""


def grouped_dynamic_scaled_fp8_matmul(
    hidden: Any,
    weight: Any,
    a_scales: Any,
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
    """Multiplies each slot's rows by its expert's weight, with scales a block of 128.

    e4m3 codes are decoded to float16 exactly and summed as Hopper's tensor cores do, in the order
    of `nbmoe.layouts.K_STEPS`. The sum of each 128 of K joins the result through one fma with the
    product of its two scales, in ascending K; the result is rounded once, to bfloat16. Rows from
    expert_start[-1] on are not written; they are 0 in a buffer that this function allocates on the
    host.

    Prepared operands are multiplied as e4m3 by compute capability 9.0, at twice the rate: the sums
    of 128 are then those of `numerics="e4m3"` of `nbmoe.reference`, with 14 bits, and so are other
    bytes than those of packed operands.

    Args:
        hidden: (M, K) e4m3 codes, float8_e4m3fn or uint8, K % 8 == 0. Or `PreparedFp8Tokens`
            beside prepared weights.
        weight: (E, N, K) e4m3 codes, N % 8 == 0. Or `PreparedWeights` of `prepare_fp8_weights`.
        a_scales: (ceil(K/128), Mpad) float32 or bfloat16 scales of `hidden`, Mpad >= M, as
            `quantize_dynamic_scaled_float8` with groups of 128 gives them. None beside prepared
            operands.
        b_scales: (E, ceil(N/128), ceil(K/128)) scales of `weight`, of the same type.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 are 0.
        bias: (E, N) bfloat16, by expert id, added in float32 after the scales.
        estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
        routed_before: See `grouped_matmul_block_scaled`.
        out: (M, N) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids and the weight's scales.

    Returns:
        (M, N) bfloat16.

    Raises:
        ArgTypeError, RangeError: `estimated_total_m` is no int >= 0.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other.
        ScaleError: scales are None, or one of the weight's is NaN, infinite or negative.
        ConfigError, UnsupportedError: prepared operands do not fit each other, or have more than
            1024 slots.
    """
    call = Call("grouped_dynamic_scaled_fp8_matmul", validate)
    routed_before = call.boolean("routed_before", routed_before)
    if are_fp8_prepared(call, hidden, weight):
        scales = (a_scales, b_scales)
        routing = (expert_start, expert_ids, bias, estimated_total_m)
        prepared = take_fp8_prepared(call, hidden, weight, *scales, *routing, rowwise=False)
        return multiply_fp8(call, prepared, out, backend, stream, routed_before, rowwise=False)
    p = take_fp8_product(call, hidden, weight, expert_start, expert_ids, bias, estimated_total_m)
    a_sf, b_sf = take_block_scales(call, a_scales, b_scales, (), p.num_rows, p.n, p.k)
    output, chosen = _outputs(call, p, b_sf, out, backend, stream)
    if p.num_rows == 0:
        return output.owner
    if chosen.name == "reference":
        _store_reference(reference.grouped_dynamic_scaled_fp8_matmul, output, p, a_sf, b_sf)
        return output.owner
    _launch(chosen, call, p, output, a_sf, b_sf, "block128", a_sf.shape[1], (0, 0))
    return output.owner


def grouped_rowwise_dynamic_scaled_fp8_matmul(
    hidden: Any,
    weight: Any,
    a_scales: Any,
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
    """Multiplies each slot's rows by its expert's weight, with scales a row or a tensor.

    As `grouped_dynamic_scaled_fp8_matmul`, but all of K is summed and then multiplied by the
    row's scale and by the weight row's, each product rounded to float32. Of prepared operands each
    128 of K is summed, and the sums are added in float32, in ascending K.

    Args:
        hidden: (M, K) e4m3 codes, float8_e4m3fn or uint8, K % 8 == 0. Or `PreparedFp8Tokens`
            beside prepared weights; then `a_scales` is None.
        weight: (E, N, K) e4m3 codes, N % 8 == 0. Or `PreparedWeights` of `prepare_fp8_weights`, or
            MXFP4 weights of `prepare_w4a8_weights`; then `b_scales` is None.
        a_scales: float32 or bfloat16 scales of `hidden`: (M, 1), or (1, Mpad) with Mpad >= M, as
            `quantize_dynamic_scaled_float8` gives them, or (1,), one for all rows.
        b_scales: Scales of `weight`, of the same type: (E, N, 1), or (E, 1, 1) or (E,), one an
            expert.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 are 0.
        bias: (E, N) bfloat16, by expert id, added in float32 after the scales.
        estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
        routed_before: See `grouped_matmul_block_scaled`.
        out: (M, N) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids and the weight's scales.

    Returns:
        (M, N) bfloat16.

    Raises:
        As `grouped_dynamic_scaled_fp8_matmul`.
    """
    call = Call("grouped_rowwise_dynamic_scaled_fp8_matmul", validate)
    routed_before = call.boolean("routed_before", routed_before)
    if are_fp8_prepared(call, hidden, weight):
        scales = (a_scales, b_scales)
        routing = (expert_start, expert_ids, bias, estimated_total_m)
        prepared = take_fp8_prepared(call, hidden, weight, *scales, *routing, rowwise=True)
        return multiply_fp8(call, prepared, out, backend, stream, routed_before, rowwise=True)
    p = take_fp8_product(call, hidden, weight, expert_start, expert_ids, bias, estimated_total_m)
    a_sf, a_step, b_sf, b_steps = take_row_scales(call, a_scales, b_scales, p)
    output, chosen = _outputs(call, p, b_sf, out, backend, stream)
    if p.num_rows == 0:
        return output.owner
    if chosen.name == "reference":
        _store_reference(reference.grouped_rowwise_dynamic_scaled_fp8_matmul, output, p, a_sf, b_sf)
        return output.owner
    _launch(chosen, call, p, output, a_sf, b_sf, "rowwise", a_step, b_steps)
    return output.owner


def batched_dynamic_scaled_fp8_matmul(
    a: Any,
    b: Any,
    a_scales: Any,
    b_scales: Any,
    *,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Multiplies the matrices of two batches: a[i] @ b[i].T, with scales a block of 128.

    The arithmetic is that of `grouped_dynamic_scaled_fp8_matmul`.

    Args:
        a: (B, M, K) e4m3 codes, float8_e4m3fn or uint8, K % 8 == 0.
        b: (B, N, K) e4m3 codes, N % 8 == 0.
        a_scales: (B, ceil(K/128), Mpad) float32 or bfloat16 scales of `a`, Mpad >= M.
        b_scales: (B, ceil(N/128), ceil(K/128)) scales of `b`, of the same type.
        out: (B, M, N) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks the scales of `b`.

    Returns:
        (B, M, N) bfloat16.

    Raises:
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RangeError: the batch has 2^32 rows or more.
        ScaleError: scales are None, or one of `b`'s is NaN, infinite or negative.
    """
    call = Call("batched_dynamic_scaled_fp8_matmul", validate)
    left = call.array("a", a, FP8, "(B, M, K)")
    right = call.array("b", b, FP8, "(B, N, K)")
    batch, m, k = left.shape
    n = right.shape[1]
    call.multiple("a", "K", k, MULTIPLE_OF_K, "pad K with zeros")
    call.shape("b", (batch, None, k), f"(B, N, K) with B = {batch}, K = {k}")
    call.multiple("b", "N", n, 8)
    call.at_most("a", "B", batch, MAX_BLOCKS_Y)
    if batch * m > MAX_ROWS:
        rule = f"B * M <= {MAX_ROWS}"
        raise RangeError(call.message("a", rule, f"B * M = {batch} * {m} = {batch * m}"))
    a_sf, b_sf = take_block_scales(call, a_scales, b_scales, (batch,), m, n, k)
    shape = (batch, m, n)
    if out is not None:
        call.output("out", out, BF16, "(B, M, N)", shape)
    chosen = call.place(backend, stream)
    if call.checks("metadata"):
        check_fp8_scales(call, "b_scales", call.data(b_sf))

    output = call.outputs.get("out") or allocate(call, "out", shape, BF16)
    if batch == 0 or m == 0:
        return output.owner
    if chosen.name == "reference":
        operands = map(host_view, (left, right, a_sf, b_sf))
        store(output, reference.batched_dynamic_scaled_fp8_matmul(*operands))
        return output.owner

    from nbmoe_kernels.heuristics import grouped_matmul_config
    from nbmoe_kernels.matmul_grouped_fp8_sm80 import launch_matmul_grouped_fp8

    launch_matmul_grouped_fp8(
        executor(chosen, call),
        *flat(chosen, output, left, right, a_sf, b_sf, None, None, None),
        scaling="block128",
        scale_type=_scale_type(a_sf),
        num_active=0,
        num_rows=m,
        n=n,
        k=k,
        a_scale_stride=a_sf.shape[2],
        has_bias=False,
        config=grouped_matmul_config("e4m3", "e4m3", n, k, 1, m),
        num_batches=batch,
        stream=call.stream,
    )
    return output.owner


def _outputs(
    call: Call, p: Fp8Product, b_scales: Array, out: Any, backend: str | None, stream: Any
) -> tuple[Array, Backend]:
    """Takes or allocates the result, places the call and checks what takes reading."""
    shape = (p.num_rows, p.n)
    if out is not None:
        call.output("out", out, BF16, "(M, N)", shape)
    chosen = call.place(backend, stream)
    check_fp8_product(call, p, b_scales)
    return call.outputs.get("out") or allocate(call, "out", shape, BF16), chosen


def _store_reference(
    matmul: Any, output: Array, p: Fp8Product, a_scales: Array, b_scales: Array
) -> None:
    operands = (p.hidden, p.weight, a_scales, b_scales, p.groups.starts, p.groups.ids)
    result = matmul(*map(host_view, operands), bias=optional_view(p.bias))
    store(output, result, [(0, int(host_view(p.groups.starts)[-1]))])


def _launch(
    chosen: Backend,
    call: Call,
    p: Fp8Product,
    output: Array,
    a_scales: Array,
    b_scales: Array,
    scaling: str,
    a_scale_stride: int,
    b_scale_strides: tuple[int, int],
) -> None:
    from nbmoe_kernels.heuristics import grouped_matmul_config
    from nbmoe_kernels.matmul_grouped_fp8_sm80 import launch_matmul_grouped_fp8

    g = p.groups
    launch_matmul_grouped_fp8(
        executor(chosen, call),
        *flat(chosen, output, p.hidden, p.weight, a_scales, b_scales, g.starts, g.ids, p.bias),
        scaling=scaling,
        scale_type=_scale_type(a_scales),
        num_active=g.count,
        num_rows=p.num_rows,
        n=p.n,
        k=p.k,
        a_scale_stride=a_scale_stride,
        b_scale_strides=b_scale_strides,
        has_bias=p.bias is not None,
        config=grouped_matmul_config("e4m3", "e4m3", p.n, p.k, g.count, p.estimated_total_m),
        stream=call.stream,
    )


def _scale_type(scales: Array) -> str:
    return "f32" if scales.dtype == "float32" else "bf16"
