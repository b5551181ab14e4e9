"""What stands between the gate/up and the down projection of an expert: a gated activation."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import numpy as np

from nbmoe.errors import ArgTypeError, ConfigError, RangeError, message

ScalarFn = Callable[[Any, Any], Any]
ArrayFn = Callable[[Any], Any]

CONSTANTS: Final[dict[str, tuple[str, ...]]] = {
    "silu": ("limit",),
    "swigluoai": ("alpha", "limit"),
    "gelu_tanh": (),
}
"""Names of the fused activations, and the constants that each takes."""

_API: Final = "GatedActivation"


def _check_constant(arg: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgTypeError(message(_API, arg, "a number", f"{type(value).__name__} {value!r}"))
    with np.errstate(over="ignore", under="ignore"):
        stored = np.float32(value)
    if not np.isfinite(stored) or (stored == 0) != (value == 0):
        raise RangeError(message(_API, arg, "a finite float32", value))


@dataclass(frozen=True)
class GatedActivation:
    """A gated activation, with g the gate and u the up value:

        silu        g * sigmoid(g) * u
        swigluoai   g * sigmoid(alpha * g) * (u + 1)
        gelu_tanh   0.5 * g * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3))) * u

    A limit L first replaces g by min(g, L) and u by u clamped to [-L, L]; the gate has no lower
    clamp. `nbmoe.reference.activation` states each rounding. gpt-oss and MiniMax-M3 use
    `GatedActivation("swigluoai", alpha=1.702, limit=7.0)`.

    Attributes:
        fused_activation: "silu", "swigluoai" or "gelu_tanh".
        alpha: Factor of the gate in the sigmoid of swigluoai, which needs one.
        limit: Clamp of silu (0 for none) and swigluoai (which needs one).
        gated_activation_fn: A function `f(gate, up)` of two float32 scalars instead of a named
            activation. It is compiled by Numba with the kernel on a GPU and in the emulator, and
            called element by element in the reference. Sums, differences, products and quotients
            of float32 have the same bits everywhere; write constants as `numpy.float32(...)`, since
            Python's floats are float64 to Numba. Functions that it calls must be compiled by
            `numba.njit`; what Numba cannot compile is refused by the operation, except by the
            backends that interpret Python (`reference`, `cudasim`). Functions of `math` differ
            between backends. The fused matmuls take names only.

    Raises:
        ConfigError: The name is unknown, it takes no such constant, or it came with a function.
        RangeError: A constant is negative where it must not be, 0 where it is needed, or not a
            finite float32.
        ArgTypeError: A constant is no number, or the function no Python function of two arguments.
    """

    fused_activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    gated_activation_fn: ScalarFn | None = None

    def __post_init__(self) -> None:
        name = self.fused_activation
        if not isinstance(name, str):
            raise ArgTypeError(message(_API, "fused_activation", "a name", repr(name)))
        if name not in CONSTANTS:
            rule = f"one of {tuple(CONSTANTS)}"
            raise ConfigError(message(_API, "fused_activation", rule, repr(name)))
        for constant in ("alpha", "limit"):
            value = getattr(self, constant)
            _check_constant(constant, value)
            if value != 0 and constant not in CONSTANTS[name]:
                raise ConfigError(message(_API, constant, f"0: {name} takes no {constant}", value))
        if self.limit < 0:
            raise RangeError(message(_API, "limit", "a limit >= 0", self.limit))
        if name == "swigluoai" and (self.alpha == 0 or self.limit == 0):
            constant = "alpha" if self.alpha == 0 else "limit"
            rule = f"{constant} other than 0 for swigluoai"
            hint = "gpt-oss uses alpha=1.702, limit=7.0"
            raise RangeError(message(_API, constant, rule, getattr(self, constant), hint))
        if self.gated_activation_fn is not None:
            self._check_function(self.gated_activation_fn)

    def _check_function(self, function: Any) -> None:
        rule = "a Python function of two scalars"
        if not isinstance(function, FunctionType):
            got = f"{type(function).__name__} {function!r}"
            raise ArgTypeError(message(_API, "gated_activation_fn", rule, got))
        try:
            inspect.signature(function).bind(0, 0)
        except TypeError as error:
            got = f"{function.__name__}{inspect.signature(function)}"
            raise ArgTypeError(message(_API, "gated_activation_fn", rule, got)) from error
        if self.fused_activation != "silu" or self.limit != 0:
            rule = "None beside a fused activation or a limit"
            got = f"a function beside {self.fused_activation} with limit {self.limit}"
            raise ConfigError(message(_API, "gated_activation_fn", rule, got))

    def kernel_parameters(self) -> dict[str, str | float]:
        """What the fused matmuls take: `activation`, `swiglu_alpha` and `swiglu_limit`.

        Raises:
            ConfigError: The activation is a function, which they cannot take.
        """
        if self.gated_activation_fn is not None:
            hint = "multiply, activate and quantize in separate calls"
            raise ConfigError(
                message(
                    "kernel_parameters", "gated_activation_fn", "a named activation", "one", hint
                )
            )
        return {
            "activation": self.fused_activation,
            "swiglu_alpha": float(self.alpha),
            "swiglu_limit": float(self.limit),
        }

    @property
    def kernel_activation(self) -> str | ScalarFn:
        """What `nbmoe_kernels.activation.make_gated_activation` takes: a name or a function."""
        return self.gated_activation_fn or self.fused_activation


SILU: Final = GatedActivation()


def take_activation(api: str, activation: Any, *, fused: bool = False) -> GatedActivation:
    """The activation that a function was given, plain silu for None.

    Args:
        api: Public function, for messages.
        activation: The caller's value.
        fused: Whether only a named activation will do.

    Raises:
        ArgTypeError: it is no GatedActivation.
        ConfigError: it is a function where a named one is needed.
    """
    if activation is None:
        return SILU
    if not isinstance(activation, GatedActivation):
        got = f"{type(activation).__name__} {activation!r}"
        raise ArgTypeError(message(api, "activation", "a GatedActivation or None", got))
    if fused and activation.gated_activation_fn is not None:
        hint = "multiply, activate and quantize in separate calls"
        got = "one with gated_activation_fn"
        raise ConfigError(message(api, "activation", "a named activation", got, hint))
    return activation


def make_concatenated_gated_activation_fn(act: ArrayFn, limit: float | None = None) -> ArrayFn:
    """A function of arrays (..., 2D), gate then up: `act(x[..., :D]) * x[..., D:]`.

    Args:
        act: Activation of the gate, on arrays.
        limit: Replaces `act(gate)` by `min(act(gate), limit)` and `up` by `up` clamped to
            [-limit, limit]. Unlike the limit of `GatedActivation` it comes after `act`.

    Raises:
        RangeError: `limit` is not above 0.
    """
    if limit is not None and not limit > 0:
        api = "make_concatenated_gated_activation_fn"
        raise RangeError(message(api, "limit", "a limit above 0 or None", limit))

    def gated(x: Any) -> Any:
        d = x.shape[-1] // 2
        gate, up = act(x[..., :d]), x[..., d:]
        if limit is None:
            return gate * up
        return gate.clip(None, limit) * up.clip(-limit, limit)

    return gated


def make_interleaved_gated_activation_fn(act: ArrayFn) -> ArrayFn:
    """A function of arrays (..., 2D), gates in even columns: `act(x[..., ::2]) * x[..., 1::2]`.

    Args:
        act: Activation of the gate, on arrays.
    """
    return lambda x: act(x[..., ::2]) * x[..., 1::2]


def make_stacked_gated_activation_fn(act: ArrayFn) -> Callable[[Any, Any], Any]:
    """A function of two arrays, gate and up: `act(gate) * up`.

    Args:
        act: Activation of the gate, on arrays.
    """
    return lambda gate, up: act(gate) * up
