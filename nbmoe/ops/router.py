"""The router: logits of a token's experts, and which of them it goes to with which weights."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe import reference
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    RangeError,
    RoutingError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.reference.router import SCORINGS
from nbmoe.validate import BF16, F32, I32, Call
from nbmoe.validate.routing import first

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
    scores = call.array("logits", logits, F32, "(T, E)")
    added = call.optional("bias", bias, F32, "(E,)")
    correction = call.optional("correction_bias", correction_bias, F32, "(E,)")
    num_tokens, columns = scores.shape
    num_parts = call.integer("num_parts", num_parts, 1)
    call.multiple("logits", "columns", columns or num_parts, num_parts)
    num_experts = columns // num_parts
    _check_experts(call, num_experts, scores.shape)
    top_k = call.integer("top_k", top_k, 1, num_experts)
    renormalize = call.boolean("renormalize", renormalize)
    shared_slot = call.boolean("shared_slot", shared_slot)
    _check_scoring(call, scoring, renormalize, n_groups, correction is not None)
    n_groups, topk_group = _take_groups(call, n_groups, topk_group, num_experts, top_k)
    factor = _take_factor(call, routed_scaling_factor)
    shape = (num_tokens, top_k + shared_slot)
    buffers = call.out_tuple(out, ("topk_ids", "topk_weights"))
    if buffers is not None:
        call.output("out[0]", buffers[0], I32, "(T, k)", shape)
        call.output("out[1]", buffers[1], F32, "(T, k)", shape)
    chosen = call.place(backend, stream)
    options: dict[str, Any] = {
        "top_k": top_k,
        "renormalize": renormalize,
        "num_parts": num_parts,
        "shared_slot": shared_slot,
    }
    groups: dict[str, Any] = {"n_groups": n_groups, "topk_group": topk_group}
    if call.checks("full"):
        _check_logits(call, call.data(scores))
        if renormalize and scoring.startswith("sigmoid"):
            _check_sums(call, scoring, options | groups)

    ids = call.outputs.get("out[0]") or allocate(call, "topk_ids", shape, I32)
    weights = call.outputs.get("out[1]") or allocate(call, "topk_weights", shape, F32)
    if num_tokens == 0:
        return ids.owner, weights.owner
    if chosen.name == "reference":
        chosen_ids, chosen_weights = reference.route(
            host_view(scores),
            scoring=scoring,
            bias=None if added is None else host_view(added),
            correction_bias=None if correction is None else host_view(correction),
            routed_scaling_factor=factor,
            **options,
            **groups,
        )
        store(ids, chosen_ids)
        store(weights, chosen_weights)
        return ids.owner, weights.owner

    from nbmoe_kernels.route_logits import launch_route_logits
    from nbmoe_kernels.route_sigmoid import launch_route_sigmoid

    run = executor(chosen, call)
    given = flat(chosen, ids, weights, scores, added)
    options |= {"num_tokens": num_tokens, "num_experts": num_experts, "factor": factor}
    options |= {"has_bias": added is not None, "stream": call.stream}
    if scoring == "sigmoid":
        options |= groups | {"has_correction": correction is not None}
        launch_route_sigmoid(run, *given, *flat(chosen, correction), **options)
    else:
        launch_route_logits(run, *given, scoring=scoring, **options)
    return ids.owner, weights.owner


def _check_experts(call: Call, num_experts: int, shape: tuple[int, ...]) -> None:
    from nbmoe_kernels.route_select import MAX_EXPERTS

    if num_experts == 0:
        raise ShapeError(call.message("logits", "(T, E) with E >= 1", f"shape {shape}"))
    if num_experts > MAX_EXPERTS:
        rule = f"at most {MAX_EXPERTS} experts"
        raise UnsupportedError(call.message("logits", rule, f"E = {num_experts}"))
    for arg in ("bias", "correction_bias"):
        if arg in call.inputs:
            call.shape(arg, (num_experts,), f"(E,) = ({num_experts},), one an expert")


def _check_scoring(
    call: Call, scoring: Any, renormalize: bool, n_groups: Any, has_correction: bool
) -> None:
    if not isinstance(scoring, str):
        raise ArgTypeError(call.message("scoring", f"one of {SCORINGS}", repr(scoring)))
    if scoring not in SCORINGS:
        raise ConfigError(call.message("scoring", f"one of {SCORINGS}", repr(scoring)))
    if scoring == "none" and renormalize:
        hint = "logits have no meaningful sum"
        raise ConfigError(call.message("renormalize", "False with scoring 'none'", True, hint))
    if scoring != "sigmoid":
        rule = f"with scoring {scoring!r}: only 'sigmoid' chooses by more than logits"
        if has_correction:
            raise ConfigError(call.message("correction_bias", f"None {rule}", "an array"))
        if n_groups != 1:
            raise ConfigError(call.message("n_groups", f"1 {rule}", repr(n_groups)))


def _take_groups(
    call: Call, n_groups: Any, topk_group: Any, num_experts: int, top_k: int
) -> tuple[int, int]:
    from nbmoe_kernels.route_sigmoid import MAX_GROUPS

    n_groups = call.integer("n_groups", n_groups, 1, MAX_GROUPS)
    topk_group = call.integer("topk_group", topk_group, 1, n_groups)
    size, rest = divmod(num_experts, n_groups)
    if rest or (n_groups > 1 and size < 2):
        rule = f"a divisor of E = {num_experts} with at least 2 experts a group"
        raise ConfigError(call.message("n_groups", rule, n_groups))
    if top_k > size * topk_group:
        rule = f"at most {size * topk_group}, the experts of topk_group = {topk_group} groups"
        raise RangeError(call.message("top_k", rule, top_k))
    return n_groups, topk_group


def _take_factor(call: Call, factor: Any) -> float:
    if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
        got = f"{type(factor).__name__} {factor!r}"
        raise ArgTypeError(call.message("routed_scaling_factor", "a number", got))
    with np.errstate(over="ignore"):
        rounded = np.float32(factor)
    if not 0 < rounded < np.inf:
        rule = "a positive, finite float32"
        raise RangeError(call.message("routed_scaling_factor", rule, factor))
    return float(rounded)


def _check_logits(call: Call, logits: NDArray[Any]) -> None:
    for what, bad in (("NaN", np.isnan(logits)), ("-inf", np.isneginf(logits))):
        rows = np.asarray(bad.all(axis=1))
        if rows.any():
            got = f"all {what} in row {first(rows)}"
            raise RoutingError(call.message("logits", "a largest logit in each row", got))


def _check_sums(call: Call, scoring: str, options: dict[str, Any]) -> None:
    arrays: dict[str, Any] = {arg: call.data(array) for arg, array in call.inputs.items()}
    options |= {"renormalize": False, "shared_slot": False}
    _, weights = reference.route(**arrays, scoring=scoring, **options)
    rows = np.asarray((weights == 0).all(axis=1))
    if rows.any():
        rule = "weights whose sum is not 0, to renormalize them"
        raise RangeError(call.message("logits", rule, f"only 0 in row {first(rows)}"))
