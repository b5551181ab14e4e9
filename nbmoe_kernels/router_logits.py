"""router_logits: logits of few tokens, out = x @ weight.T in f32.

Sums are those of the grouped matmul of bf16 rows: 64-blocks of K in ascending order, in each the
four steps of `nbmoe_kernels.matmul_operands`, K padded with zeros. One warp makes whole sums, since
parts of a sum could not be put together with the same bits; so there is a warp for every 16
experts and 8 tokens, and many blocks of K are on their way to it at once.

Shapes: out (T, N) f32, x (T, K) bf16, weight (N, K) bf16. K is a multiple of 8.

Thread map: block (x, y) is one warp, for experts [16 x, 16 x + 16), the rows of its tensor-core
tile, and tokens [8 y, 8 y + 8), its columns. Lane 4 g + t loads the 16-block t of each 64-block of
experts g and g + 8 and of token g. Rows past the last are the last one, and are not stored.

Nothing is shared: no synchronisation.
"""

import functools
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.decode import pair_halves
from nbmoe_kernels.device.memory import load_v4
from nbmoe_kernels.device.mma import mma_m16n8k16_bf16
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.kernel import Executor, Kernel, kernel

EXPERTS, TOKENS = 16, 8
"""Of a block."""
DEPTH = 6
"""64-blocks of K on their way."""
MAX_TOKENS = 512
"""With more, weights are read again too often, and larger tiles win."""

_ROW_WORDS = 8
"""Words of a 16-block."""
_BLOCK_WORDS = 24
"""Words that a lane holds of a 64-block: two experts' and a token's."""
_ZERO = np.uint32(0)


@device_function
def load_rows(words, first, source, at, is_inside):
    """Eight elements, or zeros past K."""
    for i in unroll(range(4)):
        words[first + i] = _ZERO
    if is_inside:
        w0, w1, w2, w3 = load_v4(source, at)
        words[first] = w0
        words[first + 1] = w1
        words[first + 2] = w2
        words[first + 3] = w3


@device_function
def fetch_pairs(words, i, out, at, stride):
    """Eight elements as the four steps take them."""
    pair_halves(words[i], words[i + 1], words[i + 2], words[i + 3], out, at, stride)


@functools.cache
def make_router_logits(depth: int = DEPTH) -> Kernel:
    """The kernel that holds `depth` blocks of K."""
    depth_words = depth * _BLOCK_WORDS

    @device_function
    def load_block(words, first, x, weight, low_at, high_at, token_at, word, row_words):
        """The lane's part of a 64-block; `word` is its first in a row."""
        for half in unroll(range(2)):
            at = np.uint32(word + np.uint32(4 * half))
            is_inside = at < row_words
            offset = np.uint64(at)
            load_rows(words, first + 4 * half, weight, low_at + offset, is_inside)
            load_rows(words, first + 8 + 4 * half, weight, high_at + offset, is_inside)
            load_rows(words, first + 16 + 4 * half, x, token_at + offset, is_inside)

    @device_function
    def multiply_block(acc, words, first):
        """Adds the products of a 64-block."""
        a = cuda.local.array(16, np.uint32)
        b = cuda.local.array(8, np.uint32)
        for half in unroll(range(2)):
            fetch_pairs(words, first + 4 * half, a, 2 * half, 4)
            fetch_pairs(words, first + 8 + 4 * half, a, 2 * half + 1, 4)
            fetch_pairs(words, first + 16 + 4 * half, b, half, 2)
        for j in unroll(range(4)):
            mma_m16n8k16_bf16(
                acc, a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], b[2 * j], b[2 * j + 1]
            )

    @kernel(
        "global f32* out, global u32* x, global u32* weight, u32 num_tokens, u32 num_experts, "
        "u32 row_words",
        threads=32,
        name=f"router_logits_{depth}",
    )
    def router_logits(out, x, weight, num_tokens, num_experts, row_words):
        lane = np.uint32(cuda.threadIdx.x)
        g = np.uint32(lane >> np.uint32(2))
        t = np.uint32(lane & np.uint32(3))
        expert = np.uint32(np.uint32(np.uint32(cuda.blockIdx.x) * np.uint32(EXPERTS)) + g)
        first_token = np.uint32(np.uint32(cuda.blockIdx.y) * np.uint32(TOKENS))
        last = np.uint32(num_experts - np.uint32(1))
        low_at = np.uint64(min(expert, last)) * np.uint64(row_words)
        high_at = np.uint64(min(np.uint32(expert + np.uint32(8)), last)) * np.uint64(row_words)
        token = min(np.uint32(first_token + g), np.uint32(num_tokens - np.uint32(1)))
        token_at = np.uint64(token) * np.uint64(row_words)

        words = cuda.local.array(depth_words, np.uint32)
        acc = cuda.local.array(4, np.float32)
        for i in unroll(range(4)):
            acc[i] = np.float32(0.0)
        ahead = np.uint32(t * np.uint32(_ROW_WORDS))
        for d in unroll(range(depth)):
            load_block(
                words, _BLOCK_WORDS * d, x, weight, low_at, high_at, token_at, ahead, row_words
            )
            ahead = np.uint32(ahead + np.uint32(32))
        word = np.uint32(0)
        while word < row_words:
            for d in unroll(range(depth)):
                if word < row_words:
                    multiply_block(acc, words, _BLOCK_WORDS * d)
                    load_block(
                        words,
                        _BLOCK_WORDS * d,
                        x,
                        weight,
                        low_at,
                        high_at,
                        token_at,
                        ahead,
                        row_words,
                    )
                ahead = np.uint32(ahead + np.uint32(32))
                word = np.uint32(word + np.uint32(32))

        # acc[0] and acc[1] are expert g and tokens 2 t and 2 t + 1; acc[2] and acc[3] expert g + 8.
        for i in unroll(range(4)):
            column = np.uint32(expert + np.uint32(8 * (i // 2)))
            row = np.uint32(np.uint32(first_token + np.uint32(np.uint32(2) * t)) + np.uint32(i % 2))
            if row < num_tokens and column < num_experts:
                out[np.uint64(row) * np.uint64(num_experts) + np.uint64(column)] = acc[i]

    return router_logits


def launch_router_logits(
    executor: Executor,
    out: Any,
    x: Any,
    weight: Any,
    *,
    num_tokens: int,
    num_experts: int,
    hidden: int,
    stream: Any = None,
) -> None:
    """Launch on flat arrays; ``x`` and ``weight`` are bf16 pairs viewed as u32."""
    make_router_logits().launch(
        executor,
        (-(-num_experts // EXPERTS), -(-num_tokens // TOKENS), 1),
        out,
        x,
        weight,
        num_tokens,
        num_experts,
        hidden // 2,
        stream=stream,
    )
