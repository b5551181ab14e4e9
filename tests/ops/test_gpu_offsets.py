"""P12 on a GPU: operands and outputs past 2^32 bytes, of the portable kernels and of Hopper's FP8.

`test_gpu_prepared` has Hopper's block-scaled matmuls. Small sizes run on the host, so that what a
GPU alone can show is only the size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nbmoe import ops
from nbmoe.backend import problem
from nbmoe.prepared import PreparedWeights
from nbmoe.prepared.fp8 import pack_fp8_tokens, pack_fp8_weights
from nbmoe.validate.product_prepared import reads_prepared
from tests.conftest import Kernels
from tests.fp8_operands import make_problem
from tests.ops.compare import assert_same
from tests.ops.operands import make_product
from tests.strategies import Slots

COLUMNS = 128
"""Of the result that are compared: the last ones of the last expert."""


class Memory:
    """Arrays of a backend, large ones of a GPU without a copy on the host."""

    def __init__(self, backend: str) -> None:
        self.kernels = Kernels(backend)
        self.is_gpu = backend == "gpu"

    def require(self, nbytes: int) -> None:
        """Skips the test if a GPU has not so much free memory."""
        if self.is_gpu:
            from numba import cuda

            free, _ = cuda.current_context().get_memory_info()
            if free < 1.2 * nbytes + 2**30:
                pytest.skip(f"{nbytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")

    def last_of(self, count: int, part: Any) -> Any:
        """``count`` times as large as ``part``, which is its last entry; the rest is undefined."""
        shape = (count, *part.shape)
        if not self.is_gpu:
            held = np.full(shape, 0x55, part.dtype)
            held[-1] = part
            return held
        from numba import cuda

        self.require(count * part.nbytes)
        array = cuda.device_array(shape, part.dtype)
        array[count - 1].copy_to_device(part)
        return array


def portable_weights(memory: Memory, experts: int, n: int, k: int) -> None:
    """NVFP4 in the documented layout."""
    p = make_product(1, Slots((3,), (0,), 1, 0), n, k)
    weight = memory.last_of(experts, p.weight[0])
    tiles = memory.last_of(experts, p.b_scales[0])
    factors = np.full(experts, p.expert_scales[0], np.float32)
    routing = p.slots.starts, p.slots.offsets, np.array([experts - 1], np.int32)
    matmul: Any = ops.grouped_matmul_block_scaled
    operands = (p.hidden, weight, p.a_scales, tiles, *routing, factors)
    got = memory.kernels(matmul, *operands, validate="shapes")
    few = replace(p, weight=p.weight[:, -COLUMNS:].copy(), b_scales=p.b_scales[:, -1:].copy())
    wanted = matmul(*few.operands, few.expert_scales, backend="reference")
    assert_same(got[:, -COLUMNS:], wanted)


def fp8_weights(memory: Memory, experts: int, n: int, k: int) -> None:
    """Prepared e4m3."""
    p = make_problem([3], n, k)
    data = memory.last_of(experts, pack_fp8_weights(p.weight).data)
    weights = PreparedWeights(data.reshape(-1), "e4m3", experts, n, k)
    tokens = pack_fp8_tokens(p.hidden, p.a_scales, p.starts)
    scales = np.repeat(p.b_scales, experts, axis=0)
    matmul: Any = ops.grouped_dynamic_scaled_fp8_matmul
    ids = np.array([experts - 1], np.int32)
    got = memory.kernels(matmul, tokens, weights, None, scales, p.starts, ids)
    few = pack_fp8_weights(p.weight[:, -COLUMNS:].copy())
    args = (tokens, few, None, p.b_scales[:, -1:].copy(), p.starts, p.expert_ids)
    assert_same(got[:, -COLUMNS:], matmul(*args, backend="reference"))


def portable_outputs(memory: Memory, rows: int, n: int, k: int) -> None:
    """A masked slot, and the last rows of the output."""
    memory.require(2 * rows * n)
    p = make_product(2, Slots((rows - 5, 5), (-1, 0), 2, 0), n, k)
    matmul: Any = ops.grouped_matmul_block_scaled
    got = memory.kernels(matmul, *p.operands, p.expert_scales)
    alone = p.slot_alone(1, slice(0, 5))
    wanted = matmul(*alone.operands, alone.expert_scales, backend="reference")
    assert_same(got[rows - 5 :], wanted)
    assert not got[: rows - 5 : 997].any()


def fp8_outputs(memory: Memory, rows: int, n: int, k: int) -> None:
    """The same of prepared e4m3."""
    memory.require(2 * rows * n)
    p = make_problem([rows - 5, 5], n, k, expert_ids=[-1, 0])
    matmul: Any = ops.grouped_dynamic_scaled_fp8_matmul
    weights = pack_fp8_weights(p.weight)
    tokens = pack_fp8_tokens(p.hidden, p.a_scales, p.starts)
    got = memory.kernels(matmul, tokens, weights, None, p.b_scales, p.starts, p.expert_ids)
    starts, ids = np.array([0, 5], np.uint32), np.array([0], np.int32)
    last = pack_fp8_tokens(p.hidden[-5:].copy(), p.a_scales[:, rows - 5 : rows].copy(), starts)
    wanted = matmul(last, weights, None, p.b_scales, starts, ids, backend="reference")
    assert_same(got[rows - 5 :], wanted)
    assert not got[: rows - 5 : 997].any()


Check = Callable[[Memory, int, int, int], None]
SIZES: dict[str, tuple[Check, tuple[int, int, int], tuple[int, int, int]]] = {
    "portable weights": (portable_weights, (160, 8192, 7168), (3, 256, 128)),
    "fp8 weights": (fp8_weights, (80, 8192, 7168), (3, 256, 256)),
    "portable outputs": (portable_outputs, (140_000, 16_384, 64), (40, 64, 64)),
    "fp8 outputs": (fp8_outputs, (140_000, 16_384, 128), (40, 64, 128)),
}
"""What is checked, of which size on a GPU, and of which on the host."""


@pytest.mark.parametrize("name", SIZES)
def test_small_sizes_on_the_host(name: str) -> None:
    check, _, small = SIZES[name]
    check(Memory("reference"), *small)


@pytest.mark.gpu
@pytest.mark.skipif(problem("gpu") is not None, reason="no usable GPU")
@pytest.mark.usefixtures("gpu_memory")
@pytest.mark.parametrize("name", SIZES)
def test_past_32_bits_on_the_gpu(name: str) -> None:
    check, large, _ = SIZES[name]
    if name.startswith("fp8") and not reads_prepared():
        pytest.skip("no GPU of compute capability 9.0")
    count, n, k = large
    # Two bytes an output, one or half a weight.
    size = count * n * (2 if "outputs" in name else k if "fp8" in name else k // 2)
    assert size >= 2**32
    check(Memory("gpu"), *large)
