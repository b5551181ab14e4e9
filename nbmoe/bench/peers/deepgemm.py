"""DeepGEMM: FP8 with 1x128 and 128x128 scales, rows of experts padded or in fixed room."""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbmoe.bench.models import Model
from nbmoe.bench.peers.base import Pair, Peer, missing_modules
from nbmoe.bench.routing import Problem

_MASKED_ROOM = 64
_MOST_MASKED_ROWS = 640
"""Beyond so many rows an expert the padded layout is the sensible one."""


class DeepGemm(Peer):
    """`m_grouped_fp8_gemm_nt_contiguous` and `m_grouped_fp8_fp4_gemm_nt_masked`."""

    name, activations, weights = "DeepGEMM fp8", "fp8_group", "fp8_block"

    def available(self) -> str | None:
        return missing_modules("torch", "deep_gemm")

    def make_weights(self, model: Model) -> Any:
        from nbmoe.bench.peers.tensors import block_weights

        return block_weights(model)

    def make_pairs(self, weights: Any, problem: Problem) -> Iterator[tuple[str, Pair]]:
        from nbmoe.bench.peers.tensors import Rows

        rows = Rows(problem)
        if int(problem.counts.max()) <= _MOST_MASKED_ROWS:
            yield "masked", _masked(weights, rows)
        yield "contiguous", _contiguous(weights, rows)


def _contiguous(weights: Any, rows: Any) -> Pair:
    import deep_gemm
    import torch

    from nbmoe.bench.peers.tensors import DEVICE

    places, total = rows.padded(int(deep_gemm.get_mk_alignment_for_contiguous_layout()))
    experts = torch.full((total,), -1, dtype=torch.int32, device=DEVICE)
    experts[places] = rows.experts.int()

    operands, outputs = [], []
    for x, (n, _) in zip(rows.inputs, rows.problem.model.matmuls, strict=True):
        spread = torch.zeros(total, x.shape[1], dtype=torch.bfloat16, device=DEVICE)
        spread[places] = x
        operands.append(_quantized(spread, (total,)))
        outputs.append(torch.empty(total, n, dtype=torch.bfloat16, device=DEVICE))

    def call() -> None:
        for x, weight, out in zip(operands, weights, outputs, strict=True):
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                x, weight, out, experts, disable_ue8m0_cast=True
            )

    return _pair(call, weights, rows, lambda: [out[places] for out in outputs])


def _masked(weights: Any, rows: Any) -> Pair:
    import deep_gemm
    import torch

    from nbmoe.bench.peers.tensors import DEVICE

    model, most = rows.problem.model, int(rows.problem.counts.max())
    room = -(-most // _MASKED_ROOM) * _MASKED_ROOM
    at = (rows.experts, rows.local)
    counts = rows.counts.int()
    expected = max(1, round(rows.problem.rows / model.experts))

    operands, outputs = [], []
    for x, (n, k) in zip(rows.inputs, model.matmuls, strict=True):
        spread = torch.zeros(model.experts, room, k, dtype=torch.bfloat16, device=DEVICE)
        spread[at] = x
        operands.append(_quantized(spread.view(-1, k), (model.experts, room)))
        outputs.append(torch.empty(model.experts, room, n, dtype=torch.bfloat16, device=DEVICE))

    def call() -> None:
        for x, weight, out in zip(operands, weights, outputs, strict=True):
            deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
                x, weight, out, counts, expected, disable_ue8m0_cast=True
            )

    return _pair(call, weights, rows, lambda: [out[at] for out in outputs])


def _quantized(x: Any, lead: tuple[int, ...]) -> tuple[Any, Any]:
    import deep_gemm

    from nbmoe.bench.peers.tensors import quantize_groups

    codes, scales = quantize_groups(x)
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(scales.view(*lead, -1))
    return codes.view(*lead, -1), scales


def _pair(call: Any, weights: Any, rows: Any, outputs: Any) -> Pair:
    from nbmoe.bench.peers.tensors import (
        dequantize_block_weight,
        dequantize_groups,
        quantize_groups,
    )

    def error() -> float:
        values = dequantize_groups(*quantize_groups(rows.inputs[0]))
        return float(
            rows.error(
                outputs()[0], values, lambda expert: dequantize_block_weight(weights[0], expert)
            )
        )

    return Pair(call, outputs, error)
