"""The parts of the fused Hopper matmul that work on four values a lane, against the reference."""

from typing import Any

import numpy as np
import pytest
from numba import cuda

from nbmoe import backend as backends
from nbmoe.activation import GatedActivation
from nbmoe.arrays import describe, to_numpy
from nbmoe.formats import FORMATS
from nbmoe.ops.launch import flat
from nbmoe.reference.activation import gated_activation
from nbmoe.reference.quantize import quantize_blocks
from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.kernel import Kernel, kernel
from nbmoe_kernels.matmul_sm90_swiglu_activation import make_activate
from nbmoe_kernels.matmul_sm90_swiglu_quantize import make_quantize_quads
from tests.kernels.test_activation import ACTIVATIONS, all_bf16, bits

THREADS = 128
UPS = np.float32([1.0, -2.5, 0.0, 7.25, -1e30, np.inf, np.nan])


def activating(activation: GatedActivation) -> Kernel:
    activate = make_activate(activation.fused_activation, 4)

    @kernel(
        "global f32* z, global u32* pairs, u32 count, f32 alpha, f32 limit",
        threads=THREADS,
        name="activates_quads",
        min_cc=(9, 0),
    )
    def activates(z, pairs, count, alpha, limit):
        block = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(THREADS))
        i = np.uint32(block + np.uint32(cuda.threadIdx.x))
        words = cuda.local.array(4, np.uint32)
        values = cuda.local.array(4, np.float32)
        if i < count:
            first = np.uint64(4) * np.uint64(i)
            for j in unroll(range(4)):
                words[j] = pairs[first + np.uint64(j)]
            activate(words, values, alpha, limit)
            for j in unroll(range(4)):
                z[first + np.uint64(j)] = values[j]

    return activates


def launch(kernels: Any, made: Kernel, arrays: Any, count: int, *scalars: Any) -> Any:
    """Runs a kernel with a thread for each four of ``count`` values; the arrays afterwards."""
    operands = [describe("test", "x", kernels.put(x)) for x in arrays]
    chosen = backends.resolve(kernels.name, api="test")
    made.launch(
        backends.executor(kernels.name, operands[0].device),
        (-(-count // (4 * THREADS)), 1, 1),
        *flat(chosen, *operands),
        *scalars,
    )
    return [to_numpy(x.owner) for x in operands]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_of_every_gate(hopper_kernels: Any, activation: GatedActivation) -> None:
    """Usual and unusual gates beside each other, and among their like."""
    gate = all_bf16()
    gate = np.concatenate([gate, np.random.default_rng(1).permutation(gate)])
    gate = np.tile(gate[: len(gate) // 4 * 4], len(UPS))
    up = np.repeat(UPS, len(gate) // len(UPS))
    up = (up.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    pairs = (gate.view(np.uint32) >> 16) | up.view(np.uint32)
    count = np.uint32(len(gate) // 4)
    scalars = count, np.float32(activation.alpha), np.float32(activation.limit)
    made = activating(activation)
    got, _ = launch(hopper_kernels, made, (np.empty_like(gate), pairs), len(gate), *scalars)
    np.testing.assert_array_equal(bits(got), bits(gated_activation(gate, up, activation)))


def quantizing(format: str) -> Kernel:
    quantize = make_quantize_quads(format, 2)
    quad_type = "u32" if format == "mxfp8" else "u16"

    @kernel(
        f"global {quad_type}* codes, global u8* scales, global f32* values, global f32* factors",
        threads=THREADS,
        name=f"quantizes_quads_{format}",
        min_cc=(9, 0),
    )
    def quantizes(codes, scales, values, factors):
        """A thread has four values of the block's first half, and four of its second."""
        block = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(2 * THREADS))
        i = np.uint64(np.uint32(block + np.uint32(cuda.threadIdx.x)))
        z = cuda.local.array(8, np.float32)
        found = cuda.local.array(2, np.uint32)
        words = cuda.local.array(2, np.uint32)
        for t in unroll(range(2)):
            at = np.uint64(4) * (i + np.uint64(t * THREADS))
            for j in unroll(range(4)):
                z[4 * t + j] = values[at + np.uint64(j)]
        row = np.uint64(2) * np.uint64(np.uint32(cuda.blockIdx.x))
        quantize(z, found, words, factors[row], factors[row + np.uint64(1)])
        for t in unroll(range(2)):
            codes[i + np.uint64(t * THREADS)] = words[t]
            scales[i + np.uint64(t * THREADS)] = found[t]

    return quantizes


FACTORS = np.float32([1, 0.3, 1e-39, 1e-30, 2.0**-80, 1e6, 1e24, 3e38])


@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales(hopper_kernels: Any, format: str) -> None:
    """Magnitudes of all sizes, blocks of zeros and with NaN, under factors of all sizes."""
    fmt, rng = FORMATS[format], np.random.default_rng(2)
    rows, width = len(FACTORS), 8 * THREADS
    sizes = np.exp2(rng.integers(-149, 128, (rows, width // fmt.block)).astype(np.float64))
    fine = np.exp2(rng.integers(-6, 1, (rows, width // fmt.block, fmt.block)).astype(np.float64))
    with np.errstate(over="ignore"):
        z = (rng.standard_normal(fine.shape) * fine * sizes[:, :, None]).astype(np.float32)
    z[:, 0] = 0.0
    z[:, 1, 3], z[:, 2, 5], z[:, 3, 7] = np.nan, np.inf, -np.inf
    z[:, 4:9] = rng.standard_normal((rows, 5, fmt.block)) * 3
    z[:, 5, ::2] = -0.0
    z = z.reshape(rows, width)
    with np.errstate(over="ignore", divide="ignore"):
        factors = np.stack([FACTORS, np.float32(1) / FACTORS], axis=1)
    codes = np.zeros((rows, fmt.packed_k(width)), np.uint8)
    scales = np.zeros((rows, 2 * THREADS), np.uint8)
    arrays = codes, scales, z, factors
    codes, scales, *_ = launch(hopper_kernels, quantizing(format), arrays, z.size // 2)
    for row, factor in enumerate(FACTORS):
        want, want_scales = quantize_blocks(z[row : row + 1], fmt, factor)
        np.testing.assert_array_equal(codes[row : row + 1], want.view(np.uint8))
        got_scales = scales[row].reshape(-1, fmt.block // 4)
        assert (got_scales == got_scales[:, :1]).all()
        np.testing.assert_array_equal(got_scales[:, 0], want_scales.view(np.uint8)[0])
