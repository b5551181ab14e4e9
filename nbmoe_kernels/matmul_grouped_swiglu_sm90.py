"""Hopper matmul of groups with a gated activation and requantization, for prepared operands.

Weight row 2i is gate row i and row 2i + 1 up row i. For row m and pair i:

    gate, up = acc * 2^28 (NVFP4) * expert_scales[e] * a_row_scales[m] + bias[e, .]
    gate, up = bf16(gate), bf16(up)                                        if MATCH_BF16
    z        = activation(gate, up, alpha, limit)                          f32
    output   = blocks of consecutive z in the format of the tokens         NVFP4 under
                                                                           c_input_scales[slot]

in f32 and in this order; the bytes are those of `matmul_grouped_swiglu_sm80`.

Shapes: codes (M, bytes of D codes) and scales (tiles, ceil(D/X), 32, 4, 4) u8, X the elements of
four scale bytes; or prepared tokens (ceil(D/64), R, 128) (`nbmoe_kernels.prepared_tokens`), and no
scales. c_input_scales (S,) f32, NVFP4 only; bias (E, 2D) bf16; the rest as in
`matmul_grouped_sm90`. D is a multiple of the block.

Padding: as in `matmul_grouped_swiglu_sm80`; prepared tokens are 0 past column D.

Roles, pipeline and synchronisation are those of `matmul_sm90_body`, the thread map is that of
`matmul_sm90_swiglu_tile`.
"""

import functools
from typing import Any

from nbmoe_kernels.kernel import Executor, Kernel, kernel
from nbmoe_kernels.matmul_grouped_sm90 import grid_of
from nbmoe_kernels.matmul_sm90_body import BODY_PARAMS
from nbmoe_kernels.matmul_sm90_swiglu_config import FusedMatmulConfig
from nbmoe_kernels.matmul_sm90_swiglu_tile import Fusion, make_fused_body
from nbmoe_kernels.prepared_tokens import token_rows
from nbmoe_kernels.prepared_weights import k64_count, n64_count


@functools.cache
def make_matmul_grouped_swiglu_sm90(
    config: FusedMatmulConfig,
    match_bf16: bool = True,
    activation: str = "silu",
    layout: str = "packed",
) -> Kernel:
    """The kernel for a pair of operands, a tile shape and a fusion."""
    fusion = Fusion(match_bf16, activation, layout)
    body = make_fused_body(config, fusion)
    is_half = layout == "packed" and config.a_format != "mxfp8"

    @kernel(
        f"global {'u16' if is_half else 'u32'}* output, global u8* scales, "
        "global u32* a_scale_offsets, global f32* c_input_scales, global u16* a_row_scales, "
        f"global u16* bias, {BODY_PARAMS}, u32 has_row_scales, u32 has_bias, f32 alpha, f32 limit",
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        # Left alone, ptxas takes more registers for some of these than so many blocks have.
        min_blocks=1 if config.registers else config.blocks_per_sm,
        name=f"matmul_grouped_swiglu_{config.name}_{'bf16' if match_bf16 else 'f32'}"
        f"{'' if activation == 'silu' else f'_{activation}'}"
        f"{'' if layout == 'packed' else '_prepared'}",
        min_cc=(9, 0),
        overlaps_previous=True,
    )
    def matmul_grouped_swiglu_sm90(
        output,
        scales,
        a_scale_offsets,
        c_input_scales,
        a_row_scales,
        bias,
        tokens,
        weights,
        expert_start,
        expert_ids,
        expert_scales,
        has_expert_scales,
        num_slots,
        num_rows,
        token_rows,
        n,
        k64,
        n64,
        routed_before,
        has_row_scales,
        has_bias,
        alpha,
        limit,
    ):
        out = (
            output, scales, token_rows, num_slots, expert_start, a_scale_offsets, c_input_scales,
            alpha, limit,
        )  # fmt: skip
        args = (out, a_row_scales, bias, has_row_scales, has_bias)
        body(
            tokens, weights, expert_start, expert_ids, expert_scales, has_expert_scales, num_slots,
            num_rows, token_rows, n, k64, n64, routed_before, args,
        )  # fmt: skip

    return matmul_grouped_swiglu_sm90


def launch_matmul_grouped_swiglu_sm90(
    executor: Executor,
    output: Any,
    scales: Any,
    tokens: Any,
    weights: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    expert_scales: Any,
    c_input_scales: Any,
    a_row_scales: Any,
    bias: Any,
    *,
    num_active: int,
    num_rows: int,
    n: int,
    k: int,
    has_row_scales: bool,
    has_expert_scales: bool,
    has_bias: bool,
    match_bf16: bool,
    activation: str,
    alpha: float,
    limit: float,
    config: FusedMatmulConfig,
    layout: str = "packed",
    routed_before: bool = False,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``n`` = 2 D, ``num_rows`` = M.

    Arrays whose ``has_`` flag is off are not read, nor is ``c_input_scales`` for MX formats. The
    layout "prepared" uses neither ``scales`` nor ``a_scale_offsets``.

    Args:
        num_active: slots, 1 up to ``config.max_slots``.
        routed_before: as for `nbmoe_kernels.matmul_grouped_sm90.launch_matmul_grouped_sm90`.
    """
    assert 1 <= num_active <= config.max_slots, "the table has no place for so many slots"
    make_matmul_grouped_swiglu_sm90(config, match_bf16, activation, layout).launch(
        executor,
        (grid_of(executor, config, num_rows, num_active, n), 1, 1),
        output,
        scales,
        a_scale_offsets,
        c_input_scales,
        a_row_scales,
        bias,
        tokens,
        weights,
        expert_start,
        expert_ids,
        expert_scales,
        has_expert_scales,
        num_active,
        num_rows,
        token_rows(num_rows, num_active),
        n,
        k64_count(k),
        n64_count(n),
        routed_before,
        has_row_scales,
        has_bias,
        alpha,
        limit,
        stream=stream,
    )
