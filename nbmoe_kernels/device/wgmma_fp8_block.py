"""The product of a 128-block of K by a warpgroup, e4m3: four wgmma from zero, or some of them.

Step j of the block takes the bytes 32 j to 32 j + 31 of each of A's and B's 128-byte rows; with A
in registers, the words ``a[4 j]`` to ``a[4 j + 3]``. One op instead of four keeps the descriptors'
arithmetic to one shift each.
"""

import numpy as np

from nbmoe_kernels.device.effects import reads
from nbmoe_kernels.device.fragments import (
    gather_accumulators,
    gather_rows,
    scatter_accumulators,
)
from nbmoe_kernels.device.op import Scope, Timing, device_op, op_factory
from nbmoe_kernels.device.tensor_core import step_e4m3
from nbmoe_kernels.device.wgmma import read_operand

_ROW_BYTES = 128
_UNIT_ROWS = 64
_STEPS, _STEP_BYTES = 4, 32
# wgmma's descriptor: 128-byte swizzle, 1024 bytes from 8 rows to the next.
_DESCRIPTOR_HIGH = (1 << 30) | 64
_DESCRIPTOR_LOW = 1 << 16


def _text(n: int, first: int, last: int) -> str:
    lines = [
        "{ .reg .b32 ra, rb, na, nb, high; .reg .b64 da, db;",
        f"shr.u32 ra, <a>, 4; or.b32 ra, ra, {_DESCRIPTOR_LOW}; mov.u32 high, {_DESCRIPTOR_HIGH};",
        f"shr.u32 rb, <b>, 4; or.b32 rb, rb, {_DESCRIPTOR_LOW};",
    ]
    for step in range(first, last):
        lines += [
            f"add.u32 na, ra, {2 * step}; mov.b64 da, {{na, high}};",
            f"add.u32 nb, rb, {2 * step}; mov.b64 db, {{nb, high}};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "
            f"<acc>, da, db, {int(step > 0)}, 1, 1;",
        ]
    return " ".join([*lines, "}"])


def _text_of_registers(n: int, displacement: int) -> str:
    lines = [
        "{ .reg .b32 high; .reg .b64 first, d;",
        f"mov.u32 high, {_DESCRIPTOR_HIGH}; mov.b64 first, {{<descriptor>, high}};",
    ]
    for step in range(_STEPS):
        words = ", ".join(f"<a{4 * step + i}>" for i in range(4))
        lines += [
            f"add.s64 d, first, {displacement // 16 + 2 * step};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "
            f"<acc>, {{{words}}}, d, {int(step > 0)}, 1, 1;",
        ]
    return " ".join([*lines, "}"])


def _footprint(name: str, rows: int, first: int, last: int, displacement: int):
    def offsets(operands):
        start = int(np.ravel(operands[f"{name}_index"])[0]) + displacement
        columns = np.arange(first * _STEP_BYTES, last * _STEP_BYTES)
        linear = start + _ROW_BYTES * np.arange(rows)[:, None] + columns
        return (linear ^ ((linear >> 7 & 7) << 4)).ravel()

    return offsets


def _operand(name: str, rows: int, first: int = 0, last: int = _STEPS, *, displacement: int = 0):
    footprint = _footprint(name, rows, first, last, displacement)
    return reads(name, proxy="async", footprint=footprint, align=1024)


@op_factory
def wgmma_fp8_block(n: int, first: int = 0, last: int = _STEPS):
    """The op ``(acc, a, a_index, b, b_index)``: acc (64 x n) = A (64 x 128) @ B (128 x n).

    ``acc`` is a local array of n/2 f32; from step 0 on its content does not count. The indices name
    the first byte of 64 and of n rows, a multiple of 1024. `nbmoe_kernels.device.wgmma` says what
    must be fenced, committed and awaited.

    Args:
        n: columns, a multiple of 8 up to 256.
        first: the first of the four steps, each 32 of K. From a later one on products are added to
            ``acc``: another op has done those before.
        last: the step before which to end.
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma_fp8_block: n: expected a multiple of 8 in 8..256, got {n}")
    if not 0 <= first < last <= _STEPS:
        raise ValueError(f"wgmma_fp8_block: steps: expected some of 0..4, got {first}..{last}")
    part = "" if last - first == _STEPS else f"_{first}_{last}"

    @device_op(
        f"void(f32[{n // 2}] acc, shared u8* a, shared u8* b)",
        scope=Scope.WARPGROUP,
        timing=Timing.ASYNC,
        group="wgmma",
        ptx=_text(n, first, last),
        effects=(_operand("a", _UNIT_ROWS, first, last), _operand("b", n, first, last)),
        min_cc=(9, 0),
        name=f"wgmma_m64n{n}k128_e4m3_block{part}",
    )
    def product(acc, a, a_index, b, b_index):
        tile = gather_accumulators(acc)
        if first == 0:
            tile[:] = 0
        for step in range(first, last):
            along = np.int64(step * _STEP_BYTES)
            left = read_operand(a, a_index + along, _UNIT_ROWS)
            step_e4m3(left, read_operand(b, b_index + along, n), tile)
        scatter_accumulators(tile, acc)

    return product


@op_factory
def wgmma_fp8_block_of_registers(n: int, displacement: int = 0):
    """The op ``(acc, a0, ..., a15, descriptor, b, b_index)``: as `wgmma_fp8_block`, A in registers.

    B begins ``displacement`` bytes after ``b[b_index]``, and ``descriptor`` is
    `nbmoe_kernels.device.wgmma_block.operand_descriptor` of that place.

    Args:
        n: columns, a multiple of 8 up to 256.
        displacement: see above, a multiple of 1024 [bytes].
    """
    words = ", ".join(f"u32 a{i}" for i in range(16))

    @device_op(
        f"void(f32[{n // 2}] acc, {words}, u32! descriptor, shared u8* b)",
        scope=Scope.WARPGROUP,
        timing=Timing.ASYNC,
        group="wgmma",
        ptx=_text_of_registers(n, displacement),
        effects=(_operand("b", n, displacement=displacement),),
        min_cc=(9, 0),
        name=f"wgmma_m64n{n}k128_e4m3_registers_{displacement}",
    )
    def product(
        acc, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
        descriptor, b, b_index
    ):  # fmt: skip
        tile = gather_accumulators(acc)
        tile[:] = 0
        first = b_index + np.uint32(displacement)
        # Steps in ascending order: each sum is cut before the next.
        left = gather_rows(a0, a1, a2, a3)
        step_e4m3(left.view(np.uint8), read_operand(b, first, n), tile)
        left = gather_rows(a4, a5, a6, a7)
        step_e4m3(left.view(np.uint8), read_operand(b, first + np.uint32(32), n), tile)
        left = gather_rows(a8, a9, a10, a11)
        step_e4m3(left.view(np.uint8), read_operand(b, first + np.uint32(64), n), tile)
        left = gather_rows(a12, a13, a14, a15)
        step_e4m3(left.view(np.uint8), read_operand(b, first + np.uint32(96), n), tile)
        scatter_accumulators(tile, acc)

    return product


@op_factory
def hand_over(n: int):
    """The op ``(acc)`` that does nothing, in its place among the ops with effects.

    After a `wgmma_wait` it names the accumulators that the wait was about: arithmetic on what comes
    out of it cannot be moved before the wait, which says nothing about registers.

    Args:
        n: columns of the accumulators.
    """

    @device_op(
        f"void(f32[{n // 2}] acc)", ptx="{ }", effects=(), name=f"hand_over_{n}", min_cc=(9, 0)
    )
    def pass_on(acc):
        pass

    return pass_on
