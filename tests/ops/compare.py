"""Byte-for-byte comparison with the reference, and poisoned buffers."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

POISONS = (0xAA, 0x55)
Shapes = tuple[tuple[tuple[int, ...], Any], ...]


def as_bytes(x: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array, one axis more."""
    return np.ascontiguousarray(x)[..., None].view(np.uint8)


def assert_same(got: Any, expected: Any, what: str = "result") -> None:
    """Asserts equal bytes, of tuples too; a failure shows how many differ and the first.

    The element type may differ, since GPUs carry bfloat16 as uint16.
    """
    if isinstance(expected, tuple):
        assert len(got) == len(expected)
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            assert_same(g, e, f"{what}[{i}]")
        return
    assert got.shape == expected.shape, what
    wrong = (as_bytes(got) != as_bytes(expected)).any(axis=-1)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        detail = f"got {got[at]!r}, expected {expected[at]!r}"
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} differ, first at {at}: {detail}"
        )


def poisoned(shapes: Shapes, byte: int) -> Any:
    """Buffers in which every byte is `byte`: one, or a tuple if there are several shapes."""
    buffers = []
    for shape, dtype in shapes:
        buffer = np.empty(shape, dtype)
        as_view = buffer.reshape(-1).view(np.uint8)
        as_view[...] = byte
        buffers.append(buffer)
    return buffers[0] if len(buffers) == 1 else tuple(buffers)


def assert_equals_reference(
    kernels: Any, op: Callable[..., Any], shapes: Shapes, *args: Any, **kwargs: Any
) -> Any:
    """Runs an op on a backend and on the reference, into two poisons each.

    So equality also says that the same bytes were left alone (P7), and that no byte depends on
    what a buffer held before (P5).

    Returns:
        The results in the first poison.
    """
    results = []
    for byte in POISONS:
        got = kernels(op, *args, out=poisoned(shapes, byte), **kwargs)
        expected = op(*args, out=poisoned(shapes, byte), backend="reference", **kwargs)
        assert_same(got, expected)
        results.append(got)
    return results[0]
