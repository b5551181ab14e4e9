"""The key of a compiled kernel changes with everything that reaches the machine code."""

import types

import numpy as np
import pytest
from numba import njit

from nbmoe_kernels.catalog import catalog
from nbmoe_kernels.compiler import content_key
from nbmoe_kernels.create_indices import make_create_indices
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.kernel import kernel

HOPPER = (9, 0)
FACTOR = np.float32(2.0)


@njit
def helper(x):
    return x * FACTOR


@device_function
def scaled(x):
    return helper(x)


def make(body, threads=32):
    @kernel("global f32* out", threads=threads, name="same_name")
    def fill(out):
        out[np.uint64(0)] = body(np.float32(1.0))

    return fill


def test_same_content_same_key():
    assert content_key(make(scaled), HOPPER) == content_key(make(scaled), HOPPER)


def test_architecture_and_resources_are_in_the_key():
    keys = {
        content_key(make(scaled), HOPPER),
        content_key(make(scaled), (8, 0)),
        content_key(make(scaled, threads=64), HOPPER),
    }
    assert len(keys) == 3


def test_a_global_behind_two_calls_is_in_the_key(monkeypatch):
    before = content_key(make(scaled), HOPPER)
    monkeypatch.setitem(globals(), "FACTOR", np.float32(3.0))
    assert content_key(make(scaled), HOPPER) != before


def test_a_closure_value_is_in_the_key():
    def scaling(factor):
        @device_function
        def by_factor(x):
            return x * factor

        return by_factor

    one, two = (content_key(make(scaling(np.float32(f))), HOPPER) for f in (1, 2))
    assert one != two


def test_what_cannot_be_read_is_refused():
    table = types.SimpleNamespace(value=1)

    @device_function
    def looks_up(x):
        return x * table.value

    with pytest.raises(TypeError, match=r"closure value table = .* cannot be hashed"):
        content_key(make(looks_up), HOPPER)


def test_kernels_of_the_package_differ_by_where_they_are_and_what_they_close_over():
    """Their source is in the digest of the package, not read again for each."""
    kernels = catalog()
    assert len({content_key(k, HOPPER) for k in kernels}) == len(kernels)
    make = make_create_indices.__wrapped__
    assert content_key(make(64), HOPPER) == content_key(make(64), HOPPER)
    assert content_key(make(64), HOPPER) != content_key(make(128), HOPPER)
