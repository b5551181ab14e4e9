"""Quantization settings: builders, questions, one form for every spelling, and refusals."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from nbmoe import config
from nbmoe.config import (
    InputScaleSpec,
    QuantConfig,
    QuantFormat,
    ScaleGranularity,
    ScaleOrigin,
    ScalesType,
    WeightScaleSpec,
    apply_fused_kernel_flags,
    fp4_packed_k,
)
from nbmoe.errors import ArgTypeError, ConfigError, DTypeError, RangeError, ShapeError
from nbmoe.formats import MXFP4, MXFP8, NVFP4
from nbmoe.scale_specs import padded_rows

BLOCK, ROWWISE, COLWISE, TENSOR = (
    ScaleGranularity.BLOCK,
    ScaleGranularity.ROWWISE,
    ScaleGranularity.COLWISE,
    ScaleGranularity.TENSOR,
)
STATIC, DYNAMIC = ScaleOrigin.STATIC, ScaleOrigin.DYNAMIC
ROW = WeightScaleSpec(ROWWISE, "float32")
TOKEN = InputScaleSpec(ROWWISE, DYNAMIC, "float32")
BUILT = {
    "blockscaled_fp8": QuantConfig.blockscaled_fp8(),
    "rowwise_fp8": QuantConfig.rowwise_fp8(),
    "tensor_fp8": QuantConfig.tensor_fp8(),
    "nvfp4": QuantConfig.nvfp4(),
    "mxfp4": QuantConfig.mxfp4(),
    "mxfp8": QuantConfig.mxfp8(),
}


def fields_of(cfg: QuantConfig) -> tuple[object, ...]:
    w, x = cfg.weight_scale, cfg.input_scale
    return w.granularity, w.dtype, w.block_size, x.granularity, x.dtype, x.block_size, x.origin


def test_builders() -> None:
    """The table of the module."""
    f32, e4m3, e8m0 = "float32", "float8_e4m3fn", "float8_e8m0fnu"
    assert fields_of(BUILT["blockscaled_fp8"]) == (
        *(BLOCK, f32, (128, 128)),
        *(BLOCK, f32, (1, 128), DYNAMIC),
    )
    assert fields_of(BUILT["rowwise_fp8"]) == (ROWWISE, f32, None, ROWWISE, f32, None, DYNAMIC)
    assert fields_of(BUILT["tensor_fp8"]) == (TENSOR, f32, None, TENSOR, f32, None, DYNAMIC)
    assert QuantConfig.tensor_fp8(STATIC).is_static
    assert fields_of(BUILT["nvfp4"]) == (BLOCK, e4m3, (1, 16), BLOCK, f32, (1, 16), STATIC)
    for name in ("mxfp4", "mxfp8"):
        assert fields_of(BUILT[name]) == (BLOCK, e8m0, (1, 32), BLOCK, f32, (1, 32), DYNAMIC)
    other = QuantConfig.blockscaled_fp8(64, "bfloat16", mlp_quantized_layers=[3, 1, 3])
    assert other.weight_scale == WeightScaleSpec(BLOCK, "bfloat16", (64, 64))
    assert other.mlp_quantized_layers == {1, 3} and other.attn_quantized_layers == frozenset()


QUESTIONS = ("is_static", "is_nvfp4", "is_mxfp4", "is_mxfp8", "is_mxfp6", "is_fp4", "is_mx")
ANSWERS = {
    "blockscaled_fp8": "",
    "rowwise_fp8": "",
    "tensor_fp8": "",
    "nvfp4": "is_static is_nvfp4 is_fp4",
    "mxfp4": "is_mxfp4 is_fp4 is_mx",
    "mxfp8": "is_mxfp8 is_mx",
}


@pytest.mark.parametrize("name", BUILT)
def test_questions(name: str) -> None:
    cfg = BUILT[name]
    assert [q for q in QUESTIONS if getattr(cfg, q)] == ANSWERS[name].split()
    assert cfg.is_dynamic is not cfg.is_static
    assert cfg.block_format is {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8}.get(name)


@pytest.mark.parametrize(
    ("name", "granularity"),
    [
        ("blockscaled_fp8", (1, 128, 128)),
        ("rowwise_fp8", (1, 1, -1)),
        ("tensor_fp8", (-1, -1, -1)),
        ("nvfp4", (1, 1, 16)),
        ("mxfp4", (1, 1, 32)),
        ("mxfp8", (1, 1, 32)),
    ],
)
def test_granularity(name: str, granularity: tuple[int, int, int]) -> None:
    assert BUILT[name].scales_granularity_mnk == granularity


def test_scales_of_columns_of_inputs_are_those_of_tokens() -> None:
    """They lie in a row of (1, M), and go by both names."""
    columns = InputScaleSpec(COLWISE, DYNAMIC, "float32")
    cfg = QuantConfig(columns, ROW, (), (), QuantFormat.FBGEMM_FP8)
    assert cfg.scales_granularity_mnk == (1, 1, -1)


@pytest.mark.parametrize(
    ("weight", "x"),
    [
        (ROW, InputScaleSpec(TENSOR, DYNAMIC, "float32")),
        (WeightScaleSpec(TENSOR, "float32"), TOKEN),
        (WeightScaleSpec(COLWISE, "float32"), TOKEN),
        (WeightScaleSpec(BLOCK, "float32", (128, 128)), TOKEN),
        (
            WeightScaleSpec(BLOCK, "float32", (128, 128)),
            InputScaleSpec(BLOCK, DYNAMIC, "float32", block_size=(1, 64)),
        ),
    ],
)
def test_scales_that_do_not_multiply(weight: WeightScaleSpec, x: InputScaleSpec) -> None:
    cfg = QuantConfig(x, weight, (), (), QuantFormat.COMPRESSED_TENSORS_FP8)
    with pytest.raises(ConfigError, match="scales_granularity_mnk: expected block scales of one"):
        _ = cfg.scales_granularity_mnk


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blockscaled_fp8", ("float32", (2, 132))),
        ("nvfp4", ("uint8", (2, 3, 32, 4, 4))),
        ("mxfp4", ("float8_e8m0fnu", (2, 2, 32, 4, 4))),
        ("mxfp8", ("float8_e8m0fnu", (2, 2, 32, 4, 4))),
    ],
)
def test_type_of_quantized_scales(name: str, expected: tuple[str, tuple[int, ...]]) -> None:
    assert BUILT[name].quantized_scales_type((130, 192), device=0) == ScalesType(*expected)


@pytest.mark.parametrize("name", ["rowwise_fp8", "tensor_fp8"])
def test_type_of_other_quantized_scales(name: str) -> None:
    with pytest.raises(ConfigError, match="quantized_scales_type: expected block scales"):
        BUILT[name].quantized_scales_type((130, 192))


@pytest.mark.parametrize(
    ("rows", "dtype", "expected"),
    [(0, "float32", 0), (1, "float32", 4), (5, "bfloat16", 8), (17, "float8_e8m0fnu", 32)],
)
def test_padded_rows(rows: int, dtype: str, expected: int) -> None:
    assert padded_rows(rows, dtype) == expected


def test_elements_of_mx() -> None:
    assert BUILT["mxfp4"].mx_element_dtype == "float4_e2m1fn"
    assert BUILT["mxfp8"].mx_element_dtype == "float8_e4m3fn"
    mxfp6 = dataclasses.replace(BUILT["mxfp4"], format=QuantFormat.MXFP6)
    assert mxfp6.mx_element_dtype == "float6_e2m3fn" and mxfp6.is_mxfp6
    e3m2 = dataclasses.replace(mxfp6, _mxfp6_element_format="e3m2")
    assert e3m2.mx_element_dtype == "float6_e3m2fn"
    with pytest.raises(ConfigError, match="mx_element_dtype: expected an MX format"):
        _ = BUILT["nvfp4"].mx_element_dtype


def test_packed_k() -> None:
    mxfp6 = dataclasses.replace(BUILT["mxfp4"], format=QuantFormat.MXFP6)
    configs = (BUILT["nvfp4"], BUILT["mxfp4"], mxfp6, BUILT["mxfp8"], None)
    assert [fp4_packed_k(64, c) for c in configs] == [32, 32, 48, 64, 64]
    with pytest.raises(ShapeError, match=r"fp4_packed_k\(\): in_dim: expected elements of 4 bits"):
        fp4_packed_k(33, BUILT["nvfp4"])


def test_fused_kernels_are_those_of_block_formats() -> None:
    fused = {name: apply_fused_kernel_flags(c).can_use_fused_swiglu for name, c in BUILT.items()}
    assert fused == {name: name in ("nvfp4", "mxfp4", "mxfp8") for name in BUILT}
    assert not BUILT["nvfp4"].can_use_fused_swiglu


@pytest.mark.parametrize(
    "dtype", ["bfloat16", np.dtype(ml_dtypes.bfloat16), ml_dtypes.bfloat16, "torch.bfloat16"]
)
def test_spellings_of_types(dtype: object) -> None:
    assert WeightScaleSpec(ROWWISE, dtype).dtype == "bfloat16"  # type: ignore[arg-type]


def test_names_stand_for_members() -> None:
    spec = InputScaleSpec("rowwise", "dynamic", np.float32, 7)  # type: ignore[arg-type]
    assert spec == InputScaleSpec(ROWWISE, DYNAMIC, "float32", 7.0)
    cfg = QuantConfig(spec, ROW, [1], {2}, "fbgemm-fp8", bias_dtype=np.float32)  # type: ignore[arg-type]
    assert cfg.format is QuantFormat.FBGEMM_FP8 and cfg.bias_dtype == "float32"
    assert hash(cfg) == hash(dataclasses.replace(cfg))


BAD = [
    (lambda: WeightScaleSpec("blok", "float32"), ConfigError, "granularity.*'blok'"),
    (lambda: WeightScaleSpec(BLOCK, "float32"), ConfigError, "block_size.*two ints.*None"),
    (lambda: WeightScaleSpec(BLOCK, "float32", (128,)), ConfigError, r"block_size.*\(128,\)"),
    (lambda: WeightScaleSpec(BLOCK, "float32", (0, 128)), ConfigError, r"block_size.*\(0, 128\)"),
    (lambda: WeightScaleSpec(BLOCK, "float32", (1, 2.0)), ConfigError, r"block_size.*2\.0"),
    (lambda: WeightScaleSpec(ROWWISE, "float32", (1, 128)), ConfigError, "None with.*'rowwise'"),
    (lambda: WeightScaleSpec(ROWWISE, "float"), DTypeError, "dtype.*'float'"),
    (lambda: WeightScaleSpec(ROWWISE, np.float64), DTypeError, "dtype.*float64"),
    (lambda: WeightScaleSpec(ROWWISE, None), DTypeError, "dtype.*None"),
    (lambda: InputScaleSpec(TENSOR, "online", "float32"), ConfigError, "origin.*'online'"),
    (lambda: InputScaleSpec(BLOCK, DYNAMIC, "float32"), ConfigError, "block_size"),
    (lambda: InputScaleSpec(TENSOR, DYNAMIC, "float32", 0.0), RangeError, "activation_scale_ub"),
    (lambda: InputScaleSpec(TENSOR, DYNAMIC, "float32", np.nan), RangeError, "ub.*nan"),
    (lambda: InputScaleSpec(TENSOR, DYNAMIC, "float32", "1"), ArgTypeError, "ub.*str '1'"),
    (lambda: InputScaleSpec(TENSOR, DYNAMIC, "float32", True), ArgTypeError, "ub.*bool"),
    (lambda: QuantConfig(None, ROW, (), (), "mxfp4"), ArgTypeError, "input_scale.*NoneType"),
    (lambda: QuantConfig(TOKEN, TOKEN, (), (), "mxfp4"), ArgTypeError, "weight_scale.*InputS"),
    (lambda: QuantConfig(TOKEN, ROW, (), (), "fp8"), ConfigError, "format.*'fp8'"),
    (lambda: QuantConfig(TOKEN, ROW, 3, (), "fbgemm-fp8"), ArgTypeError, "mlp_quantized.*int 3"),
    (lambda: QuantConfig(TOKEN, ROW, (), "1", "fbgemm-fp8"), ArgTypeError, "attn_quantized.*str"),
    (lambda: QuantConfig(TOKEN, ROW, (), (), "blockscaled-fp8"), ConfigError, "weight.*rowwise"),
    (lambda: QuantConfig.nvfp4(format="mxfp4"), ConfigError, r"weight_scale.*\(1, 32\)"),
    (
        lambda: QuantConfig.nvfp4(weight_scale=WeightScaleSpec(BLOCK, "float8_e8m0fnu", (1, 16))),
        ConfigError,
        "weight_scale.*float8_e4m3fn.*e8m0",
    ),
    (lambda: QuantConfig.nvfp4(can_use_fused_swiglu=1), ArgTypeError, "fused_swiglu.*int 1"),
    (lambda: QuantConfig.nvfp4(bias_dtype="f16"), DTypeError, "bias_dtype.*'f16'"),
    (lambda: QuantConfig.nvfp4(_mxfp6_element_format="e1m4"), ConfigError, "e1m4"),
    (lambda: QuantConfig.nvfp4(scale=1), TypeError, "scale"),
]


@pytest.mark.parametrize(("make", "error", "says"), BAD, ids=range(len(BAD)))
def test_refused(make: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        make()  # type: ignore[operator]
    assert type(caught.value) is error


def test_settings_are_frozen_and_named_publicly() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BUILT["nvfp4"].format = QuantFormat.MXFP4  # type: ignore[misc]
    assert all(hasattr(config, name) for name in config.__all__)
