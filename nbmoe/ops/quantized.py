"""What operations that quantize do alike: the format, the buffers and the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from nbmoe.arrays import Array
from nbmoe.backend import Backend
from nbmoe.errors import ArgTypeError, ConfigError, DeviceError
from nbmoe.formats import BlockFormat
from nbmoe.gpus import find_gpus
from nbmoe.layouts import TILE_SHAPE, activation_tiles, ceil_div
from nbmoe.ops.launch import allocate, host_view, store
from nbmoe.prepared.tokens import PreparedTokens, pack_tokens, panel_rows, token_shape
from nbmoe.reference.quantize import result_format
from nbmoe.validate import Call
from nbmoe.validate.elements import PREPARED, codes_of, scales_of
from nbmoe.validate.product_prepared import CAPABILITY, reads_prepared
from nbmoe.validate.routing import used_tiles

GROUPED_TILES = "(ceil(rows/128) + min(S, rows), ceil(K/{}), 32, 4, 4)"
"""Symbolic shape of the scales of rows in slots; the tile's columns fill the gap."""

TOKENS = "(ceil(K/64), R, 128)"
"""Symbolic shape of prepared tokens."""

LAYOUTS = ("packed", "prepared")

BLOCK_COLUMNS = 256
"""Columns of a thread block, which handles them in one scale tile's rows."""

MAX_BLOCKS = 2**31 - 1
"""Thread blocks of a grid."""

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


@dataclass(frozen=True)
class SlotResult:
    """What an operation that quantizes rows in slots writes, in the caller's layout.

    Attributes:
        call: The call.
        fmt: Format of the result.
        layout: "packed" or "prepared".
        rows: Rows of all slots.
        slots: Number of slots.
        k: Elements of a row.
    """

    call: Call
    fmt: BlockFormat
    layout: str
    rows: int
    slots: int
    k: int

    @property
    def panel_rows(self) -> int:
        """Rows of a prepared panel."""
        return token_shape(self.rows, self.slots, self.k)[1]

    def take(self, out: Any, symbols: str, columns: str = "K") -> int:
        """Takes `out=`, if there is one.

        Args:
            out: The caller's `(codes, scales)`, or array of prepared tokens.
            symbols: Symbolic shape of the scales, with a gap for a tile's columns.
            columns: Name of the elements of a row.

        Returns:
            The number of scale tiles, as many as needed if the layout has none.

        Raises:
            ArgTypeError, DTypeError, ShapeError, LayoutError: as `Call.output`.
        """
        tiles = activation_tiles(self.rows, self.slots)
        shapes = result_shapes(self.fmt, self.rows, self.k, tiles)
        if self.layout == "packed":
            names = ("codes", "scales")
            return take_buffers(
                self.call, self.fmt, out, names, shapes, symbols, columns=columns, longer=True
            )
        if out is not None:
            shape = token_shape(self.rows, self.slots, self.k)
            self.call.output("out", out, PREPARED, TOKENS.replace("K", columns), shape)
        return tiles

    def outputs(self) -> tuple[Array, Array | None]:
        """Codes and scales to write, or prepared tokens: the caller's buffers or new ones."""
        if self.layout == "packed":
            tiles = activation_tiles(self.rows, self.slots)
            shapes = result_shapes(self.fmt, self.rows, self.k, tiles)
            return results(self.call, self.fmt, shapes)
        shape = token_shape(self.rows, self.slots, self.k)
        return self.call.outputs.get("out") or allocate(self.call, "out", shape, PREPARED), None

    def owners(self, outputs: tuple[Array, Array | None]) -> Any:
        """What the caller gets."""
        codes, scales = outputs
        if scales is not None:
            return codes.owner, scales.owner
        return PreparedTokens(codes.owner, self.fmt.name, self.rows, self.slots, self.k)

    def store(
        self,
        starts: Array,
        offsets: Array,
        result: tuple[NDArray[Any], ...],
        outputs: tuple[Array, Array | None],
    ) -> None:
        """Copies codes and scales of the reference where kernels would write."""
        codes, scales = outputs
        if scales is not None:
            store_used(starts, offsets, result, codes, scales)
            return
        row_starts, tile_offsets = host_view(starts), host_view(offsets)
        quantized = result[0], result[1]
        packed = pack_tokens(*quantized, row_starts, tile_offsets, format=self.fmt.name)
        store_tokens(codes, packed, row_starts)


def check_prepared_gpu(call: Call, arg: str, chosen: Backend) -> None:
    """Refuses to prepare tokens on a GPU whose matmuls do not read them.

    Raises:
        DeviceError: it is such a GPU.
    """
    ordinal = call.inputs[arg].device or 0
    if not chosen.on_gpu or reads_prepared(ordinal):
        return
    gpus, _ = find_gpus()
    if ordinal < len(gpus):
        rule = "tokens prepared on a GPU of compute capability {}.{}".format(*CAPABILITY)
        got = "{} with {}.{}".format(gpus[ordinal].name, *gpus[ordinal].capability)
        hint = "other GPUs multiply operands in the documented layouts"
        raise DeviceError(call.message(arg, rule, got, hint))


def check_blocks(call: Call, arg: str, symbol: str, size: int, tiles: int, of: int = 1) -> None:
    """Refuses a row that with that many scale tiles down needs more blocks than a grid has.

    Args:
        call: The call.
        arg: Operand with the rows.
        symbol: Its symbol of `size`.
        size: `of` times the columns of a row.
        tiles: Scale tiles down.
        of: See `size`.

    Raises:
        ShapeError: it does.
    """
    call.at_most(arg, symbol, size, of * BLOCK_COLUMNS * (MAX_BLOCKS // max(tiles, 1)))


def take_layout(call: Call, layout: Any) -> str:
    """Takes the layout of a result.

    Raises:
        ArgTypeError, ConfigError: it is no string, or none of the layouts.
    """
    if take_name(call, "layout", layout) not in LAYOUTS:
        raise ConfigError(call.message("layout", f"one of {LAYOUTS}", repr(layout)))
    return str(layout)


def store_tokens(output: Array, packed: PreparedTokens, starts: NDArray[Any] | None) -> None:
    """Copies prepared tokens of the reference where kernels would write: rows of slots."""
    rows = panel_rows(packed.num_rows, starts)
    host_view(output)[:, rows] = packed.data[:, rows]
