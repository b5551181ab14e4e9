"""Valid calls of the matmuls of block-scaled and of bfloat16 operands."""

from collections.abc import Callable
from functools import partial

from nbmoe.formats import MXFP4, NVFP4, PAIRS, BlockFormat
from nbmoe.operand import named_dtype
from tests.bad_inputs.sizes import (
    Arguments,
    Sizes,
    bf16,
    codes,
    factors,
    poisoned,
    quantized_out,
    scale_tiles,
)

BF16 = named_dtype("bfloat16")


def product(a: BlockFormat, b: BlockFormat, sizes: Sizes, k: int, n: int) -> Arguments:
    """What both block-scaled matmuls take."""
    experts, rows = sizes.experts, sizes.rows
    of_nvfp4 = {"a_row_scales": factors(6, rows).astype(BF16)} if a is NVFP4 else {}
    return {
        "hidden": codes(1, a.codes_dtype, rows, a.packed_k(k)),
        "weight": codes(2, b.codes_dtype, experts, n, b.packed_k(k)),
        "a_scales": scale_tiles(3, a, 128 * sizes.tiles, k),
        "b_scales": scale_tiles(4, b, n, k, experts),
        **sizes.slots(),
        "expert_scales": factors(5, experts),
        "format": a.name,
        "weight_format": b.name,
        "bias": bf16(7, experts, n),
        "estimated_total_m": rows,
        **of_nvfp4,
    }


def matmul(a: BlockFormat, b: BlockFormat, sizes: Sizes) -> Arguments:
    """`grouped_matmul_block_scaled`: a down projection."""
    k, n = sizes.moe_blocks * a.block, sizes.hidden_blocks * a.block
    return product(a, b, sizes, k, n) | {"out": poisoned((sizes.rows, n), BF16)}


def swiglu(a: BlockFormat, b: BlockFormat, sizes: Sizes) -> Arguments:
    """`grouped_matmul_blocked_swiglu`."""
    k, moe_dim = sizes.hidden_blocks * a.block, sizes.moe_blocks * a.block
    input_scales = {"c_input_scales": factors(8, sizes.experts)} if a is NVFP4 else {}
    return {
        **product(a, b, sizes, k, 2 * moe_dim),
        **input_scales,
        "match_bf16": True,
        "out": quantized_out(a, sizes.rows, moe_dim, sizes.tiles),
    }


def ragged(sizes: Sizes) -> Arguments:
    """`grouped_matmul_ragged`."""
    k, n = sizes.moe_blocks * 16, sizes.hidden_blocks * 8
    return {
        "hidden": bf16(1, sizes.rows, k),
        "weight": bf16(2, sizes.experts, n, k),
        **sizes.groups(),
        "bias": bf16(3, sizes.experts, n),
        "estimated_total_m": sizes.rows,
        "out": poisoned((sizes.rows, n), BF16),
    }


def w4a16(sizes: Sizes) -> Arguments:
    """`grouped_matmul_w4a16`."""
    k, n = sizes.moe_blocks * MXFP4.block, sizes.hidden_blocks * 8
    return {
        "hidden": bf16(1, sizes.rows, k),
        "weight": codes(2, "uint8", sizes.experts, n, MXFP4.packed_k(k)),
        "b_scales": scale_tiles(4, MXFP4, n, k, sizes.experts),
        **sizes.groups(),
        "bias": bf16(3, sizes.experts, n),
        "estimated_total_m": sizes.rows,
        "out": poisoned((sizes.rows, n), BF16),
    }


def pair_name(a: BlockFormat, b: BlockFormat) -> str:
    """What a pair of formats is called in entries."""
    return a.name if a is b else f"{a.name}x{b.name}"


CALLS: dict[str, Callable[[Sizes], Arguments]] = {
    **{
        f"{op}:{pair_name(a, b)}": partial(build, a, b)
        for op, build in (
            ("grouped_matmul_block_scaled", matmul),
            ("grouped_matmul_blocked_swiglu", swiglu),
        )
        for a, b in PAIRS
    },
    "grouped_matmul_ragged": ragged,
    "grouped_matmul_w4a16": w4a16,
}
