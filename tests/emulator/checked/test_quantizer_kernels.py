"""The quantizers' kernels: no findings in several schedules, and the bytes of the fast engine."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbmoe import ops
from nbmoe.activation import GatedActivation
from tests.emulator.checked.shipped import checking
from tests.strategies import Slots, activations, factors

MXFP4 = {"sf_vector_size": 32, "scales_type": "float8_e8m0fnu"}
MXFP8 = {**MXFP4, "out_type": "float8_e4m3fn"}
SLOTS = Slots((5, 0, 17, 2), (2, 0, -1, 1), 4, 1)
SCHEDULES = ["random:0", "pct:3:1"]


def twice_up(gate: Any, up: Any) -> Any:
    """A caller's activation."""
    return gate * up + up


def calls() -> dict[str, Callable[[], Any]]:
    """One call of every kernel that quantizes, dequantizes or tiles scales."""
    rng = np.random.default_rng(0)
    x = activations(rng, SLOTS.rows, 96, "heavy")
    gate_up = activations(rng, SLOTS.rows, 192, "gauss")
    slots = SLOTS.starts, SLOTS.offsets, SLOTS.ids
    sf = factors(rng, 4)
    packed = rng.integers(0, 256, (2, 9, 32), dtype=np.uint8)
    scales = rng.integers(0, 256, (2, 9, 2), dtype=np.uint8)
    grouped = ops.grouped_quantize_dynamic_block_scaled
    indices = rng.permutation(2 * SLOTS.rows)[: SLOTS.rows].astype(np.uint32)
    oai = GatedActivation("swigluoai", 1.702, 7.0)
    gelu = GatedActivation("gelu_tanh")
    own = GatedActivation(gated_activation_fn=twice_up)
    here: dict[str, Any] = {"backend": "emulate"}
    return {
        "mxfp4": lambda: grouped(x, *slots, **MXFP4, **here),
        "mxfp8": lambda: grouped(x, *slots, **MXFP8, **here),
        "mxfp4_even": lambda: grouped(x, *slots, **MXFP4, scale_rule="even", **here),
        "mxfp8_floor": lambda: grouped(
            x, *slots, **MXFP8, indices=indices, indices_divisor=2, scale_rule="floor", **here
        ),
        "rows": lambda: ops.quantize_dynamic_block_scaled(x, **MXFP8, **here),
        "rows_nvfp4": lambda: ops.quantize_dynamic_block_scaled(x, tensor_sf=3, **here),
        "row_scaled": lambda: ops.grouped_quantize_nvfp4_row_scaled(x, *slots, relu2=True, **here),
        "gated_nvfp4": lambda: ops.fused_silu_quantize(gate_up, *slots, sf, **here),
        "gated_mxfp8": lambda: ops.fused_silu_quantize(
            gate_up, *slots, format="mxfp8", activation=oai, interleaved=True, **here
        ),
        "gated_own": lambda: ops.fused_silu_quantize(
            gate_up, *slots, format="mxfp4", activation=own, **here
        ),
        "gated_mxfp4": lambda: ops.fused_silu_quantize(
            gate_up, *slots, format="mxfp4", activation=gelu, **here
        ),
        "gated_activation": lambda: ops.gated_activation(gate_up, activation=oai, **here),
        "dequantize": lambda: ops.mxfp4_dequant(packed, scales, **here),
        "dequantize_e4m3": lambda: ops.mxfp4_dequant(
            packed, scales, out_type="float8_e4m3fn", **here
        ),
        "interleave": lambda: ops.block_scales_interleave(scales, **here),
    }


CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_no_finding_and_the_same_bytes(name: str) -> None:
    wanted = CALLS[name]()
    with checking(schedules=SCHEDULES) as executor:
        got = CALLS[name]()
    assert executor.reports and not executor.findings, str(executor.findings[0])
    assert [g.tobytes() for g in as_tuple(got)] == [w.tobytes() for w in as_tuple(wanted)]


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Results of operations with one output and with several."""
    return value if isinstance(value, tuple) else (value,)
