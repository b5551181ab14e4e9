"""The content of a kernel is everything that its machine code depends on."""

import types as pytypes
from dataclasses import dataclass

import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from emulate.fingerprint import Unhashable, fingerprint
from tests.emulator import small_ops as ops

LIMIT = 3
TABLE = np.array([1, 2])


def helper(x):
    return x + LIMIT


def kernel(x, y=1):
    return helper(x) + TABLE[0] + ops.rotate(x, y)


def with_globals(function, **changed):
    scope = {**function.__globals__, **changed}
    return pytypes.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )


def test_same_content_has_the_same_fingerprint():
    assert fingerprint(kernel) == fingerprint(with_globals(kernel))


other_ops = pytypes.ModuleType("tests.emulator.small_ops")
other_ops.rotate = ops.negate


@pytest.mark.parametrize(
    "changed",
    [
        {"TABLE": np.array([1, 3])},
        {"TABLE": np.array([1, 2], np.int32)},
        {"helper": with_globals(helper, LIMIT=4)},
        {"helper": with_globals(helper, LIMIT=3.0)},
        {"ops": other_ops},
    ],
)
def test_changed_dependency_changes_it(changed):
    assert fingerprint(kernel) != fingerprint(with_globals(kernel, **changed))


def test_defaults_and_closures_count():
    def make(value):
        def inner(x, y=value):
            return x + value

        return inner

    assert fingerprint(make(1)) == fingerprint(make(1))
    assert fingerprint(make(1)) != fingerprint(make(2))
    assert fingerprint(make(0.0)) != fingerprint(make(-0.0))
    assert fingerprint(make(1)) != fingerprint(make(True))


@dataclass(frozen=True)
class Config:
    size: int


def test_dataclass_fields_count():
    def make(config):
        def inner():
            return config

        return inner

    assert fingerprint(make(Config(1))) == fingerprint(make(Config(1)))
    assert fingerprint(make(Config(1))) != fingerprint(make(Config(2)))


def recursive(n):
    return recursive(n - 1) if n else 0


def test_recursion_ends():
    assert "again" in fingerprint(recursive)


def test_intrinsics_count():
    def make(value):
        @intrinsic
        def constant(typingctx):
            return types.int64(), lambda context, builder, signature, args: value

        def inner():
            return constant()

        return inner

    assert fingerprint(make(1)) == fingerprint(make(1))
    assert fingerprint(make(1)) != fingerprint(make(2))


def test_unknown_value_is_refused():
    value = object()

    def inner():
        return value

    with pytest.raises(Unhashable):
        fingerprint(inner)
