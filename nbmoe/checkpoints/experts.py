"""Reads the experts and the router of one MoE layer into `ExpertWeights`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.architectures import ModelConfig
from nbmoe.checkpoints.families import Family
from nbmoe.checkpoints.scales import check_block_scales, check_scale, share_weight_scale
from nbmoe.checkpoints.tensors import CheckpointTensors, StoredTensor
from nbmoe.checkpoints.weights import ExpertWeights
from nbmoe.errors import (
    ConfigError,
    DTypeError,
    ScaleError,
    ShapeError,
    UnsupportedError,
    message,
)
from nbmoe.formats import NVFP4

U8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class _Projection:
    """One projection of one expert; the two scales multiply."""

    codes: U8Array
    block_scales: U8Array
    weight_scale: np.float32
    input_scale: np.float32


@dataclass(frozen=True)
class LayerReader:
    """Reads MoE layers of one checkpoint.

    Attributes:
        tensors: The checkpoint's tensors.
        model: What config.json says about the layers.
        family: How the exporter names tensors and directs scales.
        source: Name of the checkpoint in messages.
        api: Name of the public function, for messages.
    """

    tensors: CheckpointTensors
    model: ModelConfig
    family: Family
    source: str
    api: str

    def read(self, layer: int) -> ExpertWeights:
        """Reads one layer. Nothing outside it is touched.

        Raises:
            ConfigError: A tensor that is not a scale is missing, or experts are.
            DTypeError, ShapeError: A tensor is not what the family and config.json say.
            ScaleError: A scale is missing or unusable.
            UnsupportedError: The layer has parts that nbmoe does not compute.
        """
        self._check_parts(layer)
        architecture, model = self.model.architecture, self.model
        experts, hidden, moe = model.num_experts, model.hidden_size, model.moe_dim
        block = NVFP4.block
        gate_up = np.empty((experts, 2 * moe, hidden // 2), np.uint8)
        gate_up_scales = np.empty((experts, 2 * moe, hidden // block), np.uint8)
        down = np.empty((experts, hidden, moe // 2), np.uint8)
        down_scales = np.empty((experts, hidden, moe // block), np.uint8)
        per_expert = np.empty((4, experts), np.float32)
        for e in range(experts):
            gate = self._projection(layer, e, architecture.gate_proj, moe, hidden)
            up = self._projection(layer, e, architecture.up_proj, moe, hidden)
            dn = self._projection(layer, e, architecture.down_proj, hidden, moe)
            gate_bytes, up_bytes, shared = share_weight_scale(
                gate.block_scales,
                up.block_scales,
                gate.weight_scale,
                up.weight_scale,
                self.api,
                f"layer {layer}, expert {e}, {self.family.weight_scale} of "
                f"{architecture.gate_proj} and {architecture.up_proj}",
            )
            gate_up[e, :moe], gate_up[e, moe:] = gate.codes, up.codes
            gate_up_scales[e, :moe], gate_up_scales[e, moe:] = gate_bytes, up_bytes
            down[e], down_scales[e] = dn.codes, dn.block_scales
            # The input is quantized once for both, with the scale calibrated for the gate rows.
            per_expert[:, e] = shared, gate.input_scale, dn.weight_scale, dn.input_scale
        return ExpertWeights(
            gate_up=gate_up,
            gate_up_scales=gate_up_scales,
            gate_up_weight_scale=per_expert[0],
            gate_up_input_scale=per_expert[1],
            down=down,
            down_scales=down_scales,
            down_weight_scale=per_expert[2],
            down_input_scale=per_expert[3],
            router=self._router(layer),
            top_k=model.top_k,
            renormalize=model.renormalize,
            source=f"{self.source}, layer {layer}",
        )

    def layers(self) -> list[int]:
        """Numbers of the layers that have experts, ascending."""
        block = re.escape(self.model.architecture.block)
        pattern = re.compile(rf"model\.layers\.(\d+)\.{block}\.experts\.")
        matches = (pattern.match(name) for name in self.tensors.names)
        return sorted({int(match.group(1)) for match in matches if match})

    def _check_parts(self, layer: int) -> None:
        """Every tensor of the block has to be a part that the forward pass uses."""
        prefix = self.model.architecture.layer_prefix(layer) + "."
        expert = re.compile(r"experts\.(\d+)\.")
        found: set[int] = set()
        for name in self.tensors.names:
            if not name.startswith(prefix):
                continue
            rest = name.removeprefix(prefix)
            match = expert.match(rest)
            if match:
                found.add(int(match.group(1)))
            elif rest != "gate.weight":
                rule = "only experts and a gate without bias in the MoE block"
                hint = "shared experts, router biases and fused experts are not computed"
                raise UnsupportedError(message(self.api, f"layer {layer}", rule, name, hint))
        expected = set(range(self.model.num_experts))
        if found != expected:
            rule = f"experts 0..{self.model.num_experts - 1}, as config.json says"
            missing, extra = sorted(expected - found), sorted(found - expected)
            value = f"missing {missing}" if missing else f"also {extra}"
            raise ConfigError(message(self.api, f"layer {layer}", rule, value))

    def _projection(self, layer: int, expert: int, name: str, rows: int, k: int) -> _Projection:
        prefix = f"{self.model.architecture.layer_prefix(layer)}.experts.{expert}.{name}."
        where = f"layer {layer}, expert {expert}, {name}"
        family = self.family
        codes = self._tensor(prefix + family.codes, where, "U8", (rows, k // 2))
        scales_name = prefix + family.block_scales
        scales = self._scale_tensor(scales_name, where, "F8_E4M3", (rows, k // NVFP4.block))
        check_block_scales(scales.data, codes.data, self.api, f"{where}, {scales_name}")
        return _Projection(
            codes=codes.data,
            block_scales=scales.data,
            weight_scale=self._multiplier(prefix + family.weight_scale, where),
            input_scale=self._multiplier(prefix + family.input_scale, where),
        )

    def _multiplier(self, name: str, where: str) -> np.float32:
        stored = self._scale_tensor(name, where, "F32", None)
        if stored.data.size != 1:
            arg = f"{where}, {name}"
            raise ShapeError(message(self.api, arg, "one element", stored.data.shape))
        value = np.float32(stored.data.reshape(()))
        check_scale(float(value), self.api, f"{where}, {name}")
        return np.float32(1) / value if self.family.is_divisor else value

    def _router(self, layer: int) -> npt.NDArray[Any]:
        name = f"{self.model.architecture.layer_prefix(layer)}.gate.weight"
        shape = (self.model.num_experts, self.model.hidden_size)
        return np.array(self._tensor(name, f"layer {layer}, router", "BF16 or F32", shape).data)

    def _scale_tensor(
        self, name: str, where: str, dtype: str, shape: tuple[int, ...] | None
    ) -> StoredTensor:
        if name not in self.tensors:
            hint = "without it the weights have no value; export the checkpoint again"
            raise ScaleError(message(self.api, f"{where}, {name}", "a scale", "nothing", hint))
        return self._tensor(name, where, dtype, shape)

    def _tensor(
        self, name: str, where: str, dtype: str, shape: tuple[int, ...] | None
    ) -> StoredTensor:
        arg = f"{where}, {name}"
        if name not in self.tensors:
            rule = f"a {dtype} tensor of a {self.family.name} checkpoint"
            raise ConfigError(message(self.api, arg, rule, "nothing"))
        stored = self.tensors.read(name)
        if stored.dtype not in dtype.split(" or "):
            raise DTypeError(message(self.api, arg, dtype, stored.dtype))
        if shape is not None and stored.data.shape != shape:
            raise ShapeError(message(self.api, arg, str(shape), stored.data.shape))
        return stored
