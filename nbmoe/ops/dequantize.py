"""MXFP4 back to wider elements, for matmuls that multiply bf16 or e4m3."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.errors import ConfigError, ScaleError, ShapeError
from nbmoe.formats import MXFP4
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.ops.quantized import take_name
from nbmoe.reference.dequantize import OUT_TYPES
from nbmoe.validate import BF16, Call
from nbmoe.validate.elements import FP8, codes_of, scales_of


def mxfp4_dequant(
    packed: Any,
    scales: Any,
    *,
    out_type: str = "bfloat16",
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Multiplies packed e2m1 codes by their block's e8m0 scale and rounds once.

    bfloat16 is exact but at the ends of the exponents; float8_e4m3fn saturates at 448. A scale of
    255 makes its block NaN.

    Args:
        packed: (N, K/2) or (E, N, K/2) uint8, low nibble first, K % 32 == 0.
        scales: (N, K/32) or (E, N, K/32) float8_e8m0fnu or uint8, row-major (not tiled).
        out_type: Element type of the result, "bfloat16" or "float8_e4m3fn".
        out: Buffer to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`.

    Returns:
        (N, K) or (E, N, K) of `out_type`.

    Raises:
        ArgTypeError, ConfigError: `out_type` is no string, or another.
        ScaleError: `scales` is None.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
    """
    call = Call("mxfp4_dequant", validate)
    if take_name(call, "out_type", out_type) not in OUT_TYPES:
        raise ConfigError(call.message("out_type", f"one of {OUT_TYPES}", repr(out_type)))
    codes = call.array("packed", packed, codes_of(MXFP4), "(N, K/2) or (E, N, K/2)")
    symbols = "(N, K/32) or (E, N, K/32)"
    factors = call.array("scales", scales, scales_of(MXFP4), symbols, missing=ScaleError)
    *lead, half = codes.shape
    call.multiple("packed", "K", 2 * half, MXFP4.block, "pad K with zeros")
    expected = (*lead, 2 * half // MXFP4.block)
    if factors.shape != expected:
        rule = f"(N, K/32), with E in front as packed has: {expected}"
        raise ShapeError(call.message("scales", rule, f"shape {factors.shape}"))
    elements = BF16 if out_type == "bfloat16" else FP8
    shape = (*lead, 2 * half)
    if out is not None:
        call.output("out", out, elements, "(N, K) or (E, N, K)", shape)
    chosen = call.place(backend, stream)
    result = call.outputs.get("out") or allocate(call, "result", shape, elements)
    if 0 in shape:
        return result.owner
    if chosen.name == "reference":
        store(
            result,
            reference.mxfp4_dequant(host_view(codes), host_view(factors), out_type=out_type),
        )
        return result.owner

    from nbmoe_kernels.dequantize_mxfp4 import launch_dequantize_mxfp4

    launch_dequantize_mxfp4(
        executor(chosen, call),
        *flat(chosen, result, codes, factors),
        num_words=codes.nbytes // 4,
        to_e4m3=out_type == "float8_e4m3fn",
        stream=call.stream,
    )
    return result.owner
