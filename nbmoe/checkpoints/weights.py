"""`ExpertWeights`: one MoE layer in the one convention that the rest of nbmoe knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.scales import check_block_scales, check_scale
from nbmoe.errors import ArgTypeError, DTypeError, RangeError, ShapeError, message
from nbmoe.formats import NVFP4

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]

_API = "ExpertWeights"


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertWeights:
    """The NVFP4 experts and the router of one MoE layer, in host memory.

    A weight is `e2m1(code) * e4m3(block scale) * weight scale`; scales always multiply, whatever
    the file said. E experts, H = hidden_size, D = moe_dim.

    Attributes:
        gate_up: u8 [E, 2D, H/2], packed codes, D gate rows and then D up rows.
        gate_up_scales: u8 [E, 2D, H/16], e4m3 block scales, row-major.
        gate_up_weight_scale: f32 [E], shared by gate and up.
        gate_up_input_scale: f32 [E], calibrated scale of the layer's input.
        down: u8 [E, H, D/2], packed codes.
        down_scales: u8 [E, H, D/16], e4m3 block scales, row-major.
        down_weight_scale: f32 [E].
        down_input_scale: f32 [E], calibrated scale of the activation between the two matmuls.
        router: bf16 or f32 [E, H], the gate's weight.
        top_k: Experts per token.
        renormalize: Whether the chosen experts' weights are scaled to sum 1.
        source: Where the layer comes from, for messages and reports.

    Raises:
        ArgTypeError: An attribute is not a numpy array.
        DTypeError, ShapeError: An array does not fit the table above.
        RangeError: top_k is not in 1..E.
        ScaleError: A scale cannot have come from a quantizer.
    """

    gate_up: U8Array
    gate_up_scales: U8Array
    gate_up_weight_scale: F32Array
    gate_up_input_scale: F32Array
    down: U8Array
    down_scales: U8Array
    down_weight_scale: F32Array
    down_input_scale: F32Array
    router: npt.NDArray[Any]
    top_k: int
    renormalize: bool
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

    def __post_init__(self) -> None:
        self._check_arrays()
        self._check_scales()
        if not 1 <= self.top_k <= self.num_experts:
            rule = f"1..{self.num_experts}, the number of experts"
            raise RangeError(message(_API, "top_k", rule, self.top_k))

    def _check_arrays(self) -> None:
        for name in ("gate_up", "down"):
            _check(name, getattr(self, name), (np.uint8,), None)
        experts, hidden, moe = self.num_experts, self.hidden_size, self.moe_dim
        for name, size in (("hidden_size", hidden), ("moe_dim", moe)):
            if size == 0 or size % NVFP4.block:
                rule = f"a positive multiple of the NVFP4 block of {NVFP4.block}"
                raise ShapeError(message(_API, name, rule, size))
        u8, f32 = (np.uint8,), (np.float32,)
        _check("gate_up", self.gate_up, u8, (experts, 2 * moe, hidden // 2))
        _check("gate_up_scales", self.gate_up_scales, u8, (experts, 2 * moe, hidden // 16))
        _check("down", self.down, u8, (experts, hidden, moe // 2))
        _check("down_scales", self.down_scales, u8, (experts, hidden, moe // 16))
        _check("router", self.router, (ml_dtypes.bfloat16, np.float32), (experts, hidden))
        for name in _EXPERT_SCALES:
            _check(name, getattr(self, name), f32, (experts,))

    def _check_scales(self) -> None:
        for expert in range(self.num_experts):
            for name in _EXPERT_SCALES:
                where = f"{self.source}, expert {expert}, {name}"
                check_scale(float(getattr(self, name)[expert]), _API, where)
            for name in ("gate_up", "down"):
                where = f"{self.source}, expert {expert}, {name}_scales"
                scales = getattr(self, f"{name}_scales")[expert]
                check_block_scales(scales, getattr(self, name)[expert], _API, where)


_EXPERT_SCALES = (
    "gate_up_weight_scale",
    "gate_up_input_scale",
    "down_weight_scale",
    "down_input_scale",
)


def _check(
    name: str, array: object, dtypes: tuple[Any, ...], shape: tuple[int, ...] | None
) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgTypeError(message(_API, name, "a numpy array", type(array).__name__))
    if array.dtype not in dtypes:
        rule = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise DTypeError(message(_API, name, rule, array.dtype))
    if shape is None:
        if array.ndim != 3:
            raise ShapeError(message(_API, name, "3 axes", array.shape))
    elif array.shape != shape:
        raise ShapeError(message(_API, name, str(shape), array.shape))
