"""Weights in the order in which the matmuls of compute capability 9.0 read them, made at load."""

from __future__ import annotations

from typing import Any

from nbmoe.arrays import Array, describe
from nbmoe.errors import ConfigError, ShapeError
from nbmoe.formats import FORMATS, BlockFormat
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.quantized import take_name
from nbmoe.prepared.weights import PreparedWeights, pack_weights
from nbmoe.validate import BF16, Call
from nbmoe.validate.call import FLAT
from nbmoe.validate.elements import BLOCK_CODES, PREPARED
from nbmoe.validate.operand_format import operand_format
from nbmoe.validate.product import check_weight_tiles, take_weight_scales
from nbmoe.validate.scales import check_weight_scales
from nbmoe_kernels.prepared_weights import UNIT_KINDS, prepared_bytes


def prepare_weights(
    weight: Any,
    b_scales: Any = None,
    *,
    format: str | BlockFormat | None = None,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> PreparedWeights:
    """Rearranges weights for the matmuls of compute capability 9.0; no value changes.

    `nbmoe_kernels.prepared_weights` draws the layout, `nbmoe.prepared.unpack_weights` undoes it.
    Only a block of MXFP8 with a NaN code does not come back: its codes become 0 and its scale NaN,
    which gives the same products. Any GPU can prepare weights.

    Args:
        weight: (E, N, K) bfloat16 or MXFP8 codes, or packed (E, N, K/2) FP4 codes, N % 8 == 0, K a
            multiple of the block, of 8 for bfloat16.
        b_scales: (E, ceil(N/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles of `weight`; None for
            bfloat16.
        format: "nvfp4", "mxfp4", "mxfp8" or "bf16". None tells it by element types: weights without
            scales are bfloat16, e4m3 codes MXFP8, e8m0 scales MXFP4, all else NVFP4.
        out: (bytes,) uint8 to write, see `nbmoe_kernels.prepared_weights.prepared_bytes`.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks the weight scales.

    Returns:
        The weights; their data is (bytes,) uint8 of the kind of `weight`.

    Raises:
        ArgTypeError: `format` is no name.
        ConfigError: there is no such format, it contradicts the element types, or bfloat16 came
            with scales.
        ScaleError: scales are missing, NaN or negative.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
    """
    call = Call("prepare_weights", validate)
    kind = _take_kind(call, weight, b_scales, format)
    fmt: BlockFormat | None = None
    scales: Array | None = None
    if kind == "bf16":
        given = call.array("weight", weight, BF16, "(E, N, K)")
        if b_scales is not None:
            hint = "name the format of the codes with format="
            rule = "None: bfloat16 weights have no scales"
            raise ConfigError(call.message("b_scales", rule, "some", hint))
    else:
        given = call.array("weight", weight, BLOCK_CODES, "(E, N, K) or (E, N, K/2)")
        scales = take_weight_scales(call, "b_scales", b_scales)
        fmt = operand_format(call, "format", FORMATS.get(kind), "weight", "b_scales")
        kind = fmt.name
    num_experts, n, width = given.shape
    k = width * (1 if fmt is None else fmt.per_byte)
    call.multiple("weight", "K", k, UNIT_KINDS[kind].k_multiple, "pad K with zeros")
    call.multiple("weight", "N", n, 8)
    if num_experts == 0:
        raise ShapeError(call.message("weight", "(E, N, K) with E >= 1", f"shape {given.shape}"))
    if fmt is not None:
        check_weight_tiles(call, "b_scales", num_experts, n, k, fmt)
    shape = (prepared_bytes(kind, num_experts, n, k),)
    if out is not None:
        call.output("out", out, PREPARED, FLAT, shape)
    chosen = call.place(backend, stream)
    if fmt is not None and scales is not None and call.checks("metadata"):
        check_weight_scales(call, "b_scales", call.data(scales), n, k, fmt)

    output = call.outputs.get("out") or allocate(call, "out", shape, PREPARED)
    prepared = PreparedWeights(output.owner, kind, num_experts, n, k)
    if chosen.name == "reference":
        tiles = None if scales is None else host_view(scales)
        store(output, pack_weights(host_view(given), tiles, format=kind).data)
        return prepared

    from nbmoe_kernels.prepare_weights import launch_prepare_weights

    launch_prepare_weights(
        executor(chosen, call),
        *flat(chosen, output, given, scales),
        format=kind,
        num_experts=num_experts,
        n=n,
        k=k,
        stream=call.stream,
    )
    return prepared


def _take_kind(call: Call, weight: Any, b_scales: Any, format: Any) -> str:
    """The kind that is named, "" for a block format that element types tell."""
    if format is None:
        has_codes = b_scales is not None or (
            weight is not None and describe(call.api, "weight", weight).dtype in BLOCK_CODES.names
        )
        return "" if has_codes else "bf16"
    name = format.name if isinstance(format, BlockFormat) else take_name(call, "format", format)
    if name not in UNIT_KINDS:
        raise ConfigError(call.message("format", f"one of {tuple(UNIT_KINDS)}", repr(name)))
    return name
