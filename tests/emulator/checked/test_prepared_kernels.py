"""What makes prepared operands: no finding, the same bytes in any order of threads and blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, ops
from nbmoe.formats import FORMATS
from tests.emulator.checked.orders import check_orders
from tests.ops.operands import make_product
from tests.ops.test_op_prepare_weights import operands
from tests.strategies import Slots, activations

SCHEDULES = ("random:0", "pct:3:1")
SLOTS = Slots((3, 0, 2), (1, -1, 0), 3, 2)
K = 96
"""A whole 64-block of K and half of one."""
HERE: dict[str, Any] = {"backend": "emulate"}


def weights(format: str) -> Any:
    """Units that are partly rows and columns past the last."""
    weight, tiles = operands(format, 1, 8, K)
    return ops.prepare_weights(weight, tiles, format=format, validate="shapes", **HERE).data


def tokens(format: str, has_slots: bool = True) -> Any:
    """Rows of three slots, one of them empty."""
    fmt = FORMATS[format]
    slots = SLOTS if has_slots else Slots((5,), (0,), 1, 0)
    p = make_product(1, slots, 8, K, pair=(fmt, fmt))
    routing = (slots.starts, slots.offsets) if has_slots else ()
    scales = p.a_scales if has_slots else p.a_scales[:1]
    return ops.prepare_tokens(p.hidden, scales, *routing, format=format, **HERE).data


def rows(columns: int = K) -> Any:
    return activations(np.random.default_rng(2), SLOTS.rows, columns, "gauss")


def bf16_tokens() -> Any:
    return ops.prepare_tokens(rows(), expert_start=SLOTS.starts, **HERE).data


def quantized(format: str) -> Any:
    routing = (SLOTS.starts, SLOTS.offsets, SLOTS.ids)
    if format == "nvfp4":
        of_format: dict[str, Any] = {"sf_tensor": np.float32([1, 0.5, 2])}
    else:
        types = {"scales_type": "float8_e8m0fnu", "out_type": "float8_e4m3fn"}
        of_format = {"sf_vector_size": 32, **types}
    return ops.grouped_quantize_dynamic_block_scaled(
        rows(), *routing, **of_format, layout="prepared", **HERE
    ).data


def activated() -> Any:
    factors = np.float32([1, 0.5, 2])
    return ops.fused_silu_quantize(
        rows(2 * K), SLOTS.starts, SLOTS.offsets, SLOTS.ids, factors, layout="prepared", **HERE
    ).data


def fp8_weights() -> Any:
    codes = np.random.default_rng(3).integers(0, 0x7F, (1, 8, K), np.uint8)
    return ops.prepare_fp8_weights(codes, **HERE).data


def w4a8_weights() -> Any:
    """Folded into e4m3: codes and the scales of rows."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (1, 8, K // 2), np.uint8)
    tiles = layouts.interleave_scales(rng.integers(120, 134, (1, 8, K // 32), np.uint8))
    made = ops.prepare_w4a8_weights(codes, tiles, **HERE)
    return made.data, made.scales


def fp8_tokens(dtype: Any) -> Any:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 0x7F, (SLOTS.rows, K), np.uint8)
    scales = rng.uniform(0.5, 2, (1, 8)).astype(dtype)
    made = ops.prepare_fp8_tokens(codes, scales, SLOTS.starts, **HERE)
    return made.data, made.scales


def fp8_quantized() -> Any:
    made = ops.quantize_dynamic_scaled_float8(
        rows(), group_size_or_per_token=128, row_offsets=SLOTS.starts, layout="prepared", **HERE
    )
    return made.data, made.scales


CALLS: dict[str, Callable[[], Any]] = {
    **{f"weights_{f}": partial(weights, f) for f in ("nvfp4", "mxfp4", "mxfp8", "bf16")},
    **{f"tokens_{f}": partial(tokens, f) for f in FORMATS},
    "tokens_without_slots": partial(tokens, "nvfp4", has_slots=False),
    "tokens_bf16": bf16_tokens,
    "quantized_nvfp4": partial(quantized, "nvfp4"),
    "quantized_mxfp8": partial(quantized, "mxfp8"),
    "activated_nvfp4": activated,
    "fp8_weights": fp8_weights,
    "w4a8_weights": w4a8_weights,
    "fp8_tokens_f32": partial(fp8_tokens, np.float32),
    "fp8_tokens_bf16": partial(fp8_tokens, ml_dtypes.bfloat16),
    "fp8_quantized": fp8_quantized,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_finding_and_the_same_bytes(name: str) -> None:
    check_orders(CALLS[name], CALLS[name](), SCHEDULES)
