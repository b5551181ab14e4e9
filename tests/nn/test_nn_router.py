"""P3: router logits depend on the token alone, not on its neighbours or the machine."""

import math

import ml_dtypes
import numpy as np
import pytest

from nbmoe.nn.router import router_logits

BF16 = ml_dtypes.bfloat16


def operands(tokens, experts, hidden, gate_type=BF16):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((tokens, hidden)).astype(BF16)
    return x, rng.standard_normal((experts, hidden)).astype(gate_type)


@pytest.mark.parametrize("hidden", [1, 16, 80, 128, 257])
@pytest.mark.parametrize("gate_type", [BF16, np.float32])
def test_is_the_exact_sum_rounded_to_float32(hidden, gate_type):
    x, gate = operands(7, 5, hidden, gate_type)
    logits = router_logits(x, gate)
    for t in range(7):
        for e in range(5):
            products = x[t].astype(np.float64) * gate[e].astype(np.float64)
            exact = np.float32(math.fsum(products))
            # float64 leaves 29 bits below float32's last: only a near-tie could round otherwise.
            assert abs(float(logits[t, e]) - float(exact)) <= np.spacing(abs(exact))
    assert logits.dtype == np.float32


def test_rows_do_not_depend_on_the_batch():
    x, gate = operands(300, 64, 2048)  # several chunks
    logits = router_logits(x, gate)
    for t in (0, 1, 7, 8, 155, 299):
        assert router_logits(x[t : t + 1], gate).tobytes() == logits[t : t + 1].tobytes()


def test_nan_stays_in_its_row():
    x, gate = operands(4, 3, 80)
    clean = router_logits(x, gate)
    x[2, 5] = np.nan
    logits = router_logits(x, gate)
    assert np.isnan(logits[2]).all()
    assert np.array_equal(np.delete(logits, 2, 0), np.delete(clean, 2, 0))


def test_no_tokens():
    x, gate = operands(0, 3, 80)
    assert router_logits(x, gate).shape == (0, 3)
