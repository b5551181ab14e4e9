"""The matmul kernels against the tensor-core model, through their launchers.

The operations' tests go further; here are the modes and tails that each kernel has, once a pair.
"""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import backend, codecs, layouts
from nbmoe.arrays import describe, to_numpy
from nbmoe.reference import tensor_core
from nbmoe_kernels.heuristics import MATMUL_PAIRS, grouped_matmul_config, grouped_matmul_configs
from nbmoe_kernels.matmul_grouped_fp8_sm80 import launch_matmul_grouped_fp8
from nbmoe_kernels.matmul_grouped_sm80 import launch_matmul_grouped
from nbmoe_kernels.matmul_operands import OPERANDS

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
F32, U32, I32 = np.float32, np.uint32, np.int32
EMPTY = np.zeros(0, np.uint8)


class Matrix:
    """Random rows of an operand kind.

    Attributes:
        codes: (rows, bytes).
        scales: (rows, blocks) bytes, or None.
        operand: (rows, K in steps) of float16 or bfloat16, as the tensor core gets it.
    """

    def __init__(self, rng: np.random.Generator, kind: str, rows: int, k: int) -> None:
        operand = OPERANDS[kind]
        codes = rng.integers(0, 256, (rows, operand.row_bytes(k))).astype(np.uint8)
        self.codes, self.scales, scale = codes, None, F32(1)
        if kind == "bf16":
            codes = rng.standard_normal((rows, k)).astype(BF16).view(np.uint8)
            self.codes = codes.reshape(rows, 2 * k)
            values = self.codes.view(BF16).astype(F32)
        elif operand.block_bytes == 64:
            codes[codes & 0x7F == 0x7F] = 0
            values = codecs.decode_e4m3(codes)
        else:
            values = codecs.decode_e2m1(codecs.unpack_nibbles(codes))
        if operand.scale_block:
            shape = (rows, k // operand.scale_block)
            self.scales = rng.integers(0x38, 0x48, shape).astype(np.uint8)
            if operand.scale_block == 32:
                self.scales += np.uint8(127 - 0x40)
            decode = codecs.decode_e4m3 if operand.scale_block == 16 else codecs.decode_e8m0
            scale = np.repeat(decode(self.scales), operand.scale_block, axis=1)
        padded = np.zeros((rows, layouts.ceil_div(k, 64) * 64), F32)
        padded[:, :k] = values * scale * F32(2.0**operand.exponent)
        dtype = np.float16 if operand.tensor_core == "f16" else BF16
        self.operand = layouts.group_k(padded.astype(dtype)).reshape(padded.shape)

    def tiles(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Scale tiles of rows, their padding NaN."""
        if self.scales is None:
            return EMPTY
        tiles = layouts.interleave_scales(self.scales[first:last])
        used = layouts.interleave_scales(np.ones_like(self.scales[first:last]))
        return np.where(used == 1, tiles, np.uint8(0xFF))


def launch(kernels: Any, launcher: Any, output: np.ndarray, *arrays: Any, **keywords: Any) -> None:
    """Launch on arrays of the host; ``output`` gets what the kernel wrote."""
    everything = (output, *arrays)
    if kernels.name != "gpu":
        flat = [a.reshape(-1) for a in everything]
        launcher(backend.executor(kernels.name), *flat, **keywords)
        return
    held = [kernels.put(a) for a in everything]
    pointers = [describe("test", "array", a).pointer for a in held]
    launcher(backend.executor("gpu"), *pointers, **keywords)
    output[...] = to_numpy(held[0])


def grouping(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum((0, *counts)).astype(U32)
    return starts, layouts.scales_offset(starts)


def bf16(values: np.ndarray) -> np.ndarray:
    return codecs.encode_bf16(values).view(np.uint16)


@pytest.mark.parametrize("pair", MATMUL_PAIRS[:-1], ids="x".join)
def test_grouped_pair_with_every_factor(kernels: Any, pair: tuple[str, str]) -> None:
    """K ends in a part of a 64-block, N in a part of a fragment row; a masked and an empty slot."""
    a_kind, b_kind = pair
    k = 80 if a_kind == "nvfp4" else 72 if pair == ("bf16", "bf16") else 96
    counts, ids, n = (3, 0, 18, 2), np.array([1, 2, 0, -1], I32), 24
    rng = np.random.default_rng(7)
    m = sum(counts)
    starts, offsets = grouping(counts)
    a = Matrix(rng, a_kind, m, k)
    weights = [Matrix(rng, b_kind, n, k) for _ in range(3)]
    a_tiles = EMPTY
    if a.scales is not None:
        slots = itertools.pairwise(starts)
        a_tiles = np.concatenate([a.tiles(i, j) for i, j in slots if j > i])
    b_tiles = np.stack([w.tiles() for w in weights])
    expert_scales = np.array([0.75, -2.0, 1.5], F32)
    row_scales = rng.uniform(0.5, 2, m).astype(BF16)
    row_scales[-1] = np.nan
    bias = rng.standard_normal((3, n)).astype(BF16)
    factor = F32(2.0 ** -(OPERANDS[a_kind].exponent + OPERANDS[b_kind].exponent))

    want = np.zeros((m, n), np.uint16)
    for slot, expert in enumerate(ids):
        rows = slice(starts[slot], starts[slot + 1])
        if expert >= 0 and rows.start != rows.stop:
            v = tensor_core.matmul(a.operand[rows], weights[expert].operand) * factor
            v = v * expert_scales[expert] * row_scales[rows].astype(F32)[:, None]
            want[rows] = bf16(v + bias[expert].astype(F32))
    output = np.full((m, n), 0xAAAA, np.uint16)
    launch(
        kernels,
        launch_matmul_grouped,
        output,
        a.codes,
        np.stack([w.codes for w in weights]),
        a_tiles,
        b_tiles,
        starts,
        offsets,
        ids,
        expert_scales,
        row_scales.view(np.uint16),
        bias.view(np.uint16),
        num_active=len(ids),
        num_rows=m,
        n=n,
        k=k,
        has_row_scales=True,
        has_expert_scales=True,
        has_bias=True,
        config=grouped_matmul_config(a_kind, b_kind, n, k, len(ids), m),
    )
    np.testing.assert_array_equal(output, want)


@pytest.mark.parametrize("n", [1, 60, 129])
def test_dense_f32_for_any_number_of_columns(kernels: Any, n: int) -> None:
    """Two batches; no routing array is read."""
    rng = np.random.default_rng(n)
    m, k = 5, 40
    a = [Matrix(rng, "bf16", m, k) for _ in range(2)]
    b = [Matrix(rng, "bf16", n, k) for _ in range(2)]
    output = np.full((2, m, n), np.nan, F32)
    launch(
        kernels,
        launch_matmul_grouped,
        output,
        np.stack([x.codes for x in a]),
        np.stack([x.codes for x in b]),
        *[EMPTY] * 8,
        num_active=0,
        num_rows=m,
        n=n,
        k=k,
        has_row_scales=False,
        has_expert_scales=False,
        has_bias=False,
        config=grouped_matmul_configs("bf16", "bf16", k)[0],
        out_type="f32",
        num_batches=2,
    )
    want = np.stack([tensor_core.matmul(x.operand, y.operand) for x, y in zip(a, b, strict=True)])
    np.testing.assert_array_equal(output.view(U32), want.view(U32))


def scaled_by_blocks(a: Matrix, b: Matrix, a_scales: np.ndarray, b_scales: np.ndarray) -> Any:
    """acc = fma(sums of a 128-block, sa * sb, acc), the fma in float64 and then rounded."""
    acc = np.zeros((len(a.codes), len(b.codes)), F32)
    for block in range(b_scales.shape[-1]):
        at = slice(128 * block, 128 * block + 128)
        sums = tensor_core.matmul(a.operand[:, at], b.operand[:, at])
        columns = np.arange(len(b.codes)) // 128
        scale = a_scales[block, : len(acc), None] * b_scales[columns, block][None]
        acc = (sums.astype(np.float64) * scale.astype(np.float64) + acc).astype(F32)
    return acc


@pytest.mark.parametrize("scale_type", ["f32", "bf16"])
@pytest.mark.parametrize("k", [192, 328])
def test_fp8_scaled_by_128_blocks(kernels: Any, scale_type: str, k: int) -> None:
    """Grouped and batched give the same; K ends in a part of a block; 8-byte copies."""
    rng = np.random.default_rng(k)
    m, n, padded_m, blocks = 3, 136, 8, -(-k // 128)
    if backend.simulator_enabled():
        k, blocks = k % 128, 1
    dtype = F32 if scale_type == "f32" else BF16
    a = [Matrix(rng, "e4m3", m, k) for _ in range(2)]
    b = [Matrix(rng, "e4m3", n, k) for _ in range(2)]
    a_scales = rng.uniform(0.5, 2, (2, blocks, padded_m)).astype(dtype)
    b_scales = rng.uniform(0.5, 2, (2, 2, blocks)).astype(dtype)
    bias = rng.standard_normal((2, n)).astype(BF16)
    want = np.stack(
        [
            bf16(
                scaled_by_blocks(a[i], b[i], a_scales[i].astype(F32), b_scales[i].astype(F32))
                + bias[i].astype(F32)
            )
            for i in range(2)
        ]
    )
    shared = {
        "scaling": "block128",
        "scale_type": scale_type,
        "n": n,
        "k": k,
        "a_scale_stride": padded_m,
        "has_bias": True,
        "config": grouped_matmul_configs("e4m3", "e4m3", k)[0],
    }
    codes_a, codes_b = np.stack([x.codes for x in a]), np.stack([x.codes for x in b])
    scales = (_bits(a_scales), _bits(b_scales))
    output = np.full((2, m, n), 0xAAAA, np.uint16)
    arrays = (codes_a, codes_b, *scales, EMPTY, EMPTY, bias.view(np.uint16))
    batched = {"num_active": 0, "num_rows": m, "num_batches": 2}
    launch(kernels, launch_matmul_grouped_fp8, output, *arrays, **shared, **batched)
    np.testing.assert_array_equal(output, want)

    # The same rows as slots of one array, the first expert's last.
    joined = np.zeros((blocks, padded_m), dtype)
    joined[:, :m], joined[:, m : 2 * m] = a_scales[1, :, :m], a_scales[0, :, :m]
    starts, ids = np.array([0, m, m, 2 * m], U32), np.array([1, -1, 0], I32)
    output = np.full((2, m, n), 0xAAAA, np.uint16)
    arrays = (codes_a[::-1].copy(), codes_b, _bits(joined), scales[1], starts, ids)
    grouped = {"num_active": 3, "num_rows": 2 * m}
    launch(
        kernels,
        launch_matmul_grouped_fp8,
        output,
        *arrays,
        bias.view(np.uint16),
        **shared,
        **grouped,
    )
    np.testing.assert_array_equal(output, want[::-1])


@pytest.mark.parametrize(
    ("a_stride", "b_strides"), [(1, (24, 1)), (0, (1, 0)), (1, (0, 0))], ids=str
)
def test_fp8_scaled_by_rows(kernels: Any, a_stride: int, b_strides: tuple[int, int]) -> None:
    """Scales of rows, of an expert, of all; a masked slot is 0 under NaN scales."""
    rng = np.random.default_rng(3)
    counts, ids, n, k = (2, 3), np.array([-1, 1], I32), 24, 72
    m = sum(counts)
    starts, _ = grouping(counts)
    a, b = Matrix(rng, "e4m3", m, k), [Matrix(rng, "e4m3", n, k) for _ in range(2)]
    a_scales, b_scales = rng.uniform(0.5, 2, m).astype(F32), rng.uniform(0.5, 2, 48).astype(F32)
    if a_stride:
        a_scales[:2] = np.nan
    output = np.full((m, n), 0xAAAA, np.uint16)
    launch(
        kernels,
        launch_matmul_grouped_fp8,
        output,
        a.codes,
        np.stack([x.codes for x in b]),
        a_scales,
        b_scales,
        starts,
        ids,
        EMPTY,
        scaling="rowwise",
        scale_type="f32",
        num_active=2,
        num_rows=m,
        n=n,
        k=k,
        a_scale_stride=a_stride,
        b_scale_strides=b_strides,
        has_bias=False,
        config=grouped_matmul_configs("e4m3", "e4m3", k)[0],
    )
    row = a_scales[np.arange(m) * a_stride]
    column = b_scales[b_strides[0] + np.arange(n) * b_strides[1]]
    want = tensor_core.matmul(a.operand[2:], b[1].operand) * row[2:, None] * column
    assert (output[:2] == 0).all()
    np.testing.assert_array_equal(output[2:], bf16(want))


def _bits(scales: np.ndarray) -> np.ndarray:
    return scales if scales.dtype == F32 else scales.view(np.uint16)
