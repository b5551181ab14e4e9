"""FP8 matmuls: e4m3 operands, tensor-core sums, float32 scales.

With scales a block of 128 x 128, the products of each 128 of K are summed from +0 and join the
accumulator through one fma with the product of the two scales, in ascending K:

    acc = fma(sum over k in block of a * b, a_scale * b_scale, acc)

With scales a row, all of K is summed and then multiplied by the row's scale and by the column's.

How products are summed has two definitions, `numerics`; each kernel has one:

    "f16"    of packed operands. Codes are float16, which is exact; steps of 16 in the order of
             `nbmoe.layouts.K_STEPS`, sums cut to 24 bits (`tensor_core.F16`).
    "e4m3"   of prepared operands, which compute capability 9.0 multiplies as they are. Steps of 32
             consecutive elements, sums cut to 14 bits (`tensor_core.E4M3`): every addend of a step,
             the sum so far included, is cut to a multiple of 2**-13 of the power of two of the
             largest. So no sum spans more than four steps: with scales a row, too, each 128 of K is
             summed from +0, and the sums are added in float32, in ascending K, from +0.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from nbmoe import codecs
from nbmoe.codecs import F32Array
from nbmoe.reference import tensor_core
from nbmoe.reference.float32 import fma
from nbmoe.reference.matmul import Operand, in_steps

BLOCK: Final = 128
Numerics: TypeAlias = Literal["f16", "e4m3"]


def decode_fp8(codes: npt.NDArray[Any], numerics: Numerics = "f16") -> Operand:
    """e4m3 codes (R, K) as operands of the tensor core, K padded with zeros to whole steps.

    Args:
        codes: The codes.
        numerics: "f16": float16, exactly, and in the order of the steps. "e4m3": as they are.
    """
    if numerics == "f16":
        return in_steps(codecs.decode_e4m3(codes.view(np.uint8)).astype(np.float16))
    padding = -codes.shape[1] % tensor_core.E4M3.step
    return np.pad(codes.view(np.uint8), ((0, 0), (0, padding))).view(tensor_core.E4M3_CODES)


def decode_scales(scales: npt.NDArray[Any]) -> F32Array:
    """float32 values of float32 or bf16 scales."""
    return scales if scales.dtype == np.float32 else codecs.decode_bf16(scales)


def block_products(a: Operand, b: Operand, a_scales: F32Array, b_scales: F32Array) -> F32Array:
    """a @ b.T in blocks of 128 of K.

    Args:
        a: (M, K) operand, as `decode_fp8` gives it.
        b: (N, K) operand.
        a_scales: (ceil(K/128), M) scales of `a`.
        b_scales: (ceil(N/128), ceil(K/128)) scales of `b`.

    Returns:
        (M, N) float32.
    """
    n = len(b)
    acc = np.zeros((len(a), n), np.float32)
    with np.errstate(all="ignore"):
        for block in range(a_scales.shape[0]):
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            partial = tensor_core.matmul(a[:, columns], b[:, columns])
            b_scale = np.repeat(b_scales[:, block], BLOCK)[:n]
            acc = fma(partial, a_scales[block][:, np.newaxis] * b_scale, acc)
    return acc


def row_products(a: Operand, b: Operand, a_scales: F32Array, b_scales: F32Array) -> F32Array:
    """((a @ b.T) * a_scales[m]) * b_scales[n], (M, N) float32."""
    with np.errstate(all="ignore"):
        return _row_sums(a, b) * a_scales[:, np.newaxis] * b_scales


def _row_sums(a: Operand, b: Operand) -> F32Array:
    """a @ b.T, e4m3 codes in blocks of 128 of K."""
    if a.dtype != tensor_core.E4M3_CODES:
        return tensor_core.matmul(a, b)
    total = np.zeros((len(a), len(b)), np.float32)
    for begin in range(0, a.shape[1], BLOCK):
        columns = slice(begin, begin + BLOCK)
        total = total + tensor_core.matmul(a[:, columns], b[:, columns])
    return total


def finished(acc: F32Array, bias: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """bf16 of the scaled sums, of which each first takes its column's bias if there is one."""
    with np.errstate(all="ignore"):
        return codecs.encode_bf16(acc if bias is None else acc + codecs.decode_bf16(bias))


def active_slots(
    expert_start: npt.NDArray[np.uint32], expert_ids: npt.NDArray[np.int32]
) -> list[tuple[slice, int]]:
    """Rows and expert of each slot that has both."""
    starts = [int(s) for s in expert_start]
    bounds = zip(starts[:-1], starts[1:], expert_ids, strict=True)
    return [(slice(begin, end), int(e)) for begin, end, e in bounds if e >= 0 and begin < end]


def grouped_dynamic_scaled_fp8_matmul(
    hidden: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    a_scales: npt.NDArray[Any],
    b_scales: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    *,
    bias: npt.NDArray[Any] | None = None,
    estimated_total_m: int | None = None,
    numerics: Numerics = "f16",
) -> npt.NDArray[Any]:
    """Multiplies each slot's rows by its expert's weight, with scales a block of 128.

    Args:
        hidden: (M, K) e4m3 codes.
        weight: (E, N, K) e4m3 codes.
        a_scales: (ceil(K/128), Mpad) float32 or bf16 scales of `hidden`, transposed.
        b_scales: (E, ceil(N/128), ceil(K/128)) scales of `weight`, of the same type.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 are 0.
        bias: (E, N) bf16, by expert id.
        estimated_total_m: Sizing hint of the kernels [rows]. It never changes the result.
        numerics: How products are summed: "f16" of packed operands, "e4m3" of prepared ones.

    Returns:
        (M, N) bf16, rounded once from float32. Rows of no slot are 0.
    """
    del estimated_total_m
    m, n = len(hidden), weight.shape[1]
    result = codecs.encode_bf16(np.zeros((m, n), np.float32))
    of_hidden, of_weight = decode_scales(a_scales), decode_scales(b_scales)
    for rows, expert in active_slots(expert_start, expert_ids):
        a, b = decode_fp8(hidden[rows], numerics), decode_fp8(weight[expert], numerics)
        acc = block_products(a, b, of_hidden[:, rows], of_weight[expert])
        result[rows] = finished(acc, None if bias is None else bias[expert])
    return result


def grouped_rowwise_dynamic_scaled_fp8_matmul(
    hidden: npt.NDArray[Any],
    weight: npt.NDArray[Any],
    a_scales: npt.NDArray[Any],
    b_scales: npt.NDArray[Any],
    expert_start: npt.NDArray[np.uint32],
    expert_ids: npt.NDArray[np.int32],
    *,
    bias: npt.NDArray[Any] | None = None,
    estimated_total_m: int | None = None,
    numerics: Numerics = "f16",
) -> npt.NDArray[Any]:
    """Multiplies each slot's rows by its expert's weight, with scales a row or a tensor.

    Args:
        hidden: (M, K) e4m3 codes.
        weight: (E, N, K) e4m3 codes.
        a_scales: float32 or bf16 scales of `hidden`: (M, 1); or (1, Mpad), as the quantizer gives
            them; or (1,), one for all.
        b_scales: Scales of `weight`: (E, N, 1), or (E, 1, 1) or (E,), one an expert.
        expert_start: (S + 1,) prefix sums: slot s owns rows expert_start[s]..expert_start[s + 1].
        expert_ids: (S,) expert of each slot. The rows of a slot with -1 are 0.
        bias: (E, N) bf16, by expert id.
        estimated_total_m: Sizing hint of the kernels [rows]. It never changes the result.
        numerics: How products are summed: "f16" of packed operands, "e4m3" of prepared ones.

    Returns:
        (M, N) bf16, rounded once from float32. Rows of no slot are 0.
    """
    del estimated_total_m
    m, n = len(hidden), weight.shape[1]
    result = codecs.encode_bf16(np.zeros((m, n), np.float32))
    flat, of_weight = decode_scales(a_scales).reshape(-1), decode_scales(b_scales)
    of_rows = np.broadcast_to(flat, (m,)) if flat.size == 1 else flat
    for rows, expert in active_slots(expert_start, expert_ids):
        a, b = decode_fp8(hidden[rows], numerics), decode_fp8(weight[expert], numerics)
        acc = row_products(a, b, of_rows[rows], of_weight[expert].reshape(-1))
        result[rows] = finished(acc, None if bias is None else bias[expert])
    return result


def batched_dynamic_scaled_fp8_matmul(
    a: npt.NDArray[Any],
    b: npt.NDArray[Any],
    a_scales: npt.NDArray[Any],
    b_scales: npt.NDArray[Any],
) -> npt.NDArray[Any]:
    """Multiplies the matrices of two batches: a[i] @ b[i].T, with scales a block of 128.

    Args:
        a: (B, M, K) e4m3 codes.
        b: (B, N, K) e4m3 codes.
        a_scales: (B, ceil(K/128), Mpad) float32 or bf16 scales of `a`, transposed.
        b_scales: (B, ceil(N/128), ceil(K/128)) scales of `b`, of the same type.

    Returns:
        (B, M, N) bf16, rounded once from float32.
    """
    batch, m, _ = a.shape
    result = codecs.encode_bf16(np.zeros((batch, m, b.shape[1]), np.float32))
    of_a, of_b = decode_scales(a_scales), decode_scales(b_scales)
    for i in range(batch):
        acc = block_products(decode_fp8(a[i]), decode_fp8(b[i]), of_a[i][:, :m], of_b[i])
        result[i] = finished(acc, None)
    return result
