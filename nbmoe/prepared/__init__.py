"""Operands in the order in which the sm_90 matmuls read them: same numbers, other places."""

from nbmoe.prepared.tokens import PreparedTokens, pack_tokens, unpack_tokens
from nbmoe.prepared.weights import PreparedWeights, pack_weights, unpack_weights

__all__ = [
    "PreparedTokens",
    "PreparedWeights",
    "pack_tokens",
    "pack_weights",
    "unpack_tokens",
    "unpack_weights",
]
