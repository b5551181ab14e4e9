"""Gated activation of bf16 rows: bf16(activation(gate, up)), once rounded.

gate and up are the halves of a row, or its even and odd columns with is_interleaved.

Shapes: output (M, D) bf16; input (M, 2D) bf16. D is a multiple of 16.

Thread map: block (x, y) handles row x; thread t the 16 columns from 16 (128 y + t) on.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.activation import make_gated_activation
from nbmoe_kernels.device.convert import bf16x2_of_f32, f32_of_bf16
from nbmoe_kernels.device.math import bits_f32
from nbmoe_kernels.device.memory import store_v4
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.gated_quantize import Activation, activation_name, load_gated
from nbmoe_kernels.kernel import Executor, Kernel, kernel

THREADS = 128


@functools.cache
def make_gated_activate(activation: Activation) -> Kernel:
    """The kernel of an activation, as for `nbmoe_kernels.activation.make_gated_activation`."""
    activate = make_gated_activation(activation)

    @device_function
    def activated(word, alpha, limit):
        up = bits_f32(np.uint32(word & np.uint32(0xFFFF0000)))
        return activate(f32_of_bf16(word), up, alpha, limit)

    @kernel(
        "global u32* output, global u32* input, u32 num_cols, u32 is_interleaved, f32 alpha, "
        "f32 limit",
        threads=THREADS,
        name=f"gated_activate_{activation_name(activation)}",
    )
    def gated_activate(output, input, num_cols, is_interleaved, alpha, limit):
        row = np.uint32(cuda.blockIdx.x)
        chunk = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(THREADS))
        column = np.uint32(np.uint32(chunk + np.uint32(cuda.threadIdx.x)) * np.uint32(16))
        if column < num_cols:
            words = cuda.local.array(16, np.uint32)
            load_gated(input, row, num_cols, column, is_interleaved, words, 0)
            for i in unroll(range(8)):
                low = activated(words[2 * i], alpha, limit)
                high = activated(words[2 * i + 1], alpha, limit)
                words[i] = bf16x2_of_f32(high, low)
            at = np.uint64(row) * np.uint64(num_cols >> np.uint32(1)) + np.uint64(
                column >> np.uint32(1)
            )
            store_v4(output, at, words[0], words[1], words[2], words[3])
            store_v4(output, at + np.uint64(4), words[4], words[5], words[6], words[7])

    return gated_activate


def launch_gated_activate(
    executor: Executor,
    output: Any,
    input: Any,
    *,
    activation: Activation,
    alpha: float,
    limit: float,
    num_rows: int,
    num_cols: int,
    is_interleaved: bool,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``num_cols`` is D."""
    make_gated_activate(activation).launch(
        executor,
        (num_rows, -(-num_cols // (16 * THREADS)), 1),
        output,
        input,
        num_cols,
        is_interleaved,
        alpha,
        limit,
        stream=stream,
    )
