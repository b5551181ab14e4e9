"""The Hopper matmuls' schedule on the device against a model in Python."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numba import config as numba_config
from numba import cuda

import emulate
from nbmoe_kernels.kernel import kernel
from nbmoe_kernels.matmul_sm90_schedule import make_build_table, make_find_tile

pytestmark = pytest.mark.skipif(
    numba_config.ENABLE_CUDASIM, reason="the emulator's engines do not need it"
)
MAX_WIDTH, MAX_SLOTS, TABLE_AT = 24, 64, 5
WORDS = TABLE_AT + 3 * MAX_SLOTS + 2
MASKED = 2**32 - 1

build_table = make_build_table(MAX_WIDTH, MAX_SLOTS, TABLE_AT)
num_segments, find_tile = make_find_tile(MAX_SLOTS, TABLE_AT)


@kernel(
    "global u32* expert_start, global i32* expert_ids, global u32* out, u32 num_slots, "
    "u32 num_rows",
    threads=32,
    shared_bytes=4 * WORDS,
    name="lists_segments",
)
def lists_segments(expert_start, expert_ids, out, num_slots, num_rows):
    words = cuda.shared.array(0, np.uint32, alignment=16)
    build_table(words, expert_start, expert_ids, num_slots, num_rows)
    cuda.syncthreads()
    segments = num_segments(words, num_slots)
    segment = np.uint32(cuda.threadIdx.x)
    if segment == np.uint32(0):
        out[np.uint64(0)] = segments
    while segment < segments:
        expert, row, token_row, rows = find_tile(words, segment, num_slots)
        at = np.uint64(np.uint32(1) + np.uint32(np.uint32(4) * segment))
        out[at] = np.uint32(expert)
        out[at + np.uint64(1)] = row
        out[at + np.uint64(2)] = token_row
        out[at + np.uint64(3)] = rows
        segment = np.uint32(segment + np.uint32(32))


def device_segments(starts: list[int], ids: list[int], num_rows: int) -> list[tuple[int, ...]]:
    """``(expert, row, token_row, rows)`` of every segment; no ids: without slots."""
    out = np.zeros(4096, np.uint32)
    args = (np.array(starts, np.uint32), np.array(ids or [0], np.int32), out)
    sizes = (np.uint32(len(ids)), np.uint32(num_rows))
    shared = lists_segments.shared_bytes
    emulate.launch(lists_segments, 1, 32, *args, *sizes, shared_bytes=shared, engine="interpreted")
    return [tuple(map(int, row)) for row in out[1 : 1 + 4 * out[0]].reshape(-1, 4)]


def model_segments(starts: list[int], ids: list[int], num_rows: int) -> list[tuple[int, ...]]:
    """The same, from the description of `nbmoe_kernels.matmul_sm90_schedule`."""
    found = []
    for slot in range(max(len(ids), 1)):
        begin, end = (0, num_rows) if not ids else (starts[slot], starts[slot + 1])
        begin, end = min(begin, num_rows), min(end, num_rows)
        token_row = (begin + 8 * slot) // 8 * 8
        eights = -(-(end - begin) // 8)
        segments = -(-(end - begin) // MAX_WIDTH)
        row = begin
        for index in range(segments):
            share = eights // segments + (index < eights % segments)
            rows = min(8 * share, end - row)
            expert = ids[slot] % 2**32 if ids else 0
            found.append((expert, row, token_row + row - begin, rows))
            row += 8 * share
    return found


@given(
    st.lists(
        st.tuples(st.sampled_from((0, 0, 1, 7, 8, 9, 23, 24, 25, 49, 200)), st.integers(-1, 3)),
        min_size=1,
        max_size=MAX_SLOTS,
    ),
    st.integers(0, 30),
    st.booleans(),
)
@example([(1, 0)] * MAX_SLOTS, 0, False)
@example([(0, 0)] * (MAX_SLOTS - 1) + [(25, -1)], 3, False)
@example([(25, 2), (9, 1)], 30, True)
def test_segments_are_the_models(slots: Any, spare: int, is_short: bool) -> None:
    """Too few rows allocated cut slots short; more than slots own belong to nobody."""
    starts = [0, *np.cumsum([count for count, _ in slots]).tolist()]
    ids = [expert for _, expert in slots]
    num_rows = max(starts[-1] - spare, 0) if is_short else starts[-1] + spare
    found = device_segments(starts, ids, num_rows)
    assert found == model_segments(starts, ids, num_rows)
    # Every row once, in order, in segments that a tile can hold.
    used = min(starts[-1], num_rows)
    assert [r for _, row, _, rows in found for r in range(row, row + rows)] == list(range(used))
    assert all(0 < rows <= MAX_WIDTH for *_, rows in found)


@pytest.mark.parametrize("rows", [1, 8, 24, 25, 100])
def test_without_slots_one_expert_has_all_rows(rows: int) -> None:
    found = device_segments([0], [], rows)
    assert found == model_segments([0], [], rows)
    assert sum(segment[3] for segment in found) == rows


def test_a_segments_rows_differ_by_eight_at_most() -> None:
    sizes = [rows for *_, rows in device_segments([0, 100], [1], 100)]
    assert sizes == [24, 24, 24, 16, 12]
