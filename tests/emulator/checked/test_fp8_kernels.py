"""The FP8 quantizers' kernels have no findings, and the same bytes as in the fast engine."""

import numpy as np
import pytest

from nbmoe import ops
from tests.emulator.checked.shipped import checking
from tests.strategies import activations

dynamic = ops.quantize_dynamic_scaled_float8
BOUND = np.array([0, 2, 4], np.uint32)


def calls():
    """Each kernel, with rows that are bounded and rows that are not."""
    rng = np.random.default_rng(5)
    wide, narrow = (activations(rng, 5, k, "nan rows") for k in (136, 15))
    return {
        "groups": lambda: dynamic(wide, group_size_or_per_token=64, row_offsets=BOUND),
        "groups_e8m0": lambda: dynamic(
            wide, group_size_or_per_token=128, scales_type="float8_e8m0fnu"
        ),
        "rows": lambda: dynamic(wide[:2], scales_type="bfloat16"),
        "rows_single": lambda: dynamic(narrow[:2], group_size_or_per_token=8),
        "tensor": lambda: ops.quantize_tensor_dynamic_scaled_float8(wide, row_offsets=BOUND),
        "tensor_single": lambda: ops.quantize_tensor_dynamic_scaled_float8(narrow),
        "static": lambda: ops.quantize_static_scaled_float8(wide, 0.5, row_offsets=BOUND),
        "static_bf16": lambda: ops.quantize_static_scaled_float8(narrow, 3.0),
        "static_f16": lambda: ops.quantize_static_scaled_float8(narrow.astype(np.float16), 3.0),
        "static_f32": lambda: ops.quantize_static_scaled_float8(narrow.astype(np.float32), 3.0),
    }


CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_no_finding_and_the_same_bytes(name):
    wanted = CALLS[name]()
    with checking(schedules=["fifo", "random:1", "pct:3:1"]) as executor:
        got = CALLS[name]()
    assert executor.reports and not executor.findings, str(executor.findings[0])
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)
