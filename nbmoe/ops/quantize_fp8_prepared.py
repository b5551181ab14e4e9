"""FP8 quantize of `layout="prepared"`: groups of 128, straight to what the matmuls read."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.arrays import Array
from nbmoe.errors import ConfigError
from nbmoe.ops.launch import allocate, executor, flat, host_view
from nbmoe.prepared.fp8 import BLOCK, PreparedFp8Tokens, fp8_token_shape, pack_fp8_tokens
from nbmoe.prepared.tokens import panel_rows
from nbmoe.validate import Call
from nbmoe.validate.elements import F32, PREPARED
from nbmoe.validate.fp8 import check_offsets, num_slots
from nbmoe.validate.product_fp8 import MULTIPLE_OF_K

LAYOUTS = ("packed", "prepared")


def check_prepared_options(call: Call, group: int, scales_type: str, k: int) -> None:
    """Refuses what the prepared layout has no place for.

    Raises:
        ConfigError: the groups are not of 128, or the scales no float32.
        ShapeError: K is no multiple of 8.
    """
    if group != BLOCK:
        rule = f"{BLOCK} with layout='prepared'"
        hint = "prepare_fp8_tokens arranges tokens with scales of rows"
        raise ConfigError(call.message("group_size_or_per_token", rule, group, hint))
    if scales_type != "float32":
        raise ConfigError(
            call.message("scales_type", "float32 with layout='prepared'", scales_type)
        )
    call.multiple("input", "K", k, MULTIPLE_OF_K, "pad K with zeros")


def quantize_prepared(
    call: Call,
    x: Array,
    offsets: Array | None,
    scale_ub: float,
    out: Any,
    backend: str | None,
    stream: Any,
) -> PreparedFp8Tokens:
    """Runs a call whose operands are checked.

    Args:
        call: The call.
        x: (M, K) bfloat16.
        offsets: (S + 1,) uint32, None for rows without slots.
        scale_ub: Largest magnitude that a scale takes into account.
        out: (codes, scales) to write, or None.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
    """
    (m, k), slots = x.shape, num_slots(offsets)
    shape = fp8_token_shape(m, max(slots, 1), k)
    buffers = call.out_tuple(out, ("codes", "scales"))
    if buffers is not None:
        call.output("out[0]", buffers[0], PREPARED, "(ceil(K/128), R, 128)", shape)
        call.output("out[1]", buffers[1], F32, "(ceil(K/128), R)", shape[:2])
    chosen = call.place(backend, stream)
    check_offsets(call, offsets, m)

    panels = call.outputs.get("out[0]") or allocate(call, "codes", shape, PREPARED)
    scales = call.outputs.get("out[1]") or allocate(call, "scales", shape[:2], F32)
    prepared = PreparedFp8Tokens(panels.owner, scales.owner, m, max(slots, 1), k)
    if chosen.name == "reference":
        starts = None if offsets is None else host_view(offsets)
        made = pack_fp8_tokens(
            *reference.quantize_dynamic_scaled_float8(
                host_view(x),
                group_size_or_per_token=BLOCK,
                scale_ub=scale_ub,
                row_offsets=starts,
            ),
            starts,
        )
        rows = panel_rows(m, starts)
        host_view(panels)[:, rows] = made.data[:, rows]
        host_view(scales)[:, rows] = made.scales[:, rows]
        return prepared

    from nbmoe_kernels.quantize_fp8_prepared import launch_quantize_fp8_prepared

    launch_quantize_fp8_prepared(
        executor(chosen, call),
        *flat(chosen, panels, scales, x, offsets),
        num_slots=slots,
        num_rows=m,
        num_cols=k,
        scale_ub=scale_ub,
        stream=call.stream,
    )
    return prepared
