"""Prepared weights become the right operands: every code under every scale."""

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numba import cuda

from nbmoe import codecs, layouts
from nbmoe.backend import simulator_enabled
from nbmoe.formats import FORMATS
from nbmoe.prepared import pack_weights
from nbmoe_kernels.device.op import unroll
from nbmoe_kernels.kernel import Kernel, kernel
from nbmoe_kernels.matmul_sm90_operands import (
    PREPARED,
    PreparedOperand,
    codes_offset,
    make_scales_offset,
)
from tests.kernels.test_matmul_operands import run

THREADS, ROWS, COLUMNS = 128, 64, 64
SCALED = [PREPARED[name] for name in FORMATS]


def make_decode(operand: PreparedOperand, decoder: str) -> Kernel:
    """A warpgroup decodes a unit; block b the unit b."""
    unit_bytes, raw_words = operand.unit_bytes, operand.raw_words
    load, decode = operand.make_load(0), getattr(operand, decoder)
    scales_offset = make_scales_offset(operand.unit)

    @kernel(
        "global u8* units, global u32* out",
        threads=THREADS,
        shared_bytes=unit_bytes,
        name=f"{decoder}_prepared_{operand.name}",
        min_cc=(9, 0),
    )
    def decode_unit(units, out):
        smem = cuda.shared.array(0, np.uint8, alignment=1024)
        thread, block = np.uint32(cuda.threadIdx.x), np.uint32(cuda.blockIdx.x)
        at = thread
        while at < np.uint32(unit_bytes):
            first = np.uint64(block) * np.uint64(unit_bytes)
            smem[at] = units[first + np.uint64(at)]
            at = np.uint32(at + np.uint32(THREADS))
        cuda.syncthreads()
        raw = cuda.local.array(raw_words, np.uint32)
        registers = cuda.local.array(16, np.uint32)
        load(smem, codes_offset(thread), scales_offset(thread), raw)
        decode(raw, registers, 0)
        for i in unroll(range(16)):
            place = np.uint32(np.uint32(block * np.uint32(THREADS)) + thread)
            out[np.uint64(np.uint32(place * np.uint32(16)) + np.uint32(i))] = registers[i]

    return decode_unit


def every_code(name: str, units: int) -> tuple[Any, Any, Any]:
    """Codes (128, K) as numbers, their values, and scale bytes, each with every code in turn."""
    fmt = FORMATS[name]
    rng = np.random.default_rng(3)
    blocks = 128 * units * COLUMNS // fmt.block
    if name == "mxfp8":
        legal = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
        values = legal.view(FORMATS[name].codes_dtype).astype(np.float64)
    else:
        legal = np.arange(16, dtype=np.uint8)
        values = codecs.decode_e2m1(legal).astype(np.float64)
    # The sign of an NVFP4 scale is never set.
    scales = np.resize(np.arange(128 if name == "nvfp4" else 256, dtype=np.uint8), blocks)
    scales = rng.permutation(scales)  # threads have two, of any sizes
    order = np.argsort(scales, kind="stable")
    codes = np.empty((blocks, fmt.block), np.int64)
    codes[order] = np.resize(rng.permutation(len(legal)), codes.size).reshape(codes.shape)
    codes = codes.reshape(128, -1)
    return legal[codes], values[codes], scales.reshape(128, -1)


def expected(operand: PreparedOperand, values: Any, scales: Any) -> Any:
    """(units, 128 threads, 16 registers, 2 halves), by the layout's description."""
    fmt = FORMATS[operand.name]
    of_scale = codecs.decode_e4m3 if operand.name == "nvfp4" else codecs.decode_e8m0
    factors = of_scale(scales).astype(np.float64) * 2.0**operand.exponent
    with np.errstate(all="ignore"):
        products = (values * np.repeat(factors, fmt.block, axis=1)).astype(np.float32)
        narrow = products.astype(bfloat16 if operand.tensor_core == "bf16" else np.float16)
    bits = np.where(np.isnan(products), np.uint16(0x7FFF), narrow.view(np.uint16))
    units = bits.reshape(2, ROWS, -1, COLUMNS).swapaxes(1, 2).reshape(-1, ROWS, COLUMNS)
    out = np.empty((len(units), THREADS, 16, 2), np.uint16)
    for i in range(THREADS):
        warp, g, t = i // 32, i % 32 // 4, i % 4
        for j in range(4):
            for register in range(4):
                row = 16 * warp + 2 * g + register % 2
                column = 16 * t + j + 8 * (register // 2)
                out[:, i, 4 * j + register] = units[:, row, [column, column + 4]]
    return out


@pytest.mark.parametrize("decoder", ["decode", "decode_usual"])
@pytest.mark.parametrize("operand", SCALED, ids=lambda o: o.name)
def test_every_code_under_every_scale(
    hopper_kernels: Any, operand: PreparedOperand, decoder: str
) -> None:
    """MX scales of 2 and more, and 255, go another way than usual ones."""
    across = 1 if simulator_enabled() else 16
    codes, values, scales = every_code(operand.name, across)
    stored = codes if operand.name == "mxfp8" else codecs.pack_nibbles(codes)
    tiles = layouts.interleave_scales(scales[None])
    weights = pack_weights(stored[None], tiles, format=operand.name)
    out = np.zeros((2 * across, THREADS, 16), np.uint32)
    run(hopper_kernels, make_decode(operand, decoder), len(out), weights.data, out)
    wanted = expected(operand, values, scales)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(wanted.shape), wanted)
