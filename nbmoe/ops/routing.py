"""Routing: the order that groups routed rows by expert, and rows in that order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe import reference
from nbmoe.errors import RoutingError, UnsupportedError
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.reference import RoutingIndices
from nbmoe.reference.routing import NO_ROW
from nbmoe.validate import BF16, F32, I32, U32, Call
from nbmoe.validate.call import MAX_BLOCKS_Y
from nbmoe.validate.routing import check_topk_ids, first

__all__ = ["RoutingIndices", "gather_rows", "moe_create_indices"]


def moe_create_indices(
    topk_ids: Any,
    num_experts: int,
    *,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> RoutingIndices:
    """Groups the routed rows by expert, stably, so that the result is the same on every run.

    Args:
        topk_ids: (T, k) or (M,) int32 expert ids, token-major; -1 masks a slot.
        num_experts: E.
        out: A `RoutingIndices`, or a tuple of its six arrays, to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks the ids.

    Returns:
        `RoutingIndices`; a masked slot has restore_token_order 0xFFFFFFFF.

    Raises:
        ArgTypeError, RangeError: `num_experts` is no positive int.
        UnsupportedError: there are more experts than the kernel has room for.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: an id is outside [-1, E), or a token chooses an expert twice.
    """
    from nbmoe_kernels.create_indices import MAX_EXPERTS, launch_create_indices

    call = Call("moe_create_indices", validate)
    ids = call.array("topk_ids", topk_ids, I32, "(T, k) or (M,)")
    num_experts = call.integer("num_experts", num_experts, 1)
    if num_experts > MAX_EXPERTS:
        rule = f"at most {MAX_EXPERTS} experts"
        raise UnsupportedError(call.message("num_experts", rule, num_experts))
    num_slots = ids.size
    shapes = dict(zip(RoutingIndices._fields, _shapes(num_slots, num_experts), strict=True))
    buffers = call.out_tuple(out, RoutingIndices._fields)
    for field, buffer in zip(shapes, buffers or (), strict=False):
        call.output(f"out.{field}", buffer, _elements(field), str(shapes[field]), shapes[field])
    chosen = call.place(backend, stream)
    if call.checks("metadata"):
        check_topk_ids(call, "topk_ids", call.data(ids), num_experts)

    outputs = [
        call.outputs.get(f"out.{field}") or allocate(call, field, shape, _elements(field))
        for field, shape in shapes.items()
    ]
    if chosen.name == "reference":
        for output, result in zip(
            outputs, reference.moe_create_indices(host_view(ids), num_experts), strict=True
        ):
            store(output, result)
    else:
        launch_create_indices(
            executor(chosen, call),
            *flat(chosen, *outputs, ids),
            num_slots=num_slots,
            num_experts=num_experts,
            stream=call.stream,
        )
    return RoutingIndices(*(output.owner for output in outputs))


def _shapes(num_slots: int, num_experts: int) -> tuple[tuple[int, ...], ...]:
    return (num_slots,), (num_experts + 1,), (num_slots,), (num_experts,), (2,), (num_experts,)


def _elements(field: str) -> Any:
    return I32 if field == "expert_ids" else U32


def gather_rows(
    input: Any,
    order: Any,
    *,
    divisor: int = 1,
    weights: Any = None,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Copies rows into another order: `out[m] = input[order[m] // divisor]`.

    Args:
        input: (R, K) bfloat16, K % 8 == 0.
        order: (M,) uint32, such as `token_expert_order`; 0xFFFFFFFF gives a row of zeros.
        divisor: What the order counts for each input row, k for a `token_expert_order`.
        weights: (R, divisor) float32 of `route`, or None: row m is multiplied by entry order[m] of
            the flat array in float32 and rounded to bfloat16.
        out: (M, K) bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks the order.

    Returns:
        (M, K) bfloat16.

    Raises:
        ArgTypeError, RangeError: `divisor` is no positive int.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: an order points beyond the input.
    """
    call = Call("gather_rows", validate)
    rows = call.array("input", input, BF16, "(R, K)")
    sources = call.array("order", order, U32, "(M,)")
    divisor = call.integer("divisor", divisor, 1)
    (num_inputs, num_cols), num_rows = rows.shape, sources.size
    call.multiple("input", "K", num_cols, 8, "pad K with zeros")
    call.at_most("input", "K", num_cols, 1024 * MAX_BLOCKS_Y)
    factors = call.optional("weights", weights, F32, "(R, divisor)")
    if factors is not None:
        call.shape("weights", (num_inputs, divisor), f"(R, divisor) = {(num_inputs, divisor)}")
    shape = (num_rows, num_cols)
    if out is not None:
        call.output("out", out, BF16, "(M, K)", shape)
    chosen = call.place(backend, stream)
    if call.checks("metadata"):
        _check_order(call, call.data(sources), divisor, num_inputs)

    output = call.outputs.get("out") or allocate(call, "out", shape, BF16)
    if num_rows == 0:
        return output.owner
    if chosen.name == "reference":
        result = reference.gather_rows(
            host_view(rows),
            host_view(sources),
            divisor=divisor,
            weights=None if factors is None else host_view(factors),
        )
        store(output, result)
        return output.owner

    from nbmoe_kernels.gather_rows import launch_gather_rows

    launch_gather_rows(
        executor(chosen, call),
        *flat(chosen, output, rows, sources, factors),
        num_rows=num_rows,
        num_cols=num_cols,
        divisor=divisor,
        has_weights=factors is not None,
        stream=call.stream,
    )
    return output.owner


def _check_order(call: Call, order: NDArray[Any], divisor: int, num_inputs: int) -> None:
    outside = (order != NO_ROW) & (order // np.uint32(divisor) >= num_inputs)
    if outside.any():
        i = first(outside)
        rule = f"order // {divisor} < {num_inputs}, the rows of input, or 0xFFFFFFFF"
        raise RoutingError(call.message("order", rule, f"order[{i}] = {order[i]}"))
