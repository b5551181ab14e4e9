"""What a strategy's matmul takes together: activations, their scales and their routing."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from nbmoe.arrays import Array, describe, like_operand, read
from nbmoe.errors import (
    ArgTypeError,
    DTypeError,
    RangeError,
    RoutingError,
    ScaleError,
    ShapeError,
    message,
)
from nbmoe.ops.launch import allocate, executor, flat
from nbmoe.prepared import PreparedTokens
from nbmoe.validate import F32, Call
from nbmoe.validate.routing import first
from nbmoe.validate.scales import check_factors

MAX_TOKENS_OF_ANY_EXPERT = 8192
"""What stands for usage statistics that are on a GPU, where nobody reads them."""

SUSPICIOUS_SCALE = 1e6
"""Input scales are maxima of activations divided by 2688: one above this looks like an inverse."""


class ExpertInputs(NamedTuple):
    """Quantized activations in the order of the slots, and whose they are.

    Attributes:
        hidden: (M, K) or packed (M, K/2) codes, or PreparedTokens.
        hidden_scales: (tiles, ceil(K/(4 * block)), 32, 4, 4) scale tiles, None for PreparedTokens.
        expert_start: (S + 1,) uint32 prefix sums [rows].
        scales_offsets: (S,) uint32 [128-row tiles].
        expert_ids: (S,) int32 expert of each slot, -1 for none.
        usage_stats: (2,) uint32 on the host: the most rows of a slot, and S. They choose nothing
            here, so None and an array of a GPU, which is not read, will do too.
    """

    hidden: Any
    hidden_scales: Any
    expert_start: Any
    scales_offsets: Any
    expert_ids: Any
    usage_stats: Any


_ROUTING_TYPES = {"expert_start": "uint32", "scales_offsets": "uint32", "expert_ids": "int32"}
_ORDER = f"the order is ({', '.join(ExpertInputs._fields)})"


def take_expert_inputs(api: str, expert_inputs: Any, validate: str | None = None) -> ExpertInputs:
    """Takes the six operands, and checks the usage statistics if they are on the host.

    Args:
        api: Public function, for messages.
        expert_inputs: The caller's tuple.
        validate: See `nbmoe.ops`.

    Raises:
        ArgTypeError: they are no six, or one that is needed is None.
        DTypeError: one has the type of another; or usage statistics are not uint32.
        ShapeError: routing has more axes than one, or usage statistics are not two.
        RangeError: usage statistics name more experts than slots.
        RoutingError: they name fewer rows than a slot has ("full").
    """
    names = ExpertInputs._fields
    if not isinstance(expert_inputs, tuple | list) or len(expert_inputs) != len(names):
        got = type(expert_inputs).__name__
        if isinstance(expert_inputs, tuple | list):
            got += f" of {len(expert_inputs)}"
        rule = f"a tuple of {len(names)}: {', '.join(names)}"
        raise ArgTypeError(message(api, "expert_inputs", rule, got))
    inputs = ExpertInputs(*expert_inputs)
    for name, value in zip(names[:-1], inputs[:-1], strict=True):
        is_inside = name == "hidden_scales" and isinstance(inputs.hidden, PreparedTokens)
        if value is None and not is_inside:
            raise ArgTypeError(message(api, f"expert_inputs.{name}", "an array", "None", _ORDER))
    for name, dtype in _ROUTING_TYPES.items():
        arg = f"expert_inputs.{name}"
        array = describe(api, arg, getattr(inputs, name))
        if array.dtype != dtype:
            raise DTypeError(message(api, arg, dtype, array.dtype, _ORDER))
        if len(array.shape) != 1:
            raise ShapeError(message(api, arg, f"{dtype} of one axis", f"shape {array.shape}"))
    _check_usage(api, inputs, validate)
    return inputs


def host_usage(inputs: ExpertInputs) -> Any:
    """The usage statistics, or a constant in their place where the host cannot read them."""
    stats = inputs.usage_stats
    if stats is None or describe("usage_stats", "usage_stats", stats).kind.on_gpu:
        slots = describe("usage_stats", "expert_ids", inputs.expert_ids).shape[0]
        return np.array([MAX_TOKENS_OF_ANY_EXPERT, slots], np.uint32)
    return stats


def _check_usage(api: str, inputs: ExpertInputs, validate: str | None) -> None:
    arg = "expert_inputs.usage_stats"
    if inputs.usage_stats is None:
        return
    stats = describe(api, arg, inputs.usage_stats)
    if stats.dtype != "uint32":
        raise DTypeError(message(api, arg, "uint32", stats.dtype, _ORDER))
    if stats.shape != (2,):
        rule = "(2,), the most rows of a slot and the number of slots"
        raise ShapeError(message(api, arg, rule, f"shape {stats.shape}"))
    if stats.kind.on_gpu:
        return
    most, active = (int(n) for n in read(stats))
    starts = describe(api, "expert_inputs.expert_start", inputs.expert_start)
    slots = starts.shape[0] - 1
    if active > slots:
        raise RangeError(message(api, f"{arg}[1]", f"at most {slots}, the slots", active))
    if validate == "full":
        counts = np.diff(read(starts).astype(np.int64))
        if (counts > most).any():
            slot = first(counts > most)
            rule = f"at least {counts[slot]}, the rows of slot {slot}"
            raise RoutingError(message(api, f"{arg}[0]", rule, most))


def inverse_scales(
    api: str,
    arg: str,
    scales: Any,
    per: str,
    *,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """1 / scales, each rounded once, where the scales are.

    Arrays of a GPU cost a launch of one small kernel and a new array of their size.

    Args:
        api: Public function, for messages.
        arg: Argument name.
        scales: (E,) or (S,) float32 input scales, not inverted.
        per: What an entry belongs to, "expert" or "slot".
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`.

    Raises:
        ScaleError: they are None; or one is not positive, not finite, or has no finite inverse.
        ArgTypeError, DTypeError, ShapeError, LayoutError, DeviceError: they cannot be used.
    """
    call = Call(api, validate)
    x = call.array(arg, scales, F32, "(E,)", missing=ScaleError)
    chosen = call.place(backend, stream)
    if call.checks("metadata"):
        _check_invertible(call, arg, call.data(x), per)
    if x.view is not None:
        with np.errstate(all="ignore"):
            return like_operand(np.float32(1) / x.view, x)
    from nbmoe_kernels.reciprocal import launch_reciprocal

    output: Array = allocate(call, "inverse", x.shape, F32)
    count, run = x.shape[0], executor(chosen, call)
    launch_reciprocal(run, *flat(chosen, output, x), count=count, stream=call.stream)
    return output.owner


def _check_invertible(call: Call, arg: str, values: Any, per: str) -> None:
    check_factors(call, arg, values, per)
    with np.errstate(over="ignore"):
        overflows = ~np.isfinite(np.float32(1) / values)
    if overflows.any():
        i = first(overflows)
        got = f"{arg}[{i}] = {values[i]} for {per} {i}"
        raise ScaleError(call.message(arg, "scales with a finite float32 inverse", got))
    if (values > SUSPICIOUS_SCALE).any():
        i = first(values > SUSPICIOUS_SCALE)
        rule = "input scales as checkpoints hold them, not inverted"
        warnings.warn(call.message(arg, rule, f"{arg}[{i}] = {values[i]}"), stacklevel=4)
