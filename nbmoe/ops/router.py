"""The router: logits of a token's experts, and which of them it goes to with which weights."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.route_request import RouteRequest
from nbmoe.reference.router import SCORINGS
from nbmoe.validate import BF16, F32, I32, Call

__all__ = ["SCORINGS", "route", "router_logits"]


def router_logits(
    x: Any,
    weight: Any,
    *,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Multiplies tokens by the gate's weight: x @ weight.T in float32.

    Products of bf16 values are summed as the tensor core does (`nbmoe.reference.tensor_core`), K
    padded with zeros to a multiple of 64; nothing is rounded to bf16.

    Args:
        x: (T, H) bfloat16 tokens, H % 8 == 0.
        weight: (E, H) bfloat16.
        out: (T, E) float32 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`; no level reads the elements.

    Returns:
        (T, E) float32.

    Raises:
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
    """
    call = Call("router_logits", validate)
    tokens = call.array("x", x, BF16, "(T, H)")
    gate = call.array("weight", weight, BF16, "(E, H)")
    (num_tokens, hidden), num_experts = tokens.shape, gate.shape[0]
    call.multiple("x", "H", hidden, 8, "pad H with zeros")
    call.positive("weight", "E", num_experts)
    call.shape("weight", (num_experts, hidden), f"(E, H) with H = {hidden}, that of x")
    shape = (num_tokens, num_experts)
    if out is not None:
        call.output("out", out, F32, "(T, E)", shape)
    chosen = call.place(backend, stream)
    output = call.outputs.get("out") or allocate(call, "out", shape, F32)
    if num_tokens == 0:
        return output.owner
    if chosen.name == "reference":
        store(output, reference.router_logits(host_view(tokens), host_view(gate)))
        return output.owner

    from nbmoe_kernels.heuristics import grouped_matmul_config
    from nbmoe_kernels.matmul_grouped_sm80 import launch_matmul_grouped
    from nbmoe_kernels.router_logits import MAX_TOKENS, launch_router_logits

    if num_tokens <= MAX_TOKENS:
        launch_router_logits(
            executor(chosen, call),
            *flat(chosen, output, tokens, gate),
            num_tokens=num_tokens,
            num_experts=num_experts,
            hidden=hidden,
            stream=call.stream,
        )
        return output.owner
    config = grouped_matmul_config("bf16", "bf16", num_experts, hidden, 1, num_tokens)
    nothing = flat(chosen, *(None for _ in range(7)))
    launch_matmul_grouped(
        executor(chosen, call),
        *flat(chosen, output, tokens, gate, None),
        *nothing,
        has_row_scales=False,
        has_expert_scales=False,
        has_bias=False,
        num_active=0,
        num_rows=num_tokens,
        n=num_experts,
        k=hidden,
        config=config,
        out_type="f32",
        stream=call.stream,
    )
    return output.owner


def route(
    logits: Any,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    bias: Any = None,
    correction_bias: Any = None,
    n_groups: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    num_parts: int = 1,
    shared_slot: bool = False,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> tuple[Any, Any]:
    """Chooses the k best experts of each token and weights them.

    | scoring | chosen by | weight | models |
    |---|---|---|---|
    | `softmax` | logit | softmax over all experts | Qwen3, Mixtral |
    | `softmax_after_topk` | logit | softmax over the chosen | gpt-oss |
    | `sigmoid_after_topk` | logit | sigmoid | Llama 4 |
    | `none` | logit | the logit itself | `max.nn.MoEGate` |
    | `sigmoid` | sigmoid + correction bias | sigmoid | DeepSeek-V3, Kimi K2, MiniMax |

    Equals go to the lower id. All arithmetic is float32 with stated roundings and orders of sums
    (`nbmoe.reference.router.route`), so every backend gives the same bytes, and a token's result
    does not depend on the others. Ids are always different and in range. A NaN logit is larger
    than any other, so its expert is chosen and its weight is NaN, as are the softmax weights beside
    it.

    Args:
        logits: (T, E) float32, E <= 1024; or (T, num_parts * E), see `num_parts`.
        top_k: Experts a token, k.
        scoring: How logits become weights, from the table.
        renormalize: Whether the k weights of a token are divided by their sum. Without effect on
            `softmax_after_topk`, whose sum is 1; not for `none`.
        bias: (E,) float32 added to the logits, or None.
        correction_bias: (E,) float32 added to the scores for the choice alone; `sigmoid` only.
        n_groups: Groups of E / n_groups consecutive experts, at most 32; `sigmoid` only.
        topk_group: Groups that a token may choose from: those whose two best biased scores have
            the largest sums.
        routed_scaling_factor: Factor of the weights, after renormalization.
        num_parts: A row holds this many parts of all logits, one after another, which are summed
            in order: how a float32 gate goes through a bf16 matmul.
        shared_slot: Whether expert 0 is a shared expert: it comes first for each token, with weight
            1, and the ids of the others are one higher.
        out: `(topk_ids, topk_weights)` to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "full" refuses tokens whose logits are all NaN or all -inf, or
            whose weights have no sum to be divided by.

    Returns:
        topk_ids (T, C + k) int32 and topk_weights (T, C + k) float32, C = 1 with `shared_slot`,
        else 0.

    Raises:
        ArgTypeError: a number, bool or name is of another type.
        RangeError: `top_k` is no int in [1, E], or more than the experts of `topk_group` groups;
            `n_groups`, `topk_group` or `num_parts` is out of range; the factor is not positive and
            finite; the weights of a token sum to 0 ("full").
        ConfigError: the scoring is unknown or does not take an option.
        UnsupportedError: there are more experts than the kernel has room for.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: a row has no largest logit ("full").
    """
    call = Call("route", validate)
    request = RouteRequest(
        call,
        logits,
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        bias=bias,
        correction_bias=correction_bias,
        n_groups=n_groups,
        topk_group=topk_group,
        routed_scaling_factor=routed_scaling_factor,
        num_parts=num_parts,
        shared_slot=shared_slot,
    )
    buffers = call.out_tuple(out, ("topk_ids", "topk_weights"))
    if buffers is not None:
        call.output("out[0]", buffers[0], I32, "(T, k)", request.shape)
        call.output("out[1]", buffers[1], F32, "(T, k)", request.shape)
    chosen = call.place(backend, stream)
    request.check_values()

    ids = call.outputs.get("out[0]") or allocate(call, "topk_ids", request.shape, I32)
    weights = call.outputs.get("out[1]") or allocate(call, "topk_weights", request.shape, F32)
    if request.num_tokens == 0:
        return ids.owner, weights.owner
    if chosen.name == "reference":
        for output, result in zip((ids, weights), request.reference(), strict=True):
            store(output, result)
        return ids.owner, weights.owner

    from nbmoe_kernels.route_logits import launch_route_logits
    from nbmoe_kernels.route_sigmoid import launch_route_sigmoid

    launch = launch_route_sigmoid if request.is_sigmoid else launch_route_logits
    launch(
        executor(chosen, call),
        *flat(chosen, ids, weights, *request.inputs),
        **request.kernel_options,
        stream=call.stream,
    )
    return ids.owner, weights.owner
