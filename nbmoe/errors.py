"""Typed errors. Every class is also the built-in error that a caller would expect.

All of them are raised before a kernel is launched and before an output byte is written.
"""

from __future__ import annotations


def message(api: str, arg: str, rule: str, value: object, hint: str = "") -> str:
    """Builds the one message form that every error of this package uses.

    Args:
        api: Name of the public function that was called.
        arg: Name of the offending argument.
        rule: What was expected.
        value: What was received.
        hint: How to mend it, empty if there is nothing useful to say.

    Returns:
        `api(): arg: expected RULE, got VALUE — HINT`.
    """
    text = f"{api}(): {arg}: expected {rule}, got {value}"
    return f"{text} — {hint}" if hint else text


class NbmoeError(Exception):
    """Base of every error that this package raises on purpose."""


class DTypeError(NbmoeError, TypeError):
    """An array has the wrong element type."""


class ArgTypeError(NbmoeError, TypeError):
    """An argument is missing or of the wrong Python type."""


class ShapeError(NbmoeError, ValueError):
    """An array has the wrong shape."""


class LayoutError(NbmoeError, ValueError):
    """An array has strides, alignment or a writeable flag that cannot be used."""


class RangeError(NbmoeError, ValueError):
    """A number is outside its legal range."""


class ScaleError(NbmoeError, ValueError):
    """A required scale is missing or unusable."""


class RoutingError(NbmoeError, ValueError):
    """Routing metadata contradicts itself."""


class AliasError(NbmoeError, ValueError):
    """An output overlaps an input or another output."""


class DeviceError(NbmoeError, ValueError):
    """Arrays live where the chosen backend cannot reach them."""


class ConfigError(NbmoeError, ValueError):
    """Options contradict each other."""


class UnsupportedError(NbmoeError, NotImplementedError):
    """The operation is not available for this format, shape or device."""


class WorkspaceError(NbmoeError, ValueError):
    """Memory that a caller keeps between calls is too small, in use, or not as calls leave it."""


class CaptureError(NbmoeError, RuntimeError):
    """The call cannot be made while a CUDA graph is being captured."""
