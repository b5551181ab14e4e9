"""`NvMxf4f8Strategy`: the chain of a layer for every pair of formats, and what it refuses."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, ops
from nbmoe.activation import GatedActivation
from nbmoe.backend import executor, simulator_enabled
from nbmoe.config import QuantConfig
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DeviceError,
    DTypeError,
    LayoutError,
    RangeError,
    RoutingError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.formats import MXFP4, NVFP4
from nbmoe.prepared import PreparedTokens
from nbmoe.strategies import NvMxf4f8Strategy, QuantStrategy
from nbmoe.strategies.expert_inputs import ExpertInputs
from nbmoe_kernels.reciprocal import launch_reciprocal
from tests.ops.compare import assert_same
from tests.strategies import codes, scale_bytes

BF16 = ml_dtypes.bfloat16
STRATEGIES = {
    "nvfp4": (QuantConfig.nvfp4(), "uint8"),
    "mxfp4": (QuantConfig.mxfp4(), "uint8"),
    "w4a8": (QuantConfig.mxfp4(), ml_dtypes.float8_e4m3fn),
    "mxfp8": (QuantConfig.mxfp8(), "float8_e4m3fn"),
}
EXPERTS, TOP_K, TOKENS, HIDDEN, MOE_DIM = 3, 2, 5, 64, 32
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def make(name: str, backend: str | None = "reference") -> NvMxf4f8Strategy:
    return NvMxf4f8Strategy(*STRATEGIES[name], backend=backend)


class Layer:
    """Weights, scales and routing for a strategy, interleaved as the fused matmul wants them."""

    def __init__(self, strategy: NvMxf4f8Strategy) -> None:
        rng, fmt = np.random.default_rng(1), strategy.weight_format
        self.strategy = strategy
        self.x = rng.standard_normal((TOKENS, HIDDEN)).astype(BF16)
        self.gate_up = codes(rng, (EXPERTS, 2 * MOE_DIM, fmt.packed_k(HIDDEN)), fmt)
        self.down = codes(rng, (EXPERTS, HIDDEN, fmt.packed_k(MOE_DIM)), fmt)
        self.rows = (
            scale_bytes(rng, (EXPERTS, 2 * MOE_DIM, HIDDEN // fmt.block), fmt),
            scale_bytes(rng, (EXPERTS, HIDDEN, MOE_DIM // fmt.block), fmt),
        )
        self.scales = tuple(layouts.interleave_scales(rows) for rows in self.rows)
        is_nvfp4 = strategy.is_nvfp4
        self.factors = np.float32([0.01, 0.02, 0.03]) if is_nvfp4 else None
        self.inputs = np.float32([0.01, 0.02, 0.005]) if is_nvfp4 else None
        ids = np.array([[0, 2], [2, 0], [0, 1], [2, 1], [0, 2]], np.int32)
        self.routing = ops.moe_create_indices(ids, EXPERTS, backend="reference")

    def slots(self) -> tuple[Any, Any, Any]:
        r = self.routing
        return r.expert_start_indices, r.scales_offset, r.expert_ids

    def quantized(self, **kwargs: Any) -> Any:
        return self.strategy.grouped_quantize(
            self.x,
            self.strategy.format.block,
            self.inputs,
            *self.slots(),
            self.routing.token_expert_order,
            TOP_K,
            **kwargs,
        )

    def expert_inputs(self, **changes: Any) -> ExpertInputs:
        stats = np.array([5, EXPERTS], np.uint32)
        return ExpertInputs(*self.quantized(), *self.slots(), stats)._replace(**changes)


@every_strategy
@pytest.mark.parametrize("activation", [None, GatedActivation("swigluoai", 1.702, 7.0)], ids=str)
def test_fused_equals_chained(name: str, activation: Any) -> None:
    layer = Layer(make(name))
    s, inputs = layer.strategy, layer.expert_inputs()
    fused = s.grouped_matmul_swiglu(
        layer.gate_up,
        layer.scales[0],
        expert_scales=layer.factors,
        input_scales=layer.inputs,
        expert_inputs=inputs,
        activation=activation,
    )
    gate_up = s.grouped_matmul(layer.gate_up, layer.scales[0], layer.factors, inputs)
    chained = s.fused_silu_quantize(
        gate_up, layer.inputs, inputs, activation=activation, interleaved=True
    )
    assert_same(fused[0], chained[0], "codes")
    assert fused[0].dtype == chained[0].dtype
    assert_same(fused[1], chained[1], "scales")
    down = ExpertInputs(*fused, *layer.slots(), None)
    y = s.grouped_matmul(layer.down, layer.scales[1], layer.factors, down)
    assert y.shape == (TOKENS * TOP_K, HIDDEN) and y.any()


@every_strategy
@pytest.mark.parametrize("out", [False, True])
def test_passes_every_operand_on(name: str, out: bool) -> None:
    """Bias, row scales and buffers reach the operations."""
    layer, rng = Layer(make(name)), np.random.default_rng(3)
    s, inputs = layer.strategy, layer.expert_inputs()
    extras = {"bias": rng.standard_normal((EXPERTS, 2 * MOE_DIM)).astype(BF16)}
    if s.is_nvfp4:
        extras["a_row_scales"] = rng.uniform(1, 2, TOKENS * TOP_K).astype(BF16)
    formats = {"format": s.format, "weight_format": s.weight_format, "backend": "reference"}
    hidden, hidden_scales, *slots = inputs[:5]
    operands = (hidden, layer.gate_up, hidden_scales, layer.scales[0], *slots)
    expected = ops.grouped_matmul_block_scaled(*operands, layer.factors, **extras, **formats)
    buffer = np.zeros_like(expected) if out else None
    weights = (layer.gate_up, layer.scales[0])
    got = s.grouped_matmul(*weights, layer.factors, inputs, **extras, out=buffer)
    assert_same(got, expected)
    assert not out or got is buffer

    inverse = None if layer.inputs is None else np.float32(1) / layer.inputs
    keywords = {"expert_scales": layer.factors, "match_bf16": False, **extras}
    fused = ops.grouped_matmul_blocked_swiglu(
        *operands, c_input_scales=inverse, **keywords, **formats
    )
    buffers = tuple(map(np.zeros_like, fused)) if out else None
    result = s.grouped_matmul_swiglu(
        *weights,
        input_scales=inverse,
        scales_are_inverted=True,
        expert_inputs=inputs,
        out=buffers,
        **keywords,
    )
    assert_same(result, fused)
    assert not out or result[0] is buffers[0]


@every_strategy
def test_kernels_equal_the_reference(kernels: Any, name: str) -> None:
    """The last matmul, from operands of the strategy; the kernels have tests of their own."""
    if simulator_enabled() and name != "w4a8":
        return
    layer = Layer(make(name))
    inputs = layer.expert_inputs()
    args = (layer.gate_up, layer.scales[0], layer.factors, tuple(inputs))
    expected = layer.strategy.grouped_matmul(*args, estimated_total_m=0)
    on_backend = make(name, kernels.name)

    def call(*args: Any, backend: str) -> Any:
        assert on_backend.backend == backend
        return on_backend.grouped_matmul(*args, estimated_total_m=0)

    assert_same(kernels(call, *args), expected)


@every_strategy
def test_quantizes_like_the_operations(name: str) -> None:
    layer = Layer(make(name))
    s, fmt = layer.strategy, layer.strategy.format
    types = {
        "sf_vector_size": fmt.block,
        "scales_type": "float8_e4m3fn" if fmt is NVFP4 else "float8_e8m0fnu",
        "out_type": fmt.codes_dtype,
    }
    factors = None if layer.inputs is None else np.float32(1) / layer.inputs
    order = layer.routing.token_expert_order
    expected = ops.grouped_quantize_dynamic_block_scaled(
        *(layer.x, *layer.slots(), factors),
        **{"indices": order, "indices_divisor": TOP_K, "backend": "reference", **types},
    )
    assert_same(layer.quantized(), expected)
    if factors is not None:
        inverse = s.inverse_scales(layer.inputs)
        assert_same(inverse, factors)
        layer.inputs = inverse
        assert_same(layer.quantized(scales_are_inverted=True), expected)
    plain = ops.quantize_dynamic_block_scaled(layer.x, **types, backend="reference")
    assert_same(s.quantize(layer.x, fmt.block), plain)


@every_strategy
def test_prepared_operands_change_no_byte(name: str) -> None:
    """Quantize, gate/up, activation and quantize, down: prepared throughout."""
    layer = Layer(make(name))
    s, slots = layer.strategy, layer.slots()
    weights = [
        s.prepare_weights(*pair)
        for pair in ((layer.gate_up, layer.scales[0]), (layer.down, layer.scales[1]))
    ]
    assert weights[0].format == s.weight_format.name
    inner = {"input_scales": layer.inputs, "interleaved": True}
    packed = layer.expert_inputs()
    expected = s.grouped_matmul(layer.gate_up, layer.scales[0], layer.factors, packed)
    codes = s.fused_silu_quantize(expected, expert_inputs=packed, **inner)
    down = s.grouped_matmul(
        layer.down, layer.scales[1], layer.factors, ExpertInputs(*codes, *slots, None)
    )

    tokens = layer.quantized(layout="prepared")
    assert isinstance(tokens, PreparedTokens) and tokens.format == s.format.name
    inputs = ExpertInputs(tokens, None, *slots, None)
    got = s.grouped_matmul(weights[0], None, layer.factors, inputs)
    assert_same(got, expected)
    tokens = s.fused_silu_quantize(got, expert_inputs=inputs, layout="prepared", **inner)
    inputs = ExpertInputs(tokens, None, *slots, None)
    assert_same(s.grouped_matmul(weights[1], None, layer.factors, inputs), down)


@every_strategy
def test_prepares_weight_scales(name: str) -> None:
    layer = Layer(make(name))
    for device in (None, "cpu"):
        got = layer.strategy.prepare_weight_scales(*layer.rows, device)
        for tiles, expected in zip(got, layer.scales, strict=True):
            assert_same(tiles, expected)


@every_strategy
def test_prepares_swiglu_operands(name: str) -> None:
    layer = Layer(make(name))
    inputs = layer.expert_inputs(usage_stats=None)
    p = layer.strategy.prepare_swiglu_operands(
        inputs, expert_scales=layer.factors, input_scales=layer.inputs
    )
    assert p._fields == (*ExpertInputs._fields, "c_input_scales", "expert_scales")
    assert p.hidden is inputs.hidden and p.expert_ids is inputs.expert_ids
    assert p.usage_stats.tolist() == [8192, EXPERTS]
    assert p.expert_scales is layer.factors
    if layer.inputs is None:
        assert p.c_input_scales is None
    else:
        assert_same(p.c_input_scales, np.float32(1) / layer.inputs)


@every_strategy
def test_what_it_is(name: str) -> None:
    s = make(name)
    assert isinstance(s, QuantStrategy)
    assert s.is_nvfp4 == (name == "nvfp4")
    assert s.weight_format is (MXFP4 if name in ("mxfp4", "w4a8") else s.format)
    assert s.format.name == ("mxfp8" if name == "w4a8" else name)
    assert s.format.name in repr(s)


def test_reciprocals(kernels: Any) -> None:
    """The kernel that inverts on a GPU rounds once; the host inverts in numpy."""
    rng = np.random.default_rng(0)
    count = 40 if simulator_enabled() else 1000
    scales = np.float32(2) ** rng.uniform(-120, 120, count).astype(np.float32)
    expected = np.float32(1) / scales

    def inverse(x: Any, backend: str) -> Any:
        return make("nvfp4", backend).inverse_scales(x, validate="shapes")

    assert_same(kernels(inverse, scales), expected)
    if kernels.name != "gpu":
        out = np.zeros_like(scales)
        launch_reciprocal(executor(kernels.name), out, scales, count=count)
        assert_same(out, expected)


@pytest.mark.parametrize(
    ("config", "dtype", "error", "text"),
    [
        (None, "uint8", ArgTypeError, "config: expected a QuantConfig, got NoneType"),
        (QuantConfig.nvfp4(), "float8_e4m3fn", ConfigError, "uint8 for nvfp4"),
        (QuantConfig.mxfp8(), "uint8", ConfigError, "float8_e4m3fn for mxfp8"),
        (QuantConfig.mxfp4(), "bfloat16", ConfigError, "uint8 or float8_e4m3fn for mxfp4"),
        (QuantConfig.blockscaled_fp8(), "float8_e4m3fn", ConfigError, "Fp8Strategy"),
        (QuantConfig.nvfp4(), "int4", DTypeError, "dtype"),
    ],
)
def test_bad_constructions(config: Any, dtype: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        NvMxf4f8Strategy(config, dtype)


@pytest.mark.parametrize(
    ("group_size", "error", "text"),
    [
        (0, RangeError, "group_size"),
        (-16, RangeError, "-16"),
        (24, UnsupportedError, r"16 \(NVFP4\)"),
        (32, ConfigError, "16, the block of nvfp4, got 32"),
        (16.0, ArgTypeError, "float"),
        (True, ArgTypeError, "bool"),
    ],
)
def test_bad_group_sizes(group_size: Any, error: type[Exception], text: str) -> None:
    layer = Layer(make("nvfp4"))
    with pytest.raises(error, match=text):
        layer.strategy.quantize(layer.x, group_size)
    with pytest.raises(error, match=text):
        layer.strategy.grouped_quantize(layer.x, group_size, layer.inputs, *layer.slots())


def bad_inputs_of(layer: Layer) -> list[tuple[Any, type[Exception], str]]:
    good = layer.expert_inputs()
    usage = "expert_inputs.usage_stats"
    return [
        (tuple(good)[:5], ArgTypeError, "a tuple of 6: hidden, hidden_scales, .* got tuple of 5"),
        ((), ArgTypeError, "got tuple of 0"),
        (None, ArgTypeError, "got NoneType"),
        ([None] * 6, ArgTypeError, "expert_inputs.hidden: expected an array, got None"),
        (
            good._replace(expert_start=good.hidden_scales, hidden_scales=good.expert_start),
            DTypeError,
            "expert_inputs.expert_start: expected uint32, got .* the order is",
        ),
        (good._replace(usage_stats=np.uint32([5])), ShapeError, usage),
        (good._replace(usage_stats=np.float32([5, 3])), DTypeError, usage),
        (good._replace(usage_stats=np.uint32([5, 4])), RangeError, f"{usage}.* at most 3"),
    ]


@pytest.mark.parametrize("row", range(8))
def test_bad_expert_inputs(row: int) -> None:
    layer = Layer(make("nvfp4"))
    inputs, error, text = bad_inputs_of(layer)[row]
    weights = (layer.gate_up, layer.scales[0])
    scales = {"expert_scales": layer.factors}
    with pytest.raises(error, match=text):
        layer.strategy.grouped_matmul(*weights, expert_inputs=inputs, **scales)
    scales["input_scales"] = layer.inputs
    with pytest.raises(error, match=text):
        layer.strategy.grouped_matmul_swiglu(*weights, expert_inputs=inputs, **scales)
    with pytest.raises(error, match=text):
        layer.strategy.prepare_swiglu_operands(inputs, **scales)
    with pytest.raises(error, match=text):
        gate_up = np.zeros((10, 2 * MOE_DIM), BF16)
        layer.strategy.fused_silu_quantize(gate_up, layer.inputs, inputs)


def test_usage_statistics_that_are_too_small_show_at_level_full() -> None:
    layer = Layer(make("mxfp4"))
    inputs = layer.expert_inputs(usage_stats=np.uint32([1, 3]))
    args = (layer.gate_up, layer.scales[0], None, inputs)
    assert layer.strategy.grouped_matmul(*args).any()
    with pytest.raises(RoutingError, match="at least 4, the rows of slot 0, got 1"):
        layer.strategy.grouped_matmul(*args, validate="full")


def refusals(layer: Layer) -> list[tuple[Any, type[Exception], str]]:
    s, inputs = layer.strategy, layer.expert_inputs()
    weights = (layer.gate_up, layer.scales[0])
    gate_up = np.zeros((10, 2 * MOE_DIM), BF16)
    rows = layer.rows

    starts, tile_offsets, ids = layer.slots()

    def quantize(scale: Any, offsets: Any = tile_offsets) -> Any:
        return lambda: s.grouped_quantize(layer.x, 16, scale, starts, offsets, ids)

    def swiglu(**changes: Any) -> Any:
        given = {"expert_scales": layer.factors, "input_scales": layer.inputs} | changes
        return lambda: s.grouped_matmul_swiglu(*weights, expert_inputs=inputs, **given)

    def silu(scales: Any = layer.inputs, **changes: Any) -> Any:
        return lambda: s.fused_silu_quantize(gate_up, scales, inputs, **changes)

    def prepare(*args: Any) -> Any:
        return lambda: s.prepare_weight_scales(*args)

    tiny = np.float32([1, 1e-45, 1])
    return [
        (quantize(None), ScaleError, "input_scale is required"),
        (quantize(layer.inputs, None), ScaleError, "scales_offset"),
        (quantize(np.float32([1, 0, 1])), ScaleError, r"input_scale\[1\] = 0.0 for expert 1"),
        (quantize(np.float32([1, -1, 1])), ScaleError, r"input_scale\[1\] = -1.0"),
        (quantize(np.float32([1, 1, np.nan])), ScaleError, r"input_scale\[2\] = nan"),
        (quantize(tiny), ScaleError, "a finite float32 inverse"),
        (quantize(layer.inputs.astype(np.float64)), DTypeError, "float64"),
        (lambda: s.grouped_matmul(*weights, None, inputs), ScaleError, "expert_scales"),
        (
            lambda: s.grouped_matmul(*weights, layer.factors, inputs, -1),
            RangeError,
            "estimated_total_m",
        ),
        (
            lambda: s.grouped_matmul(*weights, layer.factors, inputs, None, -1),
            RangeError,
            "a_scales_max_padded_m",
        ),
        (swiglu(expert_scales=None), ScaleError, "expert_scales"),
        (swiglu(input_scales=None), ScaleError, "input_scales"),
        (swiglu(input_scales=tiny), ScaleError, "for slot 1"),
        (swiglu(match_bf16=1), ArgTypeError, "match_bf16"),
        (swiglu(activation="silu"), ArgTypeError, "a GatedActivation"),
        (silu(None), ScaleError, "input_scales"),
        (silu(max_padded_M=-1), RangeError, "max_padded_M"),
        (silu(max_padded_M=1.5), ArgTypeError, "max_padded_M"),
        (silu(activation="gelu"), ArgTypeError, "activation"),
        (
            lambda: s.prepare_swiglu_operands(inputs, input_scales=layer.inputs),
            ScaleError,
            "expert_scales",
        ),
        (
            lambda: s.prepare_swiglu_operands(inputs, expert_scales=layer.factors),
            ScaleError,
            "input_scales is required",
        ),
        (prepare(layer.scales[0], rows[1]), LayoutError, "interleaved already"),
        (prepare(rows[0], rows[1][0]), ShapeError, "down: "),
        (prepare(rows[0], rows[1][:2]), ShapeError, "of 3 experts, as gate_up, got of 2"),
        (prepare(rows[0], None), ScaleError, "down is required"),
        (prepare(rows[0], rows[1].view(np.int8)), DTypeError, "int8"),
        (prepare(*rows, "tpu:0"), DeviceError, "'tpu:0'"),
        (prepare(*rows, "cuda:0"), DeviceError, "some on the host"),
        (prepare(*rows, 0), DeviceError, "scales on cuda:0"),
    ]


@pytest.mark.parametrize("row", range(29))
def test_refusals(row: int) -> None:
    """Tables G, M, S, W and L: what an NVFP4 strategy refuses before it computes."""
    call, error, text = refusals(Layer(make("nvfp4")))[row]
    with pytest.raises(error, match=text):
        call()


def test_refusals_of_other_formats() -> None:
    mx = Layer(make("mxfp8"))
    factors = np.ones(EXPERTS, np.float32)
    with pytest.raises(ConfigError, match="input_scale: expected None"):
        mx.strategy.grouped_quantize(mx.x, 32, factors, *mx.slots())
    packed = mx.gate_up[..., : HIDDEN // 2].copy()
    with pytest.raises(ConfigError, match="packed FP4 for K = 64"):
        mx.strategy.grouped_matmul(packed, mx.scales[0], None, mx.expert_inputs())
    rows = np.ones(TOKENS * TOP_K, BF16)
    with pytest.raises(ConfigError, match="only NVFP4 has row scales"):
        mx.strategy.grouped_matmul(
            mx.gate_up, mx.scales[0], None, mx.expert_inputs(), a_row_scales=rows
        )
    custom = GatedActivation(gated_activation_fn=lambda gate, up: gate * up)
    with pytest.raises(ConfigError, match="a named activation"):
        mx.strategy.grouped_matmul_swiglu(
            mx.gate_up, mx.scales[0], expert_inputs=mx.expert_inputs(), activation=custom
        )
    with pytest.raises(TypeError):
        mx.strategy.grouped_matmul_swiglu(mx.gate_up, mx.scales[0], mx.expert_inputs())


def test_a_scale_that_looks_inverted_warns() -> None:
    layer = Layer(make("nvfp4"))
    layer.inputs = np.float32([1e7, 1, 1])
    with pytest.warns(UserWarning, match="as checkpoints hold them, not inverted"):
        layer.quantized()
