"""Operands: every code under every scale decodes right, in the pairs that the steps sum."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from nbmoe import backend, codecs, layouts
from nbmoe.arrays import describe, to_numpy
from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.kernel import Kernel, kernel
from nbmoe_kernels.matmul_operands import OPERANDS, Operand

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
ROWS = 8
FEW_SCALES = (0, 1, 2, 0x37, 0x7E, 0x7F, 0x80, 0xF0, 0xFD, 0xFE, 0xFF)


def make_decode(operand: Operand) -> Kernel:
    """A warp decodes 8 rows of one 64-block; block b under scale byte scales[b]."""
    words = operand.block_words
    fetch, scale_of, is_swizzled = operand.fetch, operand.scale_of, operand.is_swizzled

    @kernel(
        "global u32* codes, global u32* scales, global u32* out",
        threads=32,
        shared_bytes=4 * ROWS * words,
        name=f"decode_{operand.name}",
    )
    def decode(codes, scales, out):
        smem = cuda.shared.array(0, np.uint32, alignment=16)
        lane = np.uint32(cuda.threadIdx.x)
        block = np.uint32(cuda.blockIdx.x)
        for i in range(words * ROWS // 32):
            word = np.uint32(lane + np.uint32(32 * i))
            place = word
            if is_swizzled:
                odd = np.uint32(np.uint32(word // np.uint32(words)) & np.uint32(1))
                place = np.uint32(word ^ np.uint32(odd * np.uint32(4)))
            smem[place] = codes[np.uint64(np.uint32(block * np.uint32(words * ROWS)) + word)]
        cuda.syncthreads()
        g = np.uint32(lane >> np.uint32(2))
        registers = cuda.local.array(8, np.uint32)
        scale = scale_of(scales[np.uint64(block)])
        odd = np.uint32(g & np.uint32(1))
        at, t = np.uint32(g * np.uint32(words)), np.uint32(lane & np.uint32(3))
        fetch(smem, at, t, odd, scale, registers, 0, 4, 1)
        for i in unroll(range(8)):
            first = np.uint32(np.uint32(np.uint32(block * np.uint32(32)) + lane) * np.uint32(8))
            out[np.uint64(np.uint32(first + np.uint32(i)))] = registers[i]

    return decode


def run(kernels: Any, made: Kernel, blocks: int, *args: np.ndarray) -> None:
    """Launch on arrays, which get what the kernel wrote."""
    if kernels.name != "gpu":
        made.launch(backend.executor(kernels.name), (blocks, 1, 1), *(a.reshape(-1) for a in args))
        return
    held = [kernels.put(a) for a in args]
    pointers = [describe("test", "array", a).pointer for a in held]
    made.launch(backend.executor("gpu"), (blocks, 1, 1), *pointers)
    for array, on_gpu in zip(args, held, strict=True):
        array[...] = to_numpy(on_gpu)


def values_of(operand: Operand, codes: np.ndarray) -> np.ndarray:
    """(blocks, 8, 64) float64 values of (blocks, 8, bytes) codes, without scales."""
    if operand.name in ("nvfp4", "mxfp4"):
        return codecs.decode_e2m1(codecs.unpack_nibbles(codes)).astype(np.float64)
    if operand.name == "bf16":
        return codes.view(BF16).astype(np.float64)
    return codes.view(E4M3).astype(np.float64)


def expected_bits(operand: Operand, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(blocks, 8, 4 lanes, 2, 4, 2) 16-bit patterns: pair, step, half."""
    values = values_of(operand, codes)
    if operand.scale_block == 16:
        factor = codecs.decode_e4m3(scales.astype(np.uint8)).astype(np.float64) * 2.0**-14
    elif operand.scale_block == 32:
        factor = codecs.decode_e8m0(scales.astype(np.uint8)).astype(np.float64)
    else:
        factor = np.ones(len(scales))
    with np.errstate(all="ignore"):
        values = values * factor[:, None, None]
        # float32 holds every product exactly, or as infinity; so the rounding is the only one.
        narrow = values.astype(np.float32)
        assert (
            np.array_equal(narrow.astype(np.float64), values, equal_nan=True)
            or (np.abs(values[narrow != values]) >= 2.0**128).any()
        )
        bits = narrow.astype(BF16 if operand.tensor_core == "bf16" else np.float16).view(np.uint16)
    bits = np.where(np.isnan(values), np.uint16(0x7FFF), bits)
    # Element 16 t + 8 pair + 4 half + step.
    shape = (len(codes), ROWS, 4, 2, 2, 4)
    return np.swapaxes(bits.reshape(shape), -1, -2)


def all_codes(operand: Operand) -> tuple[np.ndarray, np.ndarray]:
    """Rows with every code, (blocks, 8, bytes), and a scale byte a block: every one of them."""
    simulated = backend.simulator_enabled()
    if operand.name == "bf16":
        every = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, ROWS, 128)
        every = every[::16] if simulated else every
        return every, np.zeros(len(every), np.uint32)
    scales = FEW_SCALES if simulated else range(256)
    scales = np.array(scales if operand.scale_block else [0], np.uint32)
    if operand.scale_block == 16:
        # The sign of a block scale is never set.
        scales = scales[scales < 128]
    rng = np.random.default_rng(1)
    size = ROWS * operand.block_bytes
    codes = np.stack([rng.permutation(size) for _ in scales]).astype(np.uint8)
    return codes.reshape(-1, ROWS, operand.block_bytes), scales


@pytest.mark.parametrize("operand", OPERANDS.values(), ids=lambda o: o.name)
def test_every_code_under_every_scale(kernels: Any, operand: Operand) -> None:
    codes, scales = all_codes(operand)
    out = np.zeros((len(codes), ROWS, 4, 2, 4), np.uint32)
    run(kernels, make_decode(operand), len(codes), codes.reshape(-1).view(np.uint32), scales, out)
    want = expected_bits(operand, codes, scales)
    if operand.name == "bf16":
        # Elements move as they are, NaN payloads too.
        plain = codes.view(np.uint16).reshape(len(codes), ROWS, 4, 2, 2, 4)
        want = np.swapaxes(plain, -1, -2)
    got = out.view(np.uint16).reshape(want.shape)
    np.testing.assert_array_equal(got, want)


def test_pairs_are_those_of_the_steps() -> None:
    """The registers of step j hold exactly the elements that `layouts.K_STEPS` names."""
    for j, step in enumerate(layouts.K_STEPS):
        held = {16 * t + 8 * p + 4 * h + j for t in range(4) for p in range(2) for h in range(2)}
        assert held == set(step)
