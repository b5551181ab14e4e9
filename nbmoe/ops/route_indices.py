"""Routing in as few launches as are fast: `route`, then `moe_create_indices` of its ids."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.ops.launch import allocate, executor, flat, store
from nbmoe.ops.route_request import RouteRequest
from nbmoe.reference import RoutingIndices
from nbmoe.validate import F32, I32, U32, Call

_FIELDS = ("topk_ids", "topk_weights", *RoutingIndices._fields)
_ELEMENTS = {"topk_ids": I32, "topk_weights": F32, "expert_ids": I32}


def route_with_indices(
    logits: Any,
    top_k: int,
    *,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
    **options: Any,
) -> tuple[Any, Any, RoutingIndices]:
    """Chooses the k best experts of each token and groups the routed rows by expert.

    The bytes are those of `nbmoe.ops.route` and of `nbmoe.ops.moe_create_indices` for its ids. For
    few tokens it is one launch, otherwise two.

    Args:
        logits: As in `nbmoe.ops.route`.
        top_k: As in `nbmoe.ops.route`.
        out: `(topk_ids, topk_weights, *indices)` to write, eight arrays.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`.
        **options: The other keywords of `nbmoe.ops.route`.

    Returns:
        topk_ids, topk_weights, and the `RoutingIndices` of E experts, or E + 1 with a shared one.

    Raises:
        As both operations.
    """
    call = Call("route_with_indices", validate)
    request = RouteRequest(call, logits, top_k, **options)
    slots, experts = request.num_slots, request.num_slot_experts
    sizes = ((slots,), (experts + 1,), (slots,), (experts,), (2,), (experts,))
    shapes = dict(zip(_FIELDS, (request.shape, request.shape, *sizes), strict=True))
    buffers = call.out_tuple(out, _FIELDS)
    for field, buffer in zip(_FIELDS, buffers or (), strict=False):
        call.output(f"out.{field}", buffer, _of(field), str(shapes[field]), shapes[field])
    chosen = call.place(backend, stream)
    request.check_values()
    outputs = [
        call.outputs.get(f"out.{field}") or allocate(call, field, shape, _of(field))
        for field, shape in shapes.items()
    ]
    if chosen.name == "reference":
        ids, weights = request.reference()
        indices = reference.moe_create_indices(ids, experts)
        for output, result in zip(outputs, (ids, weights, *indices), strict=True):
            store(output, result)
    else:
        inputs = flat(chosen, *request.inputs)
        _launch(request, executor(chosen, call), flat(chosen, *outputs), inputs, call.stream)
    owners = [output.owner for output in outputs]
    return owners[0], owners[1], RoutingIndices(*owners[2:])


def _of(field: str) -> Any:
    return _ELEMENTS.get(field, U32)


def _launch(
    request: RouteRequest, run: Any, outputs: tuple[Any, ...], inputs: tuple[Any, ...], stream: Any
) -> None:
    from nbmoe_kernels import create_indices, route_grouped, route_logits, route_sigmoid

    ids, weights, *indices = outputs
    options = request.kernel_options | {"stream": stream}
    experts = request.num_slot_experts
    launch: Any
    if request.num_tokens and route_grouped.fits(*request.shape, experts):
        launch = route_grouped.launch_route_logits_grouped
        if request.is_sigmoid:
            launch = route_grouped.launch_route_sigmoid_grouped
        launch(run, ids, weights, tuple(indices), *inputs, **options)
        return
    launch = route_logits.launch_route_logits
    if request.is_sigmoid:
        launch = route_sigmoid.launch_route_sigmoid
    launch(run, ids, weights, *inputs, **options)
    launch = create_indices.launch_create_indices
    slots = {"num_slots": request.num_slots, "num_experts": experts}
    launch(run, *indices, ids, **slots, stream=stream)
