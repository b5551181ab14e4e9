"""The strategy of the block formats: NVFP4, MXFP4, MXFP8, and MXFP8 with MXFP4 weights (W4A8)."""

from __future__ import annotations

from typing import Any

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.errors import ScaleError, message
from nbmoe.strategies.block_preparation import NAME, BlockPreparation
from nbmoe.strategies.expert_inputs import take_expert_inputs
from nbmoe.strategies.group_size import check_group_size
from nbmoe.validate import Call


class NvMxf4f8Strategy(BlockPreparation):
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

    Weights that `prepare_weights` made go with tokens in `nbmoe.prepared.PreparedTokens`: these are
    `hidden` of the expert inputs, whose `hidden_scales` are None then, as are weight scales.

    Nothing in an array says whether the rows of a weight, its scales or a bias are interleaved for
    the fused SwiGLU. `QuantConfig.can_use_fused_swiglu` is the layer's note of that.
    """

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
        layout: str = "packed",
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> Any:
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
            layout: "packed" for codes and scales, "prepared" for PreparedTokens.
            out: What to write: `(codes, scales)`, or the data of prepared tokens.

        Returns:
            Codes and scale tiles as of `nbmoe.ops.grouped_quantize_dynamic_block_scaled`, or
            PreparedTokens.

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
            layout=layout,
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
        layout: str = "packed",
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> Any:
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
            layout: "packed" for codes and scales, "prepared" for PreparedTokens.
            out: What to write: `(codes, scales)`, or the data of prepared tokens.

        Returns:
            Codes (M, D) or packed (M, D/2), and scale tiles; or PreparedTokens.

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
            layout=layout,
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
        routed_before: bool = False,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> Any:
        """Multiplies each slot's rows by its expert's weight.

        Args:
            weight: (E, N, K) or packed (E, N, K/2) codes, or PreparedWeights.
            weight_scales: (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles, or None.
            expert_scales: (E,) float32 factors, by expert id; NVFP4 needs them, None means ones.
            expert_inputs: The six operands.
            estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
            a_scales_max_padded_m: Accepted without effect, an int >= 0.
            a_row_scales: (M,) bfloat16 factors of rows, for NVFP4.
            bias: (E, N) bfloat16, by expert id.
            routed_before: See `nbmoe.ops.grouped_matmul_block_scaled`.
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
            None if inputs.hidden_scales is None else inputs.scales_offsets,
            inputs.expert_ids,
            expert_scales,
            **self._formats(),
            bias=bias,
            estimated_total_m=estimated_total_m,
            a_row_scales=a_row_scales,
            routed_before=routed_before,
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
        layout: str = "packed",
        routed_before: bool = False,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> Any:
        """Multiplies by interleaved gate/up weights, activates, and quantizes the result.

        Args:
            weight: (E, 2D, K) or packed (E, 2D, K/2) codes, gate 0, up 0, gate 1, ..., or
                PreparedWeights.
            weight_scales: (E, ceil(2D/128), ceil(K/(4 * block)), 32, 4, 4), rows likewise, or None.
            expert_scales: (E,) float32 factors, by expert id; NVFP4 needs them, None means ones.
            input_scales: (S,) float32 input scales of the down projection, by slot; None for MX.
            expert_inputs: The six operands.
            estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
            activation: A named activation, None for silu.
            a_row_scales: (M,) bfloat16 factors of rows, for NVFP4.
            bias: (E, 2D) bfloat16, by expert id, entries in the order of the weight's rows.
            match_bf16: Whether gate and up are rounded to bfloat16 first.
            scales_are_inverted: Whether `input_scales` holds inverses already.
            layout: "packed" for codes and scales, or of prepared operands "prepared".
            routed_before: See `nbmoe.ops.grouped_matmul_block_scaled`.
            out: What to write: `(codes, scales)`, or the data of prepared tokens.

        Returns:
            Codes (M, D) or packed (M, D/2), and scale tiles with the tiles of the activations; or
            PreparedTokens.

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
            None if layout == "prepared" else inputs.scales_offsets,
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
            layout=layout,
            routed_before=routed_before,
            out=out,
            **run,
        )

    # Arguments

    def _formats(self) -> dict[str, Any]:
        return {"format": self.format, "weight_format": self.weight_format}

    def _quantizer(self) -> dict[str, Any]:
        scales = "float8_e4m3fn" if self.is_nvfp4 else "float8_e8m0fnu"
        return {
            "sf_vector_size": self.format.block,
            "scales_type": scales,
            "out_type": self.format.codes_dtype,
        }

    def _check_group(self, api: str, group_size: Any) -> None:
        what = f"the block of {self.format.name}"
        check_group_size(api, group_size, self.format.block, what)
