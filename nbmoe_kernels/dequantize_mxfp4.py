"""MXFP4 to bf16 or e4m3: each e2m1 code times its block's e8m0 scale.

    output[i] = round(decode(code[i]) * 2^(scales[i // 32] - 127))

rounded once, to bf16 (exact but at the ends of the exponents) or to e4m3, where it saturates. A
scale of 255 makes its block NaN.

Shapes: output (R, K) bf16 or e4m3; packed (R, K/2) u8; scales (R, K/32) u8, row-major. K is a
multiple of 32, so rows need no mention: block b has the words [4 b, 4 b + 4) of packed.

Thread map: thread t of block x handles word 256 x + t of packed, 8 elements.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import permute_bytes
from nbmoe_kernels.device.decode import bf16x2_of_e8m0, e2m1_to_bf16
from nbmoe_kernels.device.memory import store_v2, store_v4
from nbmoe_kernels.device.mx import NAN_BYTE, quantize_4
from nbmoe_kernels.kernel import Executor, Kernel, kernel

THREADS = 256
_ONE = np.float32(1.0)
_NAN_E4M3 = np.uint32(0x7F7F7F7F)


@functools.cache
def make_dequantize_mxfp4(to_e4m3: bool) -> Kernel:
    """The kernel that makes e4m3, or else bf16."""

    @kernel(
        "global u32* output, global u32* packed, global u8* scales, u64 num_words",
        threads=THREADS,
        name=f"dequantize_mxfp4_to_{'e4m3' if to_e4m3 else 'bf16'}",
    )
    def dequantize_mxfp4(output, packed, scales, num_words):
        first = np.uint64(cuda.blockIdx.x) * np.uint64(THREADS)
        i = first + np.uint64(cuda.threadIdx.x)
        if i < num_words:
            byte = np.uint32(scales[i >> np.uint64(2)])
            pairs = cuda.local.array(4, np.uint32)
            e2m1_to_bf16(packed[i], bf16x2_of_e8m0(byte), pairs, 0, 1)
            # Pair j holds elements j and j + 4.
            w0 = permute_bytes(pairs[0], pairs[1], np.uint32(0x5410))
            w1 = permute_bytes(pairs[2], pairs[3], np.uint32(0x5410))
            w2 = permute_bytes(pairs[0], pairs[1], np.uint32(0x7632))
            w3 = permute_bytes(pairs[2], pairs[3], np.uint32(0x7632))
            if to_e4m3:
                # bf16 loses only what e4m3 flushes to zero or saturates.
                low = quantize_4(w0, w1, _ONE)
                high = quantize_4(w2, w3, _ONE)
                if byte == NAN_BYTE:
                    low = _NAN_E4M3
                    high = _NAN_E4M3
                store_v2(output, i << np.uint64(1), low, high)
            else:
                store_v4(output, i << np.uint64(2), w0, w1, w2, w3)

    return dequantize_mxfp4


def launch_dequantize_mxfp4(
    executor: Executor,
    output: Any,
    packed: Any,
    scales: Any,
    *,
    num_words: int,
    to_e4m3: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``num_words`` is the size of ``packed`` in words of 4 bytes."""
    make_dequantize_mxfp4(to_e4m3).launch(
        executor,
        (-(-num_words // THREADS), 1, 1),
        output,
        packed,
        scales,
        num_words,
        stream=stream,
    )
