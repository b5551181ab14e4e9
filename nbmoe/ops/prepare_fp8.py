"""FP8 operands in the order in which the matmuls of compute capability 9.0 read them."""

from __future__ import annotations

from typing import Any

from nbmoe.arrays import Array
from nbmoe.errors import ScaleError, ShapeError
from nbmoe.layouts import ceil_div
from nbmoe.ops.launch import allocate, executor, flat, host_view, store
from nbmoe.prepared.fp8 import (
    BLOCK,
    PreparedFp8Tokens,
    fp8_token_shape,
    fp8_weight_bytes,
    pack_fp8_tokens,
    pack_fp8_weights,
)
from nbmoe.prepared.tokens import panel_rows
from nbmoe.prepared.weights import PreparedWeights
from nbmoe.validate import U32, Call
from nbmoe.validate.call import FLAT
from nbmoe.validate.elements import F32, FP8, PREPARED
from nbmoe.validate.product_fp8 import MULTIPLE_OF_K, SCALES
from nbmoe.validate.routing import check_starts


def prepare_fp8_weights(
    weight: Any,
    *,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> PreparedWeights:
    """Rearranges FP8 weights for the matmuls of compute capability 9.0; no value changes.

    `nbmoe.prepared.fp8` draws the layout. The weights' scales stay as they are: the matmuls take
    them as before. Any GPU can prepare weights.

    Args:
        weight: (E, N, K) e4m3 codes, float8_e4m3fn or uint8, N % 8 == 0, K % 8 == 0.
        out: (bytes,) uint8 to write, see `nbmoe.prepared.fp8.fp8_weight_bytes`.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`.

    Returns:
        The weights, of format "e4m3"; their data is (bytes,) uint8 of the kind of `weight`.

    Raises:
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
    """
    call = Call("prepare_fp8_weights", validate)
    given = call.array("weight", weight, FP8, "(E, N, K)")
    num_experts, n, k = given.shape
    call.multiple("weight", "K", k, MULTIPLE_OF_K, "pad K with zeros")
    call.multiple("weight", "N", n, 8)
    if num_experts == 0:
        raise ShapeError(call.message("weight", "(E, N, K) with E >= 1", f"shape {given.shape}"))
    shape = (fp8_weight_bytes(num_experts, n, k),)
    if out is not None:
        call.output("out", out, PREPARED, FLAT, shape)
    chosen = call.place(backend, stream)

    output = call.outputs.get("out") or allocate(call, "out", shape, PREPARED)
    prepared = PreparedWeights(output.owner, "e4m3", num_experts, n, k)
    if chosen.name == "reference":
        store(output, pack_fp8_weights(host_view(given)).data)
        return prepared

    from nbmoe_kernels.prepare_fp8 import launch_prepare_fp8_weights

    launch_prepare_fp8_weights(
        executor(chosen, call),
        *flat(chosen, output, given),
        num_experts=num_experts,
        n=n,
        k=k,
        stream=call.stream,
    )
    return prepared


def prepare_fp8_tokens(
    hidden: Any,
    a_scales: Any,
    expert_start: Any = None,
    *,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> PreparedFp8Tokens:
    """Arranges FP8 tokens and their scales for the matmuls of compute capability 9.0.

    `nbmoe.prepared.fp8` draws the layout. Rows that no slot owns are not written; they are 0 in a
    buffer that this function allocates on the host. Any GPU can prepare tokens.

    Args:
        hidden: (M, K) e4m3 codes, float8_e4m3fn or uint8, K % 8 == 0.
        a_scales: float32 or bfloat16 scales: (ceil(K/128), Mpad) of groups of 128, (M, 1) or
            (1, Mpad) of rows, Mpad >= M, or (1,), one for all. (1, Mpad) is either if K <= 128.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows]. None for rows without slots.
        out: (codes, scales) to write: (ceil(K/128), R, 128) uint8, see
            `nbmoe_kernels.prepared_tokens.token_rows`, and float32 (G, R) or (1,).
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets.

    Returns:
        The tokens, of the kind of `hidden`.

    Raises:
        ScaleError: scales are missing.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets contradict each other.
    """
    call = Call("prepare_fp8_tokens", validate)
    given = call.array("hidden", hidden, FP8, "(M, K)")
    scales = call.array("a_scales", a_scales, SCALES, "(G, Mpad) or (1,)", missing=ScaleError)
    starts = call.optional("expert_start", expert_start, U32, "(S + 1,)")
    m, k = given.shape
    call.multiple("hidden", "K", k, MULTIPLE_OF_K, "pad K with zeros")
    call.positive("hidden", "K", k)
    slots = 1 if starts is None else starts.shape[0] - 1
    if slots < 1:
        raise ShapeError(call.message("expert_start", "(S + 1,) with S >= 1", "shape (1,)"))
    groups, group_stride, row_stride = _scale_steps(call, scales, m, k)
    shape = fp8_token_shape(m, slots, k)
    scales_shape = (groups, shape[1]) if groups else (1,)
    buffers = call.out_tuple(out, ("codes", "scales"))
    if buffers is not None:
        call.output("out[0]", buffers[0], PREPARED, "(ceil(K/128), R, 128)", shape)
        call.output("out[1]", buffers[1], F32, "(G, R) or (1,)", scales_shape)
    chosen = call.place(backend, stream)
    if starts is not None and call.checks("metadata"):
        check_starts(call, "expert_start", call.data(starts), m, "hidden")

    panels = call.outputs.get("out[0]") or allocate(call, "codes", shape, PREPARED)
    into = call.outputs.get("out[1]") or allocate(call, "scales", scales_shape, F32)
    prepared = PreparedFp8Tokens(panels.owner, into.owner, m, slots, k)
    if chosen.name == "reference":
        _store_reference(panels, into, given, scales, starts)
        return prepared

    from nbmoe_kernels.prepare_fp8 import launch_prepare_fp8_tokens

    launch_prepare_fp8_tokens(
        executor(chosen, call),
        *flat(chosen, panels, into, given, scales, starts),
        scale_type="f32" if scales.dtype == "float32" else "bf16",
        num_slots=0 if starts is None else slots,
        num_rows=m,
        k=k,
        num_groups=groups,
        group_stride=group_stride,
        row_stride=row_stride,
        stream=call.stream,
    )
    return prepared


def _scale_steps(call: Call, scales: Array, m: int, k: int) -> tuple[int, int, int]:
    """Groups of a row, 0 where one scale is all rows', and the steps between groups and rows."""
    blocks = ceil_div(k, BLOCK)
    if scales.shape == (1,):
        return 0, 0, 0
    rule = f"(ceil(K/128), Mpad) = ({blocks}, Mpad), (1, Mpad), (M, 1) or (1,), Mpad >= M = {m}"
    if len(scales.shape) == 2:
        if scales.shape == (m, 1):
            return 1, 0, 1
        if scales.shape[0] in (1, blocks) and scales.shape[1] >= m:
            return scales.shape[0], scales.shape[1], 1
    raise ShapeError(call.message("a_scales", rule, f"shape {scales.shape}"))


def _store_reference(
    panels: Array, into: Array, given: Array, scales: Array, starts: Array | None
) -> None:
    offsets = None if starts is None else host_view(starts)
    made = pack_fp8_tokens(host_view(given), host_view(scales), offsets)
    rows = panel_rows(made.num_rows, offsets)
    host_view(panels)[:, rows] = made.data[:, rows]
    if made.scales.ndim == 1:
        host_view(into)[:] = made.scales
    else:
        host_view(into)[:, rows] = made.scales[:, rows]
