"""Shared experts: every token goes through them, beside or as slot 0 of the routed ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.errors import ConfigError, message

_ARRAYS = (
    "gate_up",
    "gate_up_scales",
    "down",
    "down_scales",
    "gate_up_weight_scale",
    "gate_up_input_scale",
    "down_weight_scale",
    "down_input_scale",
    "gate_up_bias",
    "down_bias",
)
_SAME = ("format", "activation_format", "moe_dim", "hidden_size", "activation")


def difference(routed: ExpertStack, shared: ExpertStack) -> str:
    """Why the shared experts cannot be a slot of the routed ones; empty if they can."""
    for name in _SAME:
        ours, theirs = getattr(routed, name), getattr(shared, name)
        if ours != theirs:
            return f"{name} {theirs!r} beside {ours!r}"
    for name in _ARRAYS:
        if (getattr(routed, name) is None) != (getattr(shared, name) is None):
            return f"only one of them with {name}"
    return ""


def prepend(routed: ExpertStack, shared: ExpertStack, api: str) -> ExpertStack:
    """The stack with the shared expert as expert 0 and the others one higher.

    Args:
        routed: E experts.
        shared: One expert of the same size and formats.
        api: Public class, for messages.

    Raises:
        ConfigError: They differ in size, format, activation or parts.
    """
    found = difference(routed, shared)
    if found:
        rule = "a shared expert like the routed ones, to be slot 0 of theirs"
        hint = "pass fused_shared_expert=False"
        raise ConfigError(message(api, "fused_shared_expert", rule, found, hint))
    joined: dict[str, Any] = {}
    for name in _ARRAYS:
        first, others = getattr(shared, name), getattr(routed, name)
        joined[name] = None if first is None else np.concatenate([first, others])
    names = {f.name for f in dataclasses.fields(ExpertStack)} - set(_ARRAYS)
    return ExpertStack(**joined, **{name: getattr(routed, name) for name in names})
