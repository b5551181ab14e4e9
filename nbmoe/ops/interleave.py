"""Row-major block scales to the tiles that the matmuls read."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.arrays import describe, empty, named_dtype
from nbmoe.errors import ConfigError, UnsupportedError
from nbmoe.formats import MXFP4, NVFP4
from nbmoe.layouts import TILE_SHAPE, tile_counts
from nbmoe.ops.launch import executor, flat, host_view, store
from nbmoe.validate import Call
from nbmoe.validate.call import MAX_BLOCKS_Y
from nbmoe.validate.elements import BLOCK_SCALES, Elements


def block_scales_interleave(
    scales: Any,
    sf_vector_size: int = 16,
    *,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Lays row-major block scales out in tiles of 128 rows by 4 columns, padding with byte 0.

    Args:
        scales: (N, C) or (E, N, C), C = K / sf_vector_size: e4m3 bytes for blocks of 16, e8m0 bytes
            for blocks of 32, or either as uint8.
        sf_vector_size: Elements that share a scale, 16 or 32.
        out: Tiles to write, of the same element type.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`.

    Returns:
        (ceil(N/128), ceil(C/4), 32, 4, 4), with E in front for (E, N, C), of the element type of
        `scales`.

    Raises:
        ArgTypeError, RangeError: `sf_vector_size` is no int >= 1.
        UnsupportedError: `sf_vector_size` is neither 16 nor 32.
        ConfigError: the element type is that of scales of the other block size.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
    """
    call = Call("block_scales_interleave", validate)
    size = call.integer("sf_vector_size", sf_vector_size, 1)
    if size not in (NVFP4.block, MXFP4.block):
        rule = "16 (e4m3 scales) or 32 (e8m0 scales)"
        raise UnsupportedError(call.message("sf_vector_size", rule, size))
    x = call.array("scales", scales, BLOCK_SCALES, "(N, C) or (E, N, C)")
    named = "float8_e4m3fn" if size == NVFP4.block else "float8_e8m0fnu"
    if x.dtype not in ("uint8", named):
        raise ConfigError(call.message("sf_vector_size", f"{size} with {named}", x.dtype))
    *lead, n, c = x.shape
    call.positive("scales", "N", n)
    call.positive("scales", "C", c)
    call.at_most("scales", "C", c, 4 * MAX_BLOCKS_Y)
    down, across = tile_counts(n, c)
    shape = (*lead, down, across, *TILE_SHAPE)
    elements = Elements((x.dtype, "uint8"), "block scale bytes", 16)
    if out is not None:
        symbols = "(E, ceil(N/128), ceil(C/4), 32, 4, 4)"
        call.output("out", out, elements, symbols if lead else symbols.replace("E, ", ""), shape)
    chosen = call.place(backend, stream)
    tiles = call.outputs.get("out") or describe(
        call.api, "tiles", empty(x, shape, named_dtype(x.dtype))
    )
    if 0 in shape:
        return tiles.owner
    if chosen.name == "reference":
        store(tiles, reference.block_scales_interleave(host_view(x), size))
        return tiles.owner

    from nbmoe_kernels.interleave_scales import launch_interleave_scales

    launch_interleave_scales(
        executor(chosen, call),
        *flat(chosen, tiles, x),
        num_experts=lead[0] if lead else 1,
        num_rows=n,
        num_cols=c,
        stream=call.stream,
    )
    return tiles.owner
