"""`ExpertStack`: experts of one layer in one weight format, in the one convention of nbmoe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nbmoe.activation import SILU, GatedActivation
from nbmoe.checkpoints.arrays import check_array, check_finite
from nbmoe.checkpoints.scales import SCALE_CHECKS, check_scale
from nbmoe.errors import ArgTypeError, ConfigError, ScaleError, ShapeError, message

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class WeightFormat:
    """How a stack stores weights [N, K] of one projection.

    Attributes:
        name: Lower-case name.
        per_byte: Codes a byte; 0 where weights are bf16 and there are no codes.
        scale_block: Elements (of N, of K) that share a scale; 0 stands for all of them.
        scales: Encoding of the scales: "e4m3" or "e8m0" bytes, "f32", or "" for none.
        multiple: H and D have to be multiples of this [elements].
        weight_scales: Whether a float32 an expert multiplies the block scales.
        input_scales: Whether a calibrated float32 scale an expert quantizes its input.
    """

    name: str
    per_byte: int
    scale_block: tuple[int, int]
    scales: str
    multiple: int
    weight_scales: bool = False
    input_scales: bool = False

    def codes_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the codes of one projection."""
        return n, k // (self.per_byte or 1)

    def scales_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the scales of one projection; blocks at the ends may be partial."""
        rows, columns = self.scale_block
        return -(-n // (rows or n)), -(-k // (columns or k))


WEIGHT_FORMATS: Final = {
    f.name: f
    for f in (
        WeightFormat("nvfp4", 2, (1, 16), "e4m3", 16, weight_scales=True, input_scales=True),
        WeightFormat("mxfp4", 2, (1, 32), "e8m0", 32),
        WeightFormat("mxfp8", 1, (1, 32), "e8m0", 32),
        WeightFormat("fp8_block", 1, (128, 128), "f32", 16),
        WeightFormat("fp8_row", 1, (1, 0), "f32", 16),
        WeightFormat("fp8_tensor", 1, (1, 0), "f32", 16, input_scales=True),
        WeightFormat("bf16", 0, (0, 0), "", 8),
    )
}
"""Formats of weights. `fp8_tensor` has a scale a row too: gate and up rows may have different ones.
"""

INPUT_FORMATS: Final = (*WEIGHT_FORMATS, "")
"""Formats that activations are quantized to; "" stands for the format of the weights."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertStack:
    """Weights of E experts of the same size and format, in host memory.

    Scales always multiply, whatever the file said; scale bytes are row-major. D gate rows come
    first, then D up rows. H = hidden_size, D = moe_dim.

    | format | codes [E, N, K] | scales |
    |---|---|---|
    | nvfp4 | u8 [E, N, K/2], low nibble first | u8 e4m3 [E, N, K/16], weight and input scales |
    | mxfp4 | u8 [E, N, K/2], low nibble first | u8 e8m0 [E, N, K/32] |
    | mxfp8 | u8 e4m3 [E, N, K] | u8 e8m0 [E, N, K/32] |
    | fp8_block | u8 e4m3 [E, N, K] | f32 [E, blocks(N), blocks(K)], blocks(n) = ceil(n / 128) |
    | fp8_row | u8 e4m3 [E, N, K] | f32 [E, N, 1] |
    | fp8_tensor | u8 e4m3 [E, N, K] | f32 [E, N, 1], rows of a projection alike, input scales |
    | bf16 | bf16 [E, N, K] | None |

    Blocks of fp8_block never span gate and up: gate_up_scales is [E, 2 * blocks(D), blocks(H)],
    the gate's blocks first, and the last block of each may be partial.

    Attributes:
        format: Format of the weights, a key of `WEIGHT_FORMATS`.
        input_format: Format that the checkpoint was made to quantize activations to, "bf16" for
            weight-only checkpoints; "" stands for `format`. fp8_block means groups of 1 x 128,
            fp8_row a scale a token, fp8_tensor the calibrated input scales.
        gate_up: Codes of [E, 2D, H].
        gate_up_scales: Their scales, None for bf16.
        down: Codes of [E, H, D].
        down_scales: Their scales, None for bf16.
        gate_up_weight_scale: f32 [E], nvfp4 only.
        gate_up_input_scale: f32 [E], calibrated scale of the layer's input: nvfp4 and fp8_tensor.
        down_weight_scale: f32 [E], nvfp4 only.
        down_input_scale: f32 [E], scale of the activation between the matmuls, like the above.
        gate_up_bias: bf16 [E, 2D], gate's first, or None.
        down_bias: bf16 [E, H], or None.
        activation: What joins gate and up.
        source: Where the weights come from, for messages and reports.

    Raises:
        ArgTypeError: An attribute is of the wrong Python type.
        ConfigError: A format is unknown, or an attribute does not belong to the format.
        DTypeError, ShapeError: An array does not fit the table above.
        ScaleError: A scale is missing or cannot have come from a quantizer.
    """

    format: str
    input_format: str = ""
    gate_up: npt.NDArray[Any]
    gate_up_scales: npt.NDArray[Any] | None = None
    down: npt.NDArray[Any]
    down_scales: npt.NDArray[Any] | None = None
    gate_up_weight_scale: F32Array | None = None
    gate_up_input_scale: F32Array | None = None
    down_weight_scale: F32Array | None = None
    down_input_scale: F32Array | None = None
    gate_up_bias: npt.NDArray[Any] | None = None
    down_bias: npt.NDArray[Any] | None = None
    activation: GatedActivation = SILU
    source: str

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.gate_up.shape[0])

    @property
    def hidden_size(self) -> int:
        """H [elements]."""
        return int(self.down.shape[1])

    @property
    def moe_dim(self) -> int:
        """D, the intermediate size of one expert [elements]."""
        return int(self.gate_up.shape[1]) // 2

    @property
    def weight_format(self) -> WeightFormat:
        """The format of the weights as data."""
        return WEIGHT_FORMATS[self.format]

    @property
    def activation_format(self) -> str:
        """Format that activations are quantized to, never empty."""
        return self.input_format or self.format

    def __post_init__(self) -> None:
        api = type(self).__name__
        for name, known in (("format", tuple(WEIGHT_FORMATS)), ("input_format", INPUT_FORMATS)):
            if getattr(self, name) not in known:
                rule = f"one of {known}"
                raise ConfigError(message(api, name, rule, repr(getattr(self, name))))
        if not isinstance(self.activation, GatedActivation):
            got = type(self.activation).__name__
            raise ArgTypeError(message(api, "activation", "a GatedActivation", got))
        self._check_arrays(api)
        self._check_scales(api)

    def _check_arrays(self, api: str) -> None:
        fmt = self.weight_format
        codes = (np.uint8,) if fmt.per_byte else (ml_dtypes.bfloat16,)
        for name in ("gate_up", "down"):
            check_array(api, name, getattr(self, name), codes, axes=3)
        experts, hidden, moe = self.num_experts, self.hidden_size, self.moe_dim
        for name, size in (("hidden_size", hidden), ("moe_dim", moe)):
            if size == 0 or size % fmt.multiple:
                rule = f"a positive multiple of {fmt.multiple}, as {fmt.name} demands"
                raise ShapeError(message(api, name, rule, size))
        gate_up_scales = fmt.scales_shape(moe, hidden) if fmt.scales else None
        down_scales = fmt.scales_shape(hidden, moe) if fmt.scales else None
        scale_type = (np.float32,) if fmt.scales == "f32" else (np.uint8,)
        gate_up_codes, down_codes = fmt.codes_shape(2 * moe, hidden), fmt.codes_shape(hidden, moe)
        check_array(api, "gate_up", self.gate_up, codes, (experts, *gate_up_codes))
        check_array(api, "down", self.down, codes, (experts, *down_codes))
        if gate_up_scales is not None and down_scales is not None:
            rows, columns = gate_up_scales
            self._check_present(api, "gate_up_scales", scale_type, (experts, 2 * rows, columns))
            self._check_present(api, "down_scales", scale_type, (experts, *down_scales))
        expected = {
            "gate_up_scales": bool(fmt.scales),
            "down_scales": bool(fmt.scales),
            "gate_up_weight_scale": fmt.weight_scales,
            "gate_up_input_scale": fmt.input_scales,
            "down_weight_scale": fmt.weight_scales,
            "down_input_scale": fmt.input_scales,
        }
        for name, wanted in expected.items():
            if wanted and name in EXPERT_SCALES:
                self._check_present(api, name, (np.float32,), (experts,))
            elif not wanted and getattr(self, name) is not None:
                raise ConfigError(message(api, name, f"None for {fmt.name}", "an array"))
        for name, shape in (("gate_up_bias", (experts, 2 * moe)), ("down_bias", (experts, hidden))):
            if getattr(self, name) is not None:
                check_array(api, name, getattr(self, name), (ml_dtypes.bfloat16,), shape)

    def _check_present(
        self, api: str, name: str, dtypes: tuple[Any, ...], shape: tuple[int, ...]
    ) -> None:
        if getattr(self, name) is None:
            hint = "without it the weights have no value"
            raise ScaleError(message(api, name, f"scales of {self.format}", "None", hint))
        check_array(api, name, getattr(self, name), dtypes, shape)

    def _check_scales(self, api: str) -> None:
        check = SCALE_CHECKS.get(self.weight_format.scales)
        for expert in range(self.num_experts):
            for name in EXPERT_SCALES:
                if (values := getattr(self, name)) is not None:
                    where = f"{self.source}, expert {expert}, {name}"
                    check_scale(float(values[expert]), api, where)
            for name in ("gate_up", "down"):
                if check is not None:
                    where = f"{self.source}, expert {expert}, {name}_scales"
                    scales = getattr(self, f"{name}_scales")[expert]
                    check(scales, getattr(self, name)[expert], api, where)
        for name in ("gate_up_bias", "down_bias"):
            if (bias := getattr(self, name)) is not None:
                check_finite(api, f"{self.source}, {name}", bias, ScaleError)


EXPERT_SCALES: Final = (
    "gate_up_weight_scale",
    "gate_up_input_scale",
    "down_weight_scale",
    "down_input_scale",
)
"""Attributes that hold one float32 an expert."""
