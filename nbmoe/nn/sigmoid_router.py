"""`SigmoidTopKRouter`: the router of DeepSeek-V3, Kimi K2 and MiniMax."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from nbmoe.arrays import describe
from nbmoe.errors import DTypeError, UnsupportedError, message
from nbmoe.nn.gate import MoEGate

_BIAS_TYPES = ("float32", "bfloat16")


class SigmoidTopKRouter(MoEGate):
    """Sigmoid scores; a correction bias and groups have a say in the choice, not in the weights.

    The k experts with the largest sigmoid + correction bias among the `topk_group` best groups get
    their sigmoid as weight, divided by the sum of the k if `norm_topk_prob` (without an epsilon),
    times `routed_scaling_factor`. `nbmoe.ops.route` states each rounding.

    Attributes:
        correction_bias_dtype: Element type in which the correction bias was given.
    """

    def __init__(
        self,
        weight: npt.NDArray[Any],
        num_experts_per_token: int,
        *,
        norm_topk_prob: bool = True,
        correction_bias: npt.NDArray[Any] | None = None,
        correction_bias_dtype: str = "float32",
        routed_scaling_factor: float = 1.0,
        n_groups: int = 1,
        topk_group: int = 1,
        bias: npt.NDArray[Any] | None = None,
        backend: str | None = None,
    ) -> None:
        """Uploads a router.

        Args:
            weight: bf16 or f32 [E, H] in host memory, H % 8 == 0.
            num_experts_per_token: k.
            norm_topk_prob: Whether the k weights of a token are divided by their sum.
            correction_bias: [E] of `correction_bias_dtype`, or None.
            correction_bias_dtype: "float32" or "bfloat16"; scores are float32 with either.
            routed_scaling_factor: Factor of the weights.
            n_groups: Groups of consecutive experts, at most 32.
            topk_group: Groups that a token may choose from.
            bias: bf16 or f32 [E] added to the logits, or None.
            backend: As in `nbmoe.nn.MoEQuantized`.

        Raises:
            UnsupportedError: `correction_bias_dtype` is another type.
            DTypeError, ShapeError: An array is of another type or shape than it says above.
            ArgTypeError, RangeError, ConfigError: As `nbmoe.ops.route`.
        """
        if correction_bias_dtype not in _BIAS_TYPES:
            rule = f"one of {_BIAS_TYPES}"
            raise UnsupportedError(
                message(type(self).__name__, "correction_bias_dtype", rule, correction_bias_dtype)
            )
        super().__init__(
            weight,
            num_experts_per_token,
            scoring="sigmoid",
            renormalize=norm_topk_prob,
            bias=bias,
            routed_scaling_factor=routed_scaling_factor,
            backend=backend,
        )
        self.correction_bias_dtype = correction_bias_dtype
        if correction_bias is not None:
            found = describe(type(self).__name__, "correction_bias", correction_bias)
            if found.dtype != correction_bias_dtype:
                rule = f"{correction_bias_dtype}, the correction_bias_dtype"
                raise DTypeError(message(type(self).__name__, "correction_bias", rule, found))
        self._correction_bias = self._take_vector("correction_bias", correction_bias)
        self.options |= {"n_groups": n_groups, "topk_group": topk_group}
        self._check_options()
