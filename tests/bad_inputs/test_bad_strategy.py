"""P10: what only the block formats' strategy refuses (tables K, Q, G, S, L and W)."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

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
from nbmoe.layouts import interleave_scales
from nbmoe.operand import named_dtype
from nbmoe.strategies import NvMxf4f8Strategy
from nbmoe.strategies.expert_inputs import ExpertInputs
from tests.bad_inputs.case import (
    Case,
    FakeDeviceArray,
    Recorder,
    both,
    edit,
    params,
    put,
    refused,
    remake,
    shorter,
    without,
)
from tests.bad_inputs.sizes import EXPERTS, ROWS
from tests.bad_inputs.test_bad_strategy_common import remade
from tests.bad_inputs.valid_strategy import (
    BLOCK,
    BLOCK_FORMATS,
    METHODS,
    Method,
    expert_inputs,
    strategy,
    weight_scales,
)

NAN, INF = np.float32("nan"), np.float32("inf")
FULL = {"validate": "full"}
OURS = [method for method in METHODS if method.variant in BLOCK_FORMATS]


def of(*names: str, variant: str = "") -> list[Method]:
    """The methods of these names."""
    return [m for m in OURS if m.name in names and variant in ("", m.variant)]


def table(methods: list[Method], cases: Callable[[Method], Iterator[Case]]) -> list[Any]:
    """Methods and their cases as parameters."""
    return [
        pytest.param(method, case, id=f"{method}-{case.id}")
        for method in methods
        for case in cases(method)
    ]


def check(method: Method, case: Case, recorder: Recorder) -> None:
    """Makes the spoilt call; the message names the method unless the case says otherwise."""
    arguments = method.build()
    case.change(arguments)
    refused(method.bound(), arguments, case, case.api or method.api, recorder)


CONSTRUCTOR = [
    Case("K1", put(config=None), ArgTypeError, "config", "NoneType None", "a QuantConfig"),
    Case("K1-str", put(config="nvfp4"), ArgTypeError, "config", "str 'nvfp4'", "a QuantConfig"),
    Case("K2", put(dtype="float8_e4m3fn"), ConfigError, "dtype", "float8_e4m3fn", "uint8 for nv"),
    Case(
        "K2-mxfp8",
        put(config=QuantConfig.mxfp8()),
        ConfigError,
        "dtype",
        "uint8",
        "float8_e4m3fn for mxfp8",
    ),
    Case("K2-bf16", put(dtype="bfloat16"), ConfigError, "dtype", "bfloat16", "uint8 for nvfp4"),
    Case(
        "K3",
        put(config=QuantConfig.rowwise_fp8()),
        ConfigError,
        "config",
        "fp8",
        "Fp8Strategy is the one of FP8",
    ),
    Case("dtype", put(dtype="int4"), DTypeError, "dtype", "'int4'", "the name of a type"),
    Case("dtype-none", put(dtype=None), DTypeError, "dtype", "None", "the name of a type"),
]


@pytest.mark.parametrize("case", params(CONSTRUCTOR))
def test_constructor(case: Case, recorder: Recorder) -> None:
    arguments = {"config": QuantConfig.nvfp4(), "dtype": "uint8"}
    case.change(arguments)
    refused(NvMxf4f8Strategy, arguments, case, "NvMxf4f8Strategy", recorder)


def group_cases(method: Method) -> Iterator[Case]:
    """Groups that are of no format, or of another."""
    arg, block = "group_size", BLOCK[method.variant]
    says = f"{block}, the block of "
    yield Case("Q1", put(group_size=0), RangeError, arg, "0", says)
    yield Case("Q2", put(group_size=-16), RangeError, arg, "-16", says)
    known = r"-1 \(FP8 rows and tensors\), 16 \(NVFP4\), 32 \(MX\), 128 \(FP8 blocks\)"
    yield Case("Q3", put(group_size=24), UnsupportedError, arg, "24", known)
    for other in sorted({-1, 16, 32, 128} - {block}):
        yield Case(f"Q4-{other}", put(group_size=other), ConfigError, arg, str(other), says)
    yield Case("Q6", put(group_size=16.0), ArgTypeError, arg, r"float 16\.0", says)
    yield Case("Q7", put(group_size=True), ArgTypeError, arg, "bool True", says)
    yield Case("Q6-none", put(group_size=None), ArgTypeError, arg, "NoneType None", says)


@pytest.mark.parametrize(("method", "case"), table(of("quantize", "grouped_quantize"), group_cases))
def test_group_refused(method: Method, case: Case, recorder: Recorder) -> None:
    check(method, case, recorder)


def scale_name(method: Method) -> str:
    """What a method calls the input scales."""
    return "input_scale" if method.name == "grouped_quantize" else "input_scales"


def input_scale_cases(method: Method) -> Iterator[Case]:
    """Input scales of NVFP4 that are missing or have no finite positive inverse."""
    arg = scale_name(method)
    per = "expert" if method.name == "grouped_quantize" else "slot"
    none = put(**{arg: None})
    yield Case("G17", none, ScaleError, arg, "None", f"{arg} is required")
    for row, value in (
        ("G19", np.float32(0)),
        ("L8", np.float32(-1)),
        ("G20-nan", NAN),
        ("G20-inf", INF),
        ("L9", np.float32(1e-45)),
    ):
        got = rf"{arg}\[3\] = {value} for {per} 3"
        yield Case(row, edit(arg, 3, value), ScaleError, arg, got, "missing|inverse")
    f64 = remake(arg, lambda x: x.astype(np.float64))
    yield Case("G21", f64, DTypeError, arg, "float64", "float32")
    yield Case("C2", remake(arg, lambda x: x.tolist()), ArgTypeError, arg, "list", "numpy.asarray")
    yield Case("C7", put(**{arg: 1.5}), ArgTypeError, arg, r"float 1\.5", "an array")
    wide = remake(arg, lambda x: x[:, np.newaxis])
    yield Case("C8", wide, ShapeError, arg, r"shape \(4, 1\)", "squeeze")
    theirs = {"grouped_quantize": "sf_tensor", "fused_silu_quantize": "input_scales"}
    name = theirs.get(method.name, "c_input_scales")
    got = "3 entries" if name == "sf_tensor" else r"\(3,\)"
    yield Case("G18", shorter(arg), ShapeError, name, got, api=method.op)


SCALED = of("grouped_quantize", "fused_silu_quantize", "grouped_matmul_swiglu", variant="nvfp4")


@pytest.mark.parametrize(("method", "case"), table(SCALED, input_scale_cases))
def test_input_scale_refused(method: Method, case: Case, recorder: Recorder) -> None:
    check(method, case, recorder)


@pytest.mark.parametrize("method", SCALED, ids=str)
def test_inverted_twice(method: Method, recorder: Recorder) -> None:
    """S12: legal, but nobody has activations of thousands of millions."""
    arguments = method.build()
    arg = scale_name(method)
    arguments[arg][2] = 2e6
    with pytest.warns(
        UserWarning, match=rf"{arg}: expected input scales as .*{arg}\[2\] = 2000000"
    ):
        method.bound()(**arguments)
    arguments[arg][2] = 1e6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.bound()(**arguments)


SCALELESS = of("grouped_quantize", "fused_silu_quantize", "grouped_matmul_swiglu")
SCALELESS = [method for method in SCALELESS if method.variant != "nvfp4"]


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("method", SCALELESS, ids=str)
def test_mx_has_no_input_scale(method: Method, inverted: bool, recorder: Recorder) -> None:
    arg = scale_name(method)
    for values in (np.ones(EXPERTS, np.float32), np.float32([NAN])):
        scales = put(**{arg: values}, scales_are_inverted=inverted)
        check(method, Case("Q19", scales, ConfigError, arg, "an array", "None"), recorder)


@pytest.mark.parametrize("variant", [v for v in BLOCK_FORMATS if v != "nvfp4"])
def test_mx_prepares_no_input_scale(variant: str, recorder: Recorder) -> None:
    entry = f"grouped_matmul_blocked_swiglu:{variant}"
    method = Method(
        "prepare_swiglu_operands", variant, lambda: {"expert_inputs": expert_inputs(entry)}
    )
    scales = put(input_scales=np.ones(EXPERTS, np.float32))
    check(method, Case("Q19", scales, ConfigError, "input_scales", "an array", "None"), recorder)


def routing_cases(method: Method) -> Iterator[Case]:
    """Six operands that are fewer, missing, or in another order."""
    arg = "expert_inputs"
    names = "hidden, hidden_scales, expert_start, scales_offsets, expert_ids, usage_stats"
    five = remake(arg, lambda x: tuple(x)[:5])
    yield Case("S4", five, ArgTypeError, arg, "tuple of 5", names)
    yield Case("S4-7", remake(arg, lambda x: [*x, None]), ArgTypeError, arg, "list of 7", names)
    yield Case("S4-none", put(expert_inputs=()), ArgTypeError, arg, "tuple of 0", names)
    yield Case("S4-type", put(expert_inputs=None), ArgTypeError, arg, "NoneType", names)
    yield Case("S4-dict", put(expert_inputs={}), ArgTypeError, arg, "dict", names)
    nothing = put(expert_inputs=[None] * 6)
    yield Case("S5", nothing, ArgTypeError, f"{arg}.hidden", "None", "the order is")
    swapped = remake(arg, lambda x: ExpertInputs(x[0], x[2], x[1], *x[3:]))
    yield Case("S6", swapped, DTypeError, f"{arg}.expert_start", "(float8|uint8)", "the order is")
    swapped = remake(arg, lambda x: ExpertInputs(*x[:3], x[4], x[3], x[5]))
    yield Case("S6-ids", swapped, DTypeError, f"{arg}.scales_offsets", "int32", "the order is")


def usage_cases(method: Method) -> Iterator[Case]:
    """Usage statistics that contradict the routing."""
    path = "expert_inputs.usage_stats"

    def stats(*values: Any, dtype: Any = np.uint32) -> Any:
        return remade(path, lambda x: np.array(values, dtype))

    yield Case("L13", stats(125), ShapeError, path, r"shape \(1,\)", r"\(2,\)")
    yield Case("L13-3", stats(125, 4, 0), ShapeError, path, r"shape \(3,\)", r"\(2,\)")
    yield Case("L13-i64", stats(125, 4, dtype=np.int64), DTypeError, path, "int64", "uint32")
    yield Case("L12", remade(path, lambda x: [125, 4]), ArgTypeError, path, "list", "asarray")
    yield Case("L15", stats(125, 5), RangeError, f"{path}[1]", "5", "at most 4, the slots")
    says = "at least 125, the rows of slot 2"
    yield Case("L14", stats(124, 4), RoutingError, f"{path}[0]", "124", says, FULL)


ROUTED = of("fused_silu_quantize", "grouped_matmul", "grouped_matmul_swiglu")


@pytest.mark.parametrize(
    ("method", "case"), table(ROUTED, routing_cases) + table(ROUTED, usage_cases)
)
def test_expert_inputs_refused(method: Method, case: Case, recorder: Recorder) -> None:
    check(method, case, recorder)


@pytest.mark.parametrize("method", ROUTED, ids=str)
def test_usage_may_be_missing_or_on_a_gpu(method: Method, recorder: Recorder) -> None:
    """S16: they choose nothing, so nobody reads them where that would wait for a GPU."""
    for stats in (None, FakeDeviceArray((2,), "<u4")):
        arguments = method.build()
        remade("expert_inputs.usage_stats", lambda x, stats=stats: stats)(arguments)
        method.bound()(**arguments)


def padding_cases(method: Method) -> Iterator[Case]:
    """Sizes that have no effect, but are sizes."""
    arg = "max_padded_M" if method.name == "fused_silu_quantize" else "a_scales_max_padded_m"
    yield Case("S14", put(**{arg: -1}), RangeError, arg, "-1", r"\[0, ")
    yield Case("S15", put(**{arg: 128.0}), ArgTypeError, arg, r"float 128\.0", "an int")
    yield Case("S15-none", put(**{arg: None}), ArgTypeError, arg, "NoneType None", "an int")


PADDED = of("fused_silu_quantize", "grouped_matmul")


@pytest.mark.parametrize(("method", "case"), table(PADDED, padding_cases))
def test_padding_refused(method: Method, case: Case, recorder: Recorder) -> None:
    check(method, case, recorder)


def product_cases(method: Method) -> Iterator[Case]:
    """Weights of another format, and factors that are missing."""
    op = method.op
    bad = {"estimated_total_m": -1}
    yield Case("M18", put(**bad), RangeError, "estimated_total_m", "-1", api=op)
    if method.variant == "nvfp4":
        none = put(expert_scales=None)
        yield Case("M16", none, ScaleError, "expert_scales", "None", "is required", api=op)
        codes = remake("weight", lambda x: x.view(named_dtype("float8_e4m3fn")))
        got = "weight of float8_e4m3fn"
        yield Case("M3", codes, ConfigError, "weight_format", got, "nvfp4 with weight", api=op)
    else:
        rows = put(a_row_scales=np.ones(ROWS, named_dtype("bfloat16")))
        yield Case("W4", rows, ConfigError, "a_row_scales", "some beside", "only NVFP4", api=op)
    if method.variant == "mxfp8":
        packed = remake("weight", lambda x: x[..., ::2].copy().view(np.uint8))
        got = "packed FP4 for K"
        yield Case("M3", packed, ConfigError, "weight_format", got, "mxfp8 weights", api=op)
    if method.name == "grouped_matmul_swiglu":
        yield Case("W11", put(match_bf16=1), ArgTypeError, "match_bf16", "int 1", api=op)
        yield Case("S8", put(activation="silu"), ArgTypeError, "activation", "str", api=op)


PRODUCTS = of("grouped_matmul", "grouped_matmul_swiglu")


@pytest.mark.parametrize(("method", "case"), table(PRODUCTS, product_cases))
def test_product_refused(method: Method, case: Case, recorder: Recorder) -> None:
    check(method, case, recorder)


@pytest.mark.parametrize("method", of("grouped_matmul_swiglu"), ids=str)
def test_swiglu_takes_keywords(method: Method) -> None:
    """W8, C22."""
    arguments = method.build()
    with pytest.raises(TypeError, match="positional argument"):
        method.bound()(arguments["weight"], arguments["weight_scales"], None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'expert_offset'"):
        method.bound()(**arguments, expert_offset=1)


def prepared() -> dict[str, Any]:
    """Arguments of `prepare_swiglu_operands`."""
    return {
        "expert_inputs": expert_inputs("grouped_matmul_blocked_swiglu:nvfp4"),
        "expert_scales": np.ones(EXPERTS, np.float32),
        "input_scales": np.ones(EXPERTS, np.float32),
    }


PREPARE = Method("prepare_swiglu_operands", "nvfp4", prepared)
OPERANDS = [
    Case("L10", put(expert_scales=None), ScaleError, "expert_scales", "None", "required"),
    Case("L11", put(input_scales=None), ScaleError, "input_scales", "None", "is required"),
    Case("L7", edit("input_scales", 2, 0), ScaleError, "input_scales", r"0\.0 for slot 2", "miss"),
    Case("L8", edit("input_scales", 1, -1), ScaleError, "input_scales", r"-1\.0 for slot 1"),
    Case(
        "L9", edit("input_scales", 0, 1e-45), ScaleError, "input_scales", "e-45 for slot 0", "inv"
    ),
    *routing_cases(PREPARE),
    *usage_cases(PREPARE),
]


@pytest.mark.parametrize("case", params(OPERANDS))
def test_operands_refused(case: Case, recorder: Recorder) -> None:
    check(PREPARE, case, recorder)


def tiles_cases(method: Method) -> Iterator[Case]:
    """Row-major weight scales that are missing, tiled already, or of two kinds."""
    for arg in ("gate_up", "down"):
        yield Case(f"L6-{arg}", put(**{arg: None}), ScaleError, arg, "None", f"{arg} is required")
        tiled = remake(arg, interleave_scales)
        yield Case(f"L4-{arg}", tiled, LayoutError, arg, "interleaved already", "once")
        one = remake(arg, lambda x: x[0].copy())
        yield Case(f"C7-{arg}", one, ShapeError, arg, r"shape \(\d+, \d\)", "E, rows, K/block")
        listed = remake(arg, lambda x: x.tolist())
        yield Case(f"C2-{arg}", listed, ArgTypeError, arg, "list", "numpy.asarray")
        f32 = remake(arg, lambda x: x.astype(np.float32))
        yield Case(f"L17-{arg}", f32, DTypeError, arg, "float32", "scale bytes")
        signed = remake(arg, lambda x: x.view(np.int8))
        yield Case(f"L17-i8-{arg}", signed, DTypeError, arg, "int8", r"\.view\('uint8'\)")
        gaps = remake(arg, lambda x: np.repeat(x, 2, axis=2)[..., ::2])
        yield Case(f"C10-{arg}", gaps, LayoutError, arg, "strides", "contiguous")
        unit = named_dtype("float8_e8m0fnu" if method.variant == "nvfp4" else "float8_e4m3fn")
        typed = remake(arg, lambda x, unit=unit: x.view(unit))
        yield Case(f"M9-{arg}", typed, DTypeError, arg, unit.name, "scale bytes")
        none = remake(arg, lambda x: x[:, :0].copy())
        yield Case(f"L2-{arg}", none, ShapeError, arg, "rows = 0", "rows > 0")
        none = remake(arg, lambda x: x[..., :0].copy())
        yield Case(f"L3-{arg}", none, ShapeError, arg, "K/block = 0", "K/block > 0")
        fake = remake(arg, FakeDeviceArray.of)
        on_cpu = both(fake, put(device="cpu"))
        yield Case(f"C18-{arg}", on_cpu, DeviceError, arg, "GPU 0", "move them first")
    for device in ("cuda:1", 1):
        on_gpu = both(remake("gate_up", FakeDeviceArray.of), put(device=device))
        says = "scales on cuda:1"
        yield Case(f"L16-gpu-{device}", on_gpu, DeviceError, "gate_up", "some on GPU 0", says)
    yield Case("L1", shorter("down"), ShapeError, "down", "of 3", "scales of 4 experts")
    for device in ("tpu", "cuda:x", 1.5):
        got = f"'{device}'" if isinstance(device, str) else str(device)
        yield Case(f"L16-{device}", put(device=device), DeviceError, "device", got, "'cuda'")
    for device in ("cuda", "cuda:1", 1):
        change = put(device=device)
        yield Case(f"L16-{device}", change, DeviceError, "gate_up", "some on the host", "move")


TILED = [
    Method("prepare_weight_scales", v, lambda v=v: weight_scales(v))  # type: ignore[misc]
    for v in BLOCK_FORMATS
]


@pytest.mark.parametrize(("method", "case"), table(TILED, tiles_cases))
def test_weight_scales_refused(method: Method, case: Case, recorder: Recorder) -> None:
    check(method, case, recorder)


@pytest.mark.parametrize("value", [np.float32(0), np.float32(-1), NAN, INF, np.float32(1e-45)])
def test_inverse_refused(value: Any, recorder: Recorder) -> None:
    """L7-L9."""
    method = Method("inverse_scales", "nvfp4", lambda: {"scales": np.ones(4, np.float32)})
    got = rf"scales\[1\] = {value} for expert 1"
    check(method, Case("L8", edit("scales", 1, value), ScaleError, "scales", got), recorder)


def test_options_that_need_no_array() -> None:
    """What is legal without: scale offsets are not, for any format."""
    for method in of("grouped_quantize"):
        arguments = method.build()
        without("out")(arguments)
        with pytest.raises(ScaleError, match=r"grouped_quantize\(\): scales_offset: .*, got None"):
            method.bound()(**arguments | {"scales_offset": None})
    assert repr(strategy("mxfp8xmxfp4")) == "NvMxf4f8Strategy(mxfp8 x mxfp4)"
