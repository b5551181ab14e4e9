"""`Router`: how the layer chooses experts, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nbmoe.checkpoints.arrays import check_array, check_finite
from nbmoe.errors import ArgTypeError, ConfigError, RangeError, ScaleError, message

SCORINGS = ("softmax", "sigmoid", "softmax_after_topk", "sigmoid_after_topk", "none")
"""How logits become weights. `…_after_topk` choose by logits and score the chosen alone; with
"none" the chosen logits are the weights."""

_API = "Router"


@dataclass(frozen=True, eq=False, kw_only=True)
class Router:
    """The gate's parameters and the rule that turns its logits into experts and weights.

        logits = x @ weight.T + bias
        scores = softmax(logits), sigmoid(logits) or, with scoring "none", logits
        ids    = the top_k experts by scores + correction_bias, in the topk_group best groups
        w      = scores[ids], divided by their sum if renormalize, times scaling_factor

    With `softmax_after_topk` and `sigmoid_after_topk` the top_k largest logits are chosen and w is
    the softmax over those, or the sigmoid of each. The rank of a group is the sum of the two
    largest scores + correction_bias in it.

    Attributes:
        weight: bf16 or f32 [E, H].
        top_k: Experts per token.
        scoring: One of `SCORINGS`.
        renormalize: Whether the chosen experts' scores are scaled to sum 1.
        bias: bf16 or f32 [E] added to the logits, or None.
        correction_bias: f32 [E] added to the scores for the choice alone, or None.
        n_group: Groups of E / n_group consecutive experts.
        topk_group: Groups that a token may choose from.
        scaling_factor: Factor of the weights, after renormalization.

    Raises:
        ArgTypeError: An attribute is of the wrong Python type.
        DTypeError, ShapeError: An array does not fit the table above.
        ConfigError: The scoring is unknown, or n_group does not divide E.
        RangeError: top_k, topk_group or scaling_factor is out of range.
        ScaleError: A bias is NaN or infinite.
    """

    weight: npt.NDArray[Any]
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    bias: npt.NDArray[Any] | None = None
    correction_bias: npt.NDArray[np.float32] | None = None
    n_group: int = 1
    topk_group: int = 1
    scaling_factor: float = 1.0

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        """H [elements]."""
        return int(self.weight.shape[1])

    def __post_init__(self) -> None:
        floats = (ml_dtypes.bfloat16, np.float32)
        check_array(_API, "weight", self.weight, floats, axes=2)
        experts = (self.num_experts,)
        if self.bias is not None:
            check_array(_API, "bias", self.bias, floats, experts)
        if self.correction_bias is not None:
            check_array(_API, "correction_bias", self.correction_bias, (np.float32,), experts)
        for name in ("bias", "correction_bias"):
            value = getattr(self, name)
            if value is not None:
                check_finite(_API, name, value, ScaleError)
        if self.scoring not in SCORINGS:
            raise ConfigError(message(_API, "scoring", f"one of {SCORINGS}", repr(self.scoring)))
        if not isinstance(self.renormalize, bool):
            got = f"{type(self.renormalize).__name__} {self.renormalize!r}"
            raise ArgTypeError(message(_API, "renormalize", "a bool", got))
        self._check_numbers()

    def _check_numbers(self) -> None:
        experts = self.num_experts
        self._integer("top_k", self.top_k, experts, "experts")
        self._integer("n_group", self.n_group, experts, "experts")
        self._integer("topk_group", self.topk_group, self.n_group, "groups")
        if experts % self.n_group:
            rule = f"a divisor of {experts}, the number of experts"
            raise ConfigError(message(_API, "n_group", rule, self.n_group))
        allowed = experts // self.n_group * self.topk_group
        if self.top_k > allowed:
            rule = f"at most {allowed}, the experts of {self.topk_group} groups"
            raise RangeError(message(_API, "top_k", rule, self.top_k))
        factor = self.scaling_factor
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            got = f"{type(factor).__name__} {factor!r}"
            raise ArgTypeError(message(_API, "scaling_factor", "a float", got))
        if not 0 < factor < float("inf"):
            raise RangeError(message(_API, "scaling_factor", "positive and finite", factor))

    def _integer(self, name: str, value: object, high: int, of: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            got = f"{type(value).__name__} {value!r}"
            raise ArgTypeError(message(_API, name, "an int", got))
        if not 1 <= value <= high:
            raise RangeError(message(_API, name, f"1..{high}, the number of {of}", value))
