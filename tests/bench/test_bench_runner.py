"""All formats of a toy, by the specification: every call, its bytes, its error, its row."""

import json

import numpy as np
import pytest

from nbmoe.backend import simulator_enabled
from nbmoe.bench import report, runner
from nbmoe.bench.entry import LEGS, MIXED, PACKED, PREPARED
from nbmoe.bench.formats import FORMATS
from nbmoe.bench.memory import Memory
from nbmoe.bench.routed import Routed
from nbmoe.bench.routing import Problem
from nbmoe.bench.runner import Plan, Runner
from tests.bench.conftest import TOY, FakeTimer

pytestmark = [
    pytest.mark.usefixtures("on_the_host"),
    pytest.mark.skipif(simulator_enabled(), reason="its operands are numpy arrays"),
]

ROUNDING = 0.004
"""Most that rounding to bf16 may cost."""
EIGHT_BITS = {"mxfp8": 0.04, "w4a8": 0.04, "fp8": 0.04, "fp8_row": 0.05, "w4a8_row": 0.05}
QUANTIZING = {"nvfp4": 0.12, "mxfp4": 0.2, **EIGHT_BITS}


@pytest.fixture(scope="module")
def rows():
    """What a runner makes of three tokens in every format."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBMOE_BACKEND", "reference")
        plan = Plan((TOY,), (3,), tuple(FORMATS), LEGS)
        return Runner(plan, FakeTimer(), Memory(on_gpu=False)).run()


def test_every_leg_of_every_format_ran(rows):
    packed = {(row.format, row.leg) for row in rows if row.variant in ("", PACKED) and row.times}
    mixed = {(row.format, row.leg) for row in rows if row.variant == MIXED and row.times}
    for name in FORMATS:
        found = packed
        legs = {"quantize", "gate_up", "activate", "down", "pair", "layer"}
        if name in ("nvfp4", "mxfp4", "mxfp8", "w4a8"):
            legs.add("swiglu")
        if name == "w4a8_row":  # folded weights have no packed operands
            found, legs = mixed, legs | {"prepare", "prepare_inner"}
        assert {leg for form, leg in found if form == name} == legs
    assert {("", "logits"), ("", "route"), ("", "combine")} <= packed
    assert all(row.digest and row.work.bytes for row in rows if row.times)


def test_matmuls_are_exact_up_to_rounding(rows):
    checked = [row for row in rows if row.leg in ("gate_up", "down", "pair") and row.times]
    assert len(checked) >= 3 * len(FORMATS)
    for row in checked:
        assert 1e-4 < row.error < ROUNDING, row
    for row in rows:
        if row.leg in ("swiglu", "activate") and row.error is not None:
            assert row.error < QUANTIZING.get(row.format, ROUNDING), row


def test_fused_and_chained_give_the_same_bytes(rows):
    by_leg = {(row.format, row.variant, row.leg): row.digest for row in rows if row.times}
    for name in ("nvfp4", "mxfp4", "mxfp8", "w4a8"):
        assert by_leg[name, PACKED, "swiglu"] == by_leg[name, PACKED, "activate"]


def test_variants_give_the_same_bytes(rows):
    """Where operands are only laid out differently; variants that are missing say so.

    FP8 differs: prepared operands are multiplied as e4m3, packed ones as float16.
    """
    for name in set(FORMATS) - {"fp8", "fp8_row"}:
        for leg in ("gate_up", "down", "pair", "layer"):
            found = {r.digest for r in rows if (r.format, r.leg) == (name, leg) and r.times}
            assert len(found) == 1, (name, leg)
    for row in rows:
        assert bool(row.times) != bool(row.note)


def test_other_bytes_are_noticed(monkeypatch):
    """The second variant of each leg gives a byte more."""
    digests = iter(range(1000))
    monkeypatch.setattr(runner, "digest", lambda arrays: str(next(digests)))
    plan = Plan((TOY,), (3,), ("bf16", "fp8"), ("pair",))
    rows = Runner(plan, FakeTimer(), Memory(on_gpu=False)).run()
    notes = {(row.format, row.variant): row.note for row in rows}
    assert notes["bf16", PACKED] == "" and notes["bf16", PREPARED] == runner.OTHER_BYTES
    assert not any(note for (name, _), note in notes.items() if name == "fp8")


def test_a_layer_names_the_times_of_its_legs(rows):
    for row in rows:
        if row.leg == "layer" and row.variant == PACKED:
            fused = "swiglu" in {r.leg for r in rows if r.format == row.format}
            middle = ["swiglu"] if fused else ["gate_up", "activate"]
            assert list(row.others) == ["route", "quantize", *middle, "down", "combine"]
            assert "sum of its" in report.line(row)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_write_the_same_into_their_own_buffers(name):
    memory = Memory(on_gpu=False)
    routed = Routed(memory, Problem(TOY, 3))
    chain = FORMATS[name].make_chain(routed, FORMATS[name].make_weights(memory, TOY))
    for case in chain.cases():
        entry = case.make()
        before = [array.tobytes() for array in entry.outputs]
        for array in entry.outputs:
            memory.clear(array)
            assert not array.view(np.uint8).any()
        entry.call(None)
        assert [array.tobytes() for array in entry.outputs] == before, case


def test_a_failure_becomes_a_row(monkeypatch):
    def broken(memory, model):
        raise RuntimeError("no memory\nleft")

    monkeypatch.setitem(FORMATS, "nvfp4", type(FORMATS["bf16"])(broken, None))
    plan = Plan((TOY,), (3,), ("nvfp4", "bf16"), ("down",))
    rows = Runner(plan, FakeTimer(), Memory(on_gpu=False)).run()
    assert (rows[0].format, rows[0].note) == ("nvfp4", "RuntimeError: no memory left")
    assert {row.format for row in rows[1:]} == {"bf16"} and rows[1].times


def test_outputs_are_written_again_before_they_are_hashed(monkeypatch):
    """Bytes that no kernel writes must not come from what lay there before."""
    plan, order = Plan((TOY,), (3,), ("bf16",), ("down",)), []
    memory = Memory(on_gpu=False)
    clear = memory.clear
    monkeypatch.setattr(memory, "clear", lambda array: (order.append("clear"), clear(array)))
    monkeypatch.setattr(runner, "digest", lambda arrays: order.append("hash") or "0")
    rows = Runner(plan, FakeTimer(), memory).run()
    assert order == ["clear", "hash"] * sum(bool(row.times) for row in rows)
    assert all(row.error < ROUNDING for row in rows if row.times)


def test_once_times_nothing():
    timer = FakeTimer()
    plan = Plan((TOY,), (3,), ("fp8",), ("gate_up", "down"), once=True)
    assert not any(row.times for row in Runner(plan, timer, Memory(on_gpu=False)).run())
    assert timer.measured == 0 and timer.synced >= 2


def test_nothing_begins_after_the_time_limit():
    plan = Plan((TOY,), (3,), tuple(FORMATS), LEGS, time_limit=1e-9)
    assert Runner(plan, FakeTimer(), Memory(on_gpu=False)).run() == []


def test_document_holds_every_row(rows, tmp_path):
    path = tmp_path / "rows.json"
    contents = report.document(rows, {"card": "none"}, "nbmoe bench")
    report.dump(str(path), contents)
    read = json.loads(path.read_text())
    assert read["rows"] == [row.as_dictionary() for row in rows]
    assert read["schema"] == report.SCHEMA and read["card"] == "none" and read["versions"]["nbmoe"]
    row = next(r for r in read["rows"] if r["leg"] == "pair" and r["us"])
    assert set(row["us"]) == {"dirty", "clean"}
    assert set(row["us"]["dirty"]) == {"median", "p10", "p90"}
    assert row["floor_share"] == pytest.approx(row["floor_us"] / row["us"]["dirty"]["median"], 0.1)
