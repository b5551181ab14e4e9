"""P12 on a GPU: prepared weights past 2^32 bytes, and memory behind the prepared arrays."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nbmoe import layouts, ops
from nbmoe.backend import problem
from nbmoe.prepared import pack_tokens, pack_weights
from nbmoe.prepared.tokens import panel_rows, token_shape
from nbmoe.validate.product_prepared import reads_prepared
from nbmoe_kernels.prepared_weights import prepared_bytes
from tests.ops.compare import assert_same
from tests.ops.operands import make_product
from tests.strategies import Slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(problem("gpu") is not None, reason="no usable GPU"),
    pytest.mark.skipif(not reads_prepared(), reason="no GPU of compute capability 9.0"),
]


@pytest.mark.usefixtures("gpu_memory")
def test_weights_past_32_bits() -> None:
    """The last expert's unit begins past 2^32 bytes, prepared or not, and so does its output."""
    from numba import cuda

    experts, n, k = 160, 8192, 7168
    small = make_product(1, Slots((3,), (0,), 1, 0), n, k)
    weight = cuda.device_array((experts, n, k // 2), np.uint8)
    tiles = cuda.device_array((experts, n // 128, k // 64, 32, 4, 4), np.uint8)
    weight[experts - 1].copy_to_device(small.weight[0])
    tiles[experts - 1].copy_to_device(small.b_scales[0])
    size = prepared_bytes("nvfp4", 1, n, k)
    assert (experts - 1) * size >= 2**32
    prepared = ops.prepare_weights(weight, tiles, format="nvfp4", validate="shapes")
    last = prepared.data[(experts - 1) * size :].copy_to_host()
    assert_same(last, pack_weights(small.weight, small.b_scales, format="nvfp4").data)

    slots = small.slots
    tokens = pack_tokens(small.hidden, small.a_scales, slots.starts, slots.offsets, format="nvfp4")
    on_gpu = type(tokens)(cuda.to_device(tokens.data), "nvfp4", 3, 1, k)
    factors = np.full(experts, small.expert_scales[0], np.float32)
    ids = np.array([experts - 1], np.int32)
    routing = cuda.to_device(slots.starts), None, cuda.to_device(ids)
    got = ops.grouped_matmul_block_scaled(
        on_gpu, prepared, None, None, *routing, cuda.to_device(factors)
    ).copy_to_host()
    few = replace(
        small, weight=small.weight[:, -128:].copy(), b_scales=small.b_scales[:, -1:].copy()
    )
    expected = ops.grouped_matmul_block_scaled(
        *few.operands, few.expert_scales, backend="emulate", estimated_total_m=0
    )
    assert_same(got[:, -128:], expected)


@pytest.mark.usefixtures("gpu_memory")
def test_outputs_past_32_bits() -> None:
    """The last rows of the output begin past 2^32 bytes."""
    from numba import cuda

    n, k, rows = 16_384, 64, 140_000
    p = make_product(2, Slots((5,), (0,), 1, 0), n, k)
    slots = Slots((rows - 5, 5), (-1, 0), 2, 0)
    assert (rows - 5) * n * 2 >= 2**32
    small = pack_tokens(p.hidden, p.a_scales, p.slots.starts, p.slots.offsets, format="nvfp4")
    shape = token_shape(rows, 2, k)
    data = np.zeros(shape, np.uint8)
    into, source = panel_rows(rows, slots.starts)[-5:], panel_rows(5, p.slots.starts)
    chunks = small.data.reshape(1, -1, 8, 16)[:, source]
    for rows_of in (source, into):  # undoes the swizzle of one, and applies that of the other
        places = np.arange(8) ^ (rows_of[:, None] % 8)
        chunks = np.take_along_axis(chunks, places[None, :, :, None], axis=2)
    data[:, into] = chunks.reshape(1, 5, 128)
    tokens = type(small)(cuda.to_device(data), "nvfp4", rows, 2, k)
    weights = pack_weights(p.weight, p.b_scales, format="nvfp4")
    weights = type(weights)(cuda.to_device(np.concatenate([weights.data] * 2)), "nvfp4", 2, n, k)
    factors = np.repeat(p.expert_scales, 2)
    routing = cuda.to_device(slots.starts), None, cuda.to_device(slots.ids)
    got = ops.grouped_matmul_block_scaled(
        tokens, weights, None, None, *routing, cuda.to_device(factors)
    )
    expected = ops.grouped_matmul_block_scaled(
        *p.operands, p.expert_scales, backend="emulate", estimated_total_m=0
    )
    assert_same(got[rows - 5 :].copy_to_host(), expected)
    assert not got[rows - 105 : rows - 5].copy_to_host().any()


@pytest.mark.parametrize("format", ["nvfp4", "bf16"])
def test_nothing_is_written_behind_the_array(format: str) -> None:
    from numba import cuda

    n, k, slack = 136, 208, 4096
    rng = np.random.default_rng(3)
    weight: Any = rng.integers(0, 1 << 16, (2, n, k), np.uint16)
    tiles = None
    if format == "nvfp4":
        weight = rng.integers(0, 256, (2, n, k // 2), np.uint8)
        scales = rng.integers(0, 0x7F, (2, n, k // 16), np.uint8)
        tiles = layouts.interleave_scales(scales)
    size = prepared_bytes(format, 2, n, k)
    room = cuda.to_device(np.full(size + slack, 0xAA, np.uint8))
    operands = [cuda.to_device(x) for x in (weight, tiles) if x is not None]
    ops.prepare_weights(*operands, format=format, out=room[:size])
    found = room.copy_to_host()
    assert_same(found[:size], pack_weights(weight, tiles, format=format).data)
    assert (found[size:] == 0xAA).all()
