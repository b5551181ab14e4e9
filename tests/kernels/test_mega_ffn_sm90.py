"""The whole FFN in one launch, on Hopper's mainloop: its bytes are the reference's."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import config as numba_config

import emulate
from nbmoe import backend, ops
from nbmoe.activation import GatedActivation
from nbmoe.formats import FORMATS, MXFP8, NVFP4
from nbmoe.prepared import pack_tokens, pack_weights
from nbmoe.prepared.tokens import token_shape
from nbmoe_kernels import config_report
from nbmoe_kernels import mega_ffn_counters as counters
from nbmoe_kernels import mega_ffn_order as order
from nbmoe_kernels import mega_ffn_sm90_counters as hopper_counters
from nbmoe_kernels.device import atomics
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.device.warp import sync_warp
from nbmoe_kernels.hopper_limits import lacks_memory
from nbmoe_kernels.matmul_sm90_swiglu_config import FusedMatmulConfig, fused_matmul_config
from nbmoe_kernels.mega_ffn_sm90 import launch_mega_ffn_sm90, make_mega_ffn_sm90, most_counters
from nbmoe_kernels.mega_ffn_sm90_config import mega_ffn_config, mega_ffn_pays
from tests.kernels.machine_code import machine_code
from tests.ops.compare import assert_same
from tests.ops.operands import Product, make_product
from tests.strategies import Slots

MIXED = Slots((17, 0, 3, 40, 1), (2, 4, -1, 0, 1), 5, 5)
needs_compiler = pytest.mark.skipif(
    numba_config.ENABLE_CUDASIM, reason="the simulator replaces the compiler"
)
no_simulator = pytest.mark.skipif(
    numba_config.ENABLE_CUDASIM, reason="the emulator's engines do not need it"
)
SILU = GatedActivation()


def config_of(
    fmt: Any, kind: str = "wgmma", widths: Any = (8, 16), blocks_per_sm: int = 1
) -> FusedMatmulConfig:
    """A small shape: "wgmma", "warps" that multiply by themselves, or spare warps that "finish"."""
    finishers = kind == "finish"
    return FusedMatmulConfig(
        fmt.name,
        fmt.name,
        widths,
        2 if finishers else 1,
        2,
        2,
        blocks_per_sm,
        (72, 216) if finishers else None,
        32,
        stores_later=finishers,
        warp_products=kind == "warps",
    )


class CountersError(Exception):
    """Counters are not as a launch must leave them."""


@dataclass(frozen=True)
class Problem:
    """Operands of both matmuls, in one format."""

    up: Product
    down: Product
    factors: Any
    activation: GatedActivation = SILU
    match_bf16: bool = True

    def expected(self) -> Any:
        """The reference's rows: fused gate/up, then down."""
        p, d, s = self.up, self.down, self.up.slots
        codes, scales = ops.grouped_matmul_blocked_swiglu(
            *p.operands,
            **p.keywords,
            expert_scales=p.expert_scales,
            c_input_scales=self.factors,
            activation=self.activation,
            match_bf16=self.match_bf16,
            validate="shapes",
            backend="reference",
        )
        return ops.grouped_matmul_block_scaled(
            codes,
            d.weight,
            scales,
            d.b_scales,
            s.starts,
            s.offsets,
            s.ids,
            d.expert_scales,
            **{**d.keywords, "a_row_scales": None},
            validate="shapes",
            backend="reference",
        )


def problem(
    seed: int,
    fmt: Any,
    k: int,
    moe_dim: int,
    n: int,
    slots: Slots = MIXED,
    *,
    weight_format: Any = None,
    bias: bool = False,
    row_scales: bool = False,
    **keywords: Any,
) -> Problem:
    pair = (fmt, weight_format or fmt)
    up = make_product(seed, slots, 2 * moe_dim, k, row_scales=row_scales, bias=bias, pair=pair)
    down = make_product(seed + 1, slots, n, moe_dim, row_scales=False, bias=bias, pair=pair)
    factors = None
    if fmt is NVFP4:
        factors = np.random.default_rng(seed).uniform(0.1, 9, len(slots.counts)).astype(np.float32)
    return Problem(up, down, factors, **keywords)


def run(config: FusedMatmulConfig, p: Problem, executor: Any = None, launches: int = 1) -> Any:
    """The kernel's output, poisoned before; counters are 0 again after each launch."""
    up, down, s = p.up, p.down, p.up.slots
    fmt, slots = up.a_format, len(up.slots.counts)
    tokens = pack_tokens(up.hidden, up.a_scales, s.starts, s.offsets, format=fmt.name)
    weights = [pack_weights(x.weight, x.b_scales, format=x.b_format.name) for x in (up, down)]
    output = np.full(s.rows * down.n // 2, 0xAAAAAAAA, np.uint32)
    middle = np.full(token_shape(s.rows, slots, down.k), 0xAA, np.uint8).reshape(-1)
    counters = np.zeros(most_counters(config, s.rows, slots) + 1, np.uint32)
    counters[-1] = 0x5EED
    none = np.zeros(4, np.uint32)

    def flat(array: Any, dtype: Any) -> Any:
        return none.view(dtype) if array is None else array.reshape(-1).view(dtype)

    for _ in range(launches):
        launch_mega_ffn_sm90(
            executor or backend.executor("emulate"),
            output,
            middle.view(np.uint32),
            middle,
            counters,
            tokens.data.reshape(-1),
            *(w.data.reshape(-1) for w in weights),
            s.starts,
            s.ids,
            up.expert_scales,
            down.expert_scales,
            flat(p.factors, np.float32),
            flat(up.row_scales, np.uint16),
            flat(up.bias, np.uint16),
            flat(down.bias, np.uint16),
            num_active=slots,
            num_slots=slots,
            num_rows=s.rows,
            k=up.k,
            moe_dim=down.k,
            n=down.n,
            has_up_scales=True,
            has_down_scales=True,
            has_row_scales=up.row_scales is not None,
            has_up_bias=up.bias is not None,
            has_down_bias=down.bias is not None,
            match_bf16=p.match_bf16,
            activation=p.activation.fused_activation,
            alpha=p.activation.alpha,
            limit=p.activation.limit,
            config=config,
        )
        if counters[:-1].any() or counters[-1] != 0x5EED:
            raise CountersError(counters.tolist())
    return output.view(ml_dtypes.bfloat16).reshape(s.rows, down.n)


def check(config: FusedMatmulConfig, p: Problem, **options: Any) -> None:
    got, used = run(config, p, **options), int(p.up.slots.starts[-1])
    assert_same(got[:used], np.asarray(p.expected())[:used], "output")
    assert (got[used:].view(np.uint16) == 0xAAAA).all()


def checked(seed: int | None = None) -> Any:
    """An executor: the checked engine, under one schedule."""

    def execute(kernel: Any, grid: Any, args: Any, stream: Any) -> None:
        emulate.launch(
            kernel,
            grid,
            kernel.threads,
            *args,
            shared_bytes=kernel.shared_bytes,
            engine="checked",
            seed=seed,
        )

    execute.multiprocessors = 2  # type: ignore[attr-defined]
    return execute


@no_simulator
@pytest.mark.parametrize("kind", ["wgmma", "warps", "finish"])
def test_bytes_are_the_reference_s(kind: str) -> None:
    """Masked, empty and odd slots, sizes that are no multiples of tiles, slots of segments."""
    check(config_of(NVFP4, kind), problem(1, NVFP4, 160, 96, 72))


FEW = Slots((3, 0, 9, 1), (1, 2, 0, -1), 4, 1)


@no_simulator
@pytest.mark.parametrize("kind", ["wgmma", "warps", "finish"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_checker_finds_nothing(fmt: Any, kind: str) -> None:
    """More tiles than blocks, more of K than the ring holds; bytes are the reference's."""
    check(config_of(fmt, kind, (8,)), problem(2, fmt, 352, 32, 40, FEW), executor=checked())


@no_simulator
@pytest.mark.parametrize("kind", ["wgmma", "warps", "finish"])
@pytest.mark.parametrize("seed", range(4))
def test_checker_finds_nothing_in_other_orders(kind: str, seed: int) -> None:
    slots = Slots((9, 2), (0, 1), 2, 0)
    p = problem(seed, NVFP4, 64, 32, 16, slots)
    check(config_of(NVFP4, kind, (8,)), p, executor=checked(seed), launches=2)


def _relaxed(monkeypatch: Any) -> None:
    monkeypatch.setattr(counters, "_count", atomics.reduction("add"))


def _no_proxy_fence(monkeypatch: Any) -> None:
    monkeypatch.setattr(hopper_counters, "fence_proxy_async_global", sync_warp)


def _one_too_few(monkeypatch: Any) -> None:
    real = counters._wait

    def wait(array: Any, index: Any, count: Any) -> None:
        real(array, index, np.uint32(count - np.uint32(1)))

    monkeypatch.setattr(counters, "_wait", wait)


def _one_too_many(monkeypatch: Any) -> None:
    real = counters._wait

    def wait(array: Any, index: Any, count: Any) -> None:
        real(array, index, np.uint32(count + np.uint32(1)))

    monkeypatch.setattr(counters, "_wait", wait)


def _cleared_early(monkeypatch: Any) -> None:
    real = counters._take

    def take(array: Any, index: Any, value: Any) -> Any:
        return np.uint32(real(array, index, value) + np.uint32(1))

    monkeypatch.setattr(counters, "_take", take)


def _wrong_block(monkeypatch: Any) -> None:
    real = counters._count

    def count(array: Any, index: Any, value: Any) -> None:
        real(array, np.uint64(index ^ np.uint64(1)), value)

    monkeypatch.setattr(counters, "_count", count)


def _no_meeting(monkeypatch: Any) -> None:
    monkeypatch.setattr(hopper_counters, "named_barrier_sync", lambda barrier, threads: None)


def _number_stays(monkeypatch: Any) -> None:
    monkeypatch.setattr(hopper_counters, "end_draws", lambda array, number, tiles: None)


def _number_returns_early(monkeypatch: Any) -> None:
    """By the first block that finds no tile."""

    @device_function
    def end_draws(array: Any, number: Any, tiles: Any) -> None:
        counters._put(array, np.uint64(0), np.uint32(0))

    monkeypatch.setattr(hopper_counters, "end_draws", end_draws)


FAULTS = {
    "relaxed instead of release": (_relaxed, {"RACE_RAW"}),
    "no proxy fence": (_no_proxy_fence, {"RACE_PROXY"}),
    "a count too low": (_one_too_few, {"RACE_RAW"}),
    "a count too high": (_one_too_many, {"DEADLOCK"}),
    "cleared early": (_cleared_early, {"counters are not 0"}),
    "another block's counter": (_wrong_block, {"RACE_RAW", "DEADLOCK"}),
    "an arrival before others have stored": (_no_meeting, {"RACE_RAW"}),
    "the next tile's number stays": (_number_stays, {"counters are not 0"}),
    "it returns early": (_number_returns_early, {"RACE_WAR", "counters are not 0"}),
}


def _findings(config: FusedMatmulConfig, p: Problem, seed: int) -> set[str]:
    try:
        run(config, p, executor=checked(seed))
    except emulate.FindingError as error:
        return {finding.id for finding in error.findings}
    except CountersError:
        return {"counters are not 0"}
    return set()


@no_simulator
@pytest.mark.parametrize("kind", ["wgmma", "finish"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_protocol_are_found(fault: str, kind: str, monkeypatch: Any) -> None:
    plant, expected = FAULTS[fault]
    plant(monkeypatch)
    p = problem(0, NVFP4, 64, 64, 16, Slots((9, 2), (0, 1), 2, 0))
    found: set[str] = set()
    make_mega_ffn_sm90.cache_clear()
    try:
        for seed in range(20):
            found |= _findings(config_of(NVFP4, kind, (8,)), p, seed)
            if found & expected:
                break
    finally:
        make_mega_ffn_sm90.cache_clear()
    assert found & expected


@no_simulator
def test_any_grid_finishes_and_counters_serve_again() -> None:
    """One block, and launches with another routing."""
    one = checked()
    one.multiprocessors = 1
    for counts in ((9, 2), (0, 17), (1, 0)):
        p = problem(sum(counts), NVFP4, 64, 32, 16, Slots(counts, (0, 1), 2, 3))
        check(config_of(NVFP4, "warps", (8,)), p, executor=one, launches=3)


@no_simulator
def test_epilogues() -> None:
    """Bias, row scales, limits and other activations, gate and up in float32."""
    swigluoai = GatedActivation("swigluoai", alpha=1.702, limit=7.0)
    slots = Slots((5, 0, 9), (1, -1, 0), 3, 2)
    for fmt, options in (
        (NVFP4, {"bias": True, "row_scales": True}),
        (MXFP8, {"bias": True, "activation": swigluoai}),
        (NVFP4, {"activation": GatedActivation(limit=2.5), "match_bf16": False}),
    ):
        p = problem(3, fmt, 96, 64, 24, slots, **options)
        check(config_of(fmt), p, executor=checked())


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (12, 16)])
@pytest.mark.parametrize("grid", [1, 4, 132])
@pytest.mark.parametrize("segments", [1, 2, 7, 40, 271])
def test_order_has_every_tile_once_and_its_own_before_it(segments, grid, tiles) -> None:
    up, down = (np.uint32(n) for n in tiles)
    chunk = order.chunk_segments(np.uint32(grid), up)
    find_item = order.make_find_item()
    seen: dict[tuple[bool, int], int] = {}
    for index in range(segments * sum(tiles)):
        word = find_item(np.uint32(index), np.uint32(segments), chunk, up, down)
        is_down, segment = bool(word >> 31), int(word >> order.TILE_BITS) & (2**19 - 1)
        tile = int(word & np.uint32(2**order.TILE_BITS - 1))
        # Tiles of a segment follow each other.
        assert seen.get((is_down, segment), 0) == tile
        seen[is_down, segment] = tile + 1
        if is_down:
            assert seen[False, segment] == tiles[0]
    assert len(seen) == 2 * segments
    assert all(n == tiles[is_down] for (is_down, _), n in seen.items())


FOUR_BITS = ("nvfp4", "nvfp4")
QWEN, DEEPSEEK, GPT_OSS = ((*FOUR_BITS, *m) for m in ((768, 128), (2048, 32), (2880, 32)))


@pytest.mark.parametrize(
    ("model", "rows", "pays"),
    [
        (QWEN, (8, 128, 1024, 32768), (False, False, False, False)),
        (DEEPSEEK, (1, 16, 128, 4096), (False, True, True, False)),
        (GPT_OSS, (4, 64, 512, 16384), (False, True, True, False)),
        (GPT_OSS, (0, 15, 16), (False, False, True)),
        # Of other formats there is no time.
        (("mxfp8", "mxfp4", 2880, 32), (16, 64), (False, False)),
    ],
)
def test_layers_take_it_where_it_was_faster(model: Any, rows: Any, pays: Any) -> None:
    assert tuple(mega_ffn_pays(*model, n) for n in rows) == pays


def test_the_choice_is_printed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("NBMOE_PRINT_CONFIGS", "1")
    monkeypatch.setattr(config_report, "_printed", set())
    mega_ffn_pays.cache_clear()
    for _ in range(2):
        mega_ffn_pays(*GPT_OSS, 64)
        mega_ffn_pays(*QWEN, 64)
    told = capsys.readouterr().err
    assert told.count("chosen: one launch\n") == 1 and told.count("chosen: a kernel a step\n") == 1
    assert "not, because tiles of 768 columns are over before waiting pays:\n    one launch" in told


def test_shapes_that_are_chosen() -> None:
    for rows in (8, 128, 1024, 32768, None):
        config = mega_ffn_config("nvfp4", "nvfp4", 768, 2048, 128, rows)
        fused = fused_matmul_config("nvfp4", "nvfp4", 1536, 2048, 128, rows)
        assert len(config.widths) <= 4 and config.max_width == fused.max_width
        assert config.widths[0] == fused.widths[0] and set(config.widths) <= set(fused.widths)
        assert lacks_memory(config) == ""


@needs_compiler
@pytest.mark.parametrize("rows", [8, 128, 32768])
def test_machine_code(rows: int, tmp_path: Any) -> None:
    config = mega_ffn_config("nvfp4", "nvfp4", 768, 2048, 128, rows)
    made = make_mega_ffn_sm90(config)
    code = machine_code(made, tmp_path)
    reallocates = config.registers is not None
    assert code.faults(reallocates=reallocates, by_warps=config.warp_products) == []
    # Blocks that are not on the GPU with the others would find no tile left.
    each = -(-code.registers // 8) * 8
    assert config.blocks_per_sm * made.threads * each <= 65536
