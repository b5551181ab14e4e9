"""What `mega_ffn_nvfp4` keeps between calls: counters and scratch, and how large they must be."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from nbmoe.arrays import Array
from nbmoe.errors import WorkspaceError
from nbmoe.layouts import TILE_BYTES, ceil_div
from nbmoe.prepared.tokens import token_shape
from nbmoe.streams import is_capturing
from nbmoe.validate import Call
from nbmoe.validate.mega_ffn import FFN
from nbmoe.validate.product import Product
from nbmoe_kernels.mega_ffn_layout import NEXT_TILE

_SMALLEST_SEGMENT = 8
"""Rows of the narrowest tile that any kernel has."""
_REMEMBERED = 256
"""Arrays of counters whose last launch is known."""
_ALIGNMENT = 128
"""Of the scale tiles behind the codes [bytes]."""


def mega_ffn_arrival_count_size(num_rows: int, num_active_experts: int) -> int:
    """How many counters `mega_ffn_nvfp4` may touch: one a row block of a slot, and one of tiles.

    Args:
        num_rows: M, rows of all slots [rows].
        num_active_experts: Slots.

    Returns:
        Elements of `arrival_count`, whatever the routing.
    """
    segments = -(-num_rows // _SMALLEST_SEGMENT) + max(1, min(num_active_experts, num_rows))
    return NEXT_TILE + segments


def mega_ffn_workspace_size(num_rows: int, num_slots: int, moe_dim: int) -> int:
    """How much memory holds what lies between both matmuls of `mega_ffn_nvfp4`.

    Args:
        num_rows: M, rows of all slots [rows].
        num_slots: S, entries of `expert_ids`.
        moe_dim: D [elements].

    Returns:
        Bytes of `workspace`, enough for every format, and for packed operands with as many scale
        tiles as `nbmoe.layouts.activation_tiles` says.
    """
    panels, rows, row_bytes = token_shape(num_rows, num_slots, moe_dim)
    return panels * rows * row_bytes


def code_bytes(ffn: FFN) -> int:
    """Of a workspace for packed operands: its codes, in front of the scale tiles."""
    size = ffn.gate_up.num_rows * ffn.fmt.packed_k(ffn.moe_dim)
    return ceil_div(size, _ALIGNMENT) * _ALIGNMENT


def scratch_bytes(ffn: FFN) -> int:
    """What a workspace must hold, for these operands."""
    p = ffn.gate_up
    if isinstance(p, Product):
        tiles = p.a_scales.shape[0] * ceil_div(ffn.moe_dim, ffn.fmt.tile_columns)
        return code_bytes(ffn) + tiles * TILE_BYTES
    return mega_ffn_workspace_size(p.num_rows, ffn.num_slots, ffn.moe_dim)


def check_counters(call: Call, counters: Array, needed: int) -> None:
    """Refuses counters that are too few, or "full" that a call has not left at 0.

    Raises:
        WorkspaceError: they are.
    """
    if counters.shape[0] < needed:
        rule = f"at least {needed} counters, for these rows and slots"
        got = f"{counters.shape[0]}"
        hint = "nbmoe.ops.mega_ffn_arrival_count_size says how many"
        raise WorkspaceError(call.message("arrival_count", rule, got, hint))
    if call.checks("full"):
        values = call.data(counters)[:needed]
        if values.any():
            at = int(values.argmax())
            hint = "zero them once; a call leaves them at 0, another one may be running"
            got = f"arrival_count[{at}] = {values[at]}"
            raise WorkspaceError(call.message("arrival_count", "counters of 0", got, hint))


class Launches:
    """The last launch with each array of counters, which one launch at a time can use.

    Launches that are captured, and replays of graphs, are not known here.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[int, tuple[int, Any]] = OrderedDict()

    def check(self, call: Call, counters: Array) -> None:
        """Refuses a launch while one of another stream uses the same counters.

        Raises:
            WorkspaceError: it does.
        """
        from cuda.bindings import driver

        stream, event = self._last.get(counters.pointer, (call.stream, None))
        if event is None or stream == call.stream or is_capturing(call.stream):
            return
        (status,) = driver.cuEventQuery(event)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            rule = "counters that no launch of another stream still uses"
            got = f"those of stream {stream:#x}, which runs, on stream {call.stream:#x}"
            hint = "give each stream counters of its own, or let this one wait for the other"
            raise WorkspaceError(call.message("arrival_count", rule, got, hint))

    def note(self, call: Call, counters: Array) -> None:
        """Remembers the launch that was just made, unless it is only being captured."""
        from cuda.bindings import driver

        if is_capturing(call.stream):
            return
        _, event = self._last.pop(counters.pointer, (0, None))
        if event is None:
            flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            _, event = driver.cuEventCreate(flags)
        driver.cuEventRecord(event, call.stream)
        self._last[counters.pointer] = call.stream, event
        if len(self._last) > _REMEMBERED:
            _, (_, oldest) = self._last.popitem(last=False)
            driver.cuEventDestroy(oldest)


LAUNCHES = Launches()
