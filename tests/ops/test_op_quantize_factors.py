"""NVFP4 quantizers under tensor scales at the ends of float32, and on every bf16."""

from typing import Any

import numpy as np
import pytest

from nbmoe import ops
from nbmoe.backend import simulator_enabled
from tests.ops.compare import assert_same
from tests.ops.quantize_formats import every_bf16
from tests.strategies import Slots, activations

ENDS = np.float32([2.0**-149, 1e-38, 1.2e-36, 2.0**-81, 2.0**-80, 2.0**80, 2.0**81, 1e36, 3e38])
"""Below 2^-80 and above 2^80 kernels take another path."""


@pytest.mark.parametrize("values", ["infinite", "tiny", "heavy"])
@pytest.mark.parametrize("activates", [False, True])
def test_tensor_scales_at_the_ends(hopper_kernels: Any, values: str, activates: bool) -> None:
    rng = np.random.default_rng(0)
    slots = Slots((3,) * len(ENDS), tuple(range(len(ENDS))), len(ENDS), 0)
    x = activations(rng, slots.rows, 64, values)
    x[::3, :32] = np.float32(3e38)
    x[1::3, 32:48] = np.float32(2.0**-100)
    x[::4, 5] = -np.inf
    op = ops.fused_silu_quantize if activates else ops.grouped_quantize_dynamic_block_scaled
    args = (x, slots.starts, slots.offsets, slots.ids, ENDS)
    for layout in ("packed", "prepared"):
        got = hopper_kernels(op, *args, layout=layout)
        expected = op(*args, layout=layout, backend="reference")
        if layout == "prepared":
            got, expected = got.data, expected.data
        assert_same(got, expected)


@pytest.mark.parametrize("factor", [1.0, 448 * 6.0, 0.3, 1e-4, 2.0**-80, 7e23])
def test_every_bf16(kernels: Any, factor: float) -> None:
    """Codes of e2m1 in all positions, at factors with which multipliers are and are not exact."""
    x = every_bf16(16, sparse=simulator_enabled())
    quantize = ops.quantize_dynamic_block_scaled
    got = kernels(quantize, x, tensor_sf=factor)
    assert_same(got, quantize(x, tensor_sf=factor, backend="reference"))
