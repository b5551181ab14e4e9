"""The portable MegaFFN: its order of blocks, its counters, and what the checked engine finds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbmoe import ops
from nbmoe.backend import simulator_enabled
from nbmoe.formats import FORMATS, NVFP4
from nbmoe_kernels import mega_ffn_sm80 as mega
from nbmoe_kernels.device import atomics
from nbmoe_kernels.mega_ffn_sm80 import make_mega_ffn_sm80, mega_ffn_sm80_config
from tests.emulator.checked.shipped import checking
from tests.kernels.assemble import assemble
from tests.kernels.test_mega_ffn_sm90 import Problem, problem
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


def run(p: Problem, schedule: str, blocks: int = 2, launches: int = 1) -> Any:
    """What the checked engine finds; counters are 0 after each launch."""
    given = arguments(p, prepared=False)
    with checking(schedules=[schedule]) as executor:
        executor.multiprocessors = blocks
        for _ in range(launches):
            ops.mega_ffn_nvfp4(**given)
            if not executor.findings:
                assert not given["arrival_count"].any()
    if not executor.findings:
        used = int(p.up.slots.starts[-1])
        assert_same(given["output"][:used], np.asarray(p.expected())[:used], "output")
        assert (given["output"][used:].view(np.uint16) == 0xAAAA).all()
    return {finding.id for finding in executor.findings}


@no_simulator
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_checker_finds_nothing(fmt: Any) -> None:
    """Two columns of gate/up tiles, an empty and a masked slot; counters are used again."""
    p = problem(1, fmt, 64, 96, 24, SMALL, bias=True)
    assert run(p, "fifo") == set()


@no_simulator
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_checker_finds_nothing_in_other_orders(blocks: int, seed: int) -> None:
    p = problem(seed, NVFP4, 64, 96, 24, Slots((1, 2), (0, 1), 2, 0))
    assert run(p, f"random:{seed}", blocks, launches=2) == set()


def _relaxed(monkeypatch: Any) -> None:
    monkeypatch.setattr(mega, "_count", atomics.reduction("add"))


def _waits_for(difference: int) -> Callable[[Any], None]:
    def plant(monkeypatch: Any) -> None:
        real = mega._wait

        def wait(array: Any, index: Any, count: Any) -> None:
            real(array, index, np.uint32(count + np.uint32(difference % 2**32)))

        monkeypatch.setattr(mega, "_wait", wait)

    return plant


def _other_counter(monkeypatch: Any) -> None:
    real = mega._count

    def count(array: Any, index: Any, value: Any) -> None:
        real(array, np.uint64(index ^ np.uint64(1)), value)

    monkeypatch.setattr(mega, "_count", count)


FAULTS: dict[str, tuple[Callable[[Any], None], set[str]]] = {
    "relaxed instead of release": (_relaxed, {"RACE_RAW"}),
    "a count too low": (_waits_for(-1), {"RACE_RAW"}),
    "a count too high": (_waits_for(1), {"DEADLOCK"}),
    "another row block's counter": (_other_counter, {"RACE_RAW", "DEADLOCK"}),
}


@no_simulator
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_protocol_are_found(fault: str, monkeypatch: Any) -> None:
    plant, expected = FAULTS[fault]
    plant(monkeypatch)
    p = problem(0, NVFP4, 64, 96, 24, Slots((1, 2), (0, 1), 2, 0))
    found: set[str] = set()
    make_mega_ffn_sm80.cache_clear()
    try:
        for seed in range(12):
            found |= run(p, f"random:{seed}", 3)
            if found & expected:
                break
    finally:
        make_mega_ffn_sm80.cache_clear()
    assert found & expected


def test_copies_fit_the_rows_of_both_matmuls() -> None:
    assert mega_ffn_sm80_config("nvfp4", "nvfp4", 64, 64, 2, 8).copy_bytes == 16
    assert mega_ffn_sm80_config("nvfp4", "nvfp4", 80, 64, 2, 8).copy_bytes == 8
    assert mega_ffn_sm80_config("nvfp4", "nvfp4", 64, 80, 2, 8).copy_bytes == 8


@needs_compiler
@pytest.mark.parametrize("rows", [8, 100_000])
def test_assembles_without_spills(rows: int, tmp_path: Any) -> None:
    config = mega_ffn_sm80_config("nvfp4", "nvfp4", 768, 2048, 128, rows)
    assert assemble(make_mega_ffn_sm80(config), (8, 0), tmp_path).faults() == []
