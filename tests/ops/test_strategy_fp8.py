"""Fp8Strategy: each method is the operation that it names, and a layer of them is right."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from nbmoe import ops, reference
from nbmoe.activation import GatedActivation
from nbmoe.config import InputScaleSpec, QuantConfig, ScaleGranularity, ScaleOrigin
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    RangeError,
    RoutingError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.strategies import Fp8Strategy, QuantStrategy
from tests.fp8_operands import E4M3_VALUES
from tests.ops.compare import POISONS, as_bytes, assert_same
from tests.strategies import activations

BF16 = ml_dtypes.bfloat16
CONFIGS = {
    "block": QuantConfig.blockscaled_fp8(),
    "block bf16": QuantConfig.blockscaled_fp8(scale_dtype="bfloat16"),
    "row": QuantConfig.rowwise_fp8(),
    "tensor": QuantConfig.tensor_fp8(),
    "tensor static": QuantConfig.tensor_fp8(ScaleOrigin.STATIC),
}
STATIC_SCALE = np.float32([0.02])
STARTS = np.array([0, 3, 3, 5], np.uint32)
IDS = np.array([1, 0, 2], np.int32)
EXPERTS, ROWS, HIDDEN, DIM = 3, 6, 136, 64
every_config = pytest.mark.parametrize("name", CONFIGS)


def method(name: str, of: str) -> Any:
    """A method of a strategy as an operation, for the fixture `kernels`."""

    def call(*args: Any, backend: str, **kwargs: Any) -> Any:
        return getattr(Fp8Strategy(CONFIGS[name], backend=backend), of)(*args, **kwargs)

    return call


def group_of(name: str) -> int:
    return 128 if name.startswith("block") else -1


def static_scale(name: str) -> Any:
    return STATIC_SCALE if name == "tensor static" else None


def quantized_weight(name: str, n: int, k: int, seed: int) -> tuple[Any, Any, NDArray[Any]]:
    """Codes, scales as the config has them, and the values that they stand for, in float64."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((EXPERTS, n, k)) / np.sqrt(k)
    group = (128, 128) if name.startswith("block") else (1, k) if name == "row" else (n, k)
    down, across = -(-n // group[0]), -(-k // group[1])
    dtype = BF16 if name == "block bf16" else np.float32
    scales = np.empty((EXPERTS, down, across), dtype)
    codes = np.empty(values.shape, ml_dtypes.float8_e4m3fn)
    for i in range(down):
        for j in range(across):
            block = np.s_[:, group[0] * i : group[0] * (i + 1), group[1] * j : group[1] * (j + 1)]
            scales[:, i, j] = np.abs(values[block]).max(axis=(1, 2)) / 448
            codes[block] = (values[block] / scales[:, i, j, None, None].astype(float)).clip(
                -448, 448
            )
    repeated = np.repeat(np.repeat(scales.astype(float), group[0], 1), group[1], 2)[:, :n, :k]
    return codes, scales, E4M3_VALUES[codes.view(np.uint8)] * repeated


@every_config
def test_quantizers_are_the_operations(kernels: Any, name: str) -> None:
    x = activations(np.random.default_rng(0), ROWS, HIDDEN, "heavy")
    args = (x, group_of(name), static_scale(name), STARTS, None, None)
    got = kernels(method(name, "grouped_quantize"), *args)
    bound = {"row_offsets": STARTS}
    if name == "tensor static":
        codes = reference.quantize_static_scaled_float8(x, STATIC_SCALE[0], **bound)
        expected: Any = (codes, STATIC_SCALE)
    elif name == "tensor":
        expected = reference.quantize_tensor_dynamic_scaled_float8(x, **bound)
    else:
        expected = reference.quantize_dynamic_scaled_float8(
            x,
            group_size_or_per_token=group_of(name),
            scales_type=CONFIGS[name].weight_scale.dtype,
            **bound,
        )
    if kernels.name != "gpu":  # what is not written is 0 on the host
        assert_same(got, expected)
    assert_same(got[0][:5], expected[0][:5])
    if name != "tensor static":
        whole = kernels(method(name, "quantize"), x[:5].copy(), group_of(name))
        assert_same(whole[0], expected[0][:5])
        assert_same(whole[1][..., :1], expected[1][..., :1])


@every_config
def test_rows_past_the_last_start_are_not_touched(kernels: Any, name: str) -> None:
    """P7: NaN there is not looked at either, which one scale for all rows would show."""
    x = activations(np.random.default_rng(1), ROWS, HIDDEN, "gauss")
    x[5:] = np.nan
    shape = CONFIGS[name].quantized_scales_type((ROWS, HIDDEN)) if group_of(name) == 128 else None
    for byte in POISONS:
        codes = np.full((ROWS, HIDDEN), byte, np.uint8)
        scales = np.zeros((1,) if name == "tensor" else (1, 8), np.float32)
        if shape is not None:
            scales = np.zeros(shape.shape, BF16 if "bf16" in name else np.float32)
        as_bytes(scales)[...] = byte
        filled = np.full(scales.nbytes, byte, np.uint8).view(scales.dtype).reshape(scales.shape)
        out = codes if name == "tensor static" else (codes, filled)
        args = (x, group_of(name), static_scale(name), STARTS, None, None)
        got, got_scales = kernels(method(name, "grouped_quantize"), *args, out=out)
        assert (got[5:].view(np.uint8) == byte).all()
        assert not np.isin(got[:5].view(np.uint8), (0x7F, 0xFF)).any()
        if not name.startswith("tensor"):
            assert (as_bytes(got_scales[:, 5:]) == byte).all()


@every_config
def test_matmul_is_the_operation(kernels: Any, name: str) -> None:
    x = activations(np.random.default_rng(2), ROWS, HIDDEN, "gauss")
    codes, scales = Fp8Strategy(CONFIGS[name], backend="reference").grouped_quantize(
        x, group_of(name), static_scale(name), STARTS, None, None
    )
    weight, weight_scales, _ = quantized_weight(name, 24, HIDDEN, 3)
    bias = activations(np.random.default_rng(4), EXPERTS, 24, "gauss")
    inputs = (codes, scales, STARTS, IDS, None)
    got = kernels(
        method(name, "grouped_matmul"),
        weight,
        weight_scales,
        None,
        inputs,
        bias=bias,
        out=np.zeros((ROWS, 24), BF16),
        estimated_total_m=0,
    )
    op = reference.grouped_rowwise_dynamic_scaled_fp8_matmul
    if name.startswith("block"):
        op = reference.grouped_dynamic_scaled_fp8_matmul
    assert_same(got, op(codes, weight, scales, weight_scales, STARTS, IDS, bias=bias))
    assert (got[:5].view(BF16).astype(np.float32) != 0).any(axis=1).all()


ACTIVATIONS = {
    "silu": None,
    "swigluoai": GatedActivation("swigluoai", alpha=1.702, limit=7.0),
    "own": GatedActivation(gated_activation_fn=lambda gate, up: gate * up),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_silu_quantize_is_two_operations(kernels: Any, activation: str, interleaved: bool) -> None:
    gate_up = activations(np.random.default_rng(5), ROWS, 2 * DIM, "gauss")
    act = ACTIVATIONS[activation]
    inputs = (gate_up, gate_up, STARTS, IDS, None)  # activations are not looked at
    options = {"activation": act, "interleaved": interleaved}
    got = kernels(method("block", "fused_silu_quantize"), gate_up, None, inputs, **options)
    values = reference.gated_activation(gate_up, **options)
    expected = reference.quantize_dynamic_scaled_float8(
        values, group_size_or_per_token=128, row_offsets=STARTS
    )
    assert_same(got[0][:5], expected[0][:5])
    assert_same(got[1][:, :5], expected[1][:, :5])


@every_config
def test_layer_is_near_float64(kernels: Any, name: str) -> None:
    """quantize, matmul, silu, quantize, matmul: off by the quantization of activations alone."""
    x = activations(np.random.default_rng(6), ROWS, HIDDEN, "gauss")
    x[5:] = 0
    up_codes, up_scales, up = quantized_weight(name, 2 * DIM, HIDDEN, 7)
    down_codes, down_scales, down = quantized_weight(name, HIDDEN, DIM, 8)
    scale = static_scale(name)
    hint = {"estimated_total_m": 0}
    codes = kernels(method(name, "grouped_quantize"), x, group_of(name), scale, STARTS, None, None)
    gate_up = kernels(
        method(name, "grouped_matmul"),
        up_codes,
        up_scales,
        None,
        (*codes, STARTS, IDS, None),
        **hint,
    )
    inner = kernels(
        method(name, "fused_silu_quantize"),
        gate_up,
        scale,
        (gate_up, codes[1], STARTS, IDS, None),
    )
    y = kernels(
        method(name, "grouped_matmul"),
        down_codes,
        down_scales,
        None,
        (*inner, STARTS, IDS, None),
        **hint,
    )
    got = y[:5].view(BF16).astype(float)
    expected = np.zeros((5, HIDDEN))
    for slot, expert in enumerate(IDS):
        rows = slice(int(STARTS[slot]), int(STARTS[slot + 1]))
        g, u = np.split(x[rows].astype(float) @ up[expert].T, 2, axis=1)
        expected[rows] = (g / (1 + np.exp(-g)) * u) @ down[expert].T
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert 0.005 < error < 0.06


def test_scale_bound_is_the_configs() -> None:
    x = np.full((2, 16), 100, BF16)
    cfg = QuantConfig.rowwise_fp8(activation_scale_ub=10.0)
    codes, scales = Fp8Strategy(cfg, backend="reference").quantize(x, -1)
    assert (codes.astype(np.float32) == 448).all()
    assert (scales[0, :2] == np.float32(10) / np.float32(448)).all()


def test_protocol_and_identity() -> None:
    strategy = Fp8Strategy(CONFIGS["block"])
    assert isinstance(strategy, QuantStrategy)
    assert str(strategy) == "Fp8Strategy(block, dynamic, float32)"
    scales = (np.ones(1), np.ones(2))
    prepared = strategy.prepare_weight_scales(*scales, None)
    assert all(a is b for a, b in zip(prepared, scales, strict=True))


def test_sizing_arguments_change_nothing() -> None:
    strategy = Fp8Strategy(CONFIGS["block"], backend="reference")
    x = activations(np.random.default_rng(9), ROWS, 2 * DIM, "gauss")
    quantized = strategy.grouped_quantize(x, 128, None, STARTS, None, None)
    inputs = (*quantized, STARTS, IDS, np.array([3, 3], np.uint32))
    assert_same(
        strategy.fused_silu_quantize(x, None, inputs, max_padded_M=512),
        strategy.fused_silu_quantize(x, None, inputs),
    )
    weight, scales, _ = quantized_weight("block", 24, 2 * DIM, 3)
    expected = strategy.grouped_matmul(weight, scales, None, inputs)
    got = strategy.grouped_matmul(weight, scales, None, inputs, 1330, a_scales_max_padded_m=128)
    assert_same(got, expected)


def make(**changes: Any) -> Fp8Strategy:
    return Fp8Strategy(**{"config": CONFIGS["block"], "backend": "reference", **changes})


X = activations(np.random.default_rng(0), ROWS, 2 * DIM, "gauss")
CODES = np.zeros((ROWS, 128), np.uint8)
A_SCALES = np.ones((1, 8), np.float32)
INPUTS = (CODES, A_SCALES, STARTS, IDS, None)
WEIGHT, SCALES = np.zeros((3, 8, 128), np.uint8), np.ones((3, 1, 1), np.float32)
STATIC = {"config": CONFIGS["tensor static"]}


def grouped(group: Any = 128, scale: Any = None, starts: Any = STARTS, **changes: Any) -> Any:
    return make(**changes).grouped_quantize(X, group, scale, starts, None, None)


def matmul(inputs: Any = INPUTS, *args: Any, **kwargs: Any) -> Any:
    return make().grouped_matmul(WEIGHT, SCALES, None, inputs, *args, **kwargs)


def silu(inputs: Any = INPUTS, *args: Any, **kwargs: Any) -> Any:
    return make().fused_silu_quantize(X, None, inputs, *args, **kwargs)


STATIC_ROWS = QuantConfig.rowwise_fp8(
    input_scale=InputScaleSpec(ScaleGranularity.ROWWISE, ScaleOrigin.STATIC, "float32")
)
BAD = {
    "K1": (lambda: make(config=None), ArgTypeError, r"config.*QuantConfig.*NoneType"),
    "K1-string": (lambda: make(config="fp8"), ArgTypeError, "config.*str 'fp8'"),
    "K3": (lambda: make(dtype="float4_e2m1fn_x2"), ConfigError, "dtype.*float4"),
    "K3-uint8": (lambda: make(dtype="uint8"), ConfigError, "dtype: expected float8_e4m3fn.*uint8"),
    "K3-e5m2": (lambda: make(dtype="float8_e5m2"), ConfigError, "dtype.*e5m2"),
    "K3-none": (lambda: make(dtype=None), ConfigError, "dtype.*None"),
    "K3-config": (lambda: make(config=QuantConfig.mxfp8()), ConfigError, "mxfp8.*NvMxf4f8"),
    "blocks": (lambda: make(config=QuantConfig.blockscaled_fp8(64)), ConfigError, "1, 64, 64"),
    "e8m0": (
        lambda: make(config=QuantConfig.blockscaled_fp8(scale_dtype="float8_e8m0fnu")),
        ConfigError,
        "float32 or bfloat16.*e8m0",
    ),
    "bf16 tensor": (
        lambda: make(config=QuantConfig.tensor_fp8(scale_dtype="bfloat16")),
        ConfigError,
        "float32 scales a tensor.*bfloat16",
    ),
    "static rows": (lambda: make(config=STATIC_ROWS), ConfigError, "dynamic.*row"),
    "Q1": (lambda: make().quantize(X, 0), RangeError, "quantize.*group_size.*128.*got 0"),
    "Q2": (lambda: grouped(-16), RangeError, "grouped_quantize.*group_size.*-16"),
    "Q3": (lambda: grouped(24), UnsupportedError, "group_size.*NVFP4.*MX.*FP8.*24"),
    "Q4": (lambda: grouped(32), ConfigError, "group_size.*128.*32"),
    "Q4-rows": (lambda: make(config=CONFIGS["row"]).quantize(X, 128), ConfigError, "-1.*128"),
    "Q6": (lambda: grouped(128.0), ArgTypeError, r"group_size.*float 128\.0"),
    "Q7": (lambda: grouped(True), ArgTypeError, "group_size.*bool True"),
    "G1": (lambda: grouped(starts=None), ArgTypeError, "expert_start.*required"),
    "G4": (
        lambda: grouped(starts=np.array([0, 3, 2], np.uint32)),
        RoutingError,
        "ascending row offsets",
    ),
    "G5": (lambda: grouped(starts=np.array([0, 7], np.uint32)), RoutingError, "<= 6.*7"),
    "G17": (lambda: grouped(-1, **STATIC), ScaleError, "input_scale.*None"),
    "G18": (
        lambda: grouped(-1, np.ones(3, np.float32), **STATIC),
        ConfigError,
        r"input_scale.*\(3,\).*largest",
    ),
    "G19": (lambda: grouped(-1, np.zeros(1, np.float32), **STATIC), ScaleError, "scale.*0"),
    "G21": (lambda: grouped(-1, np.ones(1), **STATIC), DTypeError, "float64"),
    "static number": (lambda: grouped(-1, 0.5, **STATIC), ArgTypeError, "float 0.5"),
    "static": (lambda: make(**STATIC).quantize(X, -1), ScaleError, "config.*grouped_quantize"),
    "G27": (
        lambda: make().grouped_quantize(X, 128, None, STARTS, None, None, indices=IDS),
        TypeError,
        "indices",
    ),
    "S4": (lambda: silu((*INPUTS, None)), ArgTypeError, "expert_inputs.*hidden_scales.*of 6"),
    "S4-none": (lambda: silu(()), ArgTypeError, "expert_inputs.*tuple of 5.*tuple of 0"),
    "S5": (lambda: silu((None,) * 5), ArgTypeError, r"expert_inputs\.hidden.*None.*order"),
    "S6": (
        lambda: matmul((CODES, STARTS, A_SCALES, IDS, None)),
        DTypeError,
        r"expert_inputs\.expert_start.*uint32.*float32.*order",
    ),
    "S8": (lambda: silu(activation="gelu"), ArgTypeError, "activation.*'gelu'"),
    "S14": (lambda: silu(INPUTS, -1), RangeError, "max_padded_M.*-1"),
    "S15": (lambda: silu(INPUTS, 1.0), ArgTypeError, r"max_padded_M.*float 1\.0"),
    "padded": (lambda: matmul(INPUTS, None, -1), RangeError, "a_scales_max_padded_m.*-1"),
    "padded-type": (lambda: matmul(INPUTS, None, None), ArgTypeError, "padded_m.*NoneType"),
    "M18": (lambda: matmul(INPUTS, -5), RangeError, "estimated_total_m.*-5"),
    "expert_scales": (
        lambda: make().grouped_matmul(WEIGHT, SCALES, np.ones(3, np.float32), INPUTS),
        ConfigError,
        "expert_scales: expected None",
    ),
    "M9": (
        lambda: make().grouped_matmul(WEIGHT, np.ones((3, 8, 1), np.float32), None, INPUTS),
        ShapeError,
        "b_scales",
    ),
    "W13": (
        lambda: make().grouped_matmul_swiglu(WEIGHT, SCALES, expert_inputs=INPUTS),
        UnsupportedError,
        "grouped_matmul_swiglu.*fused_silu_quantize",
    ),
}


@pytest.mark.parametrize("row", BAD)
def test_refused(row: str) -> None:
    """Tables K, Q, G, S and M, as far as they concern FP8."""
    call, error, says = BAD[row]
    with pytest.raises(error, match=f"(?s){says}") as caught:
        call()
    assert type(caught.value) is error


def test_operations_are_public() -> None:
    names = [name for name in ops.__all__ if "float8" in name or "fp8" in name]
    # Layouts are no matter of the specification.
    names = [name for name in names if not name.startswith("prepare_")]
    assert len(names) == 6 and all(hasattr(reference, name) for name in names)
