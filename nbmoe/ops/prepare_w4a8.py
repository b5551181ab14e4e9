"""MXFP4 weights for FP8 tokens, as the matmul of compute capability 9.0 reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbmoe.arrays import Array
from nbmoe.errors import ScaleError, ShapeError
from nbmoe.formats import MXFP4
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.prepared.w4a8 import PreparedW4A8Weights, pack_w4a8_weights, w4a8_weight_bytes
from nbmoe.validate import Call
from nbmoe.validate.call import FLAT
from nbmoe.validate.elements import F32, PREPARED, codes_of
from nbmoe.validate.product import check_weight_tiles, take_weight_scales


def prepare_w4a8_weights(
    weight: Any,
    b_scales: Any,
    *,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> PreparedW4A8Weights:
    """Folds MXFP4 scales into the codes, which become e4m3 numbers, exactly.

    `grouped_rowwise_dynamic_scaled_fp8_matmul` multiplies them by prepared FP8 tokens. A row keeps
    a power of two; its blocks' scales are folded, which is exact as long as they are within 2^14 of
    each other. Blocks of zeros have no part in that. That is checked whatever `validate` says, so
    this call waits for the GPU.

    Args:
        weight: (E, N, K/2) packed MXFP4 codes, N % 8 == 0, K % 32 == 0.
        b_scales: (E, ceil(N/128), ceil(K/128), 32, 4, 4) scale tiles of `weight`.
        out: (data, scales) to write: (bytes,) uint8, see `nbmoe.prepared.w4a8.w4a8_weight_bytes`,
            and (E, N, 1) float32.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`.

    Returns:
        The weights, of the kind of `weight`.

    Raises:
        ScaleError: scales are missing, or those of a row are too far apart: `prepare_weights`
            prepares such weights for MXFP8 or bfloat16 tokens.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
    """
    call = Call("prepare_w4a8_weights", validate)
    given = call.array("weight", weight, codes_of(MXFP4), "(E, N, K/2)")
    tiles = take_weight_scales(call, "b_scales", b_scales)
    num_experts, n, k = given.shape[0], given.shape[1], 2 * given.shape[2]
    call.multiple("weight", "K", k, MXFP4.block, "pad K with zeros")
    call.multiple("weight", "N", n, 8)
    if num_experts == 0:
        raise ShapeError(call.message("weight", "(E, N, K/2) with E >= 1", f"shape {given.shape}"))
    check_weight_tiles(call, "b_scales", num_experts, n, k, MXFP4)
    shape = (w4a8_weight_bytes(num_experts, n, k),)
    buffers = call.out_tuple(out, ("data", "scales"))
    if buffers is not None:
        call.output("out[0]", buffers[0], PREPARED, FLAT, shape)
        call.output("out[1]", buffers[1], F32, "(E, N, 1)", (num_experts, n, 1))
    chosen = call.place(backend, stream)

    data = call.outputs.get("out[0]") or allocate(call, "data", shape, PREPARED)
    scales = call.outputs.get("out[1]") or allocate(call, "scales", (num_experts, n, 1), F32)
    prepared = PreparedW4A8Weights(data.owner, scales.owner, num_experts, n, k)
    if chosen.name == "reference":
        try:
            made = pack_w4a8_weights(host_view(given), host_view(tiles))
        except ValueError:
            raise _too_far_apart(call, None) from None
        store(data, made.data)
        store(scales, made.scales)
        return prepared

    from nbmoe_kernels.prepare_w4a8 import launch_prepare_w4a8

    launch_prepare_w4a8(
        executor(chosen, call),
        *flat(chosen, data, scales, given, tiles),
        num_experts=num_experts,
        n=n,
        k=k,
        stream=call.stream,
    )
    _check_folded(call, scales)
    return prepared


def _check_folded(call: Call, scales: Array) -> None:
    bad = np.isnan(call.data(scales))
    if bad.any():
        expert, row, _ = np.argwhere(bad)[0]
        raise _too_far_apart(call, (int(expert), int(row)))


def _too_far_apart(call: Call, at: tuple[int, int] | None) -> ScaleError:
    rule = "scales within 2^14 of each other in each row"
    got = "a row whose scales are not" if at is None else f"row {at[1]} of expert {at[0]}"
    hint = "prepare_weights prepares them for MXFP8 or bfloat16 tokens"
    return ScaleError(call.message("b_scales", rule, got, hint))
