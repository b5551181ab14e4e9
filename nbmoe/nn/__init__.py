"""Layers: routing, experts and combination in one object."""

from nbmoe.nn.captured import CapturedLayer
from nbmoe.nn.gate import MoEGate
from nbmoe.nn.layer import MoELayer
from nbmoe.nn.moe import MoE, make_layer
from nbmoe.nn.moe_quantized import MoEQuantized
from nbmoe.nn.nvfp4_scales import Nvfp4Scales
from nbmoe.nn.random_weights import random_tokens, random_weights
from nbmoe.nn.routed_experts import RoutedExperts
from nbmoe.nn.sigmoid_router import SigmoidTopKRouter
from nbmoe.nn.stacked_moe import GateUpFormat, StackedMoE
from nbmoe.nn.trace import MoETrace
from nbmoe.nn.workspace import Workspace

__all__ = [
    "CapturedLayer",
    "GateUpFormat",
    "MoE",
    "MoEGate",
    "MoELayer",
    "MoEQuantized",
    "MoETrace",
    "Nvfp4Scales",
    "RoutedExperts",
    "SigmoidTopKRouter",
    "StackedMoE",
    "Workspace",
    "make_layer",
    "random_tokens",
    "random_weights",
]
