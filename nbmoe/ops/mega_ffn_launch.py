"""How checked operands of the whole FFN reach its kernels."""

from __future__ import annotations

from nbmoe.arrays import Array
from nbmoe.backend import Backend
from nbmoe.ops.launch import executor, flat
from nbmoe.ops.mega_ffn_scratch import mega_ffn_workspace_size
from nbmoe.validate import Call
from nbmoe.validate.mega_ffn import FFN
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

    p, down, activation = ffn.gate_up, ffn.down, ffn.activation
    assert isinstance(p, PreparedProduct), "the caller has looked"
    count = p.groups.count
    size = mega_ffn_workspace_size(p.num_rows, ffn.num_slots, ffn.moe_dim)
    into, middle = flat(chosen, output, workspace.leading(size))
    launch_mega_ffn_sm90(
        executor(chosen, call),
        into,
        middle,
        middle,
        *flat(chosen, counters, p.hidden, p.weight, down.weight, p.groups.starts, p.groups.ids),
        *flat(chosen, p.expert_scales, down.expert_scales, ffn.factors),
        *flat(chosen, p.a_row_scales, p.bias, down.bias),
        num_active=count,
        num_slots=ffn.num_slots,
        num_rows=p.num_rows,
        k=ffn.k,
        moe_dim=ffn.moe_dim,
        n=down.n,
        has_up_scales=p.expert_scales is not None,
        has_down_scales=down.expert_scales is not None,
        has_row_scales=p.a_row_scales is not None,
        has_up_bias=p.bias is not None,
        has_down_bias=down.bias is not None,
        match_bf16=match_bf16,
        activation=activation.fused_activation,
        alpha=activation.alpha,
        limit=activation.limit,
        config=mega_ffn_config(
            ffn.fmt.name, ffn.weight_fmt.name, ffn.moe_dim, ffn.k, count, p.estimated_total_m
        ),
        routed_before=routed_before,
        stream=call.stream,
    )
