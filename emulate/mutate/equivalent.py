"""Mutants that no check can notice, because they do the same as the kernel, and why.

The names are those of `emulate.mutate.edits.Mutant`: the function and the edit.
"""

from emulate.mutate.edits import Mutant

LEFT_OUT = "the constants of the configuration leave this code out"
"""Of all mutants that `emulate.mutate.reach` finds to be so, in whatever function."""

_STRONGER = "a wait for more groups than is needed costs time, not bytes"
_CLEARED = "one word more is cleared, before the first copies"
_GUARDED = "an item past the last one is skipped by the `if` in the loop"

REASONS: dict[str, str] = {
    "group_slots: while word < np.uint32(np.uint32(WARPS) * num_experts): end +1": (
        "one word more is cleared: with fewer experts than the capacity nobody uses it, else it is "
        "the first start, which is written after the next barrier"
    ),
    "group_slots: while group < groups_per_warp: end +1": (
        "one batch more has no slots of the warp, and so counts nothing"
    ),
    "scan_experts: for step in range(5): end +1": (
        "a shuffle by 32 lanes leaves every lane its own value, which no lane adds"
    ),
    "clear_all: while word < np.uint32(np.uint32(2 * copies) * np.uint32(num_experts + "
    "np.uint32(1))): end +1": (
        "one word more is cleared: with fewer experts than the capacity nobody uses it"
    ),
    "count_all: while first < end: end -1": "first is a multiple of a batch, and so is the end",
    "count_all: for i in range(_TAIL): end +1": "one slot more is asked for, and not counted",
    "count_all: while first < num_slots: end +1": (
        "one batch more has no slots, and so counts nothing"
    ),
    "count_all: copies - 1: -1": (
        "two lanes share a counter and half of the counters stay 0: the sums are the same"
    ),
    "sum_all: while first < num_experts: end +1": "the experts of one turn more store nothing",
    "moe_finalize: while j < top_k: end +1": "one batch more has no rows, and so adds nothing",
    "router_logits: while word < row_words: end +1": (
        "one turn more finds no block of K that is inside the rows"
    ),
    "router_logits: while word < row_words: end -1": (
        "a turn is a multiple of 4 words, and so are rows"
    ),
    "multiply_tile: BLOCK_N - 1: -1": "n is a multiple of 8, so no n / 128 has a remainder of 1",
    "accumulate: for loaded in range(np.uint32(num_stages + np.uint32(stages - 1))): end +1": (
        "one turn more multiplies a stage past the end of K, whose scales are taken as 0"
    ),
    "accumulate: stages - 1: +1 (#3)": (
        "the same as one turn more of the loop over stages, whose end it is"
    ),
    "accumulate: stages - 1: -1": (
        "one more turn, before the first product, waits and meets in the barrier as well"
    ),
    "accumulate: wait_for_stage(): 1 open groups instead of 2": _STRONGER,
    "accumulate: wait_for_stage(): 0 open groups instead of 1": _STRONGER,
    "copy_codes: for i in range((copies + threads - 1) // threads): end +1": _GUARDED,
    "copy_scales: for i in range((rows_in_block * words + threads - 1) // threads): end +1": (
        _GUARDED
    ),
    "accumulate: stage_blocks - 1: +1": (
        "at most one stage more, past the end of K, whose products are 0"
    ),
    "build_table: for i in range(5): end +1": (
        "a shuffle by 32 lanes leaves every lane its own value, which no lane adds"
    ),
    "build_table: for i in range(share): end -1 (#4)": (
        "without slots only the first of a lane is used"
    ),
    "clear_tokens: while at < end: end +1": _CLEARED,
    "clear_tokens: while at < np.uint32(end_scale): end +1": _CLEARED,
    "clear_tokens: while at < np.uint32(end_scale): end -1": (
        "the last word is of products, which are written before they are read"
    ),
    "scaled_tile: for j in range(width // 8): end +1": _GUARDED,
    "blocks: wait_for_older(): 0 open groups instead of 1": _STRONGER,
    "body: block_rows - 1: -1": "n is a multiple of 8, so no n / block_rows has a remainder of 1",
    "_next_place: PLACES - 1: -1": (
        "a ring of one place: the producer waits longer, and all read what it tells"
    ),
    "load_tokens: for q in range(stage_blocks): end +1": _GUARDED,
    "load_weights: for i in range(warpgroups): end +1": _GUARDED,
    "multiply_stage: for i in range(rounds): end +1": _GUARDED,
    "multiply_tile: wait_for_most(): 0 open groups instead of 1": _STRONGER,
}


def reason_of(mutant: Mutant) -> str:
    """Why a mutant is equivalent; empty if it is not known to be."""
    return LEFT_OUT if mutant.is_left_out else REASONS.get(mutant.name, "")
