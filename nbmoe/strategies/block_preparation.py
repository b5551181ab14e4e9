"""What `NvMxf4f8Strategy` is made of, and what it prepares before a layer runs."""

from __future__ import annotations

from typing import Any, Final

from nbmoe import ops
from nbmoe.config import QuantConfig
from nbmoe.errors import ArgTypeError, ConfigError, ScaleError, message
from nbmoe.formats import MXFP4, MXFP8, NVFP4, BlockFormat
from nbmoe.prepared import PreparedWeights
from nbmoe.reference.quantize import check_tensor_factor
from nbmoe.scale_specs import dtype_name
from nbmoe.strategies.expert_inputs import host_usage, inverse_scales, take_expert_inputs
from nbmoe.strategies.swiglu_operands import SwigluOperands
from nbmoe.strategies.weight_scales import tile_weight_scales

NAME: Final = "NvMxf4f8Strategy"


class BlockPreparation:
    """Formats of a strategy of block formats, and its weights and scales."""

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

    def prepare_weights(
        self,
        weight: Any,
        weight_scales: Any,
        *,
        out: Any = None,
        stream: Any = None,
        validate: str | None = None,
    ) -> PreparedWeights:
        """Rearranges weights once for `grouped_matmul`, see `nbmoe.ops.prepare_weights`.

        Args:
            weight: (E, N, K) or packed (E, N, K/2) codes.
            weight_scales: (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles.
            out: (bytes,) uint8 to write.

        Raises:
            As of the operation.
        """
        run = self._run(stream, validate)
        fmt = self.weight_format
        return ops.prepare_weights(weight, weight_scales, format=fmt, out=out, **run)

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

    def _inverted(
        self, api: str, arg: str, scales: Any, per: str, inverted: bool, run: dict[str, Any]
    ) -> Any:
        """The inverses of NVFP4's input scales; None for MX formats, which have none."""
        check_tensor_factor(api, arg, self.format, scales)
        if inverted or not self.is_nvfp4:
            return scales
        return inverse_scales(api, arg, scales, per, **run)
