"""Whether a layer prepares its weights and tokens (`nbmoe.prepared`), and what prepares weights.

The bytes of a layer do not depend on it, but for FP8: its prepared operands are multiplied as they
are, in sums of 14 bits, so there it is never a default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbmoe import ops
from nbmoe.backend import Backend
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.errors import ArgTypeError, DeviceError, UnsupportedError, message
from nbmoe.prepared import PreparedWeights
from nbmoe.streams import synchronize
from nbmoe.validate.product_prepared import CAPABILITY, MAX_SLOTS, reads_prepared
from nbmoe_kernels.prepared_weights import UNIT_KINDS

Prepare = Callable[[Any, Any, str], PreparedWeights]
"""Makes prepared weights of codes and scales on the backend, and the name of their format."""

FP8_FORMATS = ("fp8_block", "fp8_row", "fp8_tensor")
"""Formats of weights whose scales are no part of prepared weights."""

_DEFAULT_STREAM = 0


def preparer(
    api: str, prepared: bool | None, stack: ExpertStack, backend: Backend
) -> Prepare | None:
    """What prepares the weights of a stack, None if they keep the documented layout.

    Args:
        api: Public class, for messages.
        prepared: Whether to prepare them; None where it is faster and changes no byte, which is
            on GPUs of compute capability 9.0 and not for FP8.
        stack: The weights.
        backend: Where they are.

    Raises:
        ArgTypeError: `prepared` is no bool.
        UnsupportedError: No kernel reads prepared weights of this format, or of so many experts.
        DeviceError: The GPU's kernels do not read prepared operands.
    """
    if prepared is not None and not isinstance(prepared, bool):
        got = f"{type(prepared).__name__} {prepared!r}"
        raise ArgTypeError(message(api, "prepared", "a bool or None", got))
    if prepared is False:
        return None
    obstacle = _obstacle(stack)
    has_kernels = not backend.on_gpu or reads_prepared(_current_gpu())
    if prepared is None:
        pays = backend.on_gpu and has_kernels and stack.format not in FP8_FORMATS
        return _prepare_on(backend) if pays and not obstacle else None
    if obstacle:
        raise UnsupportedError(message(api, "prepared", "None or False", obstacle))
    if not has_kernels:
        rule = "None or False but on a GPU of compute capability {}.{}".format(*CAPABILITY)
        raise DeviceError(message(api, "prepared", rule, True))
    return _prepare_on(backend)


def _obstacle(stack: ExpertStack) -> str:
    """Why weights cannot be prepared; empty if they can."""
    if stack.format not in (*UNIT_KINDS, *FP8_FORMATS):
        return f"True with {stack.format} weights"
    if stack.num_experts > MAX_SLOTS:
        return f"True with {stack.num_experts} experts, more than {MAX_SLOTS}"
    return ""


def _current_gpu() -> int:
    from numba import cuda

    return int(cuda.get_current_device().id)


def _prepare_on(backend: Backend) -> Prepare:
    def prepare(weight: Any, scales: Any, fmt: str) -> PreparedWeights:
        if fmt in FP8_FORMATS:
            made = ops.prepare_fp8_weights(weight, backend=backend.name)
        else:
            made = ops.prepare_weights(weight, scales, format=fmt, backend=backend.name)
        if backend.on_gpu:
            # Other streams do not wait for this one, and the weight may be freed.
            synchronize(_DEFAULT_STREAM)
        return made

    return prepare
