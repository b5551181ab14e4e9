"""Twins of ops without memory against what an H200 did with the same operands."""

import numpy as np
import pytest

from tests.kernels.recorded.calls import (
    VECTORS,
    in_domain,
    make_inputs,
    recordable_ops,
    twin_outputs,
)

OPS = recordable_ops()


def recorded():
    if not VECTORS.is_file():
        pytest.fail(f"{VECTORS} is missing: python -m tests.kernels.recorded.record, on an H200")
    return np.load(VECTORS)


def test_every_op_is_recorded():
    assert {n for n in recorded().files if not n.startswith("in_")} == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_twin_equals_the_card(name):
    vectors, op = recorded(), OPS[name]
    inputs = {"f32": vectors["in_f32"], "u32": vectors["in_u32"]}
    inputs["i32"] = inputs["u32"].view(np.int32)
    threads = in_domain(op, inputs)
    assert threads.sum() >= 512
    got, want = twin_outputs(op, inputs)[:, threads], vectors[name][:, threads]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["add_rn", "max_nan", "shuffle_up", "mma_m16n8k16_f16"])
def test_inputs_tell_results_apart(name):
    """Inputs on which an op gives one answer everywhere would prove nothing."""
    values = twin_outputs(OPS[name], make_inputs())
    assert len(np.unique(values)) > 500
