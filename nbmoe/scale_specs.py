"""What the scales of weights and of activations look like: granularity, origin, type, block."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from nbmoe.errors import ArgTypeError, ConfigError, DTypeError, RangeError, message


class ScaleGranularity(Enum):
    """What shares a scale.

    TENSOR: everything. ROWWISE: a row of a weight, a token of an input. COLWISE: a column; for
    inputs the same as ROWWISE, after the place of the scales in a (1, M) array. BLOCK: a block of
    `block_size` rows and columns.
    """

    TENSOR = "tensor"
    ROWWISE = "rowwise"
    COLWISE = "colwise"
    BLOCK = "block"


class ScaleOrigin(Enum):
    """Where input scales come from: the checkpoint (STATIC) or the data (DYNAMIC)."""

    STATIC = "static"
    DYNAMIC = "dynamic"


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e8m0fnu": 1}
_BYTES |= {"float8_e5m2": 1, "uint8": 1, "int8": 1}
_DTYPES = (*_BYTES, "float4_e2m1fn", "float4_e2m1fn_x2")
SCALE_ALIGNMENT = 16
"""A row of transposed FP8 scales is padded to a multiple of this [bytes]."""
_Choice = TypeVar("_Choice", bound=Enum)


def dtype_name(api: str, arg: str, dtype: Any) -> str:
    """The name of an element type: of a string, a numpy type or a torch type.

    Raises:
        DTypeError: `dtype` names none that scales, codes or biases can have.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES and dtype is not None:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = ""
    if name not in _DTYPES:
        raise DTypeError(message(api, arg, f"the name of a type, one of {_DTYPES}", repr(dtype)))
    return name


def padded_rows(m: int, scales_dtype: str) -> int:
    """Columns of transposed FP8 scales: `m` rounded up so that a row of them is whole 16 bytes.

    Args:
        m: Rows of the activations.
        scales_dtype: Element type of the scales.
    """
    align = SCALE_ALIGNMENT // _BYTES[scales_dtype]
    return -(-m // align) * align


def _choice(api: str, arg: str, kind: type[_Choice], value: Any) -> _Choice:
    """A member of an enumeration, of itself or of its value."""
    try:
        return kind(value)
    except ValueError:
        names = tuple(member.value for member in kind)
        raise ConfigError(message(api, arg, f"one of {names}", repr(value))) from None


def _block_size(api: str, granularity: ScaleGranularity, size: Any) -> tuple[int, int] | None:
    """Checks that a block scale, and nothing else, says the size of its block."""
    if granularity is not ScaleGranularity.BLOCK:
        if size is not None:
            rule = f"None with the granularity {granularity.value!r}"
            raise ConfigError(message(api, "block_size", rule, size))
        return None
    ints = isinstance(size, tuple | list) and all(
        isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in size
    )
    if not ints or len(size) != 2 or min(size) < 1:
        rule = "(rows, columns), two ints >= 1, with the granularity 'block'"
        raise ConfigError(message(api, "block_size", rule, repr(size)))
    return int(size[0]), int(size[1])


class _Granular:
    """Questions that both kinds of scale answer."""

    granularity: ScaleGranularity

    @property
    def is_tensor(self) -> bool:
        """Whether everything shares one scale."""
        return self.granularity is ScaleGranularity.TENSOR

    @property
    def is_rowwise(self) -> bool:
        """Whether each row has a scale."""
        return self.granularity is ScaleGranularity.ROWWISE

    @property
    def is_colwise(self) -> bool:
        """Whether each column has a scale."""
        return self.granularity is ScaleGranularity.COLWISE

    @property
    def is_block(self) -> bool:
        """Whether each block has a scale."""
        return self.granularity is ScaleGranularity.BLOCK


@dataclass(frozen=True)
class WeightScaleSpec(_Granular):
    """Scales of weights.

    Attributes:
        granularity: What shares a scale.
        dtype: Element type of the scales.
        block_size: Rows and columns of a block, with BLOCK only [elements].

    Raises:
        ConfigError: BLOCK without two sizes, another granularity with some, or an unknown one.
        DTypeError: `dtype` is no element type.
    """

    granularity: ScaleGranularity
    dtype: str
    block_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Checks the values and brings them to one form."""
        _settle(self, "WeightScaleSpec")


@dataclass(frozen=True)
class InputScaleSpec(_Granular):
    """Scales of activations.

    Attributes:
        granularity: What shares a scale.
        origin: Whether scales are the checkpoint's or the data's.
        dtype: Element type of the scales.
        activation_scale_ub: Largest magnitude that a dynamic scale takes into account, None for
            the quantizer's own default.
        block_size: Rows and columns of a block, with BLOCK only [elements].

    Raises:
        ConfigError: as `WeightScaleSpec`, or an unknown origin.
        DTypeError: `dtype` is no element type.
        RangeError: `activation_scale_ub` is not finite and positive.
        ArgTypeError: `activation_scale_ub` is no number.
    """

    granularity: ScaleGranularity
    origin: ScaleOrigin
    dtype: str
    activation_scale_ub: float | None = None
    block_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Checks the values and brings them to one form."""
        api, bound = "InputScaleSpec", self.activation_scale_ub
        _settle(self, api)
        _set(self, "origin", _choice(api, "origin", ScaleOrigin, self.origin))
        if bound is None:
            return
        rule = "None or a finite number above 0"
        if isinstance(bound, bool) or not isinstance(bound, numbers.Real):
            got = f"{type(bound).__name__} {bound!r}"
            raise ArgTypeError(message(api, "activation_scale_ub", rule, got))
        if not 0 < bound < math.inf:
            raise RangeError(message(api, "activation_scale_ub", rule, bound))
        _set(self, "activation_scale_ub", float(bound))

    @property
    def is_static(self) -> bool:
        """Whether scales come from the checkpoint."""
        return self.origin is ScaleOrigin.STATIC

    @property
    def is_dynamic(self) -> bool:
        """Whether scales come from the data."""
        return self.origin is ScaleOrigin.DYNAMIC


def _set(frozen: Any, name: str, value: Any) -> None:
    object.__setattr__(frozen, name, value)


def _settle(spec: Any, api: str) -> None:
    """Checks the fields that both specs have."""
    granularity = _choice(api, "granularity", ScaleGranularity, spec.granularity)
    _set(spec, "granularity", granularity)
    _set(spec, "dtype", dtype_name(api, "dtype", spec.dtype))
    _set(spec, "block_size", _block_size(api, granularity, spec.block_size))
