"""moe_finalize: the weighted sum of each token's expert rows.

    output[t] = bf16( shared[t] + sum over j of weights[t, j] * down[order[t * top_k + j]] )

with order = restore_token_order. The sum starts at +0, takes shared[t] with weight 1 where there is
one, then j in ascending order, one fma each, in f32; it is rounded once. An order of 0xFFFFFFFF (a
slot that was routed nowhere) contributes nothing.

Shapes: output (T, H) bf16, down (M, H) bf16, restore_token_order (T * top_k,) u32, weights
(T, top_k) f32, shared (T, H) bf16 if `has_shared`. H is a multiple of 8.

Thread map: block (x, y) handles token x and columns [1024 y, 1024 y + 1024), 8 a thread. No thread
shares anything with another.

A thread first asks for a batch of rows and only then adds them, so that it waits for memory once a
batch and not once a row.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.create_indices import NOWHERE
from nbmoe_kernels.device.convert import bf16x2_of_f32
from nbmoe_kernels.device.math import bits_f32, fma_rn
from nbmoe_kernels.device.memory import load_v4, store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel

THREADS = 128
COLUMNS_PER_THREAD = 8
BATCH = 8
"""Rows that a thread asks for at once."""
_ONE = np.float32(1.0)


@device_function
def accumulate_pair(acc, i, weight, word):
    """acc[i], acc[i + 1] += weight * the word's two bf16."""
    low = bits_f32(np.uint32(word << np.uint32(16)))
    high = bits_f32(np.uint32(word & np.uint32(0xFFFF0000)))
    acc[i] = fma_rn(weight, low, acc[i])
    acc[i + 1] = fma_rn(weight, high, acc[i + 1])


@functools.cache
def make_moe_finalize(batch: int = BATCH) -> Kernel:
    """The kernel that asks for `batch` rows at once."""
    batch_words = 4 * batch

    @kernel(
        "global u32* output, global u32* down, global u32* restore_token_order, "
        "global f32* weights, global u32* shared, u32 top_k, u32 num_words, u32 has_shared",
        threads=THREADS,
        name=f"moe_finalize_{batch}",
    )
    def moe_finalize(
        output, down, restore_token_order, weights, shared, top_k, num_words, has_shared
    ):
        token = np.uint32(cuda.blockIdx.x)
        first = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(THREADS))
        word = np.uint32(np.uint32(first + np.uint32(cuda.threadIdx.x)) * np.uint32(4))
        if word < num_words:
            acc = cuda.local.array(8, np.float32)
            for i in unroll(range(8)):
                acc[i] = np.float32(0.0)
            if has_shared != np.uint32(0):
                at = np.uint64(token) * np.uint64(num_words) + np.uint64(word)
                w0, w1, w2, w3 = load_v4(shared, at)
                accumulate_pair(acc, 0, _ONE, w0)
                accumulate_pair(acc, 2, _ONE, w1)
                accumulate_pair(acc, 4, _ONE, w2)
                accumulate_pair(acc, 6, _ONE, w3)
            rows = cuda.local.array(batch, np.uint32)
            factors = cuda.local.array(batch, np.float32)
            words = cuda.local.array(batch_words, np.uint32)
            first_slot = np.uint64(token) * np.uint64(top_k)
            j = np.uint32(0)
            while j < top_k:
                for i in unroll(range(batch)):
                    choice = np.uint32(j + np.uint32(i))
                    slot = first_slot + np.uint64(min(choice, np.uint32(top_k - np.uint32(1))))
                    rows[i] = restore_token_order[slot]
                    factors[i] = weights[slot]
                    if choice >= top_k:
                        rows[i] = NOWHERE
                for i in unroll(range(batch)):
                    if rows[i] != NOWHERE:
                        at = np.uint64(rows[i]) * np.uint64(num_words) + np.uint64(word)
                        w0, w1, w2, w3 = load_v4(down, at)
                        words[4 * i] = w0
                        words[4 * i + 1] = w1
                        words[4 * i + 2] = w2
                        words[4 * i + 3] = w3
                for i in unroll(range(batch)):
                    if rows[i] != NOWHERE:
                        accumulate_pair(acc, 0, factors[i], words[4 * i])
                        accumulate_pair(acc, 2, factors[i], words[4 * i + 1])
                        accumulate_pair(acc, 4, factors[i], words[4 * i + 2])
                        accumulate_pair(acc, 6, factors[i], words[4 * i + 3])
                j = np.uint32(j + np.uint32(batch))
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
    shared: Any,
    *,
    num_tokens: int,
    top_k: int,
    num_cols: int,
    has_shared: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``output`` and ``down`` are bf16 pairs viewed as u32.

    ``shared`` is too, and is not touched without ``has_shared``.
    """
    columns = THREADS * COLUMNS_PER_THREAD
    make_moe_finalize().launch(
        executor,
        (num_tokens, -(-num_cols // columns), 1),
        output,
        down,
        restore_token_order,
        weights,
        shared,
        top_k,
        num_cols // 2,
        int(has_shared),
        stream=stream,
    )
