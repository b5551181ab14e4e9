"""The grouped matmul of prepared FP8 operands, behind both operations that accept them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbmoe import reference
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.product import optional_view
from nbmoe.prepared.fp8 import unpack_fp8_tokens, unpack_fp8_weights
from nbmoe.prepared.w4a8 import PreparedW4A8Weights, folded_codes
from nbmoe.validate import BF16, Call
from nbmoe.validate.product_fp8_prepared import PreparedFp8Product, check_fp8_prepared


def multiply_fp8(
    call: Call,
    p: PreparedFp8Product,
    out: Any,
    backend: str | None,
    stream: Any,
    routed_before: bool,
    *,
    rowwise: bool,
) -> Any:
    """Runs a call whose operands are prepared and checked.

    Args:
        call: The call.
        p: Its operands.
        out: (M, N) bfloat16 to write, or None.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        routed_before: Whether the routing was complete before the previous kernel began.
        rowwise: Scales a row or a tensor instead of a block.

    Returns:
        (M, N) bfloat16.
    """
    shape = (p.num_rows, p.n)
    if out is not None:
        call.output("out", out, BF16, "(M, N)", shape)
    chosen = call.place(backend, stream)
    check_fp8_prepared(call, p, chosen)

    output = call.outputs.get("out") or allocate(call, "out", shape, BF16)
    if p.num_rows == 0:
        return output.owner
    starts, ids = p.groups.starts, p.groups.ids
    if chosen.name == "reference":
        first = host_view(starts)
        tokens = replace(p.tokens, data=host_view(p.hidden), scales=host_view(p.a_scales))
        codes, a_scales = unpack_fp8_tokens(tokens, first)
        weight = _codes_of(p)
        matmul = reference.grouped_dynamic_scaled_fp8_matmul
        if rowwise:
            matmul = reference.grouped_rowwise_dynamic_scaled_fp8_matmul
        operands = (codes, weight, a_scales, host_view(p.b_scales), first, host_view(ids))
        result = matmul(*operands, bias=optional_view(p.bias), numerics="e4m3")
        store(output, result, [(0, int(first[-1]))])
        return output.owner

    from nbmoe_kernels.heuristics_fp8_sm90 import fp8_hopper_config
    from nbmoe_kernels.matmul_grouped_fp8_sm90 import launch_matmul_grouped_fp8_sm90

    k, count = p.weights.k, p.groups.count
    launch_matmul_grouped_fp8_sm90(
        executor(chosen, call),
        *flat(chosen, output, p.hidden, p.weight, p.a_scales, p.b_scales, starts, ids, p.bias),
        scaling="rowwise" if rowwise else "block128",
        scale_type="f32" if p.b_scales.dtype == "float32" else "bf16",
        num_active=count,
        num_rows=p.num_rows,
        n=p.n,
        k=k,
        a_scale_stride=p.a_step,
        b_scale_strides=p.b_steps,
        has_bias=p.bias is not None,
        config=fp8_hopper_config(p.n, k, count, p.estimated_total_m, _kind_of(p)),
        routed_before=routed_before,
        stream=call.stream,
    )
    return output.owner


def _kind_of(p: PreparedFp8Product) -> str:
    return "mxfp4" if isinstance(p.weights, PreparedW4A8Weights) else "e4m3"


def _codes_of(p: PreparedFp8Product) -> Any:
    """The weights' e4m3 codes (E, N, K), of operands on the host."""
    if isinstance(p.weights, PreparedW4A8Weights):
        return folded_codes(replace(p.weights, data=host_view(p.weight)))
    return unpack_fp8_weights(replace(p.weights, data=host_view(p.weight)))
