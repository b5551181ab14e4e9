"""Reads the experts and the router of one MoE layer into `ExpertWeights`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbmoe.checkpoints.architectures import ModelConfig
from nbmoe.checkpoints.families import BF16, Family
from nbmoe.checkpoints.fused import read_fused
from nbmoe.checkpoints.named import NamedTensors
from nbmoe.checkpoints.projections import Expert, read_projection, stack_fields
from nbmoe.checkpoints.router import Router
from nbmoe.checkpoints.stack import WEIGHT_FORMATS, ExpertStack
from nbmoe.checkpoints.weights import ExpertWeights
from nbmoe.errors import ConfigError, ShapeError, UnsupportedError, message


@dataclass(frozen=True)
class LayerReader:
    """Reads MoE layers of one checkpoint.

    Attributes:
        tensors: The checkpoint's tensors.
        model: What config.json says about the layers.
        family: How the exporter names tensors and directs scales.
        source: Name of the checkpoint in messages.
    """

    tensors: NamedTensors
    model: ModelConfig
    family: Family
    source: str

    def read(self, layer: int) -> ExpertWeights:
        """Reads one layer. Nothing outside it is touched.

        Raises:
            ConfigError: A tensor that is not a scale is missing, or experts are.
            DTypeError, ShapeError: A tensor is not what the family and config.json say.
            ScaleError: A scale is missing or unusable.
            UnsupportedError: The layer has parts that nbmoe does not compute.
        """
        self._check_parts(layer)
        model = self.model
        source = f"{self.source}, layer {layer}"
        prefix = f"{model.architecture.layer_prefix(layer)}."
        if model.architecture.is_fused:
            fields = read_fused(self.tensors, self.family, model, prefix, f"layer {layer}")
        else:
            names = {
                f"layer {layer}, expert {e}": f"{prefix}experts.{e}."
                for e in range(model.num_experts)
            }
            fields = self._stack(names, model.moe_dim)
        shared = None
        if model.num_shared:
            names = {f"layer {layer}, shared experts": f"{prefix}{model.architecture.shared}."}
            shared = ExpertStack(
                **self._stack(names, model.num_shared * model.moe_dim),
                activation=model.activation,
                source=f"{source}, shared experts",
            )
        return ExpertWeights(
            **fields,
            activation=model.activation,
            router=self._router(layer),
            shared=shared,
            source=source,
        )

    def layers(self) -> list[int]:
        """Numbers of the layers that have experts, ascending."""
        block = re.escape(self.model.architecture.block)
        pattern = re.compile(rf"model\.layers\.(\d+)\.{block}\.experts\.")
        matches = (pattern.match(name) for name in self.tensors.names)
        return sorted({int(match.group(1)) for match in matches if match})

    def _stack(self, prefixes: dict[str, str], moe_dim: int) -> dict[str, Any]:
        """Fields of an `ExpertStack` from experts with tensors of their own.

        Args:
            prefixes: Beginning of the tensor names of each expert, by its name for messages.
            moe_dim: D of these experts.
        """
        architecture, hidden = self.model.architecture, self.model.hidden_size
        first = next(iter(prefixes.values())) + architecture.gate_proj + "."
        family = self.family
        if family is not BF16 and self.tensors.is_bf16(first + BF16.codes):
            # What the exporter was told to ignore stays bf16 and has no scales.
            family = BF16 if first + family.scales not in self.tensors else family
        multiple = WEIGHT_FORMATS[family.format].multiple
        for name, size in (("hidden_size", hidden), ("moe_dim", moe_dim)):
            if size % multiple:
                rule = f"a multiple of {multiple}, as {family.format} demands"
                arg = f"config.json: {name}"
                raise ShapeError(message(self.tensors.api, arg, rule, size))
        experts = []
        for where, prefix in prefixes.items():
            shapes = {
                architecture.gate_proj: (moe_dim, hidden),
                architecture.up_proj: (moe_dim, hidden),
                architecture.down_proj: (hidden, moe_dim),
            }
            gate, up, down = (
                read_projection(self.tensors, family, f"{prefix}{name}.", f"{where}, {name}", shape)
                for name, shape in shapes.items()
            )
            names = f"{architecture.gate_proj} and {architecture.up_proj}"
            experts.append(Expert(gate, up, down, f"{where}, {family.weight_scale} of {names}"))
        return stack_fields(experts, family, self.tensors.api)

    def _check_parts(self, layer: int) -> None:
        """Every tensor of the block has to be a part that the forward pass uses."""
        architecture = self.model.architecture
        prefix = architecture.layer_prefix(layer) + "."
        part = re.compile(self._known_parts())
        found: set[int] = set()
        for name in self.tensors.names:
            if not name.startswith(prefix):
                continue
            match = part.fullmatch(name.removeprefix(prefix))
            if not match:
                rule = "only parts that are computed in the MoE block"
                hint = f"a {architecture.model_type} layer has none of that name"
                arg = f"layer {layer}"
                raise UnsupportedError(message(self.tensors.api, arg, rule, name, hint))
            if match.groupdict().get("expert"):
                found.add(int(match.group("expert")))
        expected = set(range(self.model.num_experts))
        if not architecture.is_fused and found != expected:
            rule = f"experts 0..{self.model.num_experts - 1}, as config.json says"
            missing, extra = sorted(expected - found), sorted(found - expected)
            value = f"missing {missing}" if missing else f"also {extra}"
            raise ConfigError(message(self.tensors.api, f"layer {layer}", rule, value))

    def _known_parts(self) -> str:
        """Pattern of the tensor names, below the block, that are read or may be ignored."""
        a = self.model.architecture
        router = ["weight"]
        router += ["bias"] if a.has_router_bias else []
        router += ["e_score_correction_bias"] if a.is_grouped else []
        patterns = [rf"{a.router}\.({'|'.join(router)})"]
        if a.is_fused:
            patterns.append(r"experts\.(gate_up|down)_proj_(blocks|scales|bias)")
        else:
            # Anything but a bias: exporters add notes such as shapes beside weights and scales.
            projection = rf"({a.gate_proj}|{a.up_proj}|{a.down_proj})\.(?!bias$)\w+"
            patterns.append(rf"experts\.(?P<expert>\d+)\.{projection}")
            if self.model.num_shared:
                patterns.append(rf"{a.shared}\.{projection}")
        return "|".join(patterns)

    def _router(self, layer: int) -> Router:
        model, architecture = self.model, self.model.architecture
        prefix = f"{architecture.layer_prefix(layer)}.{architecture.router}."
        where, floats = f"layer {layer}, router", "BF16 or F32"
        experts = model.num_experts
        shape = (experts, model.hidden_size)
        weight = np.array(self.tensors.read(prefix + "weight", where, floats, shape))
        bias = correction = None
        if architecture.has_router_bias:
            bias = np.array(self.tensors.read(prefix + "bias", where, floats, (experts,)))
        if architecture.is_grouped:
            name = prefix + "e_score_correction_bias"
            stored = self.tensors.read(name, where, floats, (experts,))
            correction = stored.astype(np.float32)
        return Router(
            weight=weight,
            bias=bias,
            correction_bias=correction,
            top_k=model.top_k,
            scoring=architecture.scoring,
            renormalize=model.renormalize,
            n_group=model.n_group,
            topk_group=model.topk_group,
            scaling_factor=model.scaling_factor,
        )
