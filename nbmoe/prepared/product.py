"""The grouped matmul of prepared operands in numpy: unpacked, and multiplied as defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.codecs import F32Array
from nbmoe.formats import FORMATS, NVFP4
from nbmoe.prepared.tokens import PreparedTokens, unpack_tokens
from nbmoe.prepared.weights import PreparedWeights, unpack_weights
from nbmoe.reference.matmul import (
    ACCUMULATOR_FACTOR,
    Operand,
    decode_operand,
    grouped_products,
    in_steps,
)


def multiply_prepared(
    tokens: PreparedTokens,
    weights: PreparedWeights,
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    *,
    expert_scales: F32Array | None = None,
    a_row_scales: npt.NDArray[Any] | None = None,
    bias: npt.NDArray[Any] | None = None,
) -> F32Array:
    """Multiplies each group of rows by its expert's weight.

    Args:
        tokens: M rows, data in numpy.
        weights: Weights of E experts, data in numpy.
        expert_start: (S + 1,) prefix sums [rows].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 are 0.
        expert_scales: (E,) factors of the result, by expert id; None for ones.
        a_row_scales: (M,) bf16 further factors, by row.
        bias: (E, N) bf16 added after all factors, by expert id.

    Returns:
        (M, N) float32, before it is rounded to bfloat16 or activated.
    """
    rows_of_all = unpack_tokens(tokens, expert_start)
    matrix, tiles = unpack_weights(weights)

    def a_of(slot: int, rows: slice) -> Operand:
        return in_steps(rows_of_all[rows])

    def b_of(expert: int) -> Operand:
        if tiles is None:
            return in_steps(matrix[expert])
        fmt = FORMATS[weights.format]
        scales = layouts.deinterleave_scales(tiles[expert], weights.n, weights.k // fmt.block)
        return decode_operand(matrix[expert], scales, fmt)

    def scaled(v: F32Array, expert: int, rows: slice) -> F32Array:
        if tokens.format == NVFP4.name:
            v = v * ACCUMULATOR_FACTOR
        if expert_scales is not None:
            v = v * np.float32(expert_scales[expert])
        if a_row_scales is not None:
            v = v * codecs.decode_bf16(a_row_scales[rows])[:, np.newaxis]
        return v if bias is None else v + codecs.decode_bf16(bias[expert])

    shape = (tokens.num_rows, weights.n)
    return grouped_products(shape, expert_start, expert_ids, a_of, b_of, scaled)
