"""The routing that everybody gets, and the sizes of models."""

import dataclasses

import numpy as np
import pytest

from nbmoe.bench.models import DEFAULT_MODELS, MODELS, find_model
from nbmoe.bench.routing import SKEWS, Problem, philox, uniform_draw
from nbmoe.errors import ConfigError
from nbmoe.reference import moe_create_indices, route


def test_models_have_the_sizes_of_their_configs():
    sizes = {name: dataclasses.astuple(m)[1:5] for name, m in MODELS.items()}
    assert sizes["Qwen3-30B-A3B"] == (128, 8, 2048, 768)
    assert sizes["DeepSeek-V3-EP8"] == (32, 1, 7168, 2048)
    assert sizes["gpt-oss-20b"] == (32, 4, 2880, 2880)
    assert set(DEFAULT_MODELS) <= set(MODELS)
    for model in MODELS.values():
        (n13, k13), (n2, k2) = model.matmuls
        assert (n13, k13, n2, k2) == (2 * k2, model.hidden, k13, model.moe_dim)
        assert all(size % 32 == 0 for size in (k13, k2)) and model.top_k <= model.experts


def test_names_of_models_have_no_case():
    assert find_model("QWEN3-30b-a3b") is MODELS["Qwen3-30B-A3B"]
    with pytest.raises(ConfigError, match=r"names out of Qwen3-30B-A3B, .*, got Qwen4"):
        find_model("Qwen4")


def test_philox_gives_the_known_answers():
    """Of the generator's authors: zeros, and all bits set."""
    counters = np.array([[0] * 4], np.uint32)
    assert philox(counters, (0, 0)).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    full = 0xFFFFFFFF
    counters = np.array([[full] * 4], np.uint32)
    assert philox(counters, (full, full)).tolist() == [
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    ]


def test_draw_is_what_torch_prints_on_a_gpu():
    """`torch.manual_seed(0); torch.rand(3, device="cuda")`, as torch's documentation shows it."""
    assert [f"{x:.4f}" for x in uniform_draw(1, 3, 0)[0]] == ["0.3990", "0.5167", "0.0249"]


def test_threads_draw_four_numbers_in_turn():
    """One multiprocessor has 2048 threads: the number of element 2048 is the second of thread 0."""
    first = philox(np.zeros((1, 4), np.uint32), (5, 0))[0]
    draw = uniform_draw(1, 3 * 4 * 2048, 5, processors=1).ravel()
    expected = first.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    assert draw[[0, 2048, 4096, 6144]].tolist() == expected.tolist()
    second_call = philox(np.array([[1, 0, 7, 0]], np.uint32), (5, 0))[0, 0]
    assert np.isclose(draw[8192 + 7], second_call * 2.0**-32)


def test_draw_begins_alike_whatever_its_size():
    assert uniform_draw(2, 64, 0).ravel().tolist() == uniform_draw(4, 64, 0).ravel()[:128].tolist()


@pytest.mark.parametrize("skew", SKEWS)
def test_our_router_chooses_what_the_problem_says(skew, toy):
    problem = Problem(toy, 37, skew)
    ids, _ = route(problem.scores, 2)
    assert np.array_equal(ids, problem.ids)
    routing = moe_create_indices(ids, toy.experts)
    assert np.array_equal(routing.token_expert_order, problem.order)
    assert np.array_equal(routing.expert_start_indices, problem.starts)
    assert np.array_equal(np.diff(problem.starts), problem.counts)
    assert np.array_equal(problem.ids.ravel()[problem.order], problem.row_experts)
    assert problem.sampled_rows[0] == 0 and problem.sampled_rows[-1] == problem.rows - 1


def test_skews_differ():
    model = MODELS["Qwen3-30B-A3B"]
    uniform, zipf, one = (Problem(model, 128, skew).counts for skew in SKEWS)
    assert one[0] == 128 > one[1:].max()
    assert zipf[0] > 4 * uniform.max() and zipf.sum() == uniform.sum() == 1024
    with pytest.raises(ConfigError, match=r"--skew: expected one of uniform, zipf, one-expert"):
        Problem(model, 1, "even")
