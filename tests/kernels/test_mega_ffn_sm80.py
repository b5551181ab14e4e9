"""The portable MegaFFN: its order of blocks, its counters, and what the checked engine finds."""

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.backend import simulator_enabled
from nbmoe.formats import FORMATS, MXFP8, NVFP4
from nbmoe_kernels import mega_ffn_counters as counters
from nbmoe_kernels import mega_ffn_sm80 as mega
from nbmoe_kernels.device import atomics
from nbmoe_kernels.heuristics import grouped_matmul_configs
from nbmoe_kernels.mega_ffn_sm80 import launch_mega_ffn_sm80, make_mega_ffn_sm80
from nbmoe_kernels.mega_ffn_sm80_config import (
    blocks_per_sm,
    mega_ffn_sm80_config,
    most_counters,
)
from tests.emulator.checked.shipped import checking
from tests.kernels.assemble import assemble
from tests.kernels.test_mega_ffn_sm90 import CountersError, Problem, problem
from tests.ops.compare import assert_same
from tests.ops.test_mega_ffn import arguments
from tests.strategies import Slots

needs_compiler = pytest.mark.skipif(
    simulator_enabled(), reason="the simulator replaces the compiler"
)
no_simulator = pytest.mark.skipif(
    simulator_enabled(), reason="the emulator's engines do not need it"
)
SMALL = Slots((3, 0, 2, 1), (1, 2, 0, -1), 4, 1)


@pytest.fixture(autouse=True)
def _one_block_an_sm(monkeypatch: Any) -> None:
    """Tests say how many blocks there are by the executor's multiprocessors."""
    monkeypatch.setattr(mega, "blocks_per_sm", lambda config: 1)


def run(p: Problem, schedule: str, blocks: int = 2, **changes: Any) -> set[str]:
    """What the checked engine finds; otherwise bytes are right and counters are 0 again."""
    given = arguments(p, prepared=False, **changes)
    with checking(schedules=[schedule]) as executor:
        executor.multiprocessors = blocks
        ops.mega_ffn_nvfp4(**given)
    if not executor.findings:
        if given["arrival_count"].any():
            raise CountersError(given["arrival_count"].tolist())
        used = int(p.up.slots.starts[-1])
        assert_same(given["output"][:used], np.asarray(p.expected())[:used], "output")
        assert (given["output"][used:].view(np.uint16) == 0xAAAA).all()
    return {finding.id for finding in executor.findings}


@no_simulator
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_checker_finds_nothing(fmt: Any) -> None:
    """Two columns of gate/up tiles, an empty and a masked slot."""
    p = problem(1, fmt, 64, 96, 24, SMALL, bias=True)
    assert run(p, "fifo") == set()


@no_simulator
@pytest.mark.parametrize(("blocks", "seed"), [(1, 0), (2, 1), (5, 2)])
def test_other_orders_and_routings_on_the_same_counters(blocks: int, seed: int) -> None:
    """A gate/up tile behind a down tile; row blocks of one scale tile; a masked slot."""
    counters = np.zeros(8, np.uint32)
    for counts, ids in (((1, 2, 1), (0, 1, 2)), ((18, 0, 0), (1, 0, 2)), ((2, 3, 0), (-1, 1, 0))):
        p = problem(seed, NVFP4, 64, 96, 24, Slots(counts, ids, 3, 0))
        assert run(p, f"random:{seed}", blocks, arrival_count=counters) == set()


@no_simulator
@pytest.mark.parametrize(
    ("fmt", "activation", "options"),
    [
        (NVFP4, GatedActivation(limit=2.5), {"match_bf16": False}),
        (MXFP8, GatedActivation("swigluoai", alpha=1.702, limit=7.0), {}),
    ],
    ids=["nvfp4", "mxfp8"],
)
def test_epilogues(fmt: Any, activation: GatedActivation, options: dict[str, Any]) -> None:
    """Biases, row scales, limits and another activation, gate and up in float32."""
    p = problem(
        3, fmt, 64, 64, 24, SMALL, bias=True, row_scales=fmt is NVFP4, activation=activation,
        **options,
    )  # fmt: skip
    assert run(p, "fifo", **options) == set()


def grids(num_rows: int, multiprocessors: int) -> list[Any]:
    """Of the launches for so many rows in two slots; a segment has two tiles."""
    config = mega_ffn_sm80_config("nvfp4", "nvfp4", 64, 64, 2, 8)
    flags = ("up_scales", "down_scales", "row_scales", "up_bias", "down_bias")
    launched = []

    def execute(kernel: Any, grid: Any, args: Any, stream: Any) -> None:
        launched.append(grid)

    execute.multiprocessors = multiprocessors  # type: ignore[attr-defined]
    arrays: list[Any] = [None] * 19
    launch_mega_ffn_sm80(
        execute, *arrays, num_active=2, num_rows=num_rows, k=64, moe_dim=64, n=24,
        match_bf16=True, activation="silu", alpha=1.0, limit=0.0, config=config,
        **{f"has_{flag}": False for flag in flags},
    )  # fmt: skip
    return launched


def test_no_rows_launch_nothing() -> None:
    assert grids(0, 2) == []


def test_the_grid_is_what_fits_or_has_tiles(monkeypatch: Any) -> None:
    """Two blocks an SM; 40 rows are 5 segments at most, one row is 2."""
    monkeypatch.setattr(mega, "blocks_per_sm", blocks_per_sm)
    assert grids(40, 3) == [(6, 1, 1)]
    assert grids(1, 100) == [(4, 1, 1)]


def _relaxed(monkeypatch: Any) -> None:
    monkeypatch.setattr(counters, "_count", atomics.reduction("add"))


def _waits_for(difference: int) -> Callable[[Any], None]:
    def plant(monkeypatch: Any) -> None:
        real = counters._wait

        def wait(array: Any, index: Any, count: Any) -> None:
            real(array, index, np.uint32(count + np.uint32(difference % 2**32)))

        monkeypatch.setattr(counters, "_wait", wait)

    return plant


def _cleared_early(monkeypatch: Any) -> None:
    real = counters._take

    def take(array: Any, index: Any, value: Any) -> Any:
        return np.uint32(real(array, index, value) + np.uint32(1))

    monkeypatch.setattr(counters, "_take", take)


def _other_counter(monkeypatch: Any) -> None:
    real = counters._count

    def count(array: Any, index: Any, value: Any) -> None:
        real(array, np.uint64(index ^ np.uint64(1)), value)

    monkeypatch.setattr(counters, "_count", count)


def _number_stays(monkeypatch: Any) -> None:
    monkeypatch.setattr(mega, "end_draws", lambda array, number, tiles: None)


FAULTS: dict[str, tuple[Callable[[Any], None], set[str]]] = {
    "relaxed instead of release": (_relaxed, {"RACE_RAW"}),
    "a count too low": (_waits_for(-1), {"RACE_RAW"}),
    "a count too high": (_waits_for(1), {"DEADLOCK"}),
    "cleared early": (_cleared_early, {"DEADLOCK", "counters are not 0"}),
    "another row block's counter": (_other_counter, {"RACE_RAW", "DEADLOCK"}),
    "the next tile's number stays": (_number_stays, {"counters are not 0"}),
}


@no_simulator
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_protocol_are_found(fault: str, monkeypatch: Any) -> None:
    plant, expected = FAULTS[fault]
    plant(monkeypatch)
    # Two down tiles: one may wait when the other one's addition is taken for the last.
    p = problem(0, NVFP4, 64, 96, 136, Slots((1, 2), (0, 1), 2, 0))
    found: set[str] = set()
    make_mega_ffn_sm80.cache_clear()
    try:
        for seed in range(12):
            try:
                found |= run(p, f"random:{seed}", 3)
            except CountersError:
                found.add("counters are not 0")
            if found & expected:
                break
    finally:
        make_mega_ffn_sm80.cache_clear()
    assert found & expected


BARRIERS = {
    "before the next tile": "RACE_RAW",
    "behind the wait": "RACE_RAW",
    "before the arrival": "RACE_RAW",
}


@no_simulator
@pytest.mark.parametrize("barrier", BARRIERS)
def test_every_block_barrier_is_needed(barrier: str, monkeypatch: Any, tmp_path: Path) -> None:
    """The kernel without one of them; one block has a gate/up tile behind a down tile."""
    statement = "cuda.syncthreads()"
    parts = Path(mega.__file__).read_text().split(statement)
    at = list(BARRIERS).index(barrier) + 1
    assert len(parts) == len(BARRIERS) + 1
    path = tmp_path / "without.py"
    path.write_text(statement.join(parts[:at]) + "pass" + statement.join(parts[at:]))
    spec = importlib.util.spec_from_file_location("without", path)
    assert spec is not None and spec.loader is not None
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    monkeypatch.setattr(mega, "make_mega_ffn_sm80", without.make_mega_ffn_sm80)
    p = problem(0, NVFP4, 64, 96, 24, Slots((1, 2, 1), (0, 1, 2), 3, 0))
    blocks = 1 if at == 1 else 2
    assert any(BARRIERS[barrier] in run(p, f"random:{seed}", blocks) for seed in range(8))


def test_copies_fit_the_rows_of_both_matmuls() -> None:
    assert mega_ffn_sm80_config("nvfp4", "nvfp4", 64, 64, 2, 8).copy_bytes == 16
    assert mega_ffn_sm80_config("nvfp4", "nvfp4", 80, 64, 2, 8).copy_bytes == 8
    assert mega_ffn_sm80_config("nvfp4", "nvfp4", 64, 80, 2, 8).copy_bytes == 8


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_operation_asks_for_enough_counters(fmt: str) -> None:
    for config in grouped_matmul_configs(fmt, fmt, 64):
        for rows, slots in itertools.product((1, 7, 8, 9, 129, 1000), (1, 3, 8, 300)):
            enough = ops.mega_ffn_arrival_count_size(rows, slots)
            assert most_counters(config, rows, slots) <= enough


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_fit_on_every_sm_together(fmt: str) -> None:
    """Of 100 KiB, 1 KiB of it reserved a block, and 65536 registers, up to 255 a thread."""
    for config in grouped_matmul_configs(fmt, fmt, 64):
        blocks = blocks_per_sm(config)
        kernel = make_mega_ffn_sm80(config)
        assert blocks >= 1
        assert blocks * (kernel.shared_bytes + 1024) <= 100 * 1024
        assert blocks * kernel.threads * 256 <= 65536


@needs_compiler
@pytest.mark.parametrize("rows", [8, 100_000])
def test_assembles_without_spills(rows: int, tmp_path: Any) -> None:
    config = mega_ffn_sm80_config("nvfp4", "nvfp4", 768, 2048, 128, rows)
    assert assemble(make_mega_ffn_sm80(config), (8, 0), tmp_path).faults() == []
