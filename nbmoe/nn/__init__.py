"""Layers: routing, experts and combination in one object."""

from nbmoe.nn.moe_quantized import MoEQuantized
from nbmoe.nn.random_weights import random_tokens, random_weights
from nbmoe.nn.trace import MoETrace

__all__ = ["MoEQuantized", "MoETrace", "random_tokens", "random_weights"]
