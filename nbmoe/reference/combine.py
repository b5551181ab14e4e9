"""The weighted sum of a token's expert outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs
from nbmoe.codecs import F32Array
from nbmoe.reference.float32 import fma
from nbmoe.reference.routing import NO_ROW


def moe_finalize(
    down: npt.NDArray[Any],
    restore_token_order: npt.NDArray[np.uint32],
    weights: F32Array,
    *,
    shared: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """out[t] = shared[t] + sum over j of weights[t, j] * down[restore[t * k + j]].

    An accumulator of +0 takes shared[t] as with weight 1, then j ascends, one float32 fma each; the
    sum is rounded once to bf16.

    Args:
        down: (M, H) bf16 rows grouped by expert.
        restore_token_order: (T * k,) uint32 row of each source; 0xFFFFFFFF contributes nothing.
        weights: (T, k) float32 routing weights.
        shared: (T, H) bf16 output of the shared experts, or None.

    Returns:
        (T, H) bfloat16. A token without any row is 0.
    """
    tokens, top_k = weights.shape
    restore = np.asarray(restore_token_order).reshape(tokens, top_k)
    total = np.zeros((tokens, down.shape[1]), np.float32)
    if shared is not None:
        total = fma(np.float32(1), codecs.decode_bf16(shared), total)
    for j in range(top_k):
        present = restore[:, j] != NO_ROW
        rows = codecs.decode_bf16(down[restore[present, j]])
        total[present] = fma(weights[present, j, np.newaxis], rows, total[present])
    return codecs.encode_bf16(total)
