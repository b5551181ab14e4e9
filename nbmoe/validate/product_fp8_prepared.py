"""Checks of prepared FP8 operands: tokens and weights that kernels read as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbmoe.arrays import Array
from nbmoe.backend import Backend
from nbmoe.errors import ArgTypeError, ConfigError, ScaleError, ShapeError, UnsupportedError
from nbmoe.layouts import ceil_div
from nbmoe.prepared.fp8 import PreparedFp8Tokens, fp8_token_shape, fp8_weight_bytes
from nbmoe.prepared.w4a8 import PreparedW4A8Weights, w4a8_weight_bytes
from nbmoe.prepared.weights import PreparedWeights
from nbmoe.validate.call import FLAT, Call
from nbmoe.validate.elements import F32, PREPARED
from nbmoe.validate.grouped import Groups, check_groups, check_slot_count, take_groups
from nbmoe.validate.product import take_bias, take_total_m
from nbmoe.validate.product_fp8 import BLOCK, SCALES, check_fp8_scales
from nbmoe.validate.product_prepared import MAX_SLOTS, check_capability

FORMAT = "e4m3"
_MADE_BY = {"hidden": "prepare_fp8_tokens", "weight": "prepare_fp8_weights"}


@dataclass(frozen=True)
class PreparedFp8Product:
    """Operands of a grouped FP8 matmul of prepared tokens and weights, checked.

    `a_step` is the step from a row's scale to the next, `b_steps` those from a weight's scales to
    the next weight's and from a weight row's to the next [elements]; both with scales a row.
    """

    tokens: PreparedFp8Tokens
    weights: PreparedWeights | PreparedW4A8Weights
    hidden: Array
    a_scales: Array
    weight: Array
    b_scales: Array
    groups: Groups
    bias: Array | None
    estimated_total_m: int
    a_step: int
    b_steps: tuple[int, int]

    @property
    def num_rows(self) -> int:
        """M."""
        return self.tokens.num_rows

    @property
    def n(self) -> int:
        """N, rows of an expert's weight."""
        return self.weights.n


def are_fp8_prepared(call: Call, hidden: Any, weight: Any) -> bool:
    """Whether both operands are prepared.

    Raises:
        ArgTypeError: only one of them is.
    """
    tokens = isinstance(hidden, PreparedFp8Tokens)
    weights = isinstance(weight, PreparedWeights | PreparedW4A8Weights)
    if tokens != weights:
        arg, value = ("weight", weight) if tokens else ("hidden", hidden)
        rule = "PreparedWeights beside PreparedFp8Tokens"
        if weights:
            rule = "PreparedFp8Tokens beside PreparedWeights"
        hint = f"nbmoe.ops.{_MADE_BY[arg]} makes them"
        raise ArgTypeError(call.message(arg, rule, type(value).__name__, hint))
    return tokens


def take_fp8_prepared(
    call: Call,
    hidden: PreparedFp8Tokens,
    weight: PreparedWeights | PreparedW4A8Weights,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    expert_ids: Any,
    bias: Any,
    estimated_total_m: Any,
    *,
    rowwise: bool,
) -> PreparedFp8Product:
    """Takes prepared operands and the weights' scales and checks that they fit each other.

    Raises:
        ConfigError: the weights are of another format, or `a_scales` is not None.
        ShapeError: sizes contradict each other, or the tokens' scales are of the other granularity.
        UnsupportedError: there are more slots than a kernel has room for.
        ScaleError, DTypeError, LayoutError, ArgTypeError, RangeError: as for other operands.
    """
    if a_scales is not None:
        rule = "None beside prepared tokens, which hold their scales"
        raise ConfigError(call.message("a_scales", rule, type(a_scales).__name__))
    if isinstance(weight, PreparedW4A8Weights):
        _check_folded(call, b_scales, rowwise)
    elif weight.format != FORMAT:
        hint = f"nbmoe.ops.{_MADE_BY['weight']} makes them"
        raise ConfigError(call.message("weight", f"weights of {FORMAT}", weight.format, hint))
    tokens = call.array("hidden", hidden.data, PREPARED, "(ceil(K/128), R, 128)")
    weights = call.array("weight", weight.data, PREPARED, FLAT)
    a = call.array("hidden.scales", hidden.scales, F32, "(G, R) or (1,)", missing=ScaleError)
    groups = take_groups(call, "expert_start", expert_start, expert_ids)
    total_m = take_total_m(call, estimated_total_m, hidden.num_rows)
    _check_sizes(call, hidden, weight, groups)
    _check_token_scales(call, hidden, a, rowwise)
    given = weight.scales if isinstance(weight, PreparedW4A8Weights) else b_scales
    b, b_steps = _take_weight_scales(call, weight, given, rowwise)
    added = take_bias(call, bias, weight.num_experts, weight.n)
    a_step = int(len(a.shape) > 1)
    return PreparedFp8Product(
        hidden, weight, tokens, a, weights, b, groups, added, total_m, a_step, b_steps
    )


def _check_folded(call: Call, b_scales: Any, rowwise: bool) -> None:
    if not rowwise:
        rule = "weights with scales a block"
        hint = "grouped_rowwise_dynamic_scaled_fp8_matmul multiplies folded MXFP4 weights"
        raise ConfigError(call.message("weight", rule, "PreparedW4A8Weights", hint))
    if b_scales is not None:
        rule = "None beside PreparedW4A8Weights, which hold their scales"
        raise ConfigError(call.message("b_scales", rule, type(b_scales).__name__))


def _check_sizes(
    call: Call,
    hidden: PreparedFp8Tokens,
    weight: PreparedWeights | PreparedW4A8Weights,
    groups: Groups,
) -> None:
    if hidden.k != weight.k:
        raise ShapeError(call.message("weight", f"K = {hidden.k}, that of hidden", weight.k))
    if hidden.num_slots != groups.count:
        rule = f"tokens prepared for {groups.count} slots, those of expert_ids"
        hint = "the places of rows depend on it"
        raise ShapeError(call.message("hidden", rule, hidden.num_slots, hint))
    if groups.count > MAX_SLOTS:
        rule = f"at most {MAX_SLOTS} slots with prepared operands"
        hint = "multiply operands in the documented layouts"
        raise UnsupportedError(call.message("expert_ids", rule, f"{groups.count} slots", hint))
    check_slot_count(call, groups, "weight", weight.num_experts)
    shape: tuple[int, ...] = fp8_token_shape(hidden.num_rows, hidden.num_slots, hidden.k)
    call.shape("hidden", shape, f"data of shape {shape}, as M, S and K say")
    is_folded = isinstance(weight, PreparedW4A8Weights)
    size_of = w4a8_weight_bytes if is_folded else fp8_weight_bytes
    shape = (size_of(weight.num_experts, weight.n, weight.k),)
    call.shape("weight", shape, f"data of shape {shape}, as E, N and K say")


def _check_token_scales(call: Call, hidden: PreparedFp8Tokens, a: Array, rowwise: bool) -> None:
    blocks, rows, _ = fp8_token_shape(hidden.num_rows, hidden.num_slots, hidden.k)
    allowed = ((1, rows), (1,)) if rowwise else ((blocks, rows),)
    if a.shape not in allowed:
        what = "a row or a tensor" if rowwise else "groups of 128"
        rule = f"tokens with scales of {what}: {' or '.join(map(str, allowed))}"
        raise ShapeError(call.message("hidden", rule, f"scales of shape {a.shape}"))


def _take_weight_scales(
    call: Call, weight: PreparedWeights | PreparedW4A8Weights, b_scales: Any, rowwise: bool
) -> tuple[Array, tuple[int, int]]:
    symbols = "(E, N, 1) or (E, 1, 1) or (E,)" if rowwise else "(E, ceil(N/128), ceil(K/128))"
    b = call.array("b_scales", b_scales, SCALES, symbols, missing=ScaleError)
    experts, n = weight.num_experts, weight.n
    allowed: tuple[tuple[int, ...], ...] = ((experts, n, 1), (experts, 1, 1), (experts,))
    if not rowwise:
        allowed = ((experts, ceil_div(n, BLOCK), ceil_div(weight.k, BLOCK)),)
    if b.shape not in allowed:
        rule = f"{symbols} = {' or '.join(map(str, allowed))}"
        raise ShapeError(call.message("b_scales", rule, f"shape {b.shape}"))
    if not rowwise:
        return b, (0, 0)
    return b, (n, 1) if b.size == experts * n else (1, 0)


def check_fp8_prepared(call: Call, p: PreparedFp8Product, chosen: Backend) -> None:
    """Checks the GPU, the routing metadata and the weight's scales ("metadata").

    Raises:
        DeviceError: the GPU's kernels cannot read prepared operands.
        RoutingError: routing metadata contradicts itself or the operands.
        ScaleError: a scale of the weight is NaN, infinite or negative.
    """
    if chosen.on_gpu:
        check_capability(call, p.hidden.device or 0)
    if call.checks("metadata"):
        experts = p.weights.num_experts
        check_groups(call, p.groups, p.num_rows, "hidden", experts, "weight")
        check_fp8_scales(call, "b_scales", call.data(p.b_scales))
