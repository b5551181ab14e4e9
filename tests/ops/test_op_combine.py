"""P1, P3, P7, P8: the combine equals the reference byte for byte."""

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nbmoe import ops
from tests.ops.compare import assert_equals_reference, assert_same
from tests.strategies import TOKENS, VALUES, activations, seeds

BF16 = ml_dtypes.bfloat16
NO_ROW = 2**32 - 1


@given(
    st.sampled_from(TOKENS),
    st.sampled_from((1, 2, 3, 7, 8, 9, 17)),
    st.sampled_from((8, 16, 48, 176, 1032, 2056)),
    st.sampled_from(VALUES),
    st.sampled_from((0, 0.3, 1)),
    seeds,
)
def test_equals_reference(
    kernels: Any, tokens: int, top_k: int, columns: int, kind: str, masked: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    size = tokens * top_k
    down = activations(rng, size, columns, kind)
    restore = rng.permutation(size).astype(np.uint32)
    restore[rng.random(size) < masked] = NO_ROW
    weights = rng.uniform(0, 1, (tokens, top_k)).astype(np.float32)
    shapes = (((tokens, columns), BF16),)
    assert_equals_reference(kernels, ops.moe_finalize, shapes, down, restore, weights)


def test_order_and_single_rounding(kernels: Any) -> None:
    """j ascends, sums stay in float32: 256 + 1 - 256 is 1, though bfloat16 has no 257."""
    down = np.zeros((3, 8), BF16)
    down[:, 0] = (1, 256, -256)
    out = kernels(ops.moe_finalize, down, np.uint32([1, 0, 2]), np.ones((1, 3), np.float32))
    assert out.view(np.uint16).view(BF16)[0, 0] == 1


def test_token_without_rows_is_zero(kernels: Any) -> None:
    """Bug case 39: nothing is read for masked slots, though every row is NaN."""
    down = np.full((4, 16), np.nan, BF16)
    out = kernels(
        ops.moe_finalize, down, np.full(4, NO_ROW, np.uint32), np.ones((2, 2), np.float32)
    )
    assert not out.view(np.uint16).any()


def test_no_rows_at_all(kernels: Any) -> None:
    down = np.zeros((0, 16), BF16)
    out = kernels(
        ops.moe_finalize, down, np.full(4, NO_ROW, np.uint32), np.ones((2, 2), np.float32)
    )
    assert out.shape == (2, 16) and not out.view(np.uint16).any()


def test_tokens_are_independent(kernels: Any) -> None:
    """P3."""
    rng = np.random.default_rng(0)
    down = activations(rng, 12, 48, "nan rows")
    restore = rng.permutation(12).astype(np.uint32)
    weights = rng.uniform(0, 1, (6, 2)).astype(np.float32)
    batch = kernels(ops.moe_finalize, down, restore, weights)
    for t in range(6):
        alone = kernels(
            ops.moe_finalize, down, restore[2 * t : 2 * t + 2].copy(), weights[t : t + 1]
        )
        assert_same(alone[0], batch[t], f"token {t}")


def test_shared_rows_come_first(kernels: Any) -> None:
    """The bytes of a shared expert that is routed first with weight 1."""
    rng = np.random.default_rng(1)
    down, shared = activations(rng, 10, 48, "heavy"), activations(rng, 5, 48, "zeros")
    weights = rng.uniform(0, 1, (5, 2)).astype(np.float32)
    restore = rng.permutation(10).astype(np.uint32)
    shapes = (((5, 48), BF16),)
    apart = assert_equals_reference(
        kernels, ops.moe_finalize, shapes, down, restore, weights, shared=shared
    )
    rows = np.concatenate([np.arange(10, 15, dtype=np.uint32)[:, None], restore.reshape(5, 2)], 1)
    routed = kernels(
        ops.moe_finalize,
        np.concatenate([down, shared]),
        rows.reshape(-1),
        np.concatenate([np.ones((5, 1), np.float32), weights], 1),
    )
    assert_same(apart, routed)
