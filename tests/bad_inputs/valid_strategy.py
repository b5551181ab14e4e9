"""Valid calls of the strategies' methods, and which operation takes which of their arguments."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from nbmoe.config import QuantConfig
from nbmoe.formats import MXFP4, MXFP8, NVFP4
from nbmoe.strategies import Fp8Strategy, NvMxf4f8Strategy
from nbmoe.strategies.expert_inputs import ExpertInputs
from nbmoe.strategies.fp8_inputs import Fp8ExpertInputs
from tests.bad_inputs.sizes import EXPERTS, factors, scale_rows
from tests.bad_inputs.valid import Arguments, op_name, valid

STRATEGIES = {
    "nvfp4": (NvMxf4f8Strategy, QuantConfig.nvfp4(), "uint8"),
    "mxfp4": (NvMxf4f8Strategy, QuantConfig.mxfp4(), "uint8"),
    "mxfp8": (NvMxf4f8Strategy, QuantConfig.mxfp8(), "float8_e4m3fn"),
    "mxfp8xmxfp4": (NvMxf4f8Strategy, QuantConfig.mxfp4(), "float8_e4m3fn"),
    "block": (Fp8Strategy, QuantConfig.blockscaled_fp8(), "float8_e4m3fn"),
    "row": (Fp8Strategy, QuantConfig.rowwise_fp8(), "float8_e4m3fn"),
    "tensor": (Fp8Strategy, QuantConfig.tensor_fp8(), "float8_e4m3fn"),
}
BLOCK = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32, "mxfp8xmxfp4": 32}
BLOCK_FORMATS = tuple(BLOCK)
FP8 = ("block", "row", "tensor")


@dataclass(frozen=True)
class Method:
    """A method of a strategy.

    Attributes:
        name: Method.
        variant: Strategy, from `STRATEGIES`.
        build: Makes fresh valid arguments.
        op: The operation that it calls.
        passed: Its arguments, "expert_inputs.hidden" for one of those, by the operation's name for
            it.
    """

    name: str
    variant: str
    build: Callable[[], Arguments]
    op: str = ""
    passed: dict[str, str] = field(default_factory=dict)

    @property
    def api(self) -> str:
        """What messages of its own name."""
        return f"{STRATEGIES[self.variant][0].__name__}.{self.name}"

    def bound(self) -> Callable[..., Any]:
        """The method of a strategy whose backend is chosen by the operands."""
        found: Callable[..., Any] = getattr(strategy(self.variant), self.name)
        return found

    def __str__(self) -> str:
        return f"{self.api}:{self.variant}"


@lru_cache
def strategy(variant: str) -> Any:
    """A strategy from the table."""
    kind, config, dtype = STRATEGIES[variant]
    return kind(config, dtype)


def renamed(entry: str, names: dict[str, str], **more: Any) -> Arguments:
    """Arguments of an operation under a strategy's names."""
    arguments = valid(entry)
    return {ours: arguments[theirs] for ours, theirs in names.items()} | more


def expert_inputs(entry: str) -> Any:
    """What an operation takes, as one argument of a strategy's method."""
    arguments = valid(entry)
    names = ("hidden", "a_scales", "expert_start", "a_scale_offsets", "expert_ids")
    taken = [arguments[name] for name in names if name in arguments]
    stats = np.array([125, EXPERTS], np.uint32)
    return (ExpertInputs if "a_scale_offsets" in arguments else Fp8ExpertInputs)(*taken, stats)


INPUTS = {
    "expert_inputs.hidden": "hidden",
    "expert_inputs.hidden_scales": "a_scales",
    "expert_inputs.expert_start": "expert_start",
    "expert_inputs.scales_offsets": "a_scale_offsets",
    "expert_inputs.expert_ids": "expert_ids",
}
FP8_INPUTS = {ours: theirs for ours, theirs in INPUTS.items() if "offsets" not in ours}
WEIGHT = {"weight": "weight", "weight_scales": "b_scales", "bias": "bias", "out": "out"}
FP8_ENTRIES = {
    "block": "grouped_dynamic_scaled_fp8_matmul:float32",
    "row": "grouped_rowwise_dynamic_scaled_fp8_matmul:row",
    "tensor": "grouped_rowwise_dynamic_scaled_fp8_matmul:tensor",
}


def _method(
    name: str, variant: str, entry: str, passed: dict[str, str], more: Callable[[], Arguments]
) -> Method:
    taken = {ours: theirs for ours, theirs in passed.items() if "." not in ours}

    def build() -> Arguments:
        return renamed(entry, taken, **more())

    return Method(name, variant, build, op_name(entry), passed)


def block_methods(variant: str) -> list[Method]:
    """Those of the block formats."""
    activations = "mxfp8" if variant == "mxfp8xmxfp4" else variant
    group = {"group_size": BLOCK[variant]}
    is_nvfp4 = variant == "nvfp4"
    tensor = {"tensor": "input", "out": "out"}
    slots = {"expert_start": "row_offsets", "scales_offset": "scales_offsets"}
    slots |= {"expert_ids": "expert_ids", "indices": "indices"}
    fused = f"fused_silu_quantize:{activations}"
    matmul = f"grouped_matmul_block_scaled:{variant}"
    swiglu = f"grouped_matmul_blocked_swiglu:{variant}"
    own = {"expert_scales": "expert_scales"}
    own |= {"a_row_scales": "a_row_scales"} if is_nvfp4 else {}
    routing = {ours: theirs for ours, theirs in INPUTS.items() if "hidden" not in ours}

    def scales(name: str) -> Arguments:
        return {name: factors(9, EXPERTS) if is_nvfp4 else None}

    return [
        _method(
            "quantize",
            variant,
            f"quantize_dynamic_block_scaled:{activations}",
            tensor,
            lambda: group,
        ),
        _method(
            "grouped_quantize",
            variant,
            f"grouped_quantize_dynamic_block_scaled:{activations}",
            tensor | slots,
            lambda: group | scales("input_scale") | {"indices_divisor": 2},
        ),
        _method(
            "fused_silu_quantize",
            variant,
            fused,
            {"gate_up_projs": "gate_up", "out": "out"} | routing,
            lambda: scales("input_scales") | {"expert_inputs": expert_inputs(matmul)},
        ),
        _method(
            "grouped_matmul",
            variant,
            matmul,
            WEIGHT | own | INPUTS,
            lambda: {"expert_inputs": expert_inputs(matmul)},
        ),
        _method(
            "grouped_matmul_swiglu",
            variant,
            swiglu,
            WEIGHT | own | INPUTS,
            lambda: scales("input_scales") | {"expert_inputs": expert_inputs(swiglu)},
        ),
    ]


def fp8_methods(variant: str) -> list[Method]:
    """Those of FP8."""
    group = {"group_size": 128 if variant == "block" else -1}
    entry = "quantize_dynamic_scaled_float8:float32"
    tensor = {"tensor": "input"}
    if variant == "tensor":
        entry, tensor = "quantize_tensor_dynamic_scaled_float8", {"tensor": "x"}
    matmul = FP8_ENTRIES[variant]
    bound = {"expert_start": "row_offsets"}
    ignored = {"input_scale": None, "scales_offset": None, "expert_ids": None}
    return [
        _method("quantize", variant, entry, tensor, lambda: group),
        _method("grouped_quantize", variant, entry, tensor | bound, lambda: group | ignored),
        _method(
            "fused_silu_quantize",
            variant,
            "gated_activation",
            {"gate_up_projs": "gate_up"},
            lambda: {"expert_inputs": expert_inputs(matmul)},
        ),
        _method(
            "grouped_matmul",
            variant,
            matmul,
            WEIGHT | FP8_INPUTS,
            lambda: {"expert_inputs": expert_inputs(matmul)},
        ),
    ]


METHODS = [
    *(method for variant in BLOCK_FORMATS for method in block_methods(variant)),
    *(method for variant in FP8 for method in fp8_methods(variant)),
]


def weight_scales(variant: str) -> Arguments:
    """Arguments of `NvMxf4f8Strategy.prepare_weight_scales`."""
    fmt = {"nvfp4": NVFP4, "mxfp8": MXFP8}.get(variant, MXFP4)
    return {
        "gate_up": scale_rows(1, fmt, EXPERTS, 96, 5),
        "down": scale_rows(2, fmt, EXPERTS, 80, 3),
    }
