"""Bytes, products, and the least time that they take."""

import pytest

from nbmoe.bench import floors
from nbmoe.bench.models import MODELS
from nbmoe.bench.routing import Problem
from nbmoe.errors import ConfigError


def test_pair_by_hand(toy):
    """Weights of active experts once, packed rows in, bf16 rows out."""
    problem = Problem(toy, 3)
    n = 3 * 128 * 128 * problem.active
    rows = 6 * (128 + 128) * 0.5625 + 6 * (256 + 128) * 2
    work = floors.pair(problem, "nvfp4", "nvfp4")
    assert work.bytes == pytest.approx(n * 0.5625 + rows)
    assert work.flops == 2 * 6 * 3 * 128 * 128
    assert work.floor_us == pytest.approx(work.bytes / 4.3e6)


@pytest.mark.parametrize(
    ("formats", "floor"),
    [(("nvfp4", "nvfp4"), 1045), (("fp8_group", "fp8_block"), 627), (("mxfp8", "mxfp4"), 627)],
)
def test_many_tokens_are_bound_by_products(formats, floor):
    """16 bits at 780 TFLOP/s, 8 bits at 1300."""
    problem = Problem(MODELS["gpt-oss-20b"], 4096)
    assert floors.pair(problem, *formats).floor_us == pytest.approx(floor, rel=1e-3)


def test_few_tokens_are_bound_by_weights():
    problem = Problem(MODELS["DeepSeek-V3-EP8"], 16)
    one = 3 * 7168 * 2048 * 0.5625
    assert floors.pair(problem, "nvfp4", "nvfp4").bytes == pytest.approx(
        problem.active * one, rel=0.01
    )


def test_width_of_products():
    assert floors.product_bits("mxfp8", "mxfp4") == floors.product_bits("fp8_row", "fp8_row") == 8
    assert floors.product_bits("mxfp8", "mxfp8") == floors.product_bits("fp8_row", "mxfp4") == 8
    for pair in (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("bf16", "bf16"), ("bf16", "nvfp4")):
        assert floors.product_bits(*pair) == 16


def test_a_fused_leg_moves_less(toy):
    problem = Problem(toy, 100)
    plain = floors.matmul(problem, 0, "nvfp4", "nvfp4")
    fused = floors.fused(problem, "nvfp4", "nvfp4")
    activate = floors.activate(problem, "nvfp4")
    assert plain.bytes - fused.bytes == pytest.approx(200 * 128 * (4 - 0.5625))
    assert activate.bytes == pytest.approx(200 * 128 * (4 + 0.5625))


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match=r"format: expected one of .*, got int4"):
        floors.element_bytes("int4")
