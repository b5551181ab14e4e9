"""What the routing kernels share: scores as sortable integers, and warp-wide choice and sums.

A warp handles one token. Its scores lie in shared memory as keys: unsigned integers in the order of
the float32 scores, so that one `redux` finds the largest. -0 has the key of +0; a NaN has the
largest key of all, 0xFFFFFFFF, so a token with one shows it in its weights; key 0 is no score's and
marks an expert that cannot be chosen (any more).

Lane l holds the experts l, l + 32, ...: it alone reads and writes their keys while experts are
chosen, so that choosing needs no synchronisation.

Sums over experts or over a token's choices have one order: each lane adds its own in ascending
order from +0, then lanes 16, 8, 4, 2 and 1 apart add theirs, which gives every lane the same bits.
"""

import numpy as np

from nbmoe_kernels.device.math import add_rn, bits_f32, exp_f32, f32_bits
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.warp import reduce_lanes, shuffle_xor

WARPS = 4
THREADS = 32 * WARPS
MAX_EXPERTS = 1024
SHARED_BYTES = 4 * WARPS * MAX_EXPERTS
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


@device_function
def take_best(keys, base, lane, num_experts):
    """The warp's expert with the largest key, the lowest of equals, which it then cannot be again.

    Returns:
        The expert and its key, on every lane.
    """
    best = TAKEN
    mine = NOBODY
    expert = lane
    while expert < num_experts:
        key = keys[np.uint32(base + expert)]
        if key > best:
            best = key
            mine = expert
        expert = np.uint32(expert + np.uint32(32))
    key = largest_of_lanes(best)
    candidate = NOBODY
    if best == key:
        candidate = mine
    chosen = smallest_of_lanes(candidate)
    if chosen == mine:
        keys[np.uint32(base + chosen)] = TAKEN
    return chosen, key
