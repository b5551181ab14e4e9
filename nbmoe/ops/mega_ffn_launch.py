"""How checked operands of the whole FFN reach its kernels."""

from __future__ import annotations

from typing import Any

from nbmoe.arrays import Array
from nbmoe.backend import Backend
from nbmoe.ops.launch import executor, flat
from nbmoe.ops.mega_ffn_scratch import code_bytes, scratch_bytes
from nbmoe.validate import Call
from nbmoe.validate.mega_ffn import FFN
from nbmoe.validate.product import Product
from nbmoe.validate.product_prepared import PreparedProduct


def launch_prepared(
    chosen: Backend,
    call: Call,
    ffn: FFN,
    output: Array,
    workspace: Array,
    counters: Array,
    *,
    match_bf16: bool,
    routed_before: bool,
) -> None:
    """The kernel for Hopper, on prepared operands."""
    from nbmoe_kernels.mega_ffn_sm90 import launch_mega_ffn_sm90
    from nbmoe_kernels.mega_ffn_sm90_config import mega_ffn_config

    p, down = ffn.gate_up, ffn.down
    assert isinstance(p, PreparedProduct), "the caller has looked"
    count = p.groups.count
    into, middle = flat(chosen, output, workspace.leading(scratch_bytes(ffn)))
    launch_mega_ffn_sm90(
        executor(chosen, call),
        into,
        middle,
        middle,
        *flat(chosen, counters, p.hidden, p.weight, down.weight, p.groups.starts, p.groups.ids),
        *flat(chosen, p.expert_scales, down.expert_scales, ffn.factors),
        *flat(chosen, p.a_row_scales, p.bias, down.bias),
        **_keywords(call, ffn, match_bf16),
        num_slots=ffn.num_slots,
        config=mega_ffn_config(
            ffn.fmt.name, ffn.weight_fmt.name, ffn.moe_dim, ffn.k, count, p.estimated_total_m
        ),
        routed_before=routed_before,
    )


def launch_packed(
    chosen: Backend,
    call: Call,
    ffn: FFN,
    output: Array,
    workspace: Array,
    counters: Array,
    *,
    match_bf16: bool,
    routed_before: bool,
) -> None:
    """The portable kernel, on packed operands; it starts behind whatever is in front of it."""
    from nbmoe_kernels.mega_ffn_sm80 import launch_mega_ffn_sm80
    from nbmoe_kernels.mega_ffn_sm80_config import mega_ffn_sm80_config

    p, down = ffn.gate_up, ffn.down
    assert isinstance(p, Product), "the caller has looked"
    s, scales_at = p.slots, code_bytes(ffn)
    into, middle = flat(chosen, output, workspace.leading(scratch_bytes(ffn)))
    if chosen.on_gpu:
        codes, scales = middle, middle + scales_at
    else:
        codes, scales = middle[:scales_at], middle[scales_at:]
    launch_mega_ffn_sm80(
        executor(chosen, call),
        into,
        codes,
        scales,
        *flat(chosen, counters, p.hidden, p.weight, down.weight),
        *flat(chosen, p.a_scales, p.b_scales, down.scales, s.starts, s.offsets, s.ids),
        *flat(chosen, p.expert_scales, down.expert_scales, ffn.factors),
        *flat(chosen, p.a_row_scales, p.bias, down.bias),
        **_keywords(call, ffn, match_bf16),
        config=mega_ffn_sm80_config(
            ffn.fmt.name, ffn.weight_fmt.name, ffn.moe_dim, p.k, s.count, p.estimated_total_m
        ),
    )


def _keywords(call: Call, ffn: FFN, match_bf16: bool) -> dict[str, Any]:
    """What both launchers take by name, but for the tile shape."""
    p, down, activation = ffn.gate_up, ffn.down, ffn.activation
    return {
        "num_active": ffn.groups.count,
        "num_rows": p.num_rows,
        "k": ffn.k,
        "moe_dim": ffn.moe_dim,
        "n": down.n,
        "has_up_scales": p.expert_scales is not None,
        "has_down_scales": down.expert_scales is not None,
        "has_row_scales": p.a_row_scales is not None,
        "has_up_bias": p.bias is not None,
        "has_down_bias": down.bias is not None,
        "match_bf16": match_bf16,
        "activation": activation.fused_activation,
        "alpha": activation.alpha,
        "limit": activation.limit,
        "stream": call.stream,
    }
