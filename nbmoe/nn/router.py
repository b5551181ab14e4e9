"""Router logits: tokens times the gate's weight, the same bits on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.codecs import decode_bf16

_CHUNK_PRODUCTS = 1 << 20  # 8 MiB of float64 products at a time stay in a CPU's cache


def router_logits(x: npt.NDArray[Any], gate: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Computes x @ gate.T in float64 and rounds once to float32.

    A product of two bf16 values is exact in float64. The sum is a tree of halves over H padded to
    a power of two: its order depends on H alone. A BLAS product's order depends on the machine and
    on the number of tokens, and a last bit in a logit can change which expert wins a tie.

    Args:
        x: bf16 [T, H].
        gate: bf16 or f32 [E, H].

    Returns:
        f32 [T, E].
    """
    tokens, hidden = x.shape
    experts = gate.shape[0]
    gate64 = _as_float64(gate)
    logits = np.empty((tokens, experts), np.float32)
    width = 1 << (hidden - 1).bit_length()
    chunk = max(1, _CHUNK_PRODUCTS // (experts * width))
    for begin in range(0, tokens, chunk):
        x64 = _as_float64(x[begin : begin + chunk])
        sums = np.zeros((len(x64), experts, width))
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(x64[:, None, :], gate64[None, :, :], out=sums[:, :, :hidden])
            while sums.shape[-1] > 1:
                half = sums.shape[-1] // 2
                sums = sums[..., :half] + sums[..., half:]
            logits[begin : begin + chunk] = sums[..., 0]
    return logits


def _as_float64(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    values = array if array.dtype == np.float32 else decode_bf16(array)
    return values.astype(np.float64)
