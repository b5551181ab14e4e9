"""The order that groups routed rows by expert, and rows in that order."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from nbmoe import codecs
from nbmoe.errors import RoutingError, message
from nbmoe.layouts import U32Array, scales_offset

NO_ROW: Final = 0xFFFFFFFF
"""Position of a slot that was routed nowhere, and source of a row that nobody owns."""
MASKED: Final = -1

I32Array = npt.NDArray[np.int32]


class RoutingIndices(NamedTuple):
    """What the grouped kernels need to know about a routing.

    Attributes:
        token_expert_order: (M,) uint32. Position p of the grouped rows holds source i = t * k + j.
            Positions from expert_start_indices[E] on, one for each masked id, hold 0xFFFFFFFF.
        expert_start_indices: (E + 1,) uint32 exclusive prefix sums of rows per expert [rows].
        restore_token_order: (M,) uint32. Source i went to position p; 0xFFFFFFFF if masked.
        expert_ids: (E,) int32, 0..E-1: the expert of each slot.
        expert_usage_stats: (2,) uint32: most rows of any expert, number of experts.
        scales_offset: (E,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
    """

    token_expert_order: U32Array
    expert_start_indices: U32Array
    restore_token_order: U32Array
    expert_ids: I32Array
    expert_usage_stats: U32Array
    scales_offset: U32Array


def moe_create_indices(topk_ids: I32Array, num_experts: int) -> RoutingIndices:
    """Groups routed rows by expert, keeping the order of sources inside an expert.

    Args:
        topk_ids: (M,) or (T, k) int32 expert ids, token-major. -1 masks a source out.
        num_experts: E.

    Returns:
        RoutingIndices with M = topk_ids.size.

    Raises:
        RoutingError: An id is neither -1 nor in 0..E-1.
    """
    ids = np.asarray(topk_ids).ravel().astype(np.int64)
    legal = (ids >= MASKED) & (ids < num_experts)
    if not legal.all():
        rule = f"-1 or 0..{num_experts - 1}"
        raise RoutingError(message("moe_create_indices", "topk_ids", rule, ids[~legal][0]))
    kept = ids != MASKED
    counts = np.bincount(ids[kept], minlength=num_experts)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)

    sources = np.argsort(np.where(kept, ids, num_experts), kind="stable")
    order = np.full(ids.size, NO_ROW, np.uint32)
    restore = np.full(ids.size, NO_ROW, np.uint32)
    routed = sources[: kept.sum()]
    order[: len(routed)] = routed
    restore[routed] = np.arange(len(routed))
    return RoutingIndices(
        token_expert_order=order,
        expert_start_indices=start,
        restore_token_order=restore,
        expert_ids=np.arange(num_experts, dtype=np.int32),
        expert_usage_stats=np.array([counts.max(initial=0), num_experts], np.uint32),
        scales_offset=scales_offset(start),
    )


def gather_rows(
    input: npt.NDArray[Any],
    order: U32Array,
    *,
    divisor: int = 1,
    weights: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[Any]:
    """Rows of the input in another order: out[m] = input[order[m] // divisor].

    Args:
        input: (R, K) bf16.
        order: (M,) uint32; 0xFFFFFFFF gives a row of zeros.
        divisor: What the order counts for each input row.
        weights: (R, divisor) float32: row m is multiplied by the entry order[m] of the flat array
            in float32 and rounded to bf16.

    Returns:
        (M, K) bf16.
    """
    result = np.zeros((len(order), input.shape[1]), input.dtype)
    present = order != NO_ROW
    sources = order[present]
    rows = input[sources // np.uint32(divisor)]
    if weights is not None:
        factors = weights.reshape(-1)[sources]
        with np.errstate(all="ignore"):
            rows = codecs.encode_bf16(codecs.decode_bf16(rows) * factors[:, np.newaxis])
    result[present] = rows
    return result
