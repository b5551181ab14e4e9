"""What `Fp8Strategy`'s matmul takes together: activations, their scales and their routing."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from nbmoe.arrays import describe
from nbmoe.errors import ArgTypeError, DTypeError, message
from nbmoe.prepared.fp8 import PreparedFp8Tokens


class Fp8ExpertInputs(NamedTuple):
    """Quantized activations in the order of the slots, and whose they are.

    Attributes:
        hidden: (M, K) e4m3 codes, or PreparedFp8Tokens.
        hidden_scales: Their scales, as `Fp8Strategy.grouped_quantize` gives them; None for
            PreparedFp8Tokens.
        expert_start: (S + 1,) uint32 prefix sums [rows].
        expert_ids: (S,) int32 expert of each slot, -1 for none.
        usage_stats: The most rows of a slot, and S. They choose nothing here and are not read, so
            None and an array of a GPU will do.
    """

    hidden: Any
    hidden_scales: Any
    expert_start: Any
    expert_ids: Any
    usage_stats: Any


_TYPES: Final = {"expert_start": "uint32", "expert_ids": "int32"}
_ORDER: Final = f"the order is ({', '.join(Fp8ExpertInputs._fields)})"


def take_fp8_inputs(api: str, expert_inputs: Any) -> Fp8ExpertInputs:
    """Takes the five operands.

    Raises:
        ArgTypeError: they are not five, or one that is needed is None.
        DTypeError: one has the type of another.
    """
    names = Fp8ExpertInputs._fields
    if not isinstance(expert_inputs, tuple | list) or len(expert_inputs) != len(names):
        got = type(expert_inputs).__name__
        if isinstance(expert_inputs, tuple | list):
            got += f" of {len(expert_inputs)}"
        rule = f"a tuple of {len(names)}: {', '.join(names)}"
        raise ArgTypeError(message(api, "expert_inputs", rule, got))
    inputs = Fp8ExpertInputs(*expert_inputs)
    for name, value in zip(names[:-1], inputs[:-1], strict=True):
        is_inside = name == "hidden_scales" and isinstance(inputs.hidden, PreparedFp8Tokens)
        if value is None and not is_inside:
            raise ArgTypeError(message(api, f"expert_inputs.{name}", "an array", "None", _ORDER))
    for name, dtype in _TYPES.items():
        got = describe(api, f"expert_inputs.{name}", getattr(inputs, name)).dtype
        if got != dtype:
            raise DTypeError(message(api, f"expert_inputs.{name}", dtype, got, _ORDER))
    return inputs
