"""gather_rows: bf16 rows in the order of the grouped kernels.

    output[m] = input[order[m] // divisor],  or zeros where order[m] is 0xFFFFFFFF

With `has_weights` the row is multiplied by weights[order[m]] in f32 and rounded to bf16.

Shapes: output (M, K) bf16, input (R, K) bf16, order (M,) u32, weights (R * divisor,) f32. K is a
multiple of 8.

Thread map: block (x, y) handles `rows` rows from rows * x on, and of them columns [1024 y, 1024 y +
1024), 8 a thread. No thread shares anything with another. A thread first asks for all its rows and
only then stores them, so that it waits for memory once.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.create_indices import NOWHERE
from nbmoe_kernels.device.convert import bf16x2_of_f32
from nbmoe_kernels.device.math import bits_f32, mul_rn
from nbmoe_kernels.device.memory import load_v4, store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel

THREADS = 128
COLUMNS_PER_THREAD = 8
ROWS = 4
"""Rows of a block."""
_ZERO = np.uint32(0)


@device_function
def scale_pair(word, weight):
    """The word's two bf16 times the weight, each rounded once to f32 and once to bf16."""
    low = mul_rn(bits_f32(np.uint32(word << np.uint32(16))), weight)
    high = mul_rn(bits_f32(np.uint32(word & np.uint32(0xFFFF0000))), weight)
    return bf16x2_of_f32(high, low)


@functools.cache
def make_gather_rows(rows: int = ROWS) -> Kernel:
    """The kernel whose blocks handle `rows` rows."""
    batch_words = 4 * rows

    @kernel(
        "global u32* output, global u32* input, global u32* order, global f32* weights, "
        "u32 divisor, u32 num_rows, u32 num_words, u32 has_weights",
        threads=THREADS,
        name=f"gather_rows_{rows}",
    )
    def gather_rows(output, input, order, weights, divisor, num_rows, num_words, has_weights):
        first_row = np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(rows))
        first = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(THREADS))
        word = np.uint32(np.uint32(first + np.uint32(cuda.threadIdx.x)) * np.uint32(4))
        if word < num_words:
            sources = cuda.local.array(rows, np.uint32)
            words = cuda.local.array(batch_words, np.uint32)
            for i in unroll(range(rows)):
                row = np.uint32(first_row + np.uint32(i))
                sources[i] = order[np.uint64(min(row, np.uint32(num_rows - np.uint32(1))))]
            for i in unroll(range(rows)):
                for j in unroll(range(4)):
                    words[4 * i + j] = _ZERO
                if sources[i] != NOWHERE:
                    from_row = np.uint32(sources[i] // divisor)
                    at = np.uint64(from_row) * np.uint64(num_words) + np.uint64(word)
                    w0, w1, w2, w3 = load_v4(input, at)
                    words[4 * i] = w0
                    words[4 * i + 1] = w1
                    words[4 * i + 2] = w2
                    words[4 * i + 3] = w3
            if has_weights != np.uint32(0):
                for i in unroll(range(rows)):
                    if sources[i] != NOWHERE:
                        weight = weights[np.uint64(sources[i])]
                        for j in unroll(range(4)):
                            words[4 * i + j] = scale_pair(words[4 * i + j], weight)
            for i in unroll(range(rows)):
                row = np.uint32(first_row + np.uint32(i))
                if row < num_rows:
                    at = np.uint64(row) * np.uint64(num_words) + np.uint64(word)
                    store_v4(
                        output,
                        at,
                        words[4 * i],
                        words[4 * i + 1],
                        words[4 * i + 2],
                        words[4 * i + 3],
                    )

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
        (-(-num_rows // ROWS), -(-num_cols // columns), 1),
        output,
        input,
        order,
        weights,
        divisor,
        num_rows,
        num_cols // 2,
        int(has_weights),
        stream=stream,
    )
