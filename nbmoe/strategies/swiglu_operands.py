"""`SwigluOperands`: what the fused matmul of block formats takes, checked and inverted."""

from __future__ import annotations

from typing import Any, NamedTuple


class SwigluOperands(NamedTuple):
    """Operands of the fused matmul, as `NvMxf4f8Strategy.prepare_swiglu_operands` brings them.

    Attributes:
        hidden: Codes of the activations.
        hidden_scales: Their scale tiles.
        expert_start: (S + 1,) uint32 prefix sums [rows].
        scales_offsets: (S,) uint32 [128-row tiles].
        expert_ids: (S,) int32.
        usage_stats: (2,) uint32 on the host.
        c_input_scales: (S,) float32 inverse input scales of the down projection; None for MX.
        expert_scales: (E,) float32 factors; None for ones.
    """

    hidden: Any
    hidden_scales: Any
    expert_start: Any
    scales_offsets: Any
    expert_ids: Any
    usage_stats: Any
    c_input_scales: Any
    expert_scales: Any
