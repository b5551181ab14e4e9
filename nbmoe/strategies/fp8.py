"""The strategy of FP8: e4m3 with float32 or bfloat16 scales a block, a row or a tensor."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.arrays import describe
from nbmoe.config import QuantConfig, QuantFormat
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DTypeError,
    ScaleError,
    UnsupportedError,
    message,
)
from nbmoe.ops.quantize_fp8_prepared import LAYOUTS
from nbmoe.scale_specs import dtype_name
from nbmoe.strategies.fp8_inputs import take_fp8_inputs
from nbmoe.strategies.group_size import check_group_size
from nbmoe.validate import Call

NAME: Final = "Fp8Strategy"
_FORMATS: Final = (
    QuantFormat.BLOCKSCALED_FP8,
    QuantFormat.COMPRESSED_TENSORS_FP8,
    QuantFormat.FBGEMM_FP8,
)
_GRANULARITIES: Final = {(1, 128, 128): "block", (1, 1, -1): "row", (-1, -1, -1): "tensor"}
_SCALE_TYPES: Final = {
    "block": ("float32", "bfloat16"),
    "row": ("float32", "bfloat16"),
    "tensor": ("float32",),
}
DEFAULT_SCALE_UB: Final = 1200.0


class Fp8Strategy:
    """Quantizes activations to e4m3 and multiplies them by e4m3 weights.

    | scales of weights | scales of activations | `group_size` |
    |---|---|---|
    | block (128, 128) | block (1, 128), dynamic | 128 |
    | a row | a row, dynamic | -1 |
    | a tensor | a tensor, dynamic or static | -1 |

    Weights that `nbmoe.ops.prepare_fp8_weights` made go with tokens in `layout="prepared"`: these
    are `hidden` of the expert inputs, whose `hidden_scales` are None then; their scales are
    float32. The matmul of prepared operands is that of compute capability 9.0, with other sums
    (`nbmoe.ops.grouped_dynamic_scaled_fp8_matmul`).

    Scales of activations have the type of the weight's. `expert_inputs` are five operands, see
    `nbmoe.strategies.fp8_inputs.Fp8ExpertInputs`. Every method also takes `stream` and `validate`
    as `nbmoe.ops` has them, those that compute `out`.
    """

    def __init__(
        self, config: QuantConfig, dtype: Any = "float8_e4m3fn", *, backend: str | None = None
    ) -> None:
        """Makes the strategy.

        Args:
            config: Settings of the weights.
            dtype: Element type of quantized activations.
            backend: What runs it, see `nbmoe.ops`.

        Raises:
            ArgTypeError: `config` is no QuantConfig.
            ConfigError: `config` is not of FP8, its scales are of a kind that no matmul takes, or
                `dtype` is not float8_e4m3fn.
        """
        if not isinstance(config, QuantConfig):
            got = f"{type(config).__name__} {config!r}"
            raise ArgTypeError(message(NAME, "config", "a QuantConfig", got))
        if config.format not in _FORMATS:
            rule = f"a config of FP8, one of {tuple(f.value for f in _FORMATS)}"
            hint = "NvMxf4f8Strategy is the one of block formats" if config.block_format else ""
            raise ConfigError(message(NAME, "config", rule, config.format.value, hint))
        try:
            name = dtype_name(NAME, "dtype", dtype)
        except DTypeError:
            name = repr(dtype)
        if name != "float8_e4m3fn":
            raise ConfigError(message(NAME, "dtype", "float8_e4m3fn", name))
        granularity = _GRANULARITIES.get(config.scales_granularity_mnk)
        if granularity is None:
            rule = "scales of (1, 128) with (128, 128) blocks, of rows, or of tensors"
            got = f"granularity {config.scales_granularity_mnk} along M, N, K"
            raise ConfigError(message(NAME, "config", rule, got))
        scales_type = config.weight_scale.dtype
        if scales_type not in _SCALE_TYPES[granularity]:
            rule = f"{' or '.join(_SCALE_TYPES[granularity])} scales a {granularity}"
            raise ConfigError(message(NAME, "config", rule, scales_type))
        if config.is_static and granularity != "tensor":
            rule = f"dynamic input scales with scales a {granularity}"
            raise ConfigError(message(NAME, "config", rule, "static ones"))
        self.config = config
        self.dtype = name
        self.backend = backend
        self.granularity = granularity
        self.scales_type = scales_type
        self.group_size = 128 if granularity == "block" else -1
        self.scale_ub = config.input_scale.activation_scale_ub or DEFAULT_SCALE_UB

    def __repr__(self) -> str:
        origin = "static" if self.config.is_static else "dynamic"
        return f"{NAME}({self.granularity}, {origin}, {self.scales_type})"

    # Quantization

    def quantize(
        self,
        tensor: Any,
        group_size: int,
        *,
        workspace: Any = None,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> tuple[Any, Any]:
        """Quantizes all rows alike, without routing.

        Args:
            tensor: (R, K) bfloat16.
            group_size: 128 with scales a block, else -1 [elements].
            workspace: Of one dynamic scale, see `nbmoe.ops.quantize_tensor_dynamic_scaled_float8`.
            out: `(codes, scales)` to write.

        Returns:
            Codes (R, K) float8_e4m3fn, and scales: (ceil(K/128), Rpad), (1, Rpad) or (1,).

        Raises:
            ArgTypeError, RangeError, UnsupportedError, ConfigError: as the group size is no int,
                not positive, of no format, or of another granularity.
            ScaleError: the config has static scales, which this method is not given.
            DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        """
        api = f"{NAME}.quantize"
        if self.config.is_static:
            hint = "grouped_quantize takes an input_scale"
            raise ScaleError(message(api, "config", "dynamic input scales", "static ones", hint))
        result: tuple[Any, Any] = self._quantize(
            api, tensor, group_size, None, None, workspace, out, stream, validate
        )
        return result

    def grouped_quantize(
        self,
        tensor: Any,
        group_size: int,
        input_scale: Any,
        expert_start: Any,
        scales_offset: Any,
        expert_ids: Any,
        *,
        workspace: Any = None,
        layout: str = "packed",
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> Any:
        """Quantizes the rows below expert_start[-1], and touches none from there on.

        Args:
            tensor: (M, K) bfloat16, rows in the order of the slots.
            group_size: 128 with scales a block, else -1 [elements].
            input_scale: (1,) float32 with a static scale, which is returned; ignored otherwise.
            expert_start: (S + 1,) uint32 prefix sums [rows].
            scales_offset: Ignored: these scales are not tiled.
            expert_ids: Ignored: experts have no scales of activations.
            workspace: Of one dynamic scale, see `nbmoe.ops.quantize_tensor_dynamic_scaled_float8`.
            layout: "packed" for codes and scales, "prepared" for PreparedFp8Tokens. With scales a
                row or a tensor prepared tokens are packed first, in arrays of their own.
            out: `(codes, scales)` to write; with a static scale `codes` alone if packed.

        Returns:
            Codes (M, K) float8_e4m3fn, and scales: (ceil(K/128), Mpad), (1, Mpad) or (1,); or
            PreparedFp8Tokens.

        Raises:
            ArgTypeError, RangeError, UnsupportedError, ConfigError: as of `quantize`; ArgTypeError
                also if `expert_start` is None.
            ScaleError: a static scale is None, or not finite and positive.
            RoutingError: expert_start is no prefix sum of at most M rows.
            DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        """
        del scales_offset, expert_ids
        api = f"{NAME}.grouped_quantize"
        if expert_start is None:
            rule = "(S + 1,) uint32"
            raise ArgTypeError(message(api, "expert_start", rule, "None", "it is required"))
        return self._quantize(
            api,
            tensor,
            group_size,
            input_scale,
            expert_start,
            workspace,
            out,
            stream,
            validate,
            layout,
        )

    def fused_silu_quantize(
        self,
        gate_up_projs: Any,
        input_scales: Any = None,
        expert_inputs: tuple[Any, ...] = (),
        max_padded_M: int = 0,
        activation: GatedActivation | None = None,
        *,
        interleaved: bool = False,
        activated: Any = None,
        workspace: Any = None,
        layout: str = "packed",
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> Any:
        """Applies the gated activation to the gate/up projections and quantizes the result.

        Two steps, `nbmoe.ops.gated_activation`, which rounds to bfloat16, and `grouped_quantize`.

        Args:
            gate_up_projs: (M, 2D) bfloat16, D % 16 == 0, gate columns then up columns.
            input_scales: (1,) float32 with a static scale; ignored otherwise.
            expert_inputs: The five operands; the routing is taken from them.
            max_padded_M: Accepted without effect, an int >= 0.
            activation: The activation, None for silu; a function will do.
            interleaved: Whether columns are gate 0, up 0, gate 1, ... instead of gates, then ups.
            activated: (M, D) bfloat16 to hold the activated values in between.
            workspace: As of `grouped_quantize`.
            layout: As of `grouped_quantize`.
            out: As of `grouped_quantize`.

        Returns:
            Codes (M, D) float8_e4m3fn and their scales, or PreparedFp8Tokens.

        Raises:
            ArgTypeError: `expert_inputs` are not five, `max_padded_M` no int, or `activation` no
                GatedActivation.
            RangeError: `max_padded_M` is negative.
            ScaleError, DTypeError, ShapeError, LayoutError, AliasError, DeviceError, RoutingError:
                as of both steps.
        """
        api = f"{NAME}.fused_silu_quantize"
        Call(api, validate).integer("max_padded_M", max_padded_M, 0)
        inputs = take_fp8_inputs(api, expert_inputs)
        run = self._run(stream, validate)
        values = ops.gated_activation(
            gate_up_projs, activation=activation, interleaved=interleaved, out=activated, **run
        )
        return self._quantize(
            api,
            values,
            self.group_size,
            input_scales,
            inputs.expert_start,
            workspace,
            out,
            stream,
            validate,
            layout,
        )

    # Multiplication

    def grouped_matmul(
        self,
        weight: Any,
        weight_scales: Any,
        expert_scales: Any = None,
        expert_inputs: tuple[Any, ...] = (),
        estimated_total_m: int | None = None,
        a_scales_max_padded_m: int = 0,
        *,
        bias: Any = None,
        routed_before: bool = False,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> Any:
        """Multiplies each slot's rows by its expert's weight.

        Args:
            weight: (E, N, K) e4m3 codes, or PreparedWeights.
            weight_scales: (E, ceil(N/128), ceil(K/128)) with scales a block; (E, N, 1) with scales
                a row; (E, 1, 1), (E,) or (E, N, 1) with scales a tensor.
            expert_scales: None: FP8 has no factors of experts.
            expert_inputs: The five operands.
            estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
            a_scales_max_padded_m: Accepted without effect, an int >= 0.
            bias: (E, N) bfloat16, by expert id.
            routed_before: See `nbmoe.ops.grouped_matmul_block_scaled`.
            out: (M, N) bfloat16 to write.

        Returns:
            (M, N) bfloat16.

        Raises:
            ConfigError: `expert_scales` is not None.
            ArgTypeError: `expert_inputs` are not five, or a number is no int.
            RangeError, DTypeError, ShapeError, LayoutError, AliasError, DeviceError, RoutingError,
            ScaleError: as of `nbmoe.ops.grouped_dynamic_scaled_fp8_matmul`.
        """
        api = f"{NAME}.grouped_matmul"
        if expert_scales is not None:
            rule = "None: FP8 weights have no factors of experts"
            raise ConfigError(message(api, "expert_scales", rule, type(expert_scales).__name__))
        Call(api, validate).integer("a_scales_max_padded_m", a_scales_max_padded_m, 0)
        inputs = take_fp8_inputs(api, expert_inputs)
        matmul = ops.grouped_rowwise_dynamic_scaled_fp8_matmul
        if self.granularity == "block":
            matmul = ops.grouped_dynamic_scaled_fp8_matmul
        return matmul(
            inputs.hidden,
            weight,
            inputs.hidden_scales,
            weight_scales,
            inputs.expert_start,
            inputs.expert_ids,
            bias=bias,
            estimated_total_m=estimated_total_m,
            routed_before=routed_before,
            out=out,
            **self._run(stream, validate),
        )

    def grouped_matmul_swiglu(self, *args: Any, **kwargs: Any) -> NoReturn:
        """There is none: its result would need scales across blocks of the grid.

        Raises:
            UnsupportedError: always.
        """
        hint = "chain grouped_matmul and fused_silu_quantize"
        rule = "a strategy of NVFP4, MXFP4 or MXFP8"
        raise UnsupportedError(message(f"{NAME}.grouped_matmul_swiglu", "self", rule, self, hint))

    # Preparation

    def prepare_weight_scales(self, gate_up: Any, down: Any, device: Any = None) -> tuple[Any, Any]:
        """Returns both scales as they are: the matmuls read them as checkpoints hold them.

        Args:
            gate_up: Scales of the gate and up weights.
            down: Scales of the down weights.
            device: Ignored.
        """
        del device
        return gate_up, down

    # Shared steps

    def _run(self, stream: Any, validate: str | None) -> dict[str, Any]:
        return {"backend": self.backend, "stream": stream, "validate": validate}

    def _quantize(
        self,
        api: str,
        tensor: Any,
        group_size: Any,
        input_scale: Any,
        row_offsets: Any,
        workspace: Any,
        out: Any,
        stream: Any,
        validate: str | None,
        layout: str = "packed",
    ) -> Any:
        self._check_group(api, group_size)
        if layout not in LAYOUTS:
            raise ConfigError(message(api, "layout", f"one of {LAYOUTS}", repr(layout)))
        run = self._run(stream, validate)
        if layout == "prepared" and self.granularity != "block":
            codes, scales = self._quantize(
                api,
                tensor,
                group_size,
                input_scale,
                row_offsets,
                workspace,
                None,
                stream,
                validate,
            )
            return ops.prepare_fp8_tokens(codes, scales, row_offsets, out=out, **run)
        if self.config.is_static:
            scale = _static_scale(api, input_scale)
            codes = ops.quantize_static_scaled_float8(
                tensor, scale, row_offsets=row_offsets, out=out, **run
            )
            return codes, scale
        if self.granularity == "tensor":
            result: tuple[Any, Any] = ops.quantize_tensor_dynamic_scaled_float8(
                tensor,
                scale_ub=self.scale_ub,
                row_offsets=row_offsets,
                workspace=workspace,
                out=out,
                **run,
            )
            return result
        return ops.quantize_dynamic_scaled_float8(
            tensor,
            group_size_or_per_token=self.group_size,
            scale_ub=self.scale_ub,
            scales_type="float32" if layout == "prepared" else self.scales_type,
            row_offsets=row_offsets,
            layout=layout,
            out=out,
            **run,
        )

    def _check_group(self, api: str, group_size: Any) -> None:
        what = f"for scales a {self.granularity}"
        check_group_size(api, group_size, self.group_size, what)


def _static_scale(api: str, input_scale: Any) -> Any:
    """Takes the scale of a static config: an array of one, which the matmul reads too.

    Raises:
        ScaleError: it is None.
        ArgTypeError: it is a number, which no matmul of a GPU could read.
        ConfigError: it has an entry for each of several experts.
    """
    if input_scale is None:
        raise ScaleError(message(api, "input_scale", "(1,) float32", "None", "it is required"))
    shape = describe(api, "input_scale", input_scale).shape
    if shape != (1,):
        hint = "rows of all experts share it: take the largest"
        raise ConfigError(message(api, "input_scale", "(1,) float32", f"shape {shape}", hint))
    return input_scale
