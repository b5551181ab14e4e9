"""Checks of arrays that a checkpoint object holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.errors import ArgTypeError, DTypeError, ShapeError, message


def check_array(
    api: str,
    name: str,
    array: object,
    dtypes: tuple[Any, ...],
    shape: tuple[int, ...] | None = None,
    *,
    axes: int | None = None,
) -> None:
    """Requires a numpy array of one of some types and, if given, of a shape.

    Args:
        api: Name of the public class, for messages.
        name: Attribute.
        array: Its value.
        dtypes: Accepted element types.
        shape: Exact shape, None for any.
        axes: Number of axes where the shape is not given.

    Raises:
        ArgTypeError, DTypeError, ShapeError: It is something else.
    """
    if not isinstance(array, np.ndarray):
        raise ArgTypeError(message(api, name, "a numpy array", type(array).__name__))
    if array.dtype not in dtypes:
        rule = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise DTypeError(message(api, name, rule, array.dtype))
    if shape is not None and array.shape != shape:
        raise ShapeError(message(api, name, str(shape), array.shape))
    if axes is not None and array.ndim != axes:
        raise ShapeError(message(api, name, f"{axes} axes", array.shape))


def check_finite(
    api: str, name: str, array: npt.NDArray[Any], error: type[Exception], hint: str = ""
) -> None:
    """Requires numbers without NaN and infinity.

    Raises:
        error: One of them is not finite.
    """
    bad = ~np.isfinite(array.astype(np.float32))
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        raise error(message(api, name, "finite numbers", f"{array[index]} at {index}", hint))
