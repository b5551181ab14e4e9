"""Mutants that no check can notice, because they do the same as the kernel, and why.

The names are those of `emulate.mutate.edits.Mutant`: the function and the edit.
"""

_STRONGER = "a wait for more groups than is needed costs time, not bytes"
_GUARDED = "an item past the last one is skipped by the `if` in the loop"

REASONS: dict[str, str] = {
    "moe_create_indices: while word < np.uint32(np.uint32(WARPS) * num_experts): end +1": (
        "one word more is cleared: with fewer experts than the capacity nobody uses it, else it is "
        "the first total, which is written after the next barrier"
    ),
    "moe_create_indices: for chunk in range(chunks): end +1": (
        "a chunk past the last expert has 0 rows in all lanes and stores nothing"
    ),
    "moe_create_indices: for step in range(5): end +1": (
        "a shuffle by 32 lanes leaves every lane its own value, which no lane adds"
    ),
    "moe_create_indices: WARPS - 1: +1": (
        "a warp's segment may be longer than it has to be: the segments still are in order and "
        "cover all slots"
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
}


def reason_of(mutant: str) -> str:
    """Why a mutant is equivalent; empty if it is not known to be."""
    return REASONS.get(mutant, "")
