"""Choices of Hopper configs: they can run, they fit the rows, and a table can override them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from numba import config as numba_config

from nbmoe_kernels import config_report, heuristics, heuristics_sm90, hopper_table
from nbmoe_kernels.heuristics_sm90 import (
    HOPPER_PAIRS,
    fusing_pays,
    hopper_matmul_candidates,
    hopper_matmul_config,
    padded_rows,
    rows_per_busy_slot,
)
from nbmoe_kernels.hopper_limits import REGISTERS, cannot_run, lacks_memory, lacks_registers
from nbmoe_kernels.hopper_table import Measurement, Shape, are_alike, lookup, write_table
from nbmoe_kernels.matmul_grouped_sm90 import make_matmul_grouped_sm90
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from tests.kernels.assemble import assemble

PAIRS = pytest.mark.parametrize("pair", HOPPER_PAIRS, ids="x".join)
ROWS = (0, 1, 3, 4, 8, 17, 40, 64, 65, 100, 128, 192, 256, 300, 511, 512, 5000)


@pytest.fixture(autouse=True)
def _fresh_choices(monkeypatch):
    """Without a measured table, and without what other tests have chosen or printed."""
    monkeypatch.setattr(hopper_table, "read_table", lambda path: ())
    caches = (hopper_matmul_config, heuristics.grouped_matmul_config)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(config_report, "_printed", set())
    yield
    for cache in caches:
        cache.cache_clear()


@PAIRS
@pytest.mark.parametrize("num_active", [0, 1, 32, 128, 256, 257, 1024])
def test_every_choice_can_run(pair, num_active):
    for rows in ROWS:
        for k in (64, 768, 2048, 7168):
            config = hopper_matmul_config(*pair, 1536, k, num_active, rows * num_active)
            assert cannot_run(config, num_active) == ""
            assert (config.a_format, config.b_format) == pair
            assert config.stages >= 2 and config.stage_blocks >= 2
            assert config.widths == tuple(sorted(set(config.widths)))
            assert all(width % 8 == 0 and width <= 256 for width in config.widths)


def test_choices_are_pure_and_take_an_unknown_total_as_large():
    problem = ("nvfp4", "nvfp4", 4096, 7168, 32)
    known, unknown = (hopper_matmul_config(*problem, total) for total in (32 * 5000, None))
    assert known == unknown
    hopper_matmul_config.cache_clear()
    assert hopper_matmul_config(*problem, None) == unknown


@pytest.mark.parametrize(
    ("rows", "widths", "warpgroups", "blocks_per_sm"),
    [
        (1, (8,), 1, 4),
        (3, (8,), 1, 4),
        (8, (8, 16), 1, 4),
        (16, (16, 32), 2, 2),
        (25, (16, 32, 64), 1, 3),
        (64, (16, 32, 64), 1, 3),
        (96, (80, 88, 96, 104, 112), 2, 1),
        (256, (112, 120, 128, 136, 144), 2, 1),
        (128, (128, 136, 144, 152, 160), 2, 1),
        (5000, (128, 136, 144, 152, 160), 2, 1),
    ],
)
def test_tiles_grow_with_the_rows_of_a_slot(rows, widths, warpgroups, blocks_per_sm):
    config = hopper_matmul_config("nvfp4", "nvfp4", 4096, 7168, 1, rows)
    assert config.widths == widths
    assert (config.warpgroups, config.blocks_per_sm) == (warpgroups, blocks_per_sm)


def test_empty_slots_do_not_count():
    assert rows_per_busy_slot(128, 128) == 2  # 47 of 128 are expected to be empty
    assert rows_per_busy_slot(128, 1024) == 8
    assert rows_per_busy_slot(1, 7) == 7
    assert rows_per_busy_slot(0, 0) == rows_per_busy_slot(5, 0) == 1


@PAIRS
def test_rejected_candidates_have_reasons_and_the_choice_has_none(pair):
    for rows in ROWS:
        problem = (*pair, 2048, 2048, 64, 64 * rows)
        candidates = hopper_matmul_candidates(*problem)
        configs = [c.config for c in candidates]
        assert len(set(configs)) == len({c.name for c in configs}) == len(configs)
        chosen = next(c for c in candidates if c.config == hopper_matmul_config(*problem))
        assert chosen.rejected == ""
        # Something is left to measure; of 8 KiB units little more than one shape fits.
        assert pair == ("bf16", "bf16") or sum(not c.rejected for c in candidates) > 1


def test_widths_with_the_least_padding_come_first():
    best = min(heuristics_sm90._PREFILL, key=lambda widths: padded_rows(widths, 192))
    assert best == (80, 88, 96, 104, 112)  # two segments of 96; one of 144 would not do
    reasons = {
        c.config.widths: c.rejected
        for c in hopper_matmul_candidates("nvfp4", "nvfp4", 1536, 2048, 1, 192)
    }
    assert reasons[(112, 120, 128, 136, 144)].endswith("registers, there are 112")
    wide = (
        c
        for c in hopper_matmul_candidates("nvfp4", "nvfp4", 1536, 2048, 1, 192)
        if c.config.widths[0] == 112 and c.config.registers
    )
    assert {c.rejected for c in wide} == {"it has 13 % more padding than other widths at 192 rows"}


def make(**fields):
    defaults = {
        **{"a_format": "nvfp4", "b_format": "nvfp4", "widths": (8,), "warpgroups": 1},
        **{"stage_blocks": 4, "stages": 3, "blocks_per_sm": 4, "registers": None},
    }
    return HopperMatmulConfig(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (make(widths=(256,), stages=8, blocks_per_sm=1), "a block needs .* shared memory"),
        (make(stages=6), "its blocks need .* shared memory"),
        (make(widths=(144,), warpgroups=2, stages=2, blocks_per_sm=2, stage_blocks=2), "a thread"),
        # 640 threads of 96 registers have 61,440: a kernel that waited for ever.
        (make(warpgroups=4, registers=(56, 112), blocks_per_sm=1, stages=2), "hands out 64512"),
        (make(widths=(256,), registers=(40, 152), blocks_per_sm=1, stages=1), "a consumer's"),
        (make(widths=(8,), blocks_per_sm=13, stages=1, stage_blocks=2), "2048 threads"),
        (make(stage_blocks=3, warp_products=True), "in pairs"),
    ],
)
def test_what_cannot_run(config, reason):
    assert re.search(reason, cannot_run(config, 1)), cannot_run(config, 1)


def test_slots_beyond_the_table():
    assert "its table holds 256 slots" in cannot_run(make(), 257)
    assert hopper_matmul_config("nvfp4", "nvfp4", 64, 64, 257, 9).max_slots == 1024
    with pytest.raises(ValueError, match=r"no Hopper kernel .* holds 1024 slots"):
        hopper_matmul_config("nvfp4", "nvfp4", 64, 64, 1025, 9)


def test_the_prototype_fits():
    """The measured configs are possible: estimates must not refuse them."""
    for config in (
        make(widths=(8, 16)),
        make(
            widths=(112, 120, 128, 136, 144),
            **{"warpgroups": 2, "stage_blocks": 2, "stages": 4, "blocks_per_sm": 1},
            registers=(40, 232),
        ),
    ):
        assert lacks_memory(config) == lacks_registers(config) == ""


@pytest.mark.skipif(numba_config.ENABLE_CUDASIM, reason="the simulator replaces the compiler")
@pytest.mark.parametrize(
    ("pair", "rows"), [(("nvfp4", "nvfp4"), 8), (("nvfp4", "nvfp4"), 40)], ids=str
)
def test_registers_are_what_the_assembler_reports(pair, rows, tmp_path):
    config = hopper_matmul_config(*pair, 1536, 2048, 1, rows)
    report = assemble(make_matmul_grouped_sm90(config), (9, 0), tmp_path)
    assert report.faults() == []
    assert REGISTERS[config.widths] - 24 <= report.registers <= REGISTERS[config.widths]


SHAPE = Shape((16, 32), 2, 2, 4, 2, None)


def test_a_table_decides_where_it_has_a_problem_like_it(tmp_path: Path, monkeypatch):
    monkeypatch.undo()
    path = tmp_path / "table.json"
    monkeypatch.setenv(hopper_table.VARIABLE, str(path))
    near = Measurement("nvfp4", "nvfp4", 1536, 2048, 128, 8, SHAPE, 50.0)
    large = Measurement(
        *("nvfp4", "nvfp4", 1536, 2048, 128, 256),
        Shape((48, 56, 64, 72, 80), 2, 2, 4, 1, (40, 232)),
        280.0,
    )
    write_table(path, {"card": "a card", "date": "2026-01-01"}, (near, large))
    assert json.loads(path.read_text())["card"] == "a card"
    assert hopper_table.read_table(path) == (near, large)
    hopper_matmul_config.cache_clear()
    config = hopper_matmul_config("nvfp4", "nvfp4", 2048, 2048, 100, 700)
    assert config == SHAPE.config("nvfp4", "nvfp4", 128) and Shape.of(config) == SHAPE
    # Another pair, other rows, other sizes: not measured.
    for problem in (
        ("mxfp4", "mxfp4", 2048, 2048, 100, 700),
        ("nvfp4", "nvfp4", 2048, 2048, 100, 100),
        ("nvfp4", "nvfp4", 64, 64, 1, 7),
    ):
        assert hopper_matmul_config(*problem).widths != SHAPE.widths
    assert hopper_matmul_config("nvfp4", "nvfp4", 1536, 2048, 128, 128 * 256).widths[0] == 48
    assert hopper_matmul_config("nvfp4", "nvfp4", 1536, 2048, 128, 128 * 400).widths[0] == 112


def test_a_measured_config_that_cannot_run_is_passed_over(tmp_path: Path, monkeypatch):
    monkeypatch.undo()
    path = tmp_path / "table.json"
    monkeypatch.setenv(hopper_table.VARIABLE, str(path))
    deep = Shape((8, 16), 1, 4, 40, 4, None)
    write_table(path, {}, (Measurement("nvfp4", "nvfp4", 64, 64, 1, 8, deep, 1.0),))
    hopper_matmul_config.cache_clear()
    assert hopper_matmul_config("nvfp4", "nvfp4", 64, 64, 1, 8).stages < 40


@pytest.mark.parametrize("text", [None, "", "[]", '{"entries": [{"n": 1}]}', '{"entries": 1}'])
def test_a_broken_table_is_refused(tmp_path: Path, text, monkeypatch):
    monkeypatch.undo()
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(hopper_table.VARIABLE, str(path))
    with pytest.raises(ValueError, match=r"NBMOE_HOPPER_TABLE=.*not a table of Hopper configs"):
        lookup("nvfp4", "nvfp4", 64, 64, 1, 8)


def test_the_packaged_table_can_be_read_and_run(monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv(hopper_table.VARIABLE, raising=False)
    for m in hopper_table.read_table(hopper_table.table_path()):
        config = m.shape.config(m.a_format, m.b_format, 128)
        assert m.num_active <= 128 and cannot_run(config, m.num_active) == ""
        assert lookup(m.a_format, m.b_format, m.n, m.k, m.num_active, m.rows) == m.shape


def test_a_larger_table_of_slots_takes_the_room_of_a_stage(tmp_path: Path, monkeypatch):
    monkeypatch.undo()
    path = tmp_path / "table.json"
    monkeypatch.setenv(hopper_table.VARIABLE, str(path))
    deep = Shape((112, 120, 128, 136, 144), 2, 2, 5, 1, (40, 232))
    write_table(path, {}, (Measurement("nvfp4", "nvfp4", 1536, 2048, 128, 256, deep, 308.0),))
    hopper_matmul_config.cache_clear()
    few, many = (
        hopper_matmul_config("nvfp4", "nvfp4", 1536, 2048, slots, 256 * slots)
        for slots in (128, 200)
    )
    assert (few.stages, many.stages) == (5, 4) and Shape.of(few) == deep
    assert many == replace(few, stages=4, max_slots=256)


def test_means_that_count_as_alike():
    assert are_alike(1, 3) and are_alike(4, 8) and are_alike(33, 64) and are_alike(256, 270)
    assert not (are_alike(3, 4) or are_alike(8, 9) or are_alike(64, 65) or are_alike(256, 300))


def test_choices_are_printed_once(monkeypatch, capsys):
    hopper_matmul_config("mxfp4", "mxfp4", 1536, 2048, 128, 1024)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(config_report.VARIABLE, "1")
    for _ in range(2):
        hopper_matmul_config.cache_clear()
        chosen = hopper_matmul_config("nvfp4", "nvfp4", 1536, 2048, 128, 1024)
    text = capsys.readouterr().err
    assert text.count("nbmoe: Hopper matmul nvfp4 x nvfp4, n 1536, k 2048, 128 slots") == 1
    assert f"chosen: {chosen.name}" in text
    for candidate in hopper_matmul_candidates("nvfp4", "nvfp4", 1536, 2048, 128, 1024):
        assert candidate.config.name in text and candidate.rejected in text
    heuristics.grouped_matmul_config("nvfp4", "nvfp4", 1536, 2048, 128, 128 * 40)
    text = capsys.readouterr().err
    assert "chosen: nvfp4_sm80_m64" in text
    assert "not, because tiles are too low for 40 rows:\n    nvfp4_sm80_m16" in text


@pytest.mark.parametrize(
    ("num_active", "rows", "pays"),
    [(128, 8, True), (128, 1024, True), (128, 8192, False), (8, 272, False), (0, 0, True)],
)
def test_fusing_pays_for_few_rows(num_active, rows, pays):
    assert fusing_pays(num_active, rows) == pays


@pytest.mark.parametrize(
    ("n", "k", "slots", "rows", "by_warps"),
    [
        (1536, 2048, 128, 8, True),  # Qwen3-30B, one token: 192 tiles
        (2048, 768, 128, 8, True),
        (4096, 7168, 32, 1, True),  # DeepSeek-V3 EP8
        (5760, 2880, 32, 4, False),  # gpt-oss-20b: 360 tiles
        (2880, 2880, 32, 4, False),  # few tiles, but K ends within a stage
        (1536, 2048, 128, 128, False),  # 16 tokens
        (4096, 7168, 32, 128, False),
    ],
)
def test_mxfp4_is_multiplied_as_measured(n, k, slots, rows, by_warps):
    for a_format in ("mxfp4", "mxfp8"):
        config = hopper_matmul_config(a_format, "mxfp4", n, k, slots, rows)
        assert config.warp_products == by_warps
    assert hopper_matmul_config("mxfp8", "mxfp8", n, k, slots, rows).warp_products
