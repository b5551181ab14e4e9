"""One projection of one expert, read and checked, and how experts become a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.families import Family
from nbmoe.checkpoints.named import NamedTensors
from nbmoe.checkpoints.scales import SCALE_CHECKS, check_scale, share_weight_scale
from nbmoe.checkpoints.stack import WEIGHT_FORMATS
from nbmoe.errors import ShapeError, message


@dataclass(frozen=True, eq=False)
class Projection:
    """Weights [N, K] of one projection; all scales multiply.

    Attributes:
        codes: As `ExpertStack` holds one expert's.
        scales: As `ExpertStack` holds one expert's, None for bf16.
        weight_scale: Second-level scale, 1 where the format has none.
        input_scale: Scale of the input, 1 where the format has none.
    """

    codes: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None
    weight_scale: np.float32
    input_scale: np.float32


@dataclass(frozen=True, eq=False)
class Expert:
    """The three projections of an expert, and the name of its gate and up scales in messages."""

    gate: Projection
    up: Projection
    down: Projection
    where: str


def read_projection(
    tensors: NamedTensors, family: Family, prefix: str, where: str, shape: tuple[int, int]
) -> Projection:
    """Reads a projection whose tensors are its own.

    Args:
        tensors: The checkpoint.
        family: How it names tensors.
        prefix: Beginning of their names.
        where: Layer, expert and projection, for messages.
        shape: (N, K) of the weight [elements].

    Raises:
        ConfigError: The weight is missing.
        DTypeError, ShapeError: A tensor is not what the family says.
        ScaleError: A scale is missing or unusable.
    """
    codes_shape = WEIGHT_FORMATS[family.format].codes_shape(*shape)
    codes = tensors.read(prefix + family.codes, where, family.codes_type, codes_shape)
    return Projection(
        codes=codes,
        scales=_scales(tensors, family, prefix, where, shape, codes),
        weight_scale=_multiplier(tensors, family, prefix, family.weight_scale, where),
        input_scale=_multiplier(tensors, family, prefix, family.input_scale, where),
    )


def _scales(
    tensors: NamedTensors,
    family: Family,
    prefix: str,
    where: str,
    shape: tuple[int, int],
    codes: npt.NDArray[np.uint8],
) -> npt.NDArray[Any] | None:
    if not family.scales:
        return None
    fmt = WEIGHT_FORMATS[family.format]
    name = prefix + family.scales
    stored_shape = None if family.is_per_tensor else fmt.scales_shape(*shape)
    stored = tensors.scale(name, where, family.scales_type, stored_shape)
    if fmt.scales != "f32":
        scales = stored
    else:
        if family.is_per_tensor:
            _check_one(stored, tensors.api, f"{where}, {name}")
            stored = np.broadcast_to(stored.reshape(1, 1), fmt.scales_shape(*shape))
        scales = stored.astype(np.float32)  # exact, also from bf16
    SCALE_CHECKS[fmt.scales](scales, codes, tensors.api, f"{where}, {name}")
    return scales


def _multiplier(
    tensors: NamedTensors, family: Family, prefix: str, suffix: str, where: str
) -> np.float32:
    if not suffix:
        return np.float32(1)
    name = prefix + suffix
    # compressed-tensors writes static FP8 input scales in the model's type.
    dtype = "F32 or BF16" if family.format == "fp8_tensor" else "F32"
    stored = tensors.scale(name, where, dtype, None)
    _check_one(stored, tensors.api, f"{where}, {name}")
    value = np.float32(stored.reshape(()))
    check_scale(float(value), tensors.api, f"{where}, {name}")
    return np.float32(1) / value if family.is_divisor else value


def _check_one(stored: npt.NDArray[Any], api: str, where: str) -> None:
    if stored.size != 1:
        raise ShapeError(message(api, where, "one element", stored.shape))


def stack_fields(experts: Sequence[Expert], family: Family, api: str) -> dict[str, Any]:
    """Fields of an `ExpertStack`: gate rows and then up rows, experts along the first axis.

    Args:
        experts: The experts in order.
        family: Their family.
        api: Name of the public function, for messages.

    Raises:
        ScaleError: The gate and up of an expert have weight scales without an exact common one.
    """
    fmt = WEIGHT_FORMATS[family.format]
    fields: dict[str, Any] = {"format": family.format, "input_format": family.input_format}
    fields["gate_up"] = _joined([e.gate.codes for e in experts], [e.up.codes for e in experts])
    fields["down"] = np.stack([e.down.codes for e in experts])
    if not fmt.scales:
        return fields
    gates, ups, downs, shared = [], [], [], []
    for expert in experts:
        gate, up, scale = expert.gate.scales, expert.up.scales, expert.gate.weight_scale
        assert gate is not None and up is not None and expert.down.scales is not None
        downs.append(expert.down.scales)
        if fmt.weight_scales:
            gate, up, scale = share_weight_scale(
                gate, up, scale, expert.up.weight_scale, api, expert.where
            )
        gates.append(gate)
        ups.append(up)
        shared.append(scale)
    fields["gate_up_scales"] = _joined(gates, ups)
    fields["down_scales"] = np.stack(downs)
    if fmt.weight_scales:
        fields["gate_up_weight_scale"] = np.array(shared, np.float32)
        fields["down_weight_scale"] = _vector([e.down.weight_scale for e in experts])
    if fmt.input_scales:
        # The input is quantized once for both, so that neither saturates.
        largest = [max(e.gate.input_scale, e.up.input_scale) for e in experts]
        fields["gate_up_input_scale"] = _vector(largest)
        fields["down_input_scale"] = _vector([e.down.input_scale for e in experts])
    return fields


def _joined(gates: list[npt.NDArray[Any]], ups: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """[E, 2N, K]: gate rows, then up rows."""
    rows, columns = gates[0].shape
    joined = np.empty((len(gates), 2 * rows, columns), gates[0].dtype)
    for into, gate, up in zip(joined, gates, ups, strict=True):
        into[:rows], into[rows:] = gate, up
    return joined


def _vector(values: list[np.float32]) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)
