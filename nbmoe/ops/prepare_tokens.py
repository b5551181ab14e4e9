"""Tokens in the order in which the matmuls of compute capability 9.0 read them."""

from __future__ import annotations

from typing import Any

from nbmoe.arrays import Array, describe
from nbmoe.errors import ConfigError, ScaleError, ShapeError
from nbmoe.formats import FORMATS, BlockFormat
from nbmoe.layouts import TILE_ROWS, TILE_SHAPE, activation_tiles, ceil_div
from nbmoe.ops.launch import allocate, executor, flat, host_view
from nbmoe.ops.quantized import (
    TOKENS,
    check_blocks,
    check_prepared_gpu,
    store_tokens,
    take_name,
)
from nbmoe.prepared.tokens import PreparedTokens, pack_tokens, token_shape
from nbmoe.validate import BF16, U32, Call
from nbmoe.validate.elements import BLOCK_CODES, BLOCK_SCALES, PREPARED
from nbmoe.validate.operand_format import operand_format
from nbmoe.validate.product import A_SCALES
from nbmoe.validate.routing import check_scale_offsets, check_starts
from nbmoe_kernels.prepared_tokens import TOKEN_FORMATS


def prepare_tokens(
    hidden: Any,
    a_scales: Any = None,
    expert_start: Any = None,
    a_scale_offsets: Any = None,
    *,
    format: str | BlockFormat | None = None,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> PreparedTokens:
    """Decodes tokens to 16 bits and arranges them for the matmuls of compute capability 9.0.

    `nbmoe_kernels.prepared_tokens` draws the layout. The matmuls give the same bytes for both.
    Rows that no slot owns are not written; they are 0 in a buffer that this function allocates on
    the host.

    Args:
        hidden: (M, K) bfloat16 or MXFP8 codes, or packed (M, K/2) FP4 codes, K a multiple of the
            block, of 8 for bfloat16.
        a_scales: (tiles, ceil(K/(4 * block)), 32, 4, 4) scale tiles of `hidden`; None for bfloat16.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows]. None for rows without slots.
        a_scale_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles]; None
            without slots and for bfloat16.
        format: "nvfp4", "mxfp4", "mxfp8" or "bf16". None tells it by element types: tokens without
            scales are bfloat16, e4m3 codes MXFP8, e8m0 scales MXFP4, all else NVFP4.
        out: (ceil(K/64), R, 128) uint8 to write, see `nbmoe_kernels.prepared_tokens.token_rows`.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets.

    Returns:
        The tokens; their data is (ceil(K/64), R, 128) uint8 of the kind of `hidden`.

    Raises:
        ArgTypeError: `format` is no name.
        ConfigError: there is no such format, it contradicts the element types, bfloat16 came with
            scales, or one of the offsets is missing or superfluous.
        ScaleError: scales are missing.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used, or
            its GPU is of another capability.
        RoutingError: offsets contradict each other.
    """
    call = Call("prepare_tokens", validate)
    kind = _take_kind(call, hidden, a_scales, format)
    fmt: BlockFormat | None = None
    scales: Array | None = None
    if kind == "bf16":
        given = call.array("hidden", hidden, BF16, "(M, K)")
        _refuse(call, "a_scales", a_scales, "bfloat16 tokens have no scales")
    else:
        given = call.array("hidden", hidden, BLOCK_CODES, "(M, K) or (M, K/2)")
        scales = call.array("a_scales", a_scales, BLOCK_SCALES, A_SCALES, missing=ScaleError)
        fmt = operand_format(call, "format", FORMATS.get(kind), "hidden", "a_scales")
        kind = fmt.name
    starts, offsets = _take_slots(call, expert_start, a_scale_offsets, fmt is not None)
    rows, k = given.shape[0], given.shape[1] * (1 if fmt is None else fmt.per_byte)
    call.multiple("hidden", "K", k, TOKEN_FORMATS[kind], "pad K with zeros")
    if fmt is not None and scales is not None:
        _check_tiles(call, scales, rows, k, fmt)
    slots = 1 if starts is None else starts.shape[0] - 1
    tiles = activation_tiles(rows, slots) if scales is None else scales.shape[0]
    check_blocks(call, "hidden", "K", k, tiles)
    shape = token_shape(rows, slots, k)
    if out is not None:
        call.output("out", out, PREPARED, TOKENS, shape)
    chosen = call.place(backend, stream)
    check_prepared_gpu(call, "hidden", chosen)
    if starts is not None and call.checks("metadata"):
        check_starts(call, "expert_start", call.data(starts), rows, "hidden")
        if offsets is not None:
            check_scale_offsets(
                call, "a_scale_offsets", call.data(starts), call.data(offsets), tiles
            )

    output = call.outputs.get("out") or allocate(call, "out", shape, PREPARED)
    prepared = PreparedTokens(output.owner, kind, rows, slots, k)
    if rows == 0:
        return prepared
    if chosen.name == "reference":
        views = (None if a is None else host_view(a) for a in (scales, starts, offsets))
        packed = pack_tokens(host_view(given), *views, format=kind)
        store_tokens(output, packed, None if starts is None else host_view(starts))
        return prepared

    from nbmoe_kernels.prepare_tokens import launch_prepare_tokens

    launch_prepare_tokens(
        executor(chosen, call),
        *flat(chosen, output, given, scales, starts, offsets),
        format=kind,
        num_active=0 if starts is None else slots,
        num_rows=rows,
        num_tiles=0 if scales is None else scales.shape[0],
        k=k,
        stream=call.stream,
    )
    return prepared


def _take_kind(call: Call, hidden: Any, a_scales: Any, format: Any) -> str:
    """The kind that is named, "" for a block format that element types tell."""
    if format is None:
        has_codes = a_scales is not None or (
            hidden is not None and describe(call.api, "hidden", hidden).dtype in BLOCK_CODES.names
        )
        return "" if has_codes else "bf16"
    name = format.name if isinstance(format, BlockFormat) else take_name(call, "format", format)
    if name not in TOKEN_FORMATS:
        raise ConfigError(call.message("format", f"one of {tuple(TOKEN_FORMATS)}", repr(name)))
    return name


def _take_slots(
    call: Call, expert_start: Any, a_scale_offsets: Any, has_scales: bool
) -> tuple[Array | None, Array | None]:
    """Row offsets and scale offsets, as far as slots and format have them."""
    if expert_start is None:
        _refuse(call, "a_scale_offsets", a_scale_offsets, "rows without slots have no offsets")
        return None, None
    starts = call.array("expert_start", expert_start, U32, "(S + 1,)")
    slots = starts.shape[0] - 1
    if slots < 1:
        rule = "(S + 1,) with S >= 1"
        raise ShapeError(call.message("expert_start", rule, f"shape {starts.shape}"))
    if not has_scales:
        _refuse(call, "a_scale_offsets", a_scale_offsets, "bfloat16 tokens have no scales")
        return starts, None
    offsets = call.array("a_scale_offsets", a_scale_offsets, U32, "(S,)", missing=ConfigError)
    call.shape("a_scale_offsets", (slots,), f"(S,) = ({slots},), S from expert_start")
    return starts, offsets


def _refuse(call: Call, arg: str, value: Any, reason: str) -> None:
    if value is not None:
        hint = "name the format of the codes with format=" if arg == "a_scales" else ""
        raise ConfigError(call.message(arg, f"None: {reason}", "some", hint))


def _check_tiles(call: Call, scales: Array, rows: int, k: int, fmt: BlockFormat) -> None:
    across = ceil_div(k, fmt.tile_columns)
    symbols = f"(tiles, ceil(K/{fmt.tile_columns}), 32, 4, 4)"
    rule = f"{symbols} = (any, {across}, 32, 4, 4), for blocks of {fmt.block}"
    call.shape("a_scales", (None, across, *TILE_SHAPE), rule)
    least = ceil_div(rows, TILE_ROWS)
    if scales.shape[0] < least:
        rule = f"{symbols} with at least ceil(M/128) = {least} tiles"
        raise ShapeError(call.message("a_scales", rule, f"shape {scales.shape}"))
