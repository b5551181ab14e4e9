"""Peers: which there are, what is said about those that are not installed, and how they run."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from types import SimpleNamespace

import pytest

from nbmoe.bench import floors, runner
from nbmoe.bench.memory import Memory
from nbmoe.bench.peers import PEERS, chosen_peers, vllm_triton
from nbmoe.bench.peers.base import Pair, Peer, missing_modules
from nbmoe.bench.routing import Problem
from nbmoe.bench.timing import Spread, Times
from nbmoe.errors import ConfigError
from tests.bench.conftest import TOY, FakeTimer

LIBRARIES = ("torch", "triton", "deep_gemm", "triton_kernels", "humming", "vllm")


@pytest.fixture
def installed(monkeypatch):
    """Makes exactly the given libraries look installed."""
    real = importlib.util.find_spec

    def pretend(*names):
        def find_spec(name, package=None):
            root = name.split(".")[0]
            if root not in LIBRARIES:
                return real(name, package)
            return SimpleNamespace(submodule_search_locations=[]) if root in names else None

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    monkeypatch.delenv(vllm_triton.VARIABLE, raising=False)
    return pretend


def test_formats_of_peers_have_floors():
    for peer in PEERS.values():
        assert floors.element_bytes(peer.weights) and floors.element_bytes(peer.activations)


def test_peers_that_are_not_installed_are_named(installed):
    installed()
    peers, missing = chosen_peers("auto")
    assert peers == [] and list(missing) == list(PEERS)
    assert set(missing.values()) == {"torch is not installed"}
    installed("torch", "triton")
    peers, missing = chosen_peers("auto")
    assert [peer.name for peer in peers] == ["torch bf16", "torch fp8 rows"]
    assert missing["DeepGEMM fp8"] == "deep_gemm is not installed"
    assert missing["triton_kernels mxfp4"] == "triton_kernels is not installed"
    assert missing["Humming nvfp4 w4a16"] == "humming is not installed"
    assert missing["vLLM Triton fp8"].startswith("vllm is not installed, and NBMOE_BENCH_VLLM")
    installed("torch", "triton", "deep_gemm", "triton_kernels", "humming")
    assert list(chosen_peers("auto")[1]) == ["vLLM Triton fp8"]


def test_peers_are_chosen_by_the_beginnings_of_their_names(installed):
    installed("torch", "humming")
    assert chosen_peers("none") == ([], {})
    names = [peer.name for peer in chosen_peers("humming mxfp4, TORCH fp8")[0]]
    assert names == ["Humming mxfp4 w4a16", "Humming mxfp4 w4a8", "torch fp8 rows"]
    for text in ("cutlass", "torch,", ""):
        with pytest.raises(ConfigError, match=r"--peers: expected auto, none, or names out of"):
            chosen_peers(text)


def test_a_module_inside_a_missing_one():
    assert missing_modules("json", "no_such_library.inside") == (
        "no_such_library.inside is not installed"
    )
    assert missing_modules("json", "json.decoder") is None


def test_vllms_kernel_can_come_from_a_folder(monkeypatch, tmp_path, installed):
    installed("torch", "triton")
    monkeypatch.setenv(vllm_triton.VARIABLE, str(tmp_path))
    assert PEERS["vLLM Triton fp8"].available() is not None
    (tmp_path / "fused_moe.py").touch()
    assert PEERS["vLLM Triton fp8"].available() is None
    assert vllm_triton.tuned_config(Problem(TOY, 3)) is None
    (tmp_path / "configs").mkdir()
    name = "E=4,N=128,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    (tmp_path / "configs" / name).write_text('{"1": {"a": 1}, "64": {"a": 2}, "note": "x"}')
    assert vllm_triton.tuned_config(Problem(TOY, 3)) == {"a": 1}
    assert vllm_triton.tuned_config(Problem(TOY, 100)) == {"a": 2}


class FakePeer(Peer):
    """Four ways: one fails, the fastest is wrong; they take what the fake timer says."""

    name, activations, weights = "fake", "fp8_group", "fp8_block"

    def available(self):
        return None

    def make_weights(self, model):
        return model.name

    def make_pairs(self, weights, problem):
        def fail():
            raise ValueError("no kernel for this")

        for label, call in (("slow", list), ("broken", fail), ("fast", list)):
            yield label, Pair(call, lambda: [b"12"], lambda: 0.01)
        yield "wrong", Pair(list, lambda: [b"34"], lambda: 0.07)
        yield "nothing", Pair(list, lambda: [b"56"], lambda: math.nan)


class CountdownTimer(FakeTimer):
    """Each measurement is shorter than the one before."""

    def measure(self, launch, runs=15):
        of = super().measure(launch, runs)
        return Times(*(Spread(100 - s.median, 90.0, 110.0) for s in (of.dirty, of.clean)))


def test_the_fastest_way_of_a_peer_counts(monkeypatch):
    def graph(call):
        call()
        return call

    monkeypatch.setattr(runner, "torch_graph", graph)
    monkeypatch.setattr(runner, "bytes_of", lambda tensor: memoryview(tensor))
    fake_torch = SimpleNamespace(
        cuda=SimpleNamespace(
            stream=contextlib.nullcontext,
            ExternalStream=lambda handle: handle,
            empty_cache=lambda: None,
        )
    )
    monkeypatch.setitem(sys.modules, "torch", fake_torch)
    timer = CountdownTimer()
    timer.stream = SimpleNamespace(handle=0)
    plan = runner.Plan((TOY,), (3,), (), ("pair",), (FakePeer(),))
    (row,) = runner.Runner(plan, timer, Memory(on_gpu=False)).run()
    assert (row.library, row.variant, row.format) == ("fake", "fast", "fp8_block x fp8_group")
    assert row.others == {"slow": 99.0, "fast": 98.0, "wrong": 97.0, "nothing": 96.0}
    assert row.times.dirty.median == 95.0
    failures = "broken: ValueError: no kernel for this", "wrong: wrong, error 7.0e-02"
    assert row.note == "; ".join([*failures, "nothing: wrong, error nan"])
    assert row.error == 0.01 and row.digest and row.work.bytes
