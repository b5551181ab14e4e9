"""Valid calls of the block quantizers, the activations and what changes layouts."""

from collections.abc import Callable
from functools import partial

import numpy as np

from nbmoe.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from nbmoe.layouts import TILE_ROWS, ceil_div
from nbmoe.operand import named_dtype
from tests.bad_inputs.sizes import (
    Arguments,
    Sizes,
    bf16,
    codes,
    factors,
    poisoned,
    quantized_out,
    scale_rows,
)


def naming(fmt: BlockFormat) -> Arguments:
    """The arguments by which the quantizers name a format."""
    return {
        "sf_vector_size": fmt.block,
        "scales_type": "float8_e4m3fn" if fmt is NVFP4 else "float8_e8m0fnu",
        "out_type": fmt.codes_dtype,
    }


def grouped_quantize(fmt: BlockFormat, sizes: Sizes) -> Arguments:
    """`grouped_quantize_dynamic_block_scaled`, gathering."""
    hidden = sizes.hidden_blocks * fmt.block
    tensor_scales = {"sf_tensor": factors(2, sizes.experts)} if fmt is NVFP4 else {}
    return {
        "input": bf16(1, sizes.tokens, hidden),
        **sizes.slots("row_offsets", "scales_offsets"),
        **tensor_scales,
        **naming(fmt),
        "indices": np.random.default_rng(3).permutation(sizes.rows).astype(np.uint32),
        "indices_divisor": sizes.top_k,
        "out": quantized_out(fmt, sizes.rows, hidden, sizes.tiles),
    }


def row_scaled(sizes: Sizes) -> Arguments:
    """`grouped_quantize_nvfp4_row_scaled`, gathering."""
    arguments = grouped_quantize(NVFP4, sizes)
    for name in ("sf_tensor", *naming(NVFP4)):
        del arguments[name]
    row_scales = poisoned((sizes.rows,), named_dtype("bfloat16"))
    return arguments | {"relu2": False, "out": (*arguments["out"], row_scales)}


def quantize(fmt: BlockFormat, sizes: Sizes) -> Arguments:
    """`quantize_dynamic_block_scaled`."""
    hidden = sizes.hidden_blocks * fmt.block
    return {
        "input": bf16(1, sizes.tokens, hidden),
        "tensor_sf": 2.0 if fmt is NVFP4 else None,
        **naming(fmt),
        "out": quantized_out(fmt, sizes.tokens, hidden, ceil_div(sizes.tokens, TILE_ROWS)),
    }


def silu_quantize(fmt: BlockFormat, sizes: Sizes) -> Arguments:
    """`fused_silu_quantize`."""
    moe_dim = sizes.moe_blocks * fmt.block
    input_scales = {"input_scales": factors(2, sizes.experts)} if fmt is NVFP4 else {}
    return {
        "gate_up": bf16(1, sizes.rows, 2 * moe_dim),
        **sizes.slots(),
        **input_scales,
        "format": fmt.name,
        "interleaved": False,
        "out": quantized_out(fmt, sizes.rows, moe_dim, sizes.tiles),
    }


def gated(sizes: Sizes) -> Arguments:
    """`gated_activation`."""
    moe_dim = sizes.moe_blocks * 16
    return {
        "gate_up": bf16(1, sizes.rows, 2 * moe_dim),
        "interleaved": True,
        "out": poisoned((sizes.rows, moe_dim), named_dtype("bfloat16")),
    }


def interleave(fmt: BlockFormat, sizes: Sizes) -> Arguments:
    """`block_scales_interleave` of the scales of all experts."""
    experts, n, columns = sizes.experts, max(sizes.tokens, 1), sizes.hidden_blocks
    scales = scale_rows(1, fmt, experts, n, columns).view(named_dtype(fmt.scales_dtype))
    shape = (experts, ceil_div(n, TILE_ROWS), ceil_div(columns, 4), 32, 4, 4)
    return {
        "scales": scales,
        "sf_vector_size": fmt.block,
        "out": poisoned(shape, named_dtype(fmt.scales_dtype)),
    }


def dequantize(out_type: str, sizes: Sizes) -> Arguments:
    """`mxfp4_dequant` of the weights of all experts."""
    lead, blocks = (sizes.experts, sizes.tokens), sizes.hidden_blocks
    scales = scale_rows(2, MXFP4, *lead, blocks).view(named_dtype(MXFP4.scales_dtype))
    return {
        "packed": codes(1, "uint8", *lead, blocks * 16),
        "scales": scales,
        "out_type": out_type,
        "out": poisoned((*lead, blocks * 32), named_dtype(out_type)),
    }


CALLS: dict[str, Callable[[Sizes], Arguments]] = {
    **{
        f"{op}:{fmt.name}": partial(build, fmt)
        for op, build in (
            ("grouped_quantize_dynamic_block_scaled", grouped_quantize),
            ("quantize_dynamic_block_scaled", quantize),
            ("fused_silu_quantize", silu_quantize),
        )
        for fmt in FORMATS.values()
    },
    "grouped_quantize_nvfp4_row_scaled": row_scaled,
    "gated_activation": gated,
    "block_scales_interleave:nvfp4": partial(interleave, NVFP4),
    "block_scales_interleave:mxfp4": partial(interleave, MXFP4),
    "mxfp4_dequant:bfloat16": partial(dequantize, "bfloat16"),
    "mxfp4_dequant:float8_e4m3fn": partial(dequantize, "float8_e4m3fn"),
}
