"""Hopper's FP8 matmul: its machine code, its races, and which shape it runs with."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from numba import config as numba_config

import emulate
from nbmoe import reference
from nbmoe.layouts import interleave_scales
from nbmoe.prepared.fp8 import pack_fp8_tokens, pack_fp8_weights
from nbmoe.prepared.w4a8 import folded_codes, pack_w4a8_weights
from nbmoe_kernels import config_report
from nbmoe_kernels import heuristics_fp8_sm90 as heuristics
from nbmoe_kernels import matmul_fp8_sm90_ring as ring
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig
from nbmoe_kernels.matmul_grouped_fp8_sm90 import (
    launch_matmul_grouped_fp8_sm90,
    make_matmul_grouped_fp8_sm90,
)
from tests.fp8_operands import make_problem
from tests.kernels.assemble import assemble

needs_compiler = pytest.mark.skipif(
    numba_config.ENABLE_CUDASIM, reason="the simulator replaces the compiler"
)
no_simulator = pytest.mark.skipif(
    numba_config.ENABLE_CUDASIM, reason="the emulator's engines do not need it"
)
*_, MANY = heuristics.fp8_hopper_configs()
FOLDED = heuristics.fp8_hopper_config(1536, 2048, 128, 128, "mxfp4")
SMALL = Fp8HopperConfig((8, 16), 1, 3, 4, None, max_slots=32)
PAIR = Fp8HopperConfig((8,), 2, 2, 1, (56, 224), max_slots=32)


@needs_compiler
@pytest.mark.parametrize("config", [MANY, FOLDED], ids=lambda c: c.name)
def test_assembles_without_spills(config, tmp_path):
    """With the widest tile alone, which needs the most registers: each width takes seconds."""
    config = replace(config, widths=config.widths[-1:])
    scaling = "rowwise" if config.b_format == "mxfp4" else "block128"
    kernel = make_matmul_grouped_fp8_sm90(config, scaling, "f32")
    report = assemble(kernel, (9, 0), tmp_path)
    assert report.faults() == []
    # An SM has 65,536; with reallocation all of them are handed out.
    warps = config.blocks_per_sm * kernel.threads // 32
    assert report.registers * 32 * warps <= 65536


def run(config, problem, **options):
    """The kernel's output and the reference's, of the rows that slots own."""
    tokens = pack_fp8_tokens(problem.hidden, problem.a_scales, problem.starts)
    weights = pack_fp8_weights(problem.weight)
    block_scales = {"scaling": "block128", "scale_type": "f32"}
    expected = reference.grouped_dynamic_scaled_fp8_matmul(*problem.arguments(), numerics="e4m3")
    a_scales, b_scales = tokens.scales.view(np.uint8), problem.b_scales
    return launch(
        config, problem, tokens, weights, a_scales, b_scales, block_scales, expected, options
    )


def run_folded(config, problem, **options):
    """The same of MXFP4 weights."""
    experts, n, k = problem.weight.shape
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (experts, n, k // 2), dtype=np.uint8)
    scales = rng.integers(121, 133, (experts, n, k // 32), dtype=np.uint8)
    weights = pack_w4a8_weights(codes, interleave_scales(scales))
    tokens = pack_fp8_tokens(problem.hidden, problem.a_scales, problem.starts)
    row_scales = {
        "scaling": "rowwise",
        "scale_type": "f32",
        "a_scale_stride": 1,
        "b_scale_strides": (n, 1),
    }
    expected = reference.grouped_rowwise_dynamic_scaled_fp8_matmul(
        problem.hidden,
        folded_codes(weights),
        problem.a_scales,
        weights.scales,
        problem.starts,
        problem.expert_ids,
        numerics="e4m3",
    )
    return launch(
        config, problem, tokens, weights, tokens.scales, weights.scales, row_scales, expected,
        options,
    )  # fmt: skip


def launch(config, problem, tokens, weights, a_scales, b_scales, scaling, expected, options):
    m, n, k = len(problem.hidden), problem.weight.shape[1], problem.weight.shape[2]
    output = np.full(m * n // 2, 0xFFFFFFFF, np.uint32)

    def executor(kernel, grid, args, stream):
        shared = kernel.shared_bytes
        emulate.launch(kernel, grid, kernel.threads, *args, shared_bytes=shared, **options)

    launch_matmul_grouped_fp8_sm90(
        executor,
        output,
        tokens.data.reshape(-1),
        weights.data,
        a_scales.reshape(-1),
        b_scales.reshape(-1),
        problem.starts,
        problem.expert_ids,
        problem.bias.reshape(-1).view(np.uint16),
        **scaling,
        num_active=len(problem.expert_ids),
        num_rows=m,
        n=n,
        k=k,
        has_bias=False,
        config=config,
        num_sms=1,
    )
    used = int(problem.starts[-1])
    return output.view(ml_dtypes.bfloat16).reshape(m, n)[:used], expected[:used]


# Fewer stages than 128-blocks, more tiles than blocks, an odd number of 128-blocks.
@no_simulator
@pytest.mark.parametrize("config", [SMALL, PAIR], ids=["small", "pair"])
def test_checker_finds_nothing(config):
    problem = make_problem([3, 0, 9], 24, 392, expert_ids=[2, 1, 0])
    got, expected = run(config, problem, engine="checked")
    assert got.tobytes() == expected.tobytes()
    masked = make_problem([3, 0, 9, 1], 24, 136, expert_ids=[2, 1, -1, 0])
    got, expected = run(config, masked, engine="checked")
    assert got.tobytes() == expected.tobytes()


# Fewer stages than a tile has, several tiles a block, a stage that is not full.
@no_simulator
@pytest.mark.parametrize("config", [SMALL, PAIR], ids=["small", "pair"])
@pytest.mark.parametrize("k", [640, 512])
def test_checker_finds_nothing_of_folded_weights(config, k):
    config = replace(config, stages=2, blocks_per_sm=1, b_format="mxfp4")
    problem = make_problem([3, 0, 9, 1], 136, k, rowwise=True, expert_ids=[2, 1, 0, -1])
    got, expected = run_folded(config, problem, engine="checked")
    assert got.tobytes() == expected.tobytes()


@no_simulator
def test_checker_finds_scales_that_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(ring, "mbarrier_wait", lambda bars, barrier, parity: None)
    make_matmul_grouped_fp8_sm90.cache_clear()
    try:
        with pytest.raises(emulate.FindingError, match=r"MBAR_PHASE|RACE_RAW"):
            run(PAIR, make_problem([3, 0, 9], 24, 392, expert_ids=[2, 1, 0]), engine="checked")
    finally:
        make_matmul_grouped_fp8_sm90.cache_clear()


@pytest.mark.parametrize("slots", [0, 1, 32, 256, 257, 1024])
@pytest.mark.parametrize("rows", [0, 1, 8, 16, 40, 100, 128, 155, 300, 5000, None])
@pytest.mark.parametrize("b_format", ["e4m3", "mxfp4"])
def test_chosen_shape_fits_and_is_known(slots, rows, b_format):
    total = None if rows is None else rows * slots
    for k in (64, 768, 7168):
        chosen = heuristics.fp8_hopper_config(1536, k, slots, total, b_format)
        assert heuristics.fits(chosen) and chosen.max_slots >= slots and chosen.stages >= 3
        assert chosen.widths in [config.widths for config in heuristics.fp8_hopper_configs()]
        assert chosen.b_format == b_format
        if chosen.registers:
            producer, consumer = chosen.registers
            handed_out = 128 * producer + chosen.consumers * consumer
            at_start = 65536 // chosen.threads // 8 * 8
            assert handed_out <= at_start * chosen.threads
            assert chosen.threads == chosen.threads_with_scaler


# n and k of gate/up, then of down; slots; rows of all.
QWEN, DEEPSEEK, GPT_OSS = (1536, 2048, 768, 128), (4096, 7168, 2048, 32), (5760, 2880, 2880, 32)
DEEP, DECODE = "8_16_32_w1_s8_b2", "8_16_32_w1_s4_b4"
FOLDED_DECODE = "8_16_32_w1_s3_b4"
WIDE = "120_128_136_144_152_w2_s"


@pytest.mark.parametrize(
    ("model", "rows", "b_format", "gate_up", "down"),
    [
        (QWEN, 8, "e4m3", DEEP, DECODE),
        (DEEPSEEK, 1, "e4m3", DEEP, DEEP),
        (GPT_OSS, 4, "e4m3", DECODE, DEEP),
        (QWEN, 1024, "e4m3", DECODE, DECODE),
        (DEEPSEEK, 128, "e4m3", DECODE, DECODE),
        (GPT_OSS, 512, "e4m3", DECODE, DECODE),
        (QWEN, 32768, "e4m3", f"{WIDE}5", f"{WIDE}5"),
        (DEEPSEEK, 4096, "e4m3", f"{WIDE}5", f"{WIDE}5"),
        (GPT_OSS, 16384, "e4m3", f"{WIDE}5", f"{WIDE}5"),
        (QWEN, 8, "mxfp4", FOLDED_DECODE, FOLDED_DECODE),
        (DEEPSEEK, 1, "mxfp4", FOLDED_DECODE, FOLDED_DECODE),
        (GPT_OSS, 512, "mxfp4", FOLDED_DECODE, FOLDED_DECODE),
        (QWEN, 32768, "mxfp4", f"{WIDE}3", f"{WIDE}3"),
        (DEEPSEEK, 4096, "mxfp4", f"{WIDE}3", f"{WIDE}3"),
        (GPT_OSS, 16384, "mxfp4", f"{WIDE}3", f"{WIDE}3"),
    ],
)
def test_models_get_the_measured_shape(model, rows, b_format, gate_up, down):
    """At 1, 128 and 4096 tokens: what the table of `heuristics_fp8_sm90` says."""
    n, hidden, inner, slots = model
    for wanted, sizes in ((gate_up, (n, hidden)), (down, (hidden, inner))):
        assert (
            f"sm90_n{wanted}_" in heuristics.fp8_hopper_config(*sizes, slots, rows, b_format).name
        )


def test_choice_is_printed_once(monkeypatch, capsys):
    monkeypatch.setenv(config_report.VARIABLE, "1")
    monkeypatch.setattr(config_report, "_printed", set())
    for _ in range(2):
        heuristics.fp8_hopper_config.cache_clear()
        heuristics.fp8_hopper_config(4096, 7168, 32, 4096)
    said = capsys.readouterr().err
    assert (
        said.count("Hopper FP8 matmul e4m3 x e4m3, n 4096, k 7168, 32 slots, rows 4096 (128") == 1
    )
    assert "128 rows are several of its tiles" in said and "more padding" in said
