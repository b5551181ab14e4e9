"""gather_rows: bf16 rows in the order of the grouped kernels.

    output[m] = input[order[m] // divisor],  or zeros where order[m] is 0xFFFFFFFF

With `has_weights` the row is multiplied by weights[order[m]] in f32 and rounded to bf16.

Shapes: output (M, K) bf16, input (R, K) bf16, order (M,) u32, weights (R * divisor,) f32. K is a
multiple of 8.

Thread map: block (x, y) handles row x and columns [1024 y, 1024 y + 1024), 8 a thread. No thread
shares anything with another.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.create_indices import NOWHERE
from nbmoe_kernels.device.convert import bf16x2_of_f32
from nbmoe_kernels.device.math import bits_f32, mul_rn
from nbmoe_kernels.device.memory import load_v4, store_v4
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.kernel import Executor, Kernel, kernel

THREADS = 128
COLUMNS_PER_THREAD = 8
_ZERO = np.uint32(0)


@device_function
def scale_pair(word, weight):
    """The word's two bf16 times the weight, each rounded once to f32 and once to bf16."""
    low = mul_rn(bits_f32(np.uint32(word << np.uint32(16))), weight)
    high = mul_rn(bits_f32(np.uint32(word & np.uint32(0xFFFF0000))), weight)
    return bf16x2_of_f32(high, low)


@functools.cache
def make_gather_rows() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global u32* output, global u32* input, global u32* order, global f32* weights, "
        "u32 divisor, u32 num_words, u32 has_weights",
        threads=THREADS,
        name="gather_rows",
    )
    def gather_rows(output, input, order, weights, divisor, num_words, has_weights):
        row = np.uint32(cuda.blockIdx.x)
        first = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(THREADS))
        word = np.uint32(np.uint32(first + np.uint32(cuda.threadIdx.x)) * np.uint32(4))
        if word < num_words:
            source = order[np.uint64(row)]
            w0, w1, w2, w3 = _ZERO, _ZERO, _ZERO, _ZERO
            if source != NOWHERE:
                from_row = np.uint32(source // divisor)
                at = np.uint64(from_row) * np.uint64(num_words) + np.uint64(word)
                w0, w1, w2, w3 = load_v4(input, at)
                if has_weights != np.uint32(0):
                    weight = weights[np.uint64(source)]
                    w0 = scale_pair(w0, weight)
                    w1 = scale_pair(w1, weight)
                    w2 = scale_pair(w2, weight)
                    w3 = scale_pair(w3, weight)
            at = np.uint64(row) * np.uint64(num_words) + np.uint64(word)
            store_v4(output, at, w0, w1, w2, w3)

    return gather_rows


def launch_gather_rows(
    executor: Executor,
    output: Any,
    input: Any,
    order: Any,
    weights: Any,
    *,
    num_rows: int,
    num_cols: int,
    divisor: int,
    has_weights: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``output`` and ``input`` are bf16 pairs viewed as u32.

    ``weights`` is not touched without ``has_weights``.
    """
    columns = THREADS * COLUMNS_PER_THREAD
    make_gather_rows().launch(
        executor,
        (num_rows, -(-num_cols // columns), 1),
        output,
        input,
        order,
        weights,
        divisor,
        num_cols // 2,
        int(has_weights),
        stream=stream,
    )
