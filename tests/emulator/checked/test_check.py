"""`emulate.check` and what it returns."""

import json

import numpy as np
import pytest
from numba import cuda, int32

import emulate


def racy(x, out):
    part = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    part[t] = x[t]
    out[t] = part[63 - t]


def counts(x):
    cuda.atomic.add(x, 0, 1)


def test_a_finding_names_both_sides():
    x = np.arange(64, dtype=np.int32)
    report = emulate.check(racy, 1, 64, x, np.zeros(64, np.int32), schedules=["fifo"])
    finding = next(f for f in report.findings if f.id == "RACE_RAW")
    first = racy.__code__.co_firstlineno
    assert [site.line - first for site in finding.sites] == [3, 4]
    assert all(site.file == __file__ and site.function == "racy" for site in finding.sites)
    assert finding.variable == "part" and finding.threads == (
        (0, finding.index),
        (0, 63 - finding.index),
    )
    assert finding.schedule.startswith("fifo@")
    text = str(finding)
    assert "part[t] = x[t]" in text and "out[t] = part[63 - t]" in text
    assert "writes" in text and "reads" in text
    assert json.loads(json.dumps(finding.as_dict()))["sites"][0]["line"] == first + 3


def test_duplicates_are_dropped():
    args = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    report = emulate.check(racy, 1, 64, *args, schedules=["random"], seeds=6)
    keys = [(f.id, f.sites) for f in report.findings]
    assert report.schedules == 6 and len(keys) == len(set(keys))


def test_every_run_starts_from_the_same_arguments():
    x = np.zeros(1, np.int32)
    report = emulate.check(counts, 2, 32, x, schedules=["random"], seeds=5)
    assert report.schedules == 5 and x[0] == 64 and not report.findings


def test_a_token_repeats_a_run():
    args = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    report = emulate.check(racy, 1, 64, *args, schedules=["random:5"])
    name = report.findings[0].schedule.partition("@")[0]
    again = emulate.check(racy, 1, 64, *args, schedules=[name])
    assert again.findings == report.findings


def test_findings_are_raised_on_request_and_by_launch():
    args = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    with pytest.raises(emulate.FindingError, match="RACE_RAW") as caught:
        emulate.check(racy, 1, 64, *args, schedules=["fifo"], raise_on_finding=True)
    assert "RACE_RAW" in caught.value.ids
    with pytest.raises(emulate.FindingError, match="RACE_RAW"):
        emulate.launch(racy, 1, 64, *args, engine="checked")


def test_ids_can_be_ignored():
    args = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    ignore = ["RACE_RAW", "RACE_WAR", "UNINIT_READ"]
    assert not emulate.check(racy, 1, 64, *args, ignore=ignore, seeds=2).findings


def views(x, out):
    row = x[1]
    part = x[2:, 1:]
    t = cuda.threadIdx.x
    out[t] = row[t] + part[0, t] + x[0][t]


def test_views_and_slices():
    x = np.arange(32, dtype=np.int32).reshape(4, 8)[:, ::2]
    out = np.zeros(3, np.int32)
    report = emulate.check(views, 1, 3, x, out, schedules=["fifo"])
    assert not report.findings and (out == x[1, :3] + x[2, 1:] + x[0, :3]).all()


def aliases(x, y):
    t = cuda.threadIdx.x
    y[t] = x[t]


def test_arguments_that_overlap():
    memory = np.arange(64, dtype=np.int32)
    report = emulate.check(aliases, 1, 32, memory[1:33], memory[:32], schedules=["fifo"])
    assert {f.id for f in report.findings} & {"RACE_WAR", "RACE_RAW"}


def bytes_of_words(out):
    words = cuda.shared.array(8, np.uint32)
    t = cuda.threadIdx.x
    if t < 8:
        words[t] = np.uint32(0x01020304)
    cuda.syncthreads()
    out[t] = words.view(np.uint8)[t]
    cuda.syncthreads()
    words.view(np.uint8)[t] = np.uint8(t)


def test_neighbouring_bytes_are_no_race():
    out = np.zeros(32, np.uint8)
    report = emulate.check(bytes_of_words, 1, 32, out, schedules=["fifo", "random:1"])
    assert not report.findings and list(out[:4]) == [4, 3, 2, 1]


@pytest.mark.parametrize("engine", ["fast", "interpreted", "checked"])
def test_marked_arrays_are_arrays_for_every_engine(engine):
    x = np.zeros(1, np.int32)
    emulate.launch(
        counts, 1, 32, emulate.uninitialised(x) if engine != "checked" else x, engine=engine
    )
    assert x[0] == 32
