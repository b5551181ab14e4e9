"""The strategy of the block formats: NVFP4, MXFP4, MXFP8, and MXFP8 with MXFP4 weights (W4A8)."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.config import QuantConfig
from nbmoe.errors import ArgTypeError, ConfigError, ScaleError, message
from nbmoe.formats import MXFP4, MXFP8, NVFP4, BlockFormat
from nbmoe.reference.quantize import check_tensor_factor
from nbmoe.scale_specs import dtype_name
from nbmoe.strategies.expert_inputs import host_usage, inverse_scales, take_expert_inputs
from nbmoe.strategies.group_size import check_group_size
from nbmoe.strategies.weight_scales import tile_weight_scales
from nbmoe.validate import Call

NAME: Final = "NvMxf4f8Strategy"


class SwigluOperands(NamedTuple):
    """Operands of the fused matmul, as `NvMxf4f8Strategy.prepare_swiglu_operands` brings them.

    Attributes:
        hidden: Codes of the activations.
        hidden_scales: Their scale tiles.
        expert_start: (S + 1,) uint32 prefix sums [rows].
        scales_offsets: (S,) uint32 [128-row tiles].
        expert_ids: (S,) int32.
        usage_stats: (2,) uint32 on the host.
        c_input_scales: (S,) float32 inverse input scales of the down projection; None for MX.
        expert_scales: (E,) float32 factors; None for ones.
    """

    hidden: Any
    hidden_scales: Any
    expert_start: Any
    scales_offsets: Any
    expert_ids: Any
    usage_stats: Any
    c_input_scales: Any
    expert_scales: Any


class NvMxf4f8Strategy:
    """Quantizes activations to a block format and multiplies them by block-scaled weights.

    | config | dtype of activations | activations | weights |
    |---|---|---|---|
    | NVFP4 | uint8 | NVFP4 | NVFP4 |
    | MXFP4 | uint8 | MXFP4 | MXFP4 |
    | MXFP4 | float8_e4m3fn | MXFP8 | MXFP4 (W4A8) |
    | MXFP8 | float8_e4m3fn | MXFP8 | MXFP8 |

    `expert_inputs` are six operands, see `nbmoe.strategies.expert_inputs.ExpertInputs`. Every
    method also takes `stream` and `validate` as `nbmoe.ops` has them, those that compute `out`.

    NVFP4's input scales are those of checkpoints, x = code * block scale * input scale; methods
    invert them, which on a GPU costs a small launch and a small array a call. A layer that inverts
    once (`inverse_scales`) says so with `scales_are_inverted=True`.

    Nothing in an array says whether the rows of a weight, its scales or a bias are interleaved for
    the fused SwiGLU. `QuantConfig.can_use_fused_swiglu` is the layer's note of that.
    """

    def __init__(self, config: QuantConfig, dtype: Any, *, backend: str | None = None) -> None:
        """Makes the strategy.

        Args:
            config: Settings of the weights.
            dtype: Element type of quantized activations, see the table.
            backend: What runs it, see `nbmoe.ops`.

        Raises:
            ArgTypeError: `config` is no QuantConfig.
            ConfigError: `config` is not of a block format, or `dtype` does not go with it.
            DTypeError: `dtype` is no element type.
        """
        if not isinstance(config, QuantConfig):
            got = f"{type(config).__name__} {config!r}"
            raise ArgTypeError(message(NAME, "config", "a QuantConfig", got))
        self.config = config
        self.dtype = dtype_name(NAME, "dtype", dtype)
        self.backend = backend
        weights = config.block_format
        if weights is None:
            rule = "a config of NVFP4, MXFP4 or MXFP8"
            hint = "Fp8Strategy is the one of FP8"
            raise ConfigError(message(NAME, "config", rule, config.format.value, hint))
        legal = {NVFP4: ("uint8",), MXFP4: ("uint8", "float8_e4m3fn"), MXFP8: ("float8_e4m3fn",)}
        if self.dtype not in legal[weights]:
            rule = f"{' or '.join(legal[weights])} for {weights.name}"
            raise ConfigError(message(NAME, "dtype", rule, self.dtype))
        self.weight_format: BlockFormat = weights
        self.format: BlockFormat = weights if self.dtype == "uint8" else MXFP8

    def __repr__(self) -> str:
        return f"{NAME}({self.format.name} x {self.weight_format.name})"

    @property
    def is_nvfp4(self) -> bool:
        """Whether the format is NVFP4."""
        return self.format is NVFP4

    # Quantization

    def quantize(
        self,
        tensor: Any,
        group_size: int,
        *,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> tuple[Any, Any]:
        """Quantizes all rows alike, without routing; NVFP4 without an input scale.

        Args:
            tensor: (R, K) bfloat16.
            group_size: The format's block [elements].
            out: `(codes, scales)` to write.

        Returns:
            Codes (R, K) or packed (R, K/2), scales (ceil(R/128), ceil(K/(4 * block)), 32, 4, 4).

        Raises:
            ArgTypeError, RangeError, UnsupportedError, ConfigError: as the group size is no int,
                not positive, of no format, or of another format.
            DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        """
        self._check_group(f"{NAME}.quantize", group_size)
        return ops.quantize_dynamic_block_scaled(
            tensor, **self._quantizer(), **self._run(stream, validate), out=out
        )

    def grouped_quantize(
        self,
        tensor: Any,
        group_size: int,
        input_scale: Any,
        expert_start: Any,
        scales_offset: Any,
        expert_ids: Any,
        indices: Any = None,
        indices_divisor: int = 1,
        *,
        scales_are_inverted: bool = False,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> tuple[Any, Any]:
        """Quantizes the rows of the slots, gathering on the way.

        Args:
            tensor: (R, K) bfloat16.
            group_size: The format's block [elements].
            input_scale: (E,) float32 input scales of NVFP4, by expert id; None for MX.
            expert_start: (S + 1,) uint32 prefix sums [rows].
            scales_offset: (S,) uint32 [128-row tiles].
            expert_ids: (S,) int32 expert of each slot; the rows of -1 get codes 0 and scales 0.
            indices: (M,) uint32: output row i reads input row indices[i] // indices_divisor.
            indices_divisor: Sources an input row, the routing's top-k.
            scales_are_inverted: Whether `input_scale` holds inverses already.
            out: `(codes, scales)` to write.

        Returns:
            Codes and scale tiles as of `nbmoe.ops.grouped_quantize_dynamic_block_scaled`.

        Raises:
            ScaleError: NVFP4 lacks its input scales, one is not positive or not finite, or the
                scale offsets are None.
            ConfigError: an MX format came with input scales.
            ArgTypeError, RangeError, UnsupportedError, DTypeError, ShapeError, LayoutError,
            AliasError, DeviceError, RoutingError: as of the operation.
        """
        api = f"{NAME}.grouped_quantize"
        self._check_group(api, group_size)
        if scales_offset is None:
            raise ScaleError(message(api, "scales_offset", "(S,) uint32", "None", "required"))
        run = self._run(stream, validate)
        return ops.grouped_quantize_dynamic_block_scaled(
            tensor,
            expert_start,
            scales_offset,
            expert_ids,
            self._inverted(api, "input_scale", input_scale, "expert", scales_are_inverted, run),
            **self._quantizer(),
            indices=indices,
            indices_divisor=indices_divisor,
            out=out,
            **run,
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
        scales_are_inverted: bool = False,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> tuple[Any, Any]:
        """Applies the gated activation to the gate/up projections and quantizes the result.

        Equals the fused `grouped_matmul_swiglu` after `grouped_matmul`, byte for byte.

        Args:
            gate_up_projs: (M, 2D) bfloat16.
            input_scales: (S,) float32 input scales of the down projection, by slot; None for MX.
            expert_inputs: The six operands; the routing is taken from them.
            max_padded_M: Accepted without effect, an int >= 0.
            activation: The activation, None for silu; a function will do.
            interleaved: Whether columns are gate 0, up 0, gate 1, ... instead of gates, then ups.
            scales_are_inverted: Whether `input_scales` holds inverses already.
            out: `(codes, scales)` to write.

        Returns:
            Codes (M, D) or packed (M, D/2), and scale tiles.

        Raises:
            ScaleError: NVFP4 lacks its input scales, or one is not positive or not finite.
            ConfigError: an MX format came with input scales.
            ArgTypeError: `expert_inputs` are not six, `max_padded_M` no int, or `activation` no
                GatedActivation.
            RangeError: `max_padded_M` is negative.
            DTypeError, ShapeError, LayoutError, AliasError, DeviceError, RoutingError: as of the
                operation.
        """
        api = f"{NAME}.fused_silu_quantize"
        Call(api, validate).integer("max_padded_M", max_padded_M, 0)
        inputs = take_expert_inputs(api, expert_inputs, validate)
        run = self._run(stream, validate)
        return ops.fused_silu_quantize(
            gate_up_projs,
            inputs.expert_start,
            inputs.scales_offsets,
            inputs.expert_ids,
            self._inverted(api, "input_scales", input_scales, "slot", scales_are_inverted, run),
            format=self.format,
            interleaved=interleaved,
            activation=activation,
            out=out,
            **run,
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
        a_row_scales: Any = None,
        bias: Any = None,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> Any:
        """Multiplies each slot's rows by its expert's weight.

        Args:
            weight: (E, N, K) or packed (E, N, K/2) codes.
            weight_scales: (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles.
            expert_scales: (E,) float32 factors, by expert id; NVFP4 needs them, None means ones.
            expert_inputs: The six operands.
            estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
            a_scales_max_padded_m: Accepted without effect, an int >= 0.
            a_row_scales: (M,) bfloat16 factors of rows, for NVFP4.
            bias: (E, N) bfloat16, by expert id.
            out: (M, N) bfloat16 to write.

        Returns:
            (M, N) bfloat16.

        Raises:
            ScaleError: NVFP4 without `expert_scales`, or a scale cannot be used.
            ConfigError: the weight is not of the strategy's format.
            ArgTypeError, RangeError, DTypeError, ShapeError, LayoutError, AliasError, DeviceError,
            RoutingError: as of `nbmoe.ops.grouped_matmul_block_scaled`.
        """
        api = f"{NAME}.grouped_matmul"
        Call(api, validate).integer("a_scales_max_padded_m", a_scales_max_padded_m, 0)
        inputs = take_expert_inputs(api, expert_inputs, validate)
        return ops.grouped_matmul_block_scaled(
            inputs.hidden,
            weight,
            inputs.hidden_scales,
            weight_scales,
            inputs.expert_start,
            inputs.scales_offsets,
            inputs.expert_ids,
            expert_scales,
            **self._formats(),
            bias=bias,
            estimated_total_m=estimated_total_m,
            a_row_scales=a_row_scales,
            out=out,
            **self._run(stream, validate),
        )

    def grouped_matmul_swiglu(
        self,
        weight: Any,
        weight_scales: Any,
        *,
        expert_scales: Any = None,
        input_scales: Any = None,
        expert_inputs: tuple[Any, ...],
        estimated_total_m: int | None = None,
        activation: GatedActivation | None = None,
        a_row_scales: Any = None,
        bias: Any = None,
        match_bf16: bool = True,
        scales_are_inverted: bool = False,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> tuple[Any, Any]:
        """Multiplies by interleaved gate/up weights, activates, and quantizes the result.

        Args:
            weight: (E, 2D, K) or packed (E, 2D, K/2) codes, gate 0, up 0, gate 1, ...
            weight_scales: (E, ceil(2D/128), ceil(K/(4 * block)), 32, 4, 4), rows likewise.
            expert_scales: (E,) float32 factors, by expert id; NVFP4 needs them, None means ones.
            input_scales: (S,) float32 input scales of the down projection, by slot; None for MX.
            expert_inputs: The six operands.
            estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
            activation: A named activation, None for silu.
            a_row_scales: (M,) bfloat16 factors of rows, for NVFP4.
            bias: (E, 2D) bfloat16, by expert id, entries in the order of the weight's rows.
            match_bf16: Whether gate and up are rounded to bfloat16 first.
            scales_are_inverted: Whether `input_scales` holds inverses already.
            out: `(codes, scales)` to write.

        Returns:
            Codes (M, D) or packed (M, D/2), and scale tiles with the tiles of the activations.

        Raises:
            ScaleError: NVFP4 without `expert_scales` or `input_scales`, or a scale cannot be used.
            ConfigError: the weight is not of the strategy's format, input or row scales came
                without NVFP4, or the activation is a function.
            ArgTypeError, RangeError, DTypeError, ShapeError, LayoutError, AliasError, DeviceError,
            RoutingError: as of `nbmoe.ops.grouped_matmul_blocked_swiglu`.
        """
        api = f"{NAME}.grouped_matmul_swiglu"
        inputs = take_expert_inputs(api, expert_inputs, validate)
        run = self._run(stream, validate)
        return ops.grouped_matmul_blocked_swiglu(
            inputs.hidden,
            weight,
            inputs.hidden_scales,
            weight_scales,
            inputs.expert_start,
            inputs.scales_offsets,
            inputs.expert_ids,
            expert_scales=expert_scales,
            c_input_scales=self._inverted(
                api, "input_scales", input_scales, "slot", scales_are_inverted, run
            ),
            **self._formats(),
            bias=bias,
            activation=activation,
            estimated_total_m=estimated_total_m,
            a_row_scales=a_row_scales,
            match_bf16=match_bf16,
            out=out,
            **run,
        )

    # Preparation

    def prepare_swiglu_operands(
        self,
        expert_inputs: tuple[Any, ...],
        *,
        expert_scales: Any = None,
        input_scales: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> SwigluOperands:
        """Checks and inverts what `nbmoe.ops.grouped_matmul_blocked_swiglu` takes.

        Args:
            expert_inputs: The six operands.
            expert_scales: (E,) float32 factors, by expert id; NVFP4 needs them.
            input_scales: (S,) float32 input scales of the down projection; None for MX.

        Raises:
            ScaleError: NVFP4 lacks a scale, or an input scale has no finite positive inverse.
            ConfigError: an MX format came with input scales.
            ArgTypeError, DTypeError, ShapeError, RangeError, RoutingError: as of
                `nbmoe.strategies.expert_inputs.take_expert_inputs`.
        """
        api = f"{NAME}.prepare_swiglu_operands"
        inputs = take_expert_inputs(api, expert_inputs, validate)
        if self.is_nvfp4 and expert_scales is None:
            raise ScaleError(message(api, "expert_scales", "(E,) float32", "None", "required"))
        run = self._run(stream, validate)
        inverse = self._inverted(api, "input_scales", input_scales, "slot", False, run)
        stats = host_usage(inputs)
        return SwigluOperands(*inputs._replace(usage_stats=stats), inverse, expert_scales)

    def inverse_scales(
        self, scales: Any, *, stream: Any = None, validate: str | None = None
    ) -> Any:
        """1 / scales, for methods that are told `scales_are_inverted=True`.

        Args:
            scales: (E,) or (S,) float32 input scales.

        Raises:
            ScaleError: one is not positive or not finite, or its inverse is not.
        """
        api = f"{NAME}.inverse_scales"
        return inverse_scales(api, "scales", scales, "expert", **self._run(stream, validate))

    def prepare_weight_scales(
        self,
        gate_up: Any,
        down: Any,
        device: Any = None,
        *,
        stream: Any = None,
        validate: str | None = None,
    ) -> tuple[Any, Any]:
        """Lays the row-major scales of both weights out in tiles, padding with byte 0.

        Args:
            gate_up: (E, 2D, H/block) scale bytes, rows interleaved already if the weight's are.
            down: (E, H, D/block) scale bytes.
            device: Where the scales are and stay: "cpu", "cuda", "cuda:<ordinal>", an ordinal, or
                None for wherever that is.

        Returns:
            The two, (E, ceil(rows/128), ceil(columns/4), 32, 4, 4).

        Raises:
            LayoutError: scales are in tiles already.
            ShapeError: they are not (E, rows, columns), or of different numbers of experts.
            DeviceError: they are elsewhere, or there is no such device.
            ScaleError, ArgTypeError, DTypeError: they are None, no arrays, or of another type.
        """
        return tile_weight_scales(
            f"{NAME}.prepare_weight_scales",
            self.weight_format,
            gate_up,
            down,
            device,
            **self._run(stream, validate),
        )

    # Arguments

    def _run(self, stream: Any, validate: str | None) -> dict[str, Any]:
        return {"backend": self.backend, "stream": stream, "validate": validate}

    def _formats(self) -> dict[str, Any]:
        return {"format": self.format, "weight_format": self.weight_format}

    def _quantizer(self) -> dict[str, Any]:
        scales = "float8_e4m3fn" if self.is_nvfp4 else "float8_e8m0fnu"
        return {
            "sf_vector_size": self.format.block,
            "scales_type": scales,
            "out_type": self.format.codes_dtype,
        }

    def _inverted(
        self, api: str, arg: str, scales: Any, per: str, inverted: bool, run: dict[str, Any]
    ) -> Any:
        """The inverses of NVFP4's input scales; None for MX formats, which have none."""
        check_tensor_factor(api, arg, self.format, scales)
        if inverted or not self.is_nvfp4:
            return scales
        return inverse_scales(api, arg, scales, per, **run)

    def _check_group(self, api: str, group_size: Any) -> None:
        what = f"the block of {self.format.name}"
        check_group_size(api, group_size, self.format.block, what)
