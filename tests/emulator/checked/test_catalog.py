"""No kernel of the catalog is forgotten: the tables of this folder launch them all.

A kernel counts as checked if one of its very name is launched; a name tells all that the kernel is
built from, such as formats and tile shape.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from nbmoe import backend
from nbmoe_kernels.catalog import catalog
from tests.emulator.checked import (
    test_fp8_kernels,
    test_layer_kernels,
    test_matmul_kernels,
    test_prepared_kernels,
    test_quantizer_kernels,
    test_shipped_kernels,
    test_sm90_kernels,
)

_matmuls = {"matmul": test_matmul_kernels.SMALLEST, "other": test_matmul_kernels.OTHERS}
_tables: dict[str, dict[str, Callable[[], Any]]] = {
    "fp8": test_fp8_kernels.CALLS,
    "layer": test_layer_kernels.CALLS,
    "prepared": test_prepared_kernels.CALLS,
    "quantizer": test_quantizer_kernels.CALLS,
    "shipped": test_shipped_kernels.CALLS,
    "sm90": test_sm90_kernels.CALLS,
    **{t: {n: partial(f, "emulate") for n, f in calls.items()} for t, calls in _matmuls.items()},
}
CALLS = {f"{table}.{name}": f for table, calls in _tables.items() for name, f in calls.items()}
"""All calls, by table and name."""


def unchecked(calls: Iterable[Callable[[], Any]]) -> set[str]:
    """Names of the catalog's kernels that none of the calls launches; runs no kernel."""
    launched: set[str] = set()

    class Recorder:
        multiprocessors = 1

        def __call__(self, kernel: Any, grid: Any, args: Any, stream: Any) -> None:
            launched.add(kernel.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "executor", lambda *_, **__: Recorder())
        for call in calls:
            call()
    return {kernel.name for kernel in catalog()} - launched


def test_every_kernel_is_checked() -> None:
    assert unchecked(CALLS.values()) == set()


def test_a_forgotten_kernel_is_noticed() -> None:
    kept = [call for name, call in CALLS.items() if name != "layer.reciprocal"]
    assert unchecked(kept) == {"reciprocal_sm80"}
