"""Prepared weights of each kind: the unit's size and how a thread turns its share into registers.

A unit is 64 weight rows by a 64-block of K in the order of wgmma's A fragments
(`nbmoe_kernels.prepared_weights`). Of step j a thread's registers are out[4 j] to out[4 j + 3].

    kind    unit bytes   tensor core   operands are
    nvfp4   2304         f16           value * 2^-14
    mxfp4   2176         bf16          value
    mxfp8   4224         bf16          value
    bf16    8192         bf16          value

To add a kind, write how a thread's share is loaded and decoded, and an entry.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbmoe_kernels.device.decode_prepared import (
    are_below_two,
    bf16x2_scales,
    e2m1_scales_below_two,
    e4m3_scales_below_two,
    f16x2_scales,
    prepared_e2m1_below_two,
    prepared_e2m1_to_bf16,
    prepared_e2m1_to_f16,
    prepared_e4m3_below_two,
    prepared_e4m3_to_bf16,
)
from nbmoe_kernels.device.memory import load_shared_half, load_shared_words
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.prepared_weights import UNIT_KINDS, UnitKind

_PLANE_BYTES = 2048
"""16 bytes of each of a warpgroup's threads."""


@device_function
def codes_offset(thread):
    """The first byte of a thread's codes in a unit."""
    return np.uint32(np.uint32(16) * thread)


def make_scales_offset(unit: UnitKind) -> Callable[..., Any]:
    """``scales_offset(thread)``: a thread's scales lie so far behind the unit's first ones."""
    is_shared = unit.scale_block == 32

    @device_function
    def scales_offset(thread):
        if is_shared:
            # Threads 2i and 2i + 1 of a quad share a block.
            return np.uint32(thread & np.uint32(0xFFFFFFFE))
        return np.uint32(np.uint32(2) * thread)

    return scales_offset


@dataclass(frozen=True)
class PreparedOperand:
    """A kind of prepared weights, or of tokens that match it.

    Attributes:
        name: as in the names of kernels.
        tensor_core: "f16" or "bf16".
        exponent: operands, prepared tokens too, are values times 2^exponent.
        raw_words: registers of a thread's share before it is decoded.
        make_load_raw: what `make_load` calls.
        decode: ``(raw, out, first)``: those registers to the 16 operands out[first ...].
        decode_usual: the same, with fewer instructions for usual scales, behind a branch. A branch
            costs more than it saves where decoding stands between a warp's own products.
    """

    name: str
    tensor_core: str
    exponent: int
    raw_words: int
    make_load_raw: Callable[[UnitKind, int], Callable[..., Any]]
    decode: Callable[..., Any]
    decode_usual: Callable[..., Any]

    @property
    def unit(self) -> UnitKind:
        """What lies where in a unit."""
        return UNIT_KINDS[self.name]

    @property
    def unit_bytes(self) -> int:
        return self.unit.unit_bytes

    def make_load(self, displacement: int) -> Callable[..., Any]:
        """``load(smem, codes_at, scales_at, raw)``: a thread's share of a unit to registers.

        The places are the thread's in the unit ``displacement`` bytes before this one: that unit's
        first byte plus `codes_offset`, and plus its `scales_offset`.
        """
        return self.make_load_raw(self.unit, displacement)


def _make_load_scales(unit: UnitKind, displacement: int) -> Callable[..., Any]:
    return load_shared_half(displacement + unit.code_bytes)


def _make_load_fp4(unit: UnitKind, displacement: int) -> Callable[..., Any]:
    load_codes = load_shared_words(displacement)
    load_scales = _make_load_scales(unit, displacement)

    @device_function
    def load(smem, codes_at, scales_at, raw):
        raw[0], raw[1], raw[2], raw[3] = load_codes(smem, codes_at)
        raw[4] = load_scales(smem, scales_at)

    return load


@device_function
def _decode_nvfp4(raw, out, first):
    s0, s1 = f16x2_scales(raw[4])
    prepared_e2m1_to_f16(raw[0], s0, out, first, 4)
    prepared_e2m1_to_f16(raw[1], s0, out, first + 2, 4)
    prepared_e2m1_to_f16(raw[2], s1, out, first + 1, 4)
    prepared_e2m1_to_f16(raw[3], s1, out, first + 3, 4)


@device_function
def _decode_mxfp4(raw, out, first):
    s0, s1 = bf16x2_scales(raw[4])
    prepared_e2m1_to_bf16(raw[0], s0, out, first, 4)
    prepared_e2m1_to_bf16(raw[1], s0, out, first + 2, 4)
    prepared_e2m1_to_bf16(raw[2], s1, out, first + 1, 4)
    prepared_e2m1_to_bf16(raw[3], s1, out, first + 3, 4)


@device_function
def _decode_usual_mxfp4(raw, out, first):
    if are_below_two(raw[4]):
        s0, s1 = e2m1_scales_below_two(raw[4])
        prepared_e2m1_below_two(raw[0], s0, out, first, 4)
        prepared_e2m1_below_two(raw[1], s0, out, first + 2, 4)
        prepared_e2m1_below_two(raw[2], s1, out, first + 1, 4)
        prepared_e2m1_below_two(raw[3], s1, out, first + 3, 4)
    else:
        _decode_mxfp4(raw, out, first)


def _make_load_mxfp8(unit: UnitKind, displacement: int) -> Callable[..., Any]:
    load0, load1 = (load_shared_words(displacement + p * _PLANE_BYTES) for p in range(2))
    load_scales = _make_load_scales(unit, displacement)

    @device_function
    def load(smem, codes_at, scales_at, raw):
        raw[0], raw[1], raw[2], raw[3] = load0(smem, codes_at)
        raw[4], raw[5], raw[6], raw[7] = load1(smem, codes_at)
        raw[8] = load_scales(smem, scales_at)

    return load


@device_function
def _decode_mxfp8(raw, out, first):
    s0, s1 = bf16x2_scales(raw[8])
    for plane in unroll(range(2)):
        at, to = 4 * plane, first + 8 * plane
        prepared_e4m3_to_bf16(raw[at], s0, out, to, 4)
        prepared_e4m3_to_bf16(raw[at + 1], s1, out, to + 1, 4)
        prepared_e4m3_to_bf16(raw[at + 2], s0, out, to + 2, 4)
        prepared_e4m3_to_bf16(raw[at + 3], s1, out, to + 3, 4)


@device_function
def _decode_usual_mxfp8(raw, out, first):
    if are_below_two(raw[8]):
        s0, s1 = e4m3_scales_below_two(raw[8])
        for plane in unroll(range(2)):
            at, to = 4 * plane, first + 8 * plane
            prepared_e4m3_below_two(raw[at], s0, out, to, 4)
            prepared_e4m3_below_two(raw[at + 1], s1, out, to + 1, 4)
            prepared_e4m3_below_two(raw[at + 2], s0, out, to + 2, 4)
            prepared_e4m3_below_two(raw[at + 3], s1, out, to + 3, 4)
    else:
        _decode_mxfp8(raw, out, first)


def _make_load_bf16(unit: UnitKind, displacement: int) -> Callable[..., Any]:
    load0, load1, load2, load3 = (
        load_shared_words(displacement + step * _PLANE_BYTES) for step in range(4)
    )

    @device_function
    def load(smem, codes_at, scales_at, raw):
        raw[0], raw[1], raw[2], raw[3] = load0(smem, codes_at)
        raw[4], raw[5], raw[6], raw[7] = load1(smem, codes_at)
        raw[8], raw[9], raw[10], raw[11] = load2(smem, codes_at)
        raw[12], raw[13], raw[14], raw[15] = load3(smem, codes_at)

    return load


@device_function
def _decode_bf16(raw, out, first):
    for i in unroll(range(16)):
        out[first + i] = raw[i]


PREPARED = {
    operand.name: operand
    for operand in (
        PreparedOperand("nvfp4", "f16", -14, 5, _make_load_fp4, _decode_nvfp4, _decode_nvfp4),
        PreparedOperand("mxfp4", "bf16", 0, 5, _make_load_fp4, _decode_mxfp4, _decode_usual_mxfp4),
        PreparedOperand(
            "mxfp8", "bf16", 0, 9, _make_load_mxfp8, _decode_mxfp8, _decode_usual_mxfp8
        ),
        PreparedOperand("bf16", "bf16", 0, 16, _make_load_bf16, _decode_bf16, _decode_bf16),
    )
}
