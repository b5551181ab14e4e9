"""P1, P2: the combine is one float32 fma a slot in ascending order, rounded once."""

from fractions import Fraction

import ml_dtypes
import numpy as np

from nbmoe import reference

BF16 = ml_dtypes.bfloat16
NO_ROW = 0xFFFFFFFF


def nearest_f32(exact):
    """A Fraction to float32: the best of the candidates around it, ties to even bits."""
    guess = np.float32(float(exact))
    near = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]

    def distance(candidate):
        return abs(Fraction(float(candidate)) - exact), int(candidate.view(np.uint32)) & 1

    return min(near, key=distance)


def test_sums_in_order_with_one_rounding_each():
    rng = np.random.default_rng(0)
    tokens, top_k, width = 6, 5, 40
    down = rng.standard_normal((tokens * top_k, width)).astype(BF16)
    down[:, 0] *= rng.choice([1, 1e4, -1e-4], tokens * top_k).astype(BF16)
    restore = rng.permutation(tokens * top_k).astype(np.uint32)
    weights = rng.random((tokens, top_k)).astype(np.float32)
    got = reference.moe_finalize(down, restore, weights)
    assert got.dtype == BF16
    for t in range(tokens):
        for h in range(width):
            total = np.float32(0)
            for j in range(top_k):
                row = Fraction(float(down[restore[t * top_k + j], h]))
                exact = Fraction(float(weights[t, j])) * row + Fraction(float(total))
                total = nearest_f32(exact)
            assert got[t, h] == total.astype(BF16)


def test_absent_rows_contribute_nothing():
    down = np.array([[1.0], [np.nan], [3.0]], BF16)
    restore = np.array([0, NO_ROW, NO_ROW, 2, NO_ROW, NO_ROW], np.uint32)
    weights = np.array([[2, np.nan], [7, 0.5], [1, 1]], np.float32)
    out = reference.moe_finalize(down, restore, weights)
    assert out.view(np.uint16).tolist() == [[0x4000], [0x3FC0], [0x0000]]


def test_sum_starts_from_plus_zero_and_nan_is_canonical():
    down = np.array([[-0.0, np.nan, np.inf, np.inf]], BF16)
    down.view(np.uint16)[0, 1] = 0xFFC1
    out = reference.moe_finalize(down, np.array([0], np.uint32), np.array([[1]], np.float32))
    assert out.view(np.uint16).tolist() == [[0, 0x7FFF, 0x7F80, 0x7F80]]
    out = reference.moe_finalize(down, np.array([0], np.uint32), np.array([[0]], np.float32))
    assert out.view(np.uint16)[0, 2] == 0x7FFF


def test_same_row_may_be_taken_twice():
    down = np.array([[1.0]], BF16)
    out = reference.moe_finalize(
        down, np.array([0, 0], np.uint32), np.array([[0.25, 0.5]], np.float32)
    )
    assert float(out[0, 0]) == 0.75


def test_no_tokens_and_no_rows():
    empty = np.zeros((0, 8), BF16)
    out = reference.moe_finalize(empty, np.zeros(0, np.uint32), np.zeros((0, 2), np.float32))
    assert out.shape == (0, 8)
    none = np.full(2, NO_ROW, np.uint32)
    out = reference.moe_finalize(empty, none, np.ones((1, 2), np.float32))
    assert (out.view(np.uint16) == 0).all()
