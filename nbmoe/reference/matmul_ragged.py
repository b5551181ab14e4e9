"""Grouped matmuls with bfloat16 activations: bfloat16 weights, or MXFP4 ones decoded to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe import codecs, layouts
from nbmoe.codecs import F32Array, U8Array
from nbmoe.formats import MXFP4
from nbmoe.reference.matmul import Operand, decode_operand, grouped_products, in_steps


def grouped_matmul_ragged(
    hidden: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    *,
    bias: npt.NDArray[Any] | None = None,
    estimated_total_m: int | None = None,
) -> npt.NDArray[Any]:
    """Multiplies each group of rows by its expert's weight, all bfloat16: A @ W[e].T (+ bias).

    Args:
        hidden: (M, K) bf16.
        weight: (E, N, K) bf16.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 are 0.
        bias: (E, N) bf16 added in float32, by expert id.
        estimated_total_m: Sizing hint of the kernels [rows]. It never changes the result.

    Returns:
        (M, N) bfloat16, rounded once from float32.
    """
    del estimated_total_m

    def b_of(expert: int) -> Operand:
        return in_steps(_as_bf16(weight[expert]))

    shape = (len(hidden), weight.shape[1])
    return _bf16_product(hidden, shape, expert_start, expert_ids, b_of, bias)


def grouped_matmul_w4a16(
    hidden: npt.NDArray[Any],
    weight: U8Array,
    b_scales: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    *,
    bias: npt.NDArray[Any] | None = None,
    estimated_total_m: int | None = None,
) -> npt.NDArray[Any]:
    """`grouped_matmul_ragged` with MXFP4 weights, decoded to bfloat16 first.

    Args:
        hidden: (M, K) bf16, K % 32 == 0.
        weight: (E, N, K/2) packed MXFP4 codes.
        b_scales: (E, ceil(N/128), ceil(K/128), 32, 4, 4) e8m0 scale tiles of `weight`.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 are 0.
        bias: (E, N) bf16 added in float32, by expert id.
        estimated_total_m: Sizing hint of the kernels [rows]. It never changes the result.

    Returns:
        (M, N) bfloat16, rounded once from float32.
    """
    del estimated_total_m
    n, columns = weight.shape[1], MXFP4.scale_columns(hidden.shape[1])

    def b_of(expert: int) -> Operand:
        scales = layouts.deinterleave_scales(b_scales[expert], n, columns)
        return decode_operand(weight[expert], scales, MXFP4)

    return _bf16_product(hidden, (len(hidden), n), expert_start, expert_ids, b_of, bias)


def _as_bf16(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return codecs.bf16_bits(x).view(codecs.BF16)


def _bf16_product(
    hidden: npt.NDArray[Any],
    shape: tuple[int, int],
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    b_of: Any,
    bias: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    def a_of(slot: int, rows: slice) -> Operand:
        return in_steps(_as_bf16(hidden[rows]))

    def biased(v: F32Array, expert: int, rows: slice) -> F32Array:
        return v if bias is None else v + codecs.decode_bf16(bias[expert])

    return codecs.encode_bf16(grouped_products(shape, expert_start, expert_ids, a_of, b_of, biased))
