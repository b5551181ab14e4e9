"""Routing: which experts a token goes to, and the order that groups rows by expert."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbmoe import reference
from nbmoe.errors import RoutingError, ShapeError, UnsupportedError
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.reference import RoutingIndices
from nbmoe.validate import F32, I32, U32, Call
from nbmoe.validate.routing import check_topk_ids, first

__all__ = ["RoutingIndices", "moe_create_indices", "route"]


def route(
    logits: Any,
    top_k: int,
    *,
    renormalize: bool,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> tuple[Any, Any]:
    """Softmax, then the k most probable experts of each token, ties to the lower id.

    Runs in numpy on every backend: routers are small, and their choice steers everything after.

    Args:
        logits: (T, E) float32, on the host.
        top_k: Experts a token, k.
        renormalize: Whether the k weights of a token are divided by their sum.
        out: `(topk_ids, topk_weights)` to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. A token with NaN logits gets NaN weights; "full" refuses rows
            that are all NaN or all -inf.

    Returns:
        topk_ids (T, k) int32 and topk_weights (T, k) float32.

    Raises:
        ArgTypeError, RangeError: `top_k` is no int in [1, E].
        DTypeError, ShapeError, LayoutError, AliasError: an array cannot be used.
        DeviceError: an array is on a GPU.
        RoutingError: a row has no largest logit ("full").
    """
    call = Call("route", validate)
    scores = call.array("logits", logits, F32, "(T, E)")
    num_tokens, num_experts = scores.shape
    if num_experts == 0:
        raise ShapeError(call.message("logits", "(T, E) with E >= 1", f"shape {scores.shape}"))
    top_k = call.integer("top_k", top_k, 1, num_experts)
    renormalize = call.boolean("renormalize", renormalize)
    shape = (num_tokens, top_k)
    buffers = call.out_tuple(out, ("topk_ids", "topk_weights"))
    if buffers is not None:
        call.output("out[0]", buffers[0], I32, "(T, k)", shape)
        call.output("out[1]", buffers[1], F32, "(T, k)", shape)
    call.place_on_host(backend, stream)
    if call.checks("full"):
        _check_logits(call, host_view(scores))

    ids = call.outputs.get("out[0]") or allocate(call, "topk_ids", shape, I32)
    weights = call.outputs.get("out[1]") or allocate(call, "topk_weights", shape, F32)
    if num_tokens:
        chosen_ids, chosen_weights = reference.route(
            host_view(scores), top_k, renormalize=renormalize
        )
        store(ids, chosen_ids)
        store(weights, chosen_weights)
    return ids.owner, weights.owner


def _check_logits(call: Call, logits: Any) -> None:
    for what, bad in (("NaN", np.isnan(logits)), ("-inf", np.isneginf(logits))):
        rows = bad.all(axis=1)
        if rows.any():
            got = f"all {what} in row {first(rows)}"
            raise RoutingError(call.message("logits", "a largest logit in each row", got))


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
