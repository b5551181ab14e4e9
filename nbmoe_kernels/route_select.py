"""What the routing kernels share: scores as sortable integers, and warp-wide choice and sums.

A warp handles one token. It holds the scores as keys: unsigned integers in the order of the float32
scores, so that one `redux` finds the largest. -0 has the key of +0; a NaN has the largest key of
all, 0xFFFFFFFF, so a token with one shows it in its weights; key 0 is no score's and marks an
expert that cannot be chosen (any more).

Lane l has the keys of experts l, l + 32, ... in registers, capacity / 32 of them, so that choosing
needs no memory. Choice j is kept by lane j % 32 in the warp's part of shared memory.

Sums over experts or over a token's choices have one order: each lane adds its own in ascending
order from +0, then lanes 16, 8, 4, 2 and 1 apart add theirs, which gives every lane the same bits.
"""

import functools
from typing import Any

import numpy as np

from nbmoe_kernels.device.math import add_rn, bits_f32, exp_f32, f32_bits
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import reduce_lanes, shuffle_xor

WARPS = 4
THREADS = 32 * WARPS
MAX_EXPERTS = 1024
TAKEN = np.uint32(0)
NOBODY = np.uint32(0xFFFFFFFF)

_SIGN = np.uint32(0x80000000)
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_ALL = np.uint32(0xFFFFFFFF)
_ZERO = np.float32(0.0)
_LOW = np.float32(-88.0)

largest_of_lanes = reduce_lanes("max")
smallest_of_lanes = reduce_lanes("min")


@device_function
def key_of_score(score):
    """The score's key; never `TAKEN`."""
    bits = f32_bits(score)
    magnitude = np.uint32(bits & _MAGNITUDE)
    key = np.uint32(bits | _SIGN)
    if magnitude > _INFINITY:
        key = _ALL
    elif bits > _SIGN:
        key = np.uint32(bits ^ _ALL)
    return key


@device_function
def score_of_key(key):
    """The score with this key; +0 for either zero, the canonical NaN for a NaN."""
    bits = np.uint32(key ^ _SIGN)
    if key < _SIGN:
        bits = np.uint32(key ^ _ALL)
    return bits_f32(bits)


@device_function
def odds_of(difference):
    """exp(difference), +0 below -88, so that a logit of -inf has no weight at all."""
    odds = exp_f32(difference)
    if difference < _LOW:
        odds = _ZERO
    return odds


@device_function
def sum_of_lanes(value):
    """The sum over the lanes, the same bits on each."""
    for step in unroll(range(5)):
        other = bits_f32(shuffle_xor(f32_bits(value), np.uint32(16 >> step)))
        value = add_rn(value, other)
    return value


@device_function
def load_logit(logits, bias, row, expert, num_experts, num_parts, has_bias):
    """Logit of an expert: the parts of its row in order, then the bias, one rounding a sum."""
    at = row + np.uint64(expert)
    logit = logits[at]
    for _ in range(np.uint32(num_parts - np.uint32(1))):
        at = at + np.uint64(num_experts)
        logit = add_rn(logit, logits[at])
    if has_bias != np.uint32(0):
        logit = add_rn(logit, bias[np.uint64(expert)])
    return logit


@functools.cache
def make_load_logits(per_lane: int) -> Any:
    """The device function that loads the logits of a lane's experts."""

    @device_function
    def load_logits(out, logits, bias, row, lane, num_experts, num_parts, has_bias):
        """The parts of each logit in order, then the bias, one rounding a sum.

        All loads of a part are on their way together. Past the last expert is the last one again.
        """
        last = np.uint32(num_experts - np.uint32(1))
        for i in unroll(range(per_lane)):
            expert = min(np.uint32(lane + np.uint32(32 * i)), last)
            out[i] = logits[row + np.uint64(expert)]
        part = np.uint32(1)
        while part < num_parts:
            at = row + np.uint64(np.uint32(part * num_experts))
            for i in unroll(range(per_lane)):
                expert = min(np.uint32(lane + np.uint32(32 * i)), last)
                out[i] = add_rn(out[i], logits[at + np.uint64(expert)])
            part = np.uint32(part + np.uint32(1))
        if has_bias != np.uint32(0):
            for i in unroll(range(per_lane)):
                expert = min(np.uint32(lane + np.uint32(32 * i)), last)
                out[i] = add_rn(out[i], bias[np.uint64(expert)])

    return load_logits


@functools.cache
def make_take_best(per_lane: int) -> Any:
    """The device function that chooses among 32 * `per_lane` keys."""

    @device_function
    def take_best(keys, lane):
        """The warp's expert with the largest key, the lowest of equals; it cannot be again.

        Returns:
            The expert and its key, on every lane.
        """
        best = TAKEN
        mine = NOBODY
        for i in unroll(range(per_lane)):
            if keys[i] > best:
                best = keys[i]
                mine = np.uint32(lane + np.uint32(32 * i))
        key = largest_of_lanes(best)
        candidate = NOBODY
        if best == key:
            candidate = mine
        chosen = smallest_of_lanes(candidate)
        for i in unroll(range(per_lane)):
            if np.uint32(lane + np.uint32(32 * i)) == chosen:
                keys[i] = TAKEN
        return chosen, key

    return take_best


def router_capacity(num_experts: int) -> int:
    """Smallest kernel capacity that holds ``num_experts``: 128 times a power of two."""
    capacity = 128
    while capacity < num_experts:
        capacity *= 2
    return capacity
