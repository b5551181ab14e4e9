"""Timelines: what lies in which row, and when."""

import json

import numpy as np
from numba import cuda

import emulate
from emulate.trace import active, recording
from tests.emulator import small_ops as ops


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
