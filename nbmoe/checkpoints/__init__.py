"""Readers of quantized checkpoints: any supported family in, `ExpertWeights` out."""

from nbmoe.checkpoints.reader import read_layer
from nbmoe.checkpoints.router import Router
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.checkpoints.weights import ExpertWeights

__all__ = ["ExpertStack", "ExpertWeights", "Router", "read_layer"]
