"""Products of a warpgroup: D (64 x n, f32) += A (64 x k) @ B (k x n), asynchronous.

Operands in shared memory are K-major with the 128-byte swizzle, as TMA writes them: row r of a
tile lies at 128 r, and its 16-byte piece i at piece i ^ (r % 8). ``array, index`` name the first
byte of the tile, a multiple of 1024, plus 32 for every step along k (a step is 32 bytes: 16 f16 or
32 e4m3). The array itself must start at a multiple of 1024 bytes of shared memory.

The accumulators, and A where it is in registers, may be touched again only after
`wgmma_wait`; `wgmma_fence` comes before the first product that reads registers which the thread
has written. Fragments are those of `nbmoe_kernels.device.fragments`.
"""

import numpy as np
from numba import njit

from nbmoe_kernels.device.effects import reads
from nbmoe_kernels.device.fragments import (
    gather_accumulators,
    gather_rows,
    scatter_accumulators,
)
from nbmoe_kernels.device.op import Scope, Timing, device_op, op_factory
from nbmoe_kernels.device.tensor_core import step_bf16, step_e4m3, step_f16

_STEP_BYTES = 32
_ROW_BYTES = 128
# 128-byte swizzle, 1024 bytes from 8 rows to the next; the leading offset is ignored.
_DESCRIPTOR = (1 << 62) | (64 << 32) | (1 << 16)
_STEPS = {"f16": (16, step_f16), "bf16": (16, step_bf16), "e4m3": (32, step_e4m3)}


def operand_offsets(start: int, rows: int) -> np.ndarray:
    """Byte offsets (rows, 32) of the operand that begins at ``start``, in the array's bytes."""
    linear = start + np.arange(rows)[:, None] * _ROW_BYTES + np.arange(_STEP_BYTES)
    return linear ^ ((linear >> 7) & 7) << 4


@njit
def read_operand(memory, indices, rows):
    """The operand's bytes (rows, 32), for twins.

    Raises:
        ValueError: the lanes name different places, or one that a descriptor cannot hold.
        IndexError: it reaches past the array.
    """
    start = np.int64(indices[0])
    for lane in range(indices.size):
        if np.int64(indices[lane]) != start:
            raise ValueError("wgmma: lanes name different operands")
    if start % 16 != 0:
        raise ValueError("wgmma: an operand must begin at a multiple of 16 bytes")
    last_line = (start + (rows - 1) * _ROW_BYTES + _STEP_BYTES - 1) // _ROW_BYTES
    if start < 0 or (last_line + 1) * _ROW_BYTES > memory.size:
        raise IndexError("wgmma: an operand reaches past the end of its array")
    tile = np.empty((rows, _STEP_BYTES), np.uint8)
    for row in range(rows):
        for piece in range(0, _STEP_BYTES, 16):
            linear = start + row * _ROW_BYTES + piece
            at = linear ^ (((linear >> 7) & 7) << 4)
            for byte in range(16):
                tile[row, piece + byte] = memory[at + byte]
    return tile


def _footprint(name: str, rows: int):
    def offsets(operands):
        return operand_offsets(int(np.ravel(operands[f"{name}_index"])[0]), rows).ravel()

    return offsets


def _operand(name: str, rows: int):
    return reads(name, proxy="async", footprint=_footprint(name, rows), align=16)


@op_factory
def wgmma(n: int, dtype: str, *, a_in_registers: bool = False):
    """The op that multiplies a 64-row A by an n-column B.

    The op's arguments are ``acc, a, a_index, b, b_index, scale_d``; or, with A in registers,
    ``acc, a0, a1, a2, a3, b, b_index, scale_d``. ``acc`` is a local array of n/2 f32; with
    ``scale_d`` = 0 it counts as zero.

    Args:
        n: columns, a multiple of 8 up to 256.
        dtype: of both operands: ``f16``, ``bf16`` (k is 16) or ``e4m3`` (k is 32).
        a_in_registers: A is in four words a lane instead of in shared memory.
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma: n: expected a multiple of 8 in 8..256, got {n}")
    if dtype not in _STEPS:
        raise ValueError(f"wgmma: dtype: expected one of {tuple(_STEPS)}, got {dtype!r}")
    k, step = _STEPS[dtype]
    element = np.uint8 if dtype == "e4m3" else np.uint16
    # The flags: signs of A and B, then, for 16-bit operands in shared memory, their major order.
    flags = "1, 1" + ("" if dtype == "e4m3" else ", 0" if a_in_registers else ", 0, 0")
    descriptors = ("b",) if a_in_registers else ("a", "b")
    build = "".join(
        f"cvt.u64.u32 d{x}, <{x}>; shr.u64 d{x}, d{x}, 4; or.b64 d{x}, d{x}, {_DESCRIPTOR:#x}; "
        for x in descriptors
    )
    a_text = "{<a0>, <a1>, <a2>, <a3>}" if a_in_registers else "da"
    a_params = "u32 a0, u32 a1, u32 a2, u32 a3" if a_in_registers else "shared u8* a"
    declare = device_op(
        f"void(f32[{n // 2}] acc, {a_params}, shared u8* b, u32! scale_d)",
        scope=Scope.WARPGROUP,
        timing=Timing.ASYNC,
        group="wgmma",
        ptx=f"{{ .reg .pred p; .reg .b64 da, db; {build}setp.ne.b32 p, <scale_d>, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{dtype}.{dtype} "
        f"<acc>, {a_text}, db, p, {flags}; }}",
        effects=((_operand("b", n),) if a_in_registers else (_operand("a", 64), _operand("b", n))),
        min_cc=(9, 0),
        name=f"wgmma_m64n{n}k{k}_{dtype}_{'registers' if a_in_registers else 'shared'}",
    )
    if a_in_registers:

        @declare
        def product_of_registers(acc, a0, a1, a2, a3, b, b_index, scale_d):
            tile = gather_accumulators(acc)
            if scale_d == 0:
                tile[:] = 0
            left = gather_rows(a0, a1, a2, a3)
            step(left.view(element), read_operand(b, b_index, n).view(element), tile)
            scatter_accumulators(tile, acc)

        return product_of_registers

    @declare
    def product_of_shared(acc, a, a_index, b, b_index, scale_d):
        tile = gather_accumulators(acc)
        if scale_d == 0:
            tile[:] = 0
        left = read_operand(a, a_index, 64)
        step(left.view(element), read_operand(b, b_index, n).view(element), tile)
        scatter_accumulators(tile, acc)

    return product_of_shared


@device_op("void()", scope=Scope.WARP, ptx="wgmma.fence.sync.aligned;", effects=(), min_cc=(9, 0))
def wgmma_fence():
    """Products issued from here on see the registers as the warp has left them."""


@device_op(
    "void()",
    scope=Scope.WARP,
    ptx="wgmma.commit_group.sync.aligned;",
    group="wgmma.commit",
    effects=(),
    min_cc=(9, 0),
)
def wgmma_commit():
    """Close the warp's open group of products."""


@op_factory
def wgmma_wait(open_groups: int):
    """The op that waits until at most ``open_groups`` of the warp's newest groups are open."""

    @device_op(
        "void()",
        scope=Scope.WARP,
        ptx=f"wgmma.wait_group.sync.aligned {open_groups};",
        group=f"wgmma.wait{open_groups}",
        effects=(),
        min_cc=(9, 0),
        name=f"wgmma_wait_{open_groups}",
    )
    def wait():
        pass

    return wait
