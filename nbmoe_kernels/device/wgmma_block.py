"""The product of a 64-block of K by a warpgroup: four wgmma, with A in registers.

Step j of the block takes the words ``a[4 j]`` to ``a[4 j + 3]`` and the bytes 32 j to 32 j + 31 of
each of B's 128-byte rows. `operand_descriptor` is computed once for many blocks, in the uniform
registers that wgmma wants; what differs between them is part of the op.
"""

import numpy as np

from nbmoe_kernels.device.effects import reads
from nbmoe_kernels.device.fragments import (
    gather_accumulators,
    gather_rows,
    scatter_accumulators,
)
from nbmoe_kernels.device.op import Scope, Timing, device_op, op_factory
from nbmoe_kernels.device.tensor_core import step_bf16, step_f16
from nbmoe_kernels.device.wgmma import read_operand

_ROW_BYTES = 128
_STEP = {"f16": step_f16, "bf16": step_bf16}
# wgmma's descriptor: 128-byte swizzle, 1024 bytes from 8 rows to the next.
_DESCRIPTOR_HIGH = (1 << 30) | 64
_DESCRIPTOR_LOW = 1 << 16


def _text(n: int, dtype: str, displacement: int) -> str:
    lines = [
        "{ .reg .b32 high; .reg .b64 first, d;",
        f"mov.u32 high, {_DESCRIPTOR_HIGH}; mov.b64 first, {{<descriptor>, high}};",
    ]
    for step in range(4):
        words = ", ".join(f"<a{4 * step + i}>" for i in range(4))
        lines += [
            f"add.s64 d, first, {displacement // 16 + 2 * step};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} "
            f"<acc>, {{{words}}}, d, 1, 1, 1, 0;",
        ]
    return " ".join([*lines, "}"])


def _footprint(n: int, displacement: int):
    def offsets(operands):
        first = int(np.ravel(operands["b_index"])[0]) + displacement
        return first + np.arange(n * _ROW_BYTES)

    return offsets


@device_op(
    "u32(shared u8* b)",
    scope=Scope.WARP,
    ptx="{ .reg .b32 t; shr.u32 t, <b>, 4; "
    f"or.b32 t, t, {_DESCRIPTOR_LOW}; redux.sync.or.b32 <ret>, t, 0xffffffff; }}",
    effects=(),
    min_cc=(9, 0),
)
def operand_descriptor(b, b_index):
    """The low half of the descriptor of an operand in shared memory; twins need none of it."""
    return np.zeros(32, np.uint32)


@op_factory
def wgmma_block(n: int, dtype: str, displacement: int = 0):
    """The op ``(acc, a0, ..., a15, descriptor, b, b_index)``: acc (64 x n) += A (64 x 64) @ B.

    ``acc`` is a local array of n/2 f32; B begins ``displacement`` bytes after ``b[b_index]``, both
    multiples of 1024, and ``descriptor`` is `operand_descriptor` of that place.
    `nbmoe_kernels.device.wgmma` says what must be fenced, committed and awaited.

    Args:
        n: columns, a multiple of 8 up to 256.
        dtype: of both operands, ``f16`` or ``bf16``.
        displacement: see above [bytes].
    """
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"wgmma_block: n: expected a multiple of 8 in 8..256, got {n}")
    if dtype not in _STEP:
        raise ValueError(f"wgmma_block: dtype: expected one of {tuple(_STEP)}, got {dtype!r}")
    step = _STEP[dtype]
    words = ", ".join(f"u32 a{i}" for i in range(16))

    @device_op(
        f"void(f32[{n // 2}] acc, {words}, u32! descriptor, shared u8* b)",
        scope=Scope.WARPGROUP,
        timing=Timing.ASYNC,
        group="wgmma",
        ptx=_text(n, dtype, displacement),
        effects=(reads("b", proxy="async", footprint=_footprint(n, displacement), align=1024),),
        min_cc=(9, 0),
        name=f"wgmma_block_m64n{n}k64_{dtype}_{displacement}",
    )
    def product(
        acc, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
        descriptor, b, b_index
    ):  # fmt: skip
        tile = gather_accumulators(acc)
        first = b_index + np.uint32(displacement)
        # Steps in ascending order: each sum is cut before the next.
        left = gather_rows(a0, a1, a2, a3)
        step(left.view(np.uint16), read_operand(b, first, n).view(np.uint16), tile)
        left = gather_rows(a4, a5, a6, a7)
        right = read_operand(b, first + np.uint32(32), n)
        step(left.view(np.uint16), right.view(np.uint16), tile)
        left = gather_rows(a8, a9, a10, a11)
        right = read_operand(b, first + np.uint32(64), n)
        step(left.view(np.uint16), right.view(np.uint16), tile)
        left = gather_rows(a12, a13, a14, a15)
        right = read_operand(b, first + np.uint32(96), n)
        step(left.view(np.uint16), right.view(np.uint16), tile)
        scatter_accumulators(tile, acc)

    return product


@op_factory
def settle(count: int):
    """The op ``(acc)`` after the wait for the products that ``acc`` (f32[count]) sums.

    It does nothing, but the compiler sees ``acc`` change here: without it, arithmetic on the sums
    could be moved before the wait, which does not say which registers it is about.
    """

    @device_op(f"void(f32[{count}] acc)", ptx="", effects=(), min_cc=(9, 0), name=f"settle_{count}")
    def settled(acc):
        pass

    return settled
