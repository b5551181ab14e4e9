"""What operations that quantize do alike: the format, the buffers and the results."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from nbmoe.arrays import Array
from nbmoe.errors import ArgTypeError
from nbmoe.formats import BlockFormat
from nbmoe.layouts import TILE_SHAPE, ceil_div
from nbmoe.ops.launch import allocate, host_view, store
from nbmoe.reference.quantize import result_format
from nbmoe.validate import Call
from nbmoe.validate.elements import codes_of, scales_of
from nbmoe.validate.routing import used_tiles

GROUPED_TILES = "(ceil(rows/128) + min(S, rows), ceil(K/{}), 32, 4, 4)"
"""Symbolic shape of the scales of rows in slots; the tile's columns fill the gap."""

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def take_format(
    call: Call, sf_vector_size: Any, scales_type: Any, out_type: Any, scale_rule: Any
) -> BlockFormat:
    """The format that an operation's arguments name.

    Raises:
        ArgTypeError, RangeError: the size is no positive int, or a name no string.
        UnsupportedError, ConfigError: as `nbmoe.reference.quantize.result_format`.
    """
    size = call.integer("sf_vector_size", sf_vector_size, 1)
    names = (("scales_type", scales_type), ("out_type", out_type), ("scale_rule", scale_rule))
    for arg, name in names:
        take_name(call, arg, name)
    return result_format(call.api, size, scales_type, out_type, scale_rule)


def take_name(call: Call, arg: str, name: Any) -> str:
    """Takes a string.

    Raises:
        ArgTypeError: it is something else.
    """
    if not isinstance(name, str):
        raise ArgTypeError(call.message(arg, "a name", f"{type(name).__name__} {name!r}"))
    return name


def result_shapes(fmt: BlockFormat, rows: int, k: int, tiles: int) -> Shapes:
    """Shapes of the codes and of the scale tiles of `rows` rows of `k` elements."""
    return (rows, fmt.packed_k(k)), (tiles, ceil_div(k, fmt.tile_columns), *TILE_SHAPE)


def take_buffers(
    call: Call,
    fmt: BlockFormat,
    out: Any,
    names: tuple[str, ...],
    shapes: Shapes,
    symbols: str,
    *,
    columns: str = "K",
    longer: bool = False,
) -> int:
    """Takes the first two buffers of `out=`, if there are any.

    Args:
        call: The call.
        fmt: Format of the results.
        out: The caller's tuple or None.
        names: What the tuple holds.
        shapes: Exact shapes of codes and scales.
        symbols: Symbolic shape of the scales, with a gap for a tile's columns.
        columns: Name of the elements of a row.
        longer: Whether there may be more scale tiles than needed.

    Returns:
        The number of scale tiles.

    Raises:
        ArgTypeError, DTypeError, ShapeError, LayoutError: as `Call.output`.
    """
    buffers = call.out_tuple(out, names)
    if buffers is None:
        return shapes[1][0]
    packed = f"(rows, {columns}/2)" if fmt.per_byte == 2 else f"(rows, {columns})"
    call.output("out[0]", buffers[0], codes_of(fmt), packed, shapes[0])
    tiles = symbols.format(fmt.tile_columns)
    return call.output("out[1]", buffers[1], scales_of(fmt), tiles, shapes[1], longer=longer).shape[
        0
    ]


def results(call: Call, fmt: BlockFormat, shapes: Shapes) -> tuple[Array, Array]:
    """Codes and scales to write: the caller's buffers or new ones."""
    return (
        call.outputs.get("out[0]") or allocate(call, "codes", shapes[0], codes_of(fmt)),
        call.outputs.get("out[1]") or allocate(call, "scales", shapes[1], scales_of(fmt)),
    )


def store_used(
    starts: Array, offsets: Array, result: tuple[NDArray[Any], ...], codes: Array, scales: Array
) -> None:
    """Copies results of the reference where kernels would write: rows and tiles of slots."""
    row_starts, tile_offsets = host_view(starts), host_view(offsets)
    store(codes, result[0], [(0, int(row_starts[-1]))])
    store(scales, result[1], used_tiles(row_starts, tile_offsets))
