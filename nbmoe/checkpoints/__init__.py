"""Readers of quantized checkpoints: any supported family in, `ExpertWeights` out."""

from nbmoe.checkpoints.reader import read_layer
from nbmoe.checkpoints.weights import ExpertWeights

__all__ = ["ExpertWeights", "read_layer"]
