"""moe_finalize: the weighted sum of each token's expert rows.

    output[t] = bf16( sum over j of weights[t, j] * down[restore_token_order[t * top_k + j]] )

The sum starts at +0 and takes j in ascending order, one fma each, in f32; it is rounded once. An
order of 0xFFFFFFFF (a slot that was routed nowhere) contributes nothing.

Shapes: output (T, H) bf16, down (M, H) bf16, restore_token_order (T * top_k,) u32, weights
(T, top_k) f32. H is a multiple of 8.

Thread map: block (x, y) handles token x and columns [1024 y, 1024 y + 1024), 8 a thread. No thread
shares anything with another.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.convert import bf16x2_of_f32
from nbmoe_kernels.device.math import bits_f32, fma_rn
from nbmoe_kernels.device.memory import load_v4, store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel

THREADS = 128
COLUMNS_PER_THREAD = 8
NO_ROW = np.uint32(0xFFFFFFFF)


@device_function
def accumulate_pair(acc, i, weight, word):
    """acc[i], acc[i + 1] += weight * the word's two bf16."""
    low = bits_f32(np.uint32(word << np.uint32(16)))
    high = bits_f32(np.uint32(word & np.uint32(0xFFFF0000)))
    acc[i] = fma_rn(weight, low, acc[i])
    acc[i + 1] = fma_rn(weight, high, acc[i + 1])


@functools.cache
def make_moe_finalize() -> Kernel:
    """The kernel; it has no configuration."""

    @kernel(
        "global u32* output, global u32* down, global u32* restore_token_order, "
        "global f32* weights, u32 top_k, u32 num_words",
        threads=THREADS,
        name="moe_finalize",
    )
    def moe_finalize(output, down, restore_token_order, weights, top_k, num_words):
        token = np.uint32(cuda.blockIdx.x)
        first = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(THREADS))
        word = np.uint32(np.uint32(first + np.uint32(cuda.threadIdx.x)) * np.uint32(4))
        if word < num_words:
            acc = cuda.local.array(8, np.float32)
            for i in unroll(range(8)):
                acc[i] = np.float32(0.0)
            for j in range(top_k):
                slot = np.uint64(token) * np.uint64(top_k) + np.uint64(j)
                row = restore_token_order[slot]
                if row != NO_ROW:
                    weight = weights[slot]
                    at = np.uint64(row) * np.uint64(num_words) + np.uint64(word)
                    w0, w1, w2, w3 = load_v4(down, at)
                    accumulate_pair(acc, 0, weight, w0)
                    accumulate_pair(acc, 2, weight, w1)
                    accumulate_pair(acc, 4, weight, w2)
                    accumulate_pair(acc, 6, weight, w3)
            at = np.uint64(token) * np.uint64(num_words) + np.uint64(word)
            store_v4(
                output,
                at,
                bf16x2_of_f32(acc[1], acc[0]),
                bf16x2_of_f32(acc[3], acc[2]),
                bf16x2_of_f32(acc[5], acc[4]),
                bf16x2_of_f32(acc[7], acc[6]),
            )

    return moe_finalize


def launch_moe_finalize(
    executor: Executor,
    output: Any,
    down: Any,
    restore_token_order: Any,
    weights: Any,
    *,
    num_tokens: int,
    top_k: int,
    num_cols: int,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``output`` and ``down`` are bf16 pairs viewed as u32."""
    columns = THREADS * COLUMNS_PER_THREAD
    make_moe_finalize().launch(
        executor,
        (num_tokens, -(-num_cols // columns), 1),
        output,
        down,
        restore_token_order,
        weights,
        top_k,
        num_cols // 2,
        stream=stream,
    )
