"""Quantization settings of a model: what its scales look like and which layers have them.

Settings are frozen and checked where they are made, so that a strategy or a layer only has to ask
whether they are of its kind.

| builder           | weight scales                 | input scales                       |
|-------------------|-------------------------------|------------------------------------|
| `blockscaled_fp8` | BLOCK (128, 128), float32     | BLOCK (1, 128), DYNAMIC, float32   |
| `rowwise_fp8`     | ROWWISE, float32              | ROWWISE, DYNAMIC, float32          |
| `tensor_fp8`      | TENSOR, float32               | TENSOR, DYNAMIC, float32           |
| `nvfp4`           | BLOCK (1, 16), float8_e4m3fn  | BLOCK (1, 16), STATIC, float32     |
| `mxfp4`, `mxfp8`  | BLOCK (1, 32), float8_e8m0fnu | BLOCK (1, 32), DYNAMIC, float32    |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from nbmoe.errors import ArgTypeError, ConfigError, ShapeError, message
from nbmoe.formats import MXFP4, MXFP8, NVFP4, BlockFormat
from nbmoe.layouts import TILE_ROWS, TILE_SHAPE, ceil_div
from nbmoe.scale_specs import (
    InputScaleSpec,
    ScaleGranularity,
    ScaleOrigin,
    WeightScaleSpec,
    dtype_name,
    padded_rows,
)

__all__ = [
    "InputScaleSpec",
    "QuantConfig",
    "QuantFormat",
    "ScaleGranularity",
    "ScaleOrigin",
    "ScalesType",
    "WeightScaleSpec",
    "apply_fused_kernel_flags",
    "fp4_packed_k",
]

API: Final = "QuantConfig"


class QuantFormat(Enum):
    """Family of a quantized checkpoint, under its usual name."""

    COMPRESSED_TENSORS_FP8 = "compressed-tensors-fp8"
    FBGEMM_FP8 = "fbgemm-fp8"
    BLOCKSCALED_FP8 = "blockscaled-fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    MXFP6 = "mxfp6"
    INT8_W8A8 = "int8-w8a8"


_BLOCK_FORMATS: Final = {
    QuantFormat.NVFP4: NVFP4,
    QuantFormat.MXFP4: MXFP4,
    QuantFormat.MXFP8: MXFP8,
}
_BLOCK_SCALES: Final = {
    QuantFormat.NVFP4: ((1, 16), "float8_e4m3fn"),
    QuantFormat.MXFP4: ((1, 32), "float8_e8m0fnu"),
    QuantFormat.MXFP6: ((1, 32), "float8_e8m0fnu"),
    QuantFormat.MXFP8: ((1, 32), "float8_e8m0fnu"),
}
_FP4: Final = (QuantFormat.NVFP4, QuantFormat.MXFP4)
_MX: Final = (QuantFormat.MXFP4, QuantFormat.MXFP6, QuantFormat.MXFP8)
_MXFP6_ELEMENTS: Final = ("e2m3", "e3m2")


class ScalesType(NamedTuple):
    """Element type and shape of the scales of quantized activations."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class QuantConfig:
    """How a model is quantized.

    Attributes:
        input_scale: Scales of activations.
        weight_scale: Scales of weights.
        mlp_quantized_layers: Indices of the layers whose MLP or experts are quantized.
        attn_quantized_layers: Indices of the layers whose attention is quantized.
        format: Family of the checkpoint.
        embedding_output_dtype: Element type of the output embedding, None for the model's.
        shared_experts_weight_dtype: Element type of shared experts' weights, None for `format`'s.
        bias_dtype: Element type of biases, None for the model's.
        can_use_fused_mlp: Whether gate and up may be one matmul.
        can_use_fused_swiglu: Whether gate and up rows are interleaved for the fused SwiGLU.
        scales_pre_interleaved: Whether the checkpoint holds scale tiles, flattened to (N, K/16).

    Raises:
        ArgTypeError: a spec or a flag is of another type.
        ConfigError: `format` is unknown, or the scales are not those of a block format.
        DTypeError: a dtype is no element type.
    """

    input_scale: InputScaleSpec
    weight_scale: WeightScaleSpec
    mlp_quantized_layers: Collection[int]
    attn_quantized_layers: Collection[int]
    format: QuantFormat
    embedding_output_dtype: str | None = None
    shared_experts_weight_dtype: str | None = None
    bias_dtype: str | None = None
    can_use_fused_mlp: bool = False
    can_use_fused_swiglu: bool = False
    scales_pre_interleaved: bool = False
    _mxfp6_element_format: str = "e2m3"

    def __post_init__(self) -> None:
        """Checks the values and brings them to one form."""
        for name, kind in (("input_scale", InputScaleSpec), ("weight_scale", WeightScaleSpec)):
            self._check(name, isinstance(getattr(self, name), kind), f"a {kind.__name__}")
        for name in ("can_use_fused_mlp", "can_use_fused_swiglu", "scales_pre_interleaved"):
            self._check(name, isinstance(getattr(self, name), bool), "a bool")
        for name in ("mlp_quantized_layers", "attn_quantized_layers"):
            layers = getattr(self, name)
            is_layers = isinstance(layers, Collection) and not isinstance(layers, str | bytes)
            self._check(name, is_layers, "a collection of layer indices")
            object.__setattr__(self, name, frozenset(layers))
        for name in ("embedding_output_dtype", "shared_experts_weight_dtype", "bias_dtype"):
            dtype = getattr(self, name)
            if dtype is not None:
                object.__setattr__(self, name, dtype_name(API, name, dtype))
        self._settle_format()

    def _check(self, arg: str, is_right: bool, rule: str) -> None:
        if not is_right:
            value = getattr(self, arg)
            raise ArgTypeError(message(API, arg, rule, f"{type(value).__name__} {value!r}"))

    def _settle_format(self) -> None:
        try:
            object.__setattr__(self, "format", QuantFormat(self.format))
        except ValueError:
            names = tuple(f.value for f in QuantFormat)
            raise ConfigError(
                message(API, "format", f"one of {names}", repr(self.format))
            ) from None
        if self._mxfp6_element_format not in _MXFP6_ELEMENTS:
            got = repr(self._mxfp6_element_format)
            raise ConfigError(
                message(API, "_mxfp6_element_format", f"one of {_MXFP6_ELEMENTS}", got)
            )
        if self.format in _BLOCK_SCALES:
            size, dtype = _BLOCK_SCALES[self.format]
            for name in ("weight_scale", "input_scale"):
                if getattr(self, name).block_size != size:
                    rule = f"blocks of {size} with the format {self.format.value!r}"
                    raise ConfigError(message(API, name, rule, getattr(self, name)))
            if self.weight_scale.dtype not in (dtype, "uint8"):
                rule = f"{dtype} scales with the format {self.format.value!r}"
                raise ConfigError(message(API, "weight_scale", rule, self.weight_scale.dtype))
        if self.format is QuantFormat.BLOCKSCALED_FP8:
            for name in ("weight_scale", "input_scale"):
                if not getattr(self, name).is_block:
                    got = getattr(self, name).granularity.value
                    rule = f"block scales with the format {self.format.value!r}"
                    raise ConfigError(message(API, name, rule, got))

    # What it is

    @property
    def is_static(self) -> bool:
        """Whether input scales come from the checkpoint."""
        return self.input_scale.is_static

    @property
    def is_dynamic(self) -> bool:
        """Whether input scales come from the data."""
        return self.input_scale.is_dynamic

    @property
    def is_nvfp4(self) -> bool:
        """Whether the format is NVFP4."""
        return self.format is QuantFormat.NVFP4

    @property
    def is_mxfp4(self) -> bool:
        """Whether the format is MXFP4."""
        return self.format is QuantFormat.MXFP4

    @property
    def is_mxfp6(self) -> bool:
        """Whether the format is MXFP6, which this package only recognises."""
        return self.format is QuantFormat.MXFP6

    @property
    def is_mxfp8(self) -> bool:
        """Whether the format is MXFP8."""
        return self.format is QuantFormat.MXFP8

    @property
    def is_fp4(self) -> bool:
        """Whether two elements share a byte."""
        return self.format in _FP4

    @property
    def is_mx(self) -> bool:
        """Whether 32 elements share an e8m0 scale."""
        return self.format in _MX

    @property
    def block_format(self) -> BlockFormat | None:
        """The block format of NVFP4, MXFP4 and MXFP8, None of every other family."""
        return _BLOCK_FORMATS.get(self.format)

    @property
    def mx_element_dtype(self) -> str:
        """Element type of an MX format.

        Raises:
            ConfigError: the format is no MX format.
        """
        if not self.is_mx:
            rule = f"an MX format, one of {tuple(f.value for f in _MX)}"
            raise ConfigError(message(API, "mx_element_dtype", rule, self.format.value))
        if self.is_mxfp6:
            return f"float6_{self._mxfp6_element_format}fn"
        return "float4_e2m1fn" if self.is_mxfp4 else "float8_e4m3fn"

    @property
    def scales_granularity_mnk(self) -> tuple[int, int, int]:
        """Rows of input, rows of weight and elements of K that share scales, -1 for a whole axis.

        Raises:
            ConfigError: the two kinds of scale cannot be multiplied with each other.
        """
        x, w = self.input_scale, self.weight_scale
        if x.block_size is not None and w.block_size is not None:
            if x.block_size[1] == w.block_size[1]:
                return x.block_size[0], w.block_size[0], w.block_size[1]
        elif x.is_tensor and w.is_tensor:
            return -1, -1, -1
        elif (x.is_rowwise or x.is_colwise) and w.is_rowwise:
            return 1, 1, -1
        rule = "block scales of one size along K, scales of rows with scales of rows, or of tensors"
        got = ", ".join(
            f"{name} {spec.granularity.value} {spec.block_size or ''}".strip()
            for name, spec in (("input", x), ("weight", w))
        )
        raise ConfigError(message(API, "scales_granularity_mnk", rule, got))

    def quantized_scales_type(self, shape: tuple[int, int], device: Any = None) -> ScalesType:
        """The scales that quantizing activations of a shape gives.

        Args:
            shape: (M, K) of the activations.
            device: Accepted and ignored: a type has no place.

        Returns:
            Of a block format the scale tiles (ceil(M/128), ceil(K/tile columns), 32, 4, 4); of
            block-scaled FP8 (ceil(K/128), M rounded up to 16 bytes), transposed.

        Raises:
            ConfigError: the scales are of another granularity.
        """
        m, k = shape
        fmt = self.block_format
        if fmt is not None:
            tiles = (ceil_div(m, TILE_ROWS), ceil_div(k, fmt.tile_columns), *TILE_SHAPE)
            return ScalesType(fmt.scales_dtype, tiles)
        block = self.input_scale.block_size
        if block is None or self.is_mxfp6:
            rule = "block scales of FP8, NVFP4, MXFP4 or MXFP8"
            got = f"{self.format.value} with {self.input_scale.granularity.value} scales"
            raise ConfigError(message(API, "quantized_scales_type", rule, got))
        dtype = self.weight_scale.dtype
        return ScalesType(dtype, (ceil_div(k, block[1]), padded_rows(m, dtype)))

    # Builders

    @classmethod
    def blockscaled_fp8(
        cls, block_size: int = 128, scale_dtype: Any = "float32", **settings: Any
    ) -> QuantConfig:
        """FP8 with a scale a block of weights and a group of a token's values, as DeepSeek's.

        Args:
            block_size: Rows and columns of a weight block, values of a token's group [elements].
            scale_dtype: Element type of both scales.
            **settings: Further fields of `QuantConfig`; no layer is listed by default.
        """
        weight = WeightScaleSpec(ScaleGranularity.BLOCK, scale_dtype, (block_size, block_size))
        x = InputScaleSpec(
            ScaleGranularity.BLOCK, ScaleOrigin.DYNAMIC, scale_dtype, block_size=(1, block_size)
        )
        return cls._built(QuantFormat.BLOCKSCALED_FP8, weight, x, settings)

    @classmethod
    def rowwise_fp8(
        cls,
        scale_dtype: Any = "float32",
        activation_scale_ub: float | None = None,
        **settings: Any,
    ) -> QuantConfig:
        """FP8 with a scale a row of a weight and a token.

        Args:
            scale_dtype: Element type of both scales.
            activation_scale_ub: Largest magnitude that a token's scale takes into account.
            **settings: Further fields of `QuantConfig`, such as `format`.
        """
        weight = WeightScaleSpec(ScaleGranularity.ROWWISE, scale_dtype)
        x = InputScaleSpec(
            ScaleGranularity.ROWWISE, ScaleOrigin.DYNAMIC, scale_dtype, activation_scale_ub
        )
        return cls._built(QuantFormat.COMPRESSED_TENSORS_FP8, weight, x, settings)

    @classmethod
    def tensor_fp8(
        cls,
        origin: ScaleOrigin = ScaleOrigin.DYNAMIC,
        scale_dtype: Any = "float32",
        activation_scale_ub: float | None = None,
        **settings: Any,
    ) -> QuantConfig:
        """FP8 with a scale a weight and a scale for all activations of a matmul.

        Args:
            origin: Whether the activations' scale is the checkpoint's or the data's.
            scale_dtype: Element type of both scales.
            activation_scale_ub: Largest magnitude that a dynamic scale takes into account.
            **settings: Further fields of `QuantConfig`, such as `format`.
        """
        weight = WeightScaleSpec(ScaleGranularity.TENSOR, scale_dtype)
        x = InputScaleSpec(ScaleGranularity.TENSOR, origin, scale_dtype, activation_scale_ub)
        return cls._built(QuantFormat.COMPRESSED_TENSORS_FP8, weight, x, settings)

    @classmethod
    def nvfp4(cls, **settings: Any) -> QuantConfig:
        """NVFP4 with the checkpoint's input scales; `settings` are fields of `QuantConfig`."""
        return cls._block(QuantFormat.NVFP4, ScaleOrigin.STATIC, settings)

    @classmethod
    def mxfp4(cls, **settings: Any) -> QuantConfig:
        """MXFP4; `settings` are further fields of `QuantConfig`."""
        return cls._block(QuantFormat.MXFP4, ScaleOrigin.DYNAMIC, settings)

    @classmethod
    def mxfp8(cls, **settings: Any) -> QuantConfig:
        """MXFP8 with e4m3 elements; `settings` are further fields of `QuantConfig`."""
        return cls._block(QuantFormat.MXFP8, ScaleOrigin.DYNAMIC, settings)

    @classmethod
    def _block(cls, fmt: QuantFormat, origin: ScaleOrigin, settings: dict[str, Any]) -> QuantConfig:
        size, dtype = _BLOCK_SCALES[fmt]
        weight = WeightScaleSpec(ScaleGranularity.BLOCK, dtype, size)
        x = InputScaleSpec(ScaleGranularity.BLOCK, origin, "float32", block_size=size)
        return cls._built(fmt, weight, x, settings)

    @classmethod
    def _built(
        cls,
        fmt: QuantFormat,
        weight: WeightScaleSpec,
        x: InputScaleSpec,
        settings: dict[str, Any],
    ) -> QuantConfig:
        fields: dict[str, Any] = {
            "input_scale": x,
            "weight_scale": weight,
            "mlp_quantized_layers": (),
            "attn_quantized_layers": (),
            "format": fmt,
        }
        return cls(**{**fields, **settings})


def fp4_packed_k(in_dim: int, config: QuantConfig | None) -> int:
    """Bytes that hold a row of a weight: in_dim/2 in FP4, in_dim * 3/4 in FP6, else in_dim.

    Args:
        in_dim: Elements of a row.
        config: The weight's settings, None where it is not quantized.

    Raises:
        ShapeError: a row does not fill its last byte.
    """
    bits = 8
    if config is not None:
        bits = 4 if config.is_fp4 else 6 if config.is_mxfp6 else 8
    if in_dim < 0 or in_dim * bits % 8:
        rule = f"elements of {bits} bits that fill whole bytes"
        raise ShapeError(message("fp4_packed_k", "in_dim", rule, in_dim))
    return in_dim * bits // 8


def apply_fused_kernel_flags(config: QuantConfig) -> QuantConfig:
    """Says that gate and up are interleaved where the fused SwiGLU takes them: every block format.

    Unlike a setting that depends on the machine, the result depends on the format alone, so a
    model that is prepared on one machine runs on another.
    """
    return dataclasses.replace(config, can_use_fused_swiglu=config.block_format is not None)
