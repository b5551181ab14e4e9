"""Valid calls of what makes prepared operands."""

from collections.abc import Callable
from functools import partial

import numpy as np

from nbmoe.formats import MXFP8, NVFP4, BlockFormat
from nbmoe_kernels.prepared_weights import prepared_bytes
from tests.bad_inputs.sizes import Arguments, Sizes, bf16, codes, poisoned, scale_tiles


def weights(fmt: BlockFormat, sizes: Sizes) -> Arguments:
    """`prepare_weights` of a block format."""
    n, k = sizes.hidden_blocks * 8, sizes.moe_blocks * fmt.block
    shape = (prepared_bytes(fmt.name, sizes.experts, n, k),)
    return {
        "weight": codes(1, fmt.codes_dtype, sizes.experts, n, fmt.packed_k(k)),
        "b_scales": scale_tiles(2, fmt, n, k, sizes.experts),
        "format": fmt.name,
        "out": poisoned(shape, np.uint8),
    }


def bf16_weights(sizes: Sizes) -> Arguments:
    """`prepare_weights` of bfloat16."""
    n, k = sizes.hidden_blocks * 8, sizes.moe_blocks * 8
    out = poisoned((prepared_bytes("bf16", sizes.experts, n, k),), np.uint8)
    return {"weight": bf16(1, sizes.experts, n, k), "out": out}


CALLS: dict[str, Callable[[Sizes], Arguments]] = {
    **{f"prepare_weights:{fmt.name}": partial(weights, fmt) for fmt in (NVFP4, MXFP8)},
    "prepare_weights:bf16": bf16_weights,
}
