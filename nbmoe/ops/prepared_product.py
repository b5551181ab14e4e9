"""The grouped matmul of prepared tokens and weights, behind every operation that accepts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbmoe.codecs import F32Array, encode_bf16
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.product import optional_view
from nbmoe.prepared.product import multiply_prepared
from nbmoe.validate import BF16, Call
from nbmoe.validate.product_prepared import PreparedProduct, check_prepared


def multiply(
    call: Call,
    p: PreparedProduct,
    out: Any,
    backend: str | None,
    stream: Any,
    routed_before: bool,
) -> Any:
    """Runs a call whose operands are prepared and checked.

    Args:
        call: The call.
        p: Its operands.
        out: (M, N) bfloat16 to write, or None.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        routed_before: Whether the routing was complete before the previous kernel began.

    Returns:
        (M, N) bfloat16.
    """
    shape = (p.num_rows, p.n)
    if out is not None:
        call.output("out", out, BF16, "(M, N)", shape)
    chosen = call.place(backend, stream)
    check_prepared(call, p, chosen)

    output = call.outputs.get("out") or allocate(call, "out", shape, BF16)
    if p.num_rows == 0:
        return output.owner
    starts, ids = p.groups.starts, p.groups.ids
    if chosen.name == "reference":
        result = encode_bf16(reference_products(p))
        store(output, result, [(0, int(host_view(starts)[-1]))])
        return output.owner

    from nbmoe_kernels.heuristics_sm90 import hopper_matmul_config
    from nbmoe_kernels.matmul_grouped_sm90 import launch_matmul_grouped_sm90

    formats, k = (p.tokens.format, p.weights.format), p.weights.k
    launch_matmul_grouped_sm90(
        executor(chosen, call),
        *flat(chosen, output, p.hidden, p.weight, starts, ids),
        *flat(chosen, p.expert_scales, p.a_row_scales, p.bias),
        num_active=p.groups.count,
        num_rows=p.num_rows,
        n=p.n,
        k=k,
        has_row_scales=p.a_row_scales is not None,
        has_expert_scales=p.expert_scales is not None,
        has_bias=p.bias is not None,
        config=hopper_matmul_config(*formats, p.n, k, p.groups.count, p.estimated_total_m),
        routed_before=routed_before,
        stream=call.stream,
    )
    return output.owner


def reference_products(p: PreparedProduct) -> F32Array:
    """The float32 products of operands on the host, by the reference."""
    return multiply_prepared(
        replace(p.tokens, data=host_view(p.hidden)),
        replace(p.weights, data=host_view(p.weight)),
        host_view(p.groups.starts),
        host_view(p.groups.ids),
        expert_scales=optional_view(p.expert_scales),
        a_row_scales=optional_view(p.a_row_scales),
        bias=optional_view(p.bias),
    )
