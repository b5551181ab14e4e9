"""Numba's simulator: its arrays and streams are accepted everywhere and come back as such."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops
from nbmoe.arrays import Kind, describe, is_simulator_array, to_backend, to_numpy
from nbmoe.backend import simulator_enabled
from nbmoe.prepared import PreparedWeights
from nbmoe.prepared.tokens import PreparedTokens
from tests.bad_inputs.sizes import TINY
from tests.bad_inputs.valid import VALID, function, op_name, valid

pytestmark = pytest.mark.skipif(
    not simulator_enabled(), reason="numba.cuda is the simulator only with NUMBA_ENABLE_CUDASIM=1"
)

FIRST = tuple({op_name(entry): entry for entry in reversed(VALID)}.values())
"""An entry of each operation."""


def on_simulator(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on_simulator(v) for v in value)
    return to_backend(value, "cudasim") if isinstance(value, np.ndarray) else value


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The arrays of a result."""
    if isinstance(value, PreparedWeights | PreparedTokens):
        return (value.data,)
    return value if isinstance(value, tuple) else (value,)


def test_describe() -> None:
    x = to_backend(np.zeros((2, 3), ml_dtypes.bfloat16), "cudasim")
    a = describe("t", "x", x)
    assert is_simulator_array(x) and a.kind is Kind.SIMULATOR and not a.kind.on_gpu
    assert (a.shape, a.dtype) == ((2, 3), "bfloat16") and a.view is x._ary


@pytest.mark.parametrize(
    ("entry", "with_out"), [(e, True) for e in VALID] + [(e, False) for e in FIRST]
)
def test_every_operation(entry: str, with_out: bool) -> None:
    """Simulator arrays in, simulator arrays out, the reference's bytes in them."""
    from numba import cuda

    arguments = valid(entry, TINY)
    if not with_out:
        del arguments["out"]
    expected = function(entry)(**valid(entry, TINY), backend="reference")
    moved = {name: on_simulator(value) for name, value in arguments.items()}
    got = function(entry)(**moved, stream=cuda.stream())
    if with_out:
        assert all(g is o for g, o in zip(as_tuple(got), as_tuple(moved["out"]), strict=True))
        pairs = zip(as_tuple(got), as_tuple(expected), strict=True)
        assert all(to_numpy(g).tobytes() == e.tobytes() for g, e in pairs)
    assert all(is_simulator_array(g) for g in as_tuple(got))


@pytest.mark.parametrize("entry", FIRST)
def test_numpy_stays_numpy(entry: str) -> None:
    expected = function(entry)(**valid(entry, TINY), backend="reference")
    got = function(entry)(**valid(entry, TINY))
    pairs = zip(as_tuple(got), as_tuple(expected), strict=True)
    assert all(type(g) is np.ndarray and g.tobytes() == e.tobytes() for g, e in pairs)


def test_streams() -> None:
    from numba import cuda

    for stream in (None, 0, cuda.stream(), cuda.default_stream()):
        ops.moe_create_indices(np.zeros((2, 1), np.int32), 3, stream=stream)
