"""Expert ids that are absent, repeated or somebody else's."""

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops
from nbmoe.errors import RoutingError
from nbmoe.formats import NVFP4
from tests.bug_cases.grouped import bf16, problem, quantize_weights, types

BF16 = ml_dtypes.bfloat16


def combine(kernels, ids, weights, rows):
    """Sums the rows of experts, which are given by source (t, j)."""
    indices = kernels(ops.moe_create_indices, ids, 8)
    used = int(indices.expert_start_indices[-1])
    down = np.zeros_like(rows)
    down[:used] = rows[indices.token_expert_order[:used]]
    y = kernels(ops.moe_finalize, down, indices.restore_token_order, weights)
    return y.view(BF16).astype(np.float32), indices


def test_masked_ids(kernels):
    """ROCm/aiter#4636, vllm-project/vllm#48371, #47281: -1 indexed maps and counts."""
    ids = np.array([[0, -1], [-1, -1], [3, 1]], np.int32)
    weights = np.where(ids < 0, 0, 0.5).astype(np.float32)
    rows = bf16(np.random.default_rng(0), 6, 8)
    y, indices = combine(kernels, ids, weights, rows)
    assert indices.expert_start_indices.tolist() == [0, 1, 2, 2, 3, 3, 3, 3, 3]
    wide = rows.astype(np.float32)
    assert (y[1] == 0).all()
    assert (y[0] == (wide[0] * 0.5).astype(BF16).astype(np.float32)).all()
    assert (y[2] == (wide[4] * 0.5 + wide[5] * 0.5).astype(BF16).astype(np.float32)).all()


def test_ids_of_other_ranks(kernels):
    """ROCm/aiter#3995: global ids were used with local weights. A global id is refused; mapped to
    local ones, two halves of the experts give what all of them give."""
    ids = np.array([[0, 5], [4, 7], [2, 3]], np.int32)
    with pytest.raises(RoutingError, match="below num_experts = 4, got"):
        kernels(ops.moe_create_indices, ids, 4, validate="metadata")
    weights = np.full((3, 2), 0.5, np.float32)
    rows = np.arange(6, dtype=np.float32)[:, None].repeat(8, axis=1).astype(BF16)
    whole, _ = combine(kernels, ids, weights, rows)
    total = np.zeros_like(whole)
    for first in (0, 4):
        local = np.where((ids >= first) & (ids < first + 4), ids - first, -1).astype(np.int32)
        part, _ = combine(kernels, local, np.where(local < 0, 0, weights).astype(np.float32), rows)
        total += part
    assert (total == whole).all()


def test_all_tokens_to_the_only_expert(kernels):
    """vllm-project/vllm-xpu-kernels#453: only the first of four tokens was kept."""
    indices = kernels(ops.moe_create_indices, np.zeros((4, 1), np.int32), 1)
    assert indices.token_expert_order.tolist() == [0, 1, 2, 3]
    assert indices.expert_start_indices.tolist() == [0, 4]


def test_the_same_expert_twice(kernels):
    """vllm-project/vllm#39593, #37758, flashinfer-ai/flashinfer#3208: NaN logits chose one expert
    k times, and kernels that assumed distinct ids wrote out of bounds. It is refused where ids are
    read, and counts like one choice with the sum of the weights where they are not."""
    ids = np.full((1, 4), 2, np.int32)
    with pytest.raises(RoutingError, match="different experts for a token"):
        kernels(ops.moe_create_indices, ids, 8, validate="metadata")
    indices = kernels(ops.moe_create_indices, ids, 8, validate="shapes")
    assert indices.expert_start_indices.tolist() == [0, 0, 0, 4, 4, 4, 4, 4, 4]
    rows = np.full((4, 8), 3.0, np.float32).astype(BF16)
    quarter = np.full((1, 4), 0.25, np.float32)
    y = kernels(ops.moe_finalize, rows, indices.restore_token_order, quarter)
    assert (y.view(BF16).astype(np.float32) == 3).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_nan_logits_still_choose_distinct_experts(kernels, scoring):
    """The cause of the above."""
    logits = np.full((3, 8), np.nan, np.float32)
    logits[1, 3] = 1.0
    logits[2] = np.arange(8)
    logits[2, 5] = np.nan
    ids, _ = kernels(ops.route, logits, 4, scoring=scoring)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 8 for row in ids.tolist())


def test_routing_changed_in_place(kernels):
    """flashinfer-ai/flashinfer#4238: a second run on the same buffers used the first one's
    routing. (On a GPU, under a replayed graph: tests/ops/test_gpu.py.)"""
    rng = np.random.default_rng(0)
    x, w = bf16(rng, 8, 64), bf16(rng, 4, 16, 64)
    weight, b_scales = quantize_weights(w, NVFP4)
    ones = np.ones(4, np.float32)

    def run(ids, buffers):
        indices = kernels(ops.moe_create_indices, ids, 4)
        slots = (indices.expert_start_indices, indices.scales_offset, indices.expert_ids)
        gather = {"indices": indices.token_expert_order, "indices_divisor": 1, **types(NVFP4)}
        q = kernels(
            ops.grouped_quantize_dynamic_block_scaled, x, *slots, ones, **gather, out=buffers
        )
        y = kernels(ops.grouped_matmul_block_scaled, q[0], weight, q[1], b_scales, *slots, ones)
        return y[indices.restore_token_order]

    first, second = np.zeros(8, np.int32), np.array([3, 1, 1, 0, 3, 3, 3, 1], np.int32)
    p = problem(NVFP4, [8, 0, 0, 0], k=64)
    buffers = (np.zeros_like(p.hidden), np.zeros_like(p.a_scales))
    run(first, buffers)
    again = run(second, buffers)
    fresh = run(second, (np.zeros_like(p.hidden), np.zeros_like(p.a_scales)))
    assert again.tobytes() == fresh.tobytes()
