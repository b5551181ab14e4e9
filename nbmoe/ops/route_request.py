"""What a call asks of the router, checked: options, operands, and how the kernels take them."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe import reference
from nbmoe.arrays import Array
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    RangeError,
    RoutingError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.ops.launch import host_view
from nbmoe.reference.router import SCORINGS
from nbmoe.validate import F32, Call
from nbmoe.validate.routing import first


class RouteRequest:
    """The arguments of `nbmoe.ops.route`, after its checks of all but values.

    Attributes:
        num_tokens: T.
        num_experts: E, without the shared one.
        shape: Of ids and weights, (T, C + k).
    """

    def __init__(
        self,
        call: Call,
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
    ) -> None:
        """Checks the arguments, which become the call's inputs.

        Raises:
            As `nbmoe.ops.route`, but for errors of values and places.
        """
        self._call = call
        self._scores = call.array("logits", logits, F32, "(T, E)")
        self._bias = call.optional("bias", bias, F32, "(E,)")
        self._correction = call.optional("correction_bias", correction_bias, F32, "(E,)")
        self.num_tokens, columns = self._scores.shape
        num_parts = call.integer("num_parts", num_parts, 1)
        call.multiple("logits", "columns", columns or num_parts, num_parts)
        self.num_experts = columns // num_parts
        _check_experts(call, self.num_experts, self._scores.shape)
        top_k = call.integer("top_k", top_k, 1, self.num_experts)
        renormalize = call.boolean("renormalize", renormalize)
        shared_slot = call.boolean("shared_slot", shared_slot)
        _check_scoring(call, scoring, renormalize, n_groups, self._correction is not None)
        n_groups, topk_group = _take_groups(call, n_groups, topk_group, self.num_experts, top_k)
        self._scoring = scoring
        self._factor = _take_factor(call, routed_scaling_factor)
        self._options: dict[str, Any] = {
            "top_k": top_k,
            "renormalize": renormalize,
            "num_parts": num_parts,
            "shared_slot": shared_slot,
        }
        self._groups: dict[str, Any] = {"n_groups": n_groups, "topk_group": topk_group}
        self.shape = (self.num_tokens, top_k + shared_slot)

    @property
    def num_slots(self) -> int:
        """T * (C + k)."""
        return self.shape[0] * self.shape[1]

    @property
    def num_slot_experts(self) -> int:
        """Experts that ids name, the shared one included."""
        return int(self.num_experts + self._options["shared_slot"])

    @property
    def is_sigmoid(self) -> bool:
        """Whether scores are sigmoids plus corrections, which has kernels of its own."""
        return self._scoring == "sigmoid"

    @property
    def inputs(self) -> tuple[Array | None, ...]:
        """Operands in the order of the kernels."""
        inputs = (self._scores, self._bias)
        return (*inputs, self._correction) if self.is_sigmoid else inputs

    @property
    def kernel_options(self) -> dict[str, Any]:
        """Keywords of the kernels' launchers, without the stream."""
        options = self._options | {
            "num_tokens": self.num_tokens,
            "num_experts": self.num_experts,
            "factor": self._factor,
            "has_bias": self._bias is not None,
        }
        if self.is_sigmoid:
            return options | self._groups | {"has_correction": self._correction is not None}
        return options | {"scoring": self._scoring}

    def check_values(self) -> None:
        """Reads the logits at level "full".

        Raises:
            RangeError, RoutingError: As `nbmoe.ops.route`.
        """
        if not self._call.checks("full"):
            return
        _check_logits(self._call, self._call.data(self._scores))
        if self._options["renormalize"] and self._scoring.startswith("sigmoid"):
            _check_sums(self._call, self._scoring, self._options | self._groups)

    def reference(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ids and weights by `nbmoe.reference`."""
        bias, correction = (
            None if operand is None else host_view(operand)
            for operand in (self._bias, self._correction)
        )
        return reference.route(
            host_view(self._scores),
            scoring=self._scoring,
            bias=bias,
            correction_bias=correction,
            routed_scaling_factor=self._factor,
            **self._options,
            **self._groups,
        )


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
