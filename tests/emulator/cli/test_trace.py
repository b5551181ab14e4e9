"""Timelines: what lies in which row, and when."""

import json

import numpy as np
import pytest
from numba import cuda, uint32, uint64

import emulate
from emulate.trace import active, recording
from nbmoe_kernels.device import atomics
from nbmoe_kernels.device.bulk import bulk_load
from nbmoe_kernels.device.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from tests.emulator import small_ops as ops

count = atomics.reduction("add", "u32", order="release")
wait_for = atomics.wait_ge("u32")


def slices(timeline, **wanted):
    return [
        e
        for e in timeline.as_dict()["traceEvents"]
        if e["ph"] == "X" and all(e[k] == v for k, v in wanted.items())
    ]


def pipeline(x, y):
    part = cuda.shared.array(64, np.uint32)
    t = cuda.threadIdx.x
    ops.copy_word(part, t, x, t)
    ops.copy_commit()
    ops.copy_wait_all()
    cuda.syncthreads()
    y[t] = ops.shuffle_down(part[63 - t], np.uint32(1))
    cuda.syncthreads()


def test_rows_and_order():
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    with recording() as timeline:
        emulate.launch(pipeline, 2, 64, x, y, engine="interpreted", copies="lazy")
    assert active() is None
    for block in (0, 1):
        for warp in (0, 1):
            row = slices(timeline, pid=block, tid=16 * warp)
            assert [e["name"] for e in row] == ["syncthreads", "t_shuffle_down", "syncthreads"]
            assert [e["cat"] for e in row] == ["barrier", "collective", "barrier"]
            ends = [e["ts"] + e["dur"] for e in row]
            assert all(a <= b["ts"] for a, b in zip(ends, row[1:], strict=False))
            copies = slices(timeline, pid=block, tid=16 * warp + 8)
            assert {e["name"] for e in copies} == {"t_copy"}
            assert sum(e["args"]["events"] for e in copies) == 32
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in timeline.as_dict()["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert names[0, 16] == "warp 1" and names[1, 24] == "warp 1 copies"


def test_same_schedule_same_timeline():
    texts = []
    for _ in range(2):
        with recording() as timeline:
            x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
            emulate.check(pipeline, 1, 64, x, y, schedules=["random:5"])
        texts.append(json.dumps(timeline.as_dict()))
    assert texts[0] == texts[1]


def test_a_sleeping_thread_is_one_slice():
    def spin(flag):
        if cuda.threadIdx.x < 32:
            while flag[0] == 0:
                cuda.nanosleep(100)
        elif cuda.threadIdx.x == 32:
            for _ in range(5):
                cuda.nanosleep(100)
            flag[0] = 1

    with recording() as timeline:
        emulate.launch(spin, 1, 64, np.zeros(1, np.int32), engine="interpreted")
    assert {e["cat"] for e in slices(timeline)} == {"sleep"}
    assert 1 <= len(slices(timeline, pid=0, tid=0)) <= 6


def handover(x, y, arrivals):
    """The last block copies and counts, the others wait for it, each for a number of its own."""
    bars = cuda.shared.array(2, uint64)
    part = cuda.shared.array(32, np.uint8, alignment=16)
    t, block = cuda.threadIdx.x, cuda.blockIdx.x
    if block + 1 < cuda.gridDim.x:
        wait_for(arrivals, uint32(1), uint32(block + 1))
        return
    if t == 0:
        mbarrier_init(bars, uint32(1), uint32(1))
        fence_mbarrier_init()
        mbarrier_arrive_expect(bars, uint32(1), uint32(32))
        bulk_load(part, uint32(0), x, np.uint64(0), uint32(32), bars, uint32(1))
    cuda.syncwarp()
    mbarrier_wait(bars, uint32(1), uint32(0))
    y[t] = part[t]
    cuda.syncwarp()
    if t == 0:
        for _ in range(block):
            count(arrivals, uint32(1), uint32(1))


@pytest.mark.parametrize(("engine", "bar"), [("interpreted", "shared[1]"), ("checked", "bars[1]")])
def test_what_is_waited_on_and_copied(engine, bar):
    """Arguments have their names; of shared memory the checked engine knows names, too."""
    x, y = np.arange(32, dtype=np.uint8), np.zeros(32, np.uint8)
    with recording() as timeline:
        args = (handover, 3, 32, x, y, np.zeros(2, np.uint32))
        # Copies that land at once would leave nothing to wait for.
        emulate.launch(*args, engine=engine, copies="lazy")
    (copy,) = slices(timeline, cat="copy")
    assert (copy["args"]["of"], copy["args"]["to"]) == ("x", bar)
    waits = slices(timeline, cat="wait")
    on = [e["args"]["on"] for e in waits]
    # The checked engine's copy lands before anybody waits for it.
    assert on == ["arrivals[1]"] * 2 + [bar] * (engine == "interpreted")
    # Asking again is no event: each lane has waited once, in one slice.
    assert all(e["args"]["events"] == 32 for e in waits)
    assert all(e["ts"] + e["dur"] > copy["ts"] + copy["dur"] for e in waits[:2])


def test_lanes_that_wait_on_other_elements_have_other_rows():
    def two(flags):
        if cuda.threadIdx.x < 32:
            wait_for(flags, uint32(cuda.threadIdx.x % 2), uint32(1))
        elif cuda.threadIdx.x < 34:
            count(flags, uint32(cuda.threadIdx.x % 2), uint32(1))

    with recording() as timeline:
        emulate.launch(two, 1, 64, np.zeros(2, np.uint32), engine="interpreted")
    rows = {e["tid"]: e["args"]["on"] for e in slices(timeline, cat="wait")}
    assert rows == {0: "flags[0]", 1: "flags[1]"}


def test_without_recording_nothing_is_kept():
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    with recording() as timeline:
        pass
    emulate.launch(pipeline, 1, 64, x, y, engine="interpreted")
    assert slices(timeline) == []


def test_write(tmp_path):
    with recording() as timeline:
        x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
        emulate.launch(pipeline, 1, 64, x, y, engine="interpreted")
    timeline.write(tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    assert document == timeline.as_dict() and document["traceEvents"]
