"""The group size that a strategy's caller repeats: it must be that of the strategy's format."""

from __future__ import annotations

import numbers
from typing import Any, Final

from nbmoe.errors import ArgTypeError, ConfigError, RangeError, UnsupportedError, message

GROUP_SIZES: Final = {-1: "FP8 rows and tensors", 16: "NVFP4", 32: "MX", 128: "FP8 blocks"}


def check_group_size(api: str, group_size: Any, expected: int, what: str) -> None:
    """Refuses a group size other than the expected one.

    Args:
        api: Public function, for messages.
        group_size: The caller's value.
        expected: The strategy's group size [elements], -1 for whole rows or tensors.
        what: What has that size, for messages.

    Raises:
        ArgTypeError, RangeError, UnsupportedError, ConfigError: as it is no int, not positive (or
            -1), of no format, or of another one.
    """
    rule = f"{expected}, {what}"
    if isinstance(group_size, bool) or not isinstance(group_size, numbers.Integral):
        got = f"{type(group_size).__name__} {group_size!r}"
        raise ArgTypeError(message(api, "group_size", rule, got))
    if group_size == 0 or group_size < -1:
        raise RangeError(message(api, "group_size", rule, group_size))
    if group_size not in GROUP_SIZES:
        known = ", ".join(f"{size} ({of})" for size, of in GROUP_SIZES.items())
        raise UnsupportedError(message(api, "group_size", f"one of {known}", group_size))
    if group_size != expected:
        raise ConfigError(message(api, "group_size", rule, group_size))
