"""Our formats by name: how to make their weights, and their chain at a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbmoe.bench.block_chain import BlockChain, BlockWeights
from nbmoe.bench.chain import Chain
from nbmoe.bench.fp8_chain import (
    FoldedRowChain,
    FoldedWeights,
    Fp8Chain,
    Fp8RowChain,
    Fp8Weights,
)
from nbmoe.bench.memory import Memory
from nbmoe.bench.models import Model
from nbmoe.bench.routed import Routed
from nbmoe.bench.row_chains import Bf16Chain, Bf16Weights, mxfp4_weights
from nbmoe.formats import MXFP4, MXFP8, NVFP4, BlockFormat


@dataclass(frozen=True)
class Format:
    """Weights of a model, shared by all numbers of tokens, and a chain for each."""

    make_weights: Callable[[Memory, Model], Any]
    make_chain: Callable[[Routed, Any], Chain]


def _block(activations: BlockFormat, weights: BlockFormat) -> Format:
    return Format(
        lambda memory, model: BlockWeights(memory, model, weights),
        lambda routed, made: BlockChain(routed, made, activations),
    )


FORMATS = {
    "nvfp4": _block(NVFP4, NVFP4),
    "mxfp4": _block(MXFP4, MXFP4),
    "mxfp8": _block(MXFP8, MXFP8),
    "w4a8": _block(MXFP8, MXFP4),
    "fp8": Format(Fp8Weights, Fp8Chain),
    "fp8_row": Format(lambda memory, model: Fp8Weights(memory, model, by_row=True), Fp8RowChain),
    "w4a8_row": Format(FoldedWeights, FoldedRowChain),
    "bf16": Format(Bf16Weights, Bf16Chain),
    "w4a16": Format(mxfp4_weights, Bf16Chain),
}
