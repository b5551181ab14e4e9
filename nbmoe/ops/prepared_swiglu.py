"""The fused matmul of prepared operands: gate and up, activation, quantization of the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbmoe import layouts
from nbmoe.activation import GatedActivation
from nbmoe.arrays import Array, describe
from nbmoe.formats import FORMATS
from nbmoe.ops.launch import executor, flat, host_view
from nbmoe.ops.prepared_product import reference_products
from nbmoe.ops.product import optional_view
from nbmoe.ops.quantized import SlotResult
from nbmoe.reference.swiglu import activate_and_quantize
from nbmoe.validate import Call
from nbmoe.validate.product_prepared import PreparedProduct, check_prepared
from nbmoe.validate.routing import check_scale_offsets
from nbmoe.validate.scales import check_factors

TILES = "(ceil(M/128) + min(S, M), ceil(D/{}), 32, 4, 4)"


def multiply_swiglu(
    call: Call,
    p: PreparedProduct,
    offsets: Array | None,
    factors: Array | None,
    out: Any,
    backend: str | None,
    stream: Any,
    *,
    activation: GatedActivation,
    match_bf16: bool,
    layout: str,
    routed_before: bool,
) -> Any:
    """Runs a call whose operands are prepared and checked.

    Args:
        call: The call.
        p: Its operands.
        offsets: (S,) scale offsets of the result, None for the layout "prepared".
        factors: (S,) inverse input scales of the next matmul, None for MX.
        out: What to write, or None.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        activation: What to apply.
        match_bf16: Whether gate and up are rounded to bfloat16 first.
        layout: "packed" or "prepared".
        routed_before: Whether the routing was complete before the previous kernel began.

    Returns:
        Codes and scales, or prepared tokens.
    """
    fmt, starts, ids = FORMATS[p.tokens.format], p.groups.starts, p.groups.ids
    result = SlotResult(call, fmt, layout, p.num_rows, p.groups.count, p.n // 2)
    tiles = result.take(out, TILES, columns="D")
    chosen = call.place(backend, stream)
    check_prepared(call, p, chosen)
    if call.checks("metadata"):
        if offsets is not None:
            given = call.data(starts), call.data(offsets)
            check_scale_offsets(call, "a_scale_offsets", *given, tiles)
        if factors is not None:
            check_factors(call, "c_input_scales", call.data(factors), "slot")

    outputs = result.outputs()
    if p.num_rows == 0:
        return result.owners(outputs)
    if chosen.name == "reference":
        where = offsets
        if where is None:
            own = layouts.scales_offset(host_view(starts))
            where = describe(call.api, "a_scale_offsets", np.ascontiguousarray(own))
        quantized = activate_and_quantize(
            reference_products(p),
            fmt,
            host_view(starts),
            host_view(where),
            host_view(ids),
            optional_view(factors),
            num_tiles=tiles,
            activation=activation,
            match_bf16=match_bf16,
        )
        result.store(starts, where, quantized, outputs)
        return result.owners(outputs)

    from nbmoe_kernels.matmul_grouped_swiglu_sm90 import launch_matmul_grouped_swiglu_sm90
    from nbmoe_kernels.matmul_sm90_swiglu_config import fused_matmul_config

    k, count, formats = p.weights.k, p.groups.count, (p.tokens.format, p.weights.format)
    launch_matmul_grouped_swiglu_sm90(
        executor(chosen, call),
        *flat(chosen, *outputs, p.hidden, p.weight, starts, offsets, ids),
        *flat(chosen, p.expert_scales, factors, p.a_row_scales, p.bias),
        num_active=count,
        num_rows=p.num_rows,
        n=p.n,
        k=k,
        has_row_scales=p.a_row_scales is not None,
        has_expert_scales=p.expert_scales is not None,
        has_bias=p.bias is not None,
        match_bf16=match_bf16,
        activation=activation.fused_activation,
        alpha=activation.alpha,
        limit=activation.limit,
        config=fused_matmul_config(*formats, p.n, k, count, p.estimated_total_m),
        layout=layout,
        routed_before=routed_before,
        stream=call.stream,
    )
    return result.owners(outputs)
