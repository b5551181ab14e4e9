"""Operands of the grouped matmuls in the prepared layouts, made from the documented ones."""

from typing import Any

from nbmoe.prepared import PreparedTokens, PreparedWeights, pack_tokens, pack_weights
from tests.ops.operands import Product
from tests.strategies import Slots


def prepared_product(p: Product) -> tuple[Any, ...]:
    """Positional arguments of `grouped_matmul_block_scaled`."""
    s = p.slots
    tokens = pack_tokens(p.hidden, p.a_scales, s.starts, s.offsets, format=p.a_format.name)
    weights = pack_weights(p.weight, p.b_scales, format=p.b_format.name)
    return tokens, weights, None, None, s.starts, None, s.ids


def prepared_rows(
    hidden: Any, weight: Any, b_scales: Any, slots: Slots
) -> tuple[PreparedTokens, PreparedWeights]:
    """Both operands of the matmuls of bfloat16 rows."""
    tokens = pack_tokens(hidden, expert_start=slots.starts, format="bf16")
    kind = "bf16" if b_scales is None else "mxfp4"
    return tokens, pack_weights(weight, b_scales, format=kind)
