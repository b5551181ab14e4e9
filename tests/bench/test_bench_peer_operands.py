"""Operands that peers get, on torch without a GPU, with stand-ins that multiply as the peers do."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from nbmoe.bench.models import Model
from nbmoe.bench.peers import PEERS
from nbmoe.bench.routing import Problem

pytestmark = pytest.mark.oracles

MODEL = Model("toy", experts=5, top_k=2, hidden=192, moe_dim=128)
ROUNDING = 0.004


@pytest.fixture
def problem():
    return Problem(MODEL, 9)


@pytest.fixture
def tensors(monkeypatch):
    """Peers' operands on the host."""
    pytest.importorskip("torch")
    from nbmoe.bench.peers import tensors

    monkeypatch.setattr(tensors, "DEVICE", "cpu")
    return tensors


def check(peer, problem, expected_ways):
    """Each way gives the same rows, near float64."""
    weights = peer.make_weights(MODEL)
    found = []
    for label, pair in peer.make_pairs(weights, problem):
        pair.call()
        assert pair.error() < ROUNDING, label
        outputs = [out.float().numpy() for out in pair.outputs()]
        assert [out.shape for out in outputs] == [(18, 256), (18, 192)]
        found.append((label, outputs))
    assert [label for label, _ in found] == expected_ways
    for _, outputs in found[1:]:
        for out, first in zip(outputs, found[0][1], strict=True):
            assert np.allclose(out, first, rtol=0.02, atol=0.05)


def test_scales_of_groups_and_blocks(tensors):
    import torch

    x = torch.randn(6, 192).bfloat16()
    codes, scales = tensors.quantize_groups(x)
    assert codes.shape == (6, 192) and scales.shape == (6, 2)
    assert torch.allclose(tensors.dequantize_groups(codes, scales), x.float(), rtol=0.07)
    assert torch.allclose(scales[:, 1] * 448, x[:, 128:].float().abs().amax(1))
    weight = torch.randn(200, 192).bfloat16()
    codes, scales = tensors.quantize_blocks(weight)
    assert scales.shape == (2, 2)
    wide = tensors.dequantize_block_weight((codes[None], scales[None]), 0)
    assert torch.allclose(wide, weight.float(), rtol=0.07, atol=0.02)
    largest = float(weight[128:, 128:].float().abs().max())
    assert float(scales[1, 1]) * 448 == pytest.approx(largest)


def test_rows_are_in_expert_order(tensors, problem):
    rows = tensors.Rows(problem)
    assert rows.ends.tolist() == problem.starts[1:].tolist()
    assert rows.local.tolist() == [i - problem.starts[e] for i, e in enumerate(problem.row_experts)]
    places, total = rows.padded(16)
    assert total % 16 == 0 and len(set(places.tolist())) == problem.rows
    assert (places % 16 == rows.local).all()


def test_torch_bf16(tensors, problem, monkeypatch):
    import torch

    def grouped_mm(a, b, offs):
        starts = [0, *offs.tolist()]
        parts = [a[starts[e] : starts[e + 1]].float() @ b[e].float() for e in range(len(b))]
        return torch.cat(parts).bfloat16()

    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    check(PEERS["torch bf16"], problem, [""])


def test_torch_fp8(tensors, problem, monkeypatch):
    import torch

    def scaled(a, b, scales, factors, offs, out_dtype, use_fast_accum):
        starts = [0, *offs.tolist()]
        parts = [
            a[starts[e] : starts[e + 1]].float() @ b[e].float() * factors[e] for e in range(len(b))
        ]
        return (torch.cat(parts) * scales[:, None]).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled)
    check(PEERS["torch fp8 rows"], problem, [""])


def test_deepgemm(tensors, problem, monkeypatch):
    def product(x, weight, expert):
        values = tensors.dequantize_groups(*x)
        return values @ tensors.dequantize_block_weight(weight, expert).T

    def contiguous(x, weight, out, experts, disable_ue8m0_cast):
        for expert in range(len(weight[0])):
            mine = experts == expert
            out[mine] = product((x[0][mine], x[1][mine]), weight, expert).bfloat16()

    def masked(x, weight, out, counts, expected, disable_ue8m0_cast):
        assert expected == 4
        for expert, count in enumerate(counts.tolist()):
            rows = x[0][expert, :count], x[1][expert, :count]
            out[expert, :count] = product(rows, weight, expert).bfloat16()

    fake = SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: 128,
        get_mn_major_tma_aligned_tensor=lambda scales: scales,
        m_grouped_fp8_gemm_nt_contiguous=contiguous,
        m_grouped_fp8_fp4_gemm_nt_masked=masked,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    check(PEERS["DeepGEMM fp8"], problem, ["masked", "contiguous"])


class FakeKernel:
    """`fused_moe_kernel` by the meaning of its arguments; padding rows are not computed."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __getitem__(self, grid):
        def launch(*args, **keys):
            codes, weight, out, _, scales, factors, _, sources, experts, padded = args[:10]
            n, k, total, size = args[10:14]
            assert (n, k) == weight.shape[1:] and size == len(out) and total == int(padded)
            assert args[14:16] == codes.stride() and args[19:21] == out.stride()
            block = keys["BLOCK_SIZE_M"]
            assert grid == (total // block * -(-n // keys["BLOCK_SIZE_N"]),)
            values = self.tensors.dequantize_groups(codes, scales)
            for tile, expert in enumerate(experts.tolist()):
                mine = sources[tile * block : (tile + 1) * block].long()
                mine = mine[mine < size]
                wide = self.tensors.dequantize_block_weight((weight, factors), expert)
                out[mine] = (values[mine] @ wide.T).bfloat16()

        return launch


def test_vllm(tensors, problem, monkeypatch):
    from nbmoe.bench.peers import vllm_triton

    monkeypatch.setattr(vllm_triton, "_kernel", lambda: FakeKernel(tensors))
    monkeypatch.setattr(vllm_triton, "source_folder", lambda: None)
    language = SimpleNamespace(bfloat16="bf16")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(language=language))
    monkeypatch.setitem(sys.modules, "triton.language", language)
    tiles = ["16x64", "16x128", "32x128", "64x128", "128x128"]
    check(PEERS["vLLM Triton fp8"], problem, tiles)


@pytest.mark.parametrize("name", ["Humming nvfp4 w4a16", "Humming mxfp4 w4a8", "Humming fp8"])
def test_humming(name, tensors, problem, monkeypatch):
    """Its layers keep bf16 weights here; what is tested is which row meets which expert."""
    import torch

    is_groups, bits = name == "Humming fp8", 16 if "w4a16" in name else 8

    class Layer:
        def __init__(self, *, shape_n, shape_k, num_experts, **keys):
            self.weight_schema = self
            padding = dict(shape_n=shape_n, pad_shape_n=0, is_group_input_scale=is_groups)
            dtype = SimpleNamespace(num_bits=bits)
            self.humming_config = SimpleNamespace(**padding, a_dtype=dtype, to_str=lambda: "")

        def to(self, device):
            return self

        def load_from_tensors(self, given):
            self.values = given["weight"].float()

        def transform(self):
            pass

        def dequant_tensors(self, given):
            return given["weight"]

        def __call__(self, inputs, outputs, input_scale, compute_config, tuning_config, **keys):
            rows = inputs.float()
            if is_groups:
                columnwise = input_scale.shape[0] != len(rows)
                scales = input_scale.T[: len(rows)] if columnwise else input_scale
                rows = tensors.dequantize_groups(inputs, scales)
            elif input_scale is not None:
                rows = rows * input_scale
            if "indexed" in compute_config:
                tiles = keys["sorted_ids"].view(-1, 16)
                assert keys["num_tokens_padded"] == tiles.numel()
                for ids, expert in zip(tiles, keys["expert_ids"].tolist(), strict=True):
                    ids = ids[ids < len(outputs)].long()
                    product = rows[ids // keys["top_k"]] @ self.values[expert].T
                    outputs[ids] = product.bfloat16()
            else:
                starts = keys["expert_layout"].tolist()
                for expert in range(len(starts) - 1):
                    mine = slice(starts[expert], starts[expert + 1])
                    outputs[mine] = (rows[mine] @ self.values[expert].T).bfloat16()

    def quant_tensor(values, schema, dtype, allow_negative_scale):
        return {"weight": values}

    def heuristics(config, shape_m, gemm_type, use_m_major_input_scale, device):
        assert shape_m == problem.rows
        assert use_m_major_input_scale == (is_groups and gemm_type != "indexed")
        return {"block_shape": (16, 64, 64)}

    modules = {
        "humming": {},
        "humming.layer": {"HummingLayer": Layer},
        "humming.schema": {"HummingWeightSchema": SimpleNamespace(quant_tensor=quant_tensor)},
        "humming.tune": {"get_heuristics_config": heuristics},
        "humming.kernel": {},
        "humming.kernel.humming": {"HummingKernel": None},
    }
    for module, contents in modules.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**contents))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    peer, weights = PEERS[name], PEERS[name].make_weights(MODEL)
    ways = {}
    for label, pair in peer.make_pairs(weights, problem):
        pair.call()
        assert pair.error() < ROUNDING, label
        ways[label] = pair.outputs()
    hidden = 256 if is_groups else 192
    for outputs in ways.values():
        assert [tuple(out.shape) for out in outputs] == [(18, 256), (18, hidden)]
