"""Combine: each token's expert rows, weighted and summed."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbmoe import reference
from nbmoe.errors import RangeError, RoutingError
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.reference.routing import NO_ROW
from nbmoe.validate import BF16, F32, U32, Call
from nbmoe.validate.call import MAX_BLOCKS_Y
from nbmoe.validate.routing import check_restore, first


def moe_finalize(
    down: Any,
    restore_token_order: Any,
    weights: Any,
    *,
    shared: Any = None,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Sums each token's rows of the down projection with the routing weights.

    `out[t] = bf16(shared[t] + sum over j of weights[t, j] * down[restore_token_order[t * k + j]])`:
    from +0 the shared row as with weight 1, then j ascends, one float32 fma each. So the bytes are
    those of a shared expert that is routed first with weight 1. An order of 0xFFFFFFFF (a masked
    slot) contributes nothing; a token with none is 0.

    Args:
        down: (M, H) bfloat16, rows in expert order, H % 8 == 0.
        restore_token_order: (T * k,) uint32 of `moe_create_indices`.
        weights: (T, k) float32 of `route`.
        shared: (T, H) bfloat16 output of shared experts, or None.
        out: (T, H) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks the order; "full" also refuses NaN weights and
            weights of masked slots that are not 0.

    Returns:
        (T, H) bfloat16.

    Raises:
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: an order is beyond the rows, or repeats.
        RangeError: a weight is NaN ("full").
    """
    call = Call("moe_finalize", validate)
    rows = call.array("down", down, BF16, "(M, H)")
    restore = call.array("restore_token_order", restore_token_order, U32, "(T*k,)")
    factors = call.array("weights", weights, F32, "(T, k)")
    (num_rows, num_cols), (num_tokens, top_k) = rows.shape, factors.shape
    call.positive("weights", "k", top_k)
    call.multiple("down", "H", num_cols, 8, "pad H with zeros")
    call.at_most("down", "H", num_cols, 1024 * MAX_BLOCKS_Y)
    size = num_tokens * top_k
    call.shape("restore_token_order", (size,), f"(T*k,) = ({size},), one a weight")
    shape = (num_tokens, num_cols)
    added = call.optional("shared", shared, BF16, "(T, H)")
    if added is not None:
        call.shape("shared", shape, f"(T, H) = {shape}")
    if out is not None:
        call.output("out", out, BF16, "(T, H)", shape)
    chosen = call.place(backend, stream)
    if call.checks("metadata"):
        check_restore(call, "restore_token_order", call.data(restore), num_rows)
    if call.checks("full"):
        _check_weights(call, call.data(restore), call.data(factors))

    output = call.outputs.get("out") or allocate(call, "out", shape, BF16)
    if num_tokens == 0:
        return output.owner
    if chosen.name == "reference":
        result = reference.moe_finalize(
            *map(host_view, (rows, restore, factors)),
            shared=None if added is None else host_view(added),
        )
        store(output, result)
        return output.owner

    from nbmoe_kernels.finalize import launch_moe_finalize

    launch_moe_finalize(
        executor(chosen, call),
        *flat(chosen, output, rows, restore, factors, added),
        num_tokens=num_tokens,
        top_k=top_k,
        num_cols=num_cols,
        has_shared=added is not None,
        stream=call.stream,
    )
    return output.owner


def _check_weights(call: Call, restore: Any, weights: Any) -> None:
    flat_weights = weights.reshape(-1)
    if np.isnan(flat_weights).any():
        t, j = divmod(first(np.isnan(flat_weights)), weights.shape[1])
        raise RangeError(call.message("weights", "no NaN", f"weights[{t}, {j}] = nan"))
    stray = (restore == NO_ROW) & (flat_weights != 0)
    if stray.any():
        t, j = divmod(first(stray), weights.shape[1])
        got = f"weights[{t}, {j}] = {weights[t, j]}"
        raise RoutingError(call.message("weights", "0 for a slot that is masked", got))
