"""Operands of peers on torch tensors: the routing of a problem, and FP8 in blocks and groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nbmoe.bench.exact import sampled_columns
from nbmoe.bench.models import Model
from nbmoe.bench.routing import Problem

DEVICE = "cuda"
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
GROUP = 128
_WEIGHT_SPREAD = 0.05


class Rows:
    """The rows of a problem in expert order, random, and where they belong.

    Attributes:
        counts: [E] rows of each expert.
        experts: [S] expert of each row.
        local: [S] place of each row among those of its expert.
        ends: int32 [E] rows up to the end of each expert.
        inputs: bf16 [S, K] of gate/up and of down.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, model = problem, problem.model
        self.counts = torch.as_tensor(problem.counts, device=DEVICE)
        self.experts = torch.as_tensor(problem.row_experts, device=DEVICE)
        self.ends = self.counts.cumsum(0).to(torch.int32)
        first = self.counts.cumsum(0) - self.counts
        self.local = torch.arange(problem.rows, device=DEVICE) - first[self.experts]
        generator = torch.Generator(DEVICE).manual_seed(problem.seed + 1)
        self.inputs = [
            torch.randn(problem.rows, k, device=DEVICE, generator=generator).bfloat16()
            for _, k in model.matmuls
        ]

    def padded(self, multiple: int) -> tuple[Any, int]:
        """Places [S] of rows where each expert starts at a multiple, and the end of the last."""
        room = (self.counts + multiple - 1) // multiple * multiple
        first = room.cumsum(0) - room
        return first[self.experts] + self.local, int(room.sum())

    def error(
        self,
        output: Any,
        values: Any,
        weight: Callable[[int], Any],
    ) -> float:
        """Relative error of sampled outputs of gate/up against float64.

        Args:
            output: [S, N], in expert order.
            values: [S, K] dequantized operands.
            weight: The dequantized [N, K] of an expert.
        """
        n = self.problem.model.matmuls[0][0]
        columns = torch.as_tensor(sampled_columns(n), device=DEVICE)
        difference = norm = 0.0
        for row in self.problem.sampled_rows:
            expert = int(self.problem.row_experts[row])
            exact = weight(expert)[columns].double() @ values[int(row)].double()
            found = output[int(row)][columns].double()
            difference += float((found - exact).square().sum())
            norm += float(exact.square().sum())
        return float((difference / norm) ** 0.5)


def expert_weights(model: Model, leg: int) -> Iterator[Any]:
    """Random bf16 [N, K] of each expert in turn, the same every time."""
    generator = torch.Generator(DEVICE).manual_seed(leg)
    for _ in range(model.experts):
        weight = torch.randn(*model.matmuls[leg], device=DEVICE, generator=generator)
        yield (weight * _WEIGHT_SPREAD).bfloat16()


def quantize_groups(x: Any) -> tuple[Any, Any]:
    """e4m3 codes [M, K] and float32 scales [M, ceil(K/128)] of 128 values of a row."""
    rows, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % GROUP)).view(rows, -1, GROUP)
    scales = padded.abs().amax(dim=2).clamp(min=1e-4) / E4M3_MAX
    codes = (padded / scales[..., None]).to(E4M3)
    return codes.view(rows, -1)[:, :k].contiguous(), scales


def quantize_rows(x: Any) -> tuple[Any, Any]:
    """e4m3 codes [M, K] and float32 scales [M] of rows."""
    scales = x.float().abs().amax(dim=1).clamp(min=1e-4) / E4M3_MAX
    return (x.float() / scales[:, None]).to(E4M3), scales


def quantize_blocks(weight: Any) -> tuple[Any, Any]:
    """e4m3 codes [N, K] and float32 scales [ceil(N/128), ceil(K/128)] of blocks."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -k % GROUP, 0, -n % GROUP))
    down, across = padded.shape[0] // GROUP, padded.shape[1] // GROUP
    blocks = padded.view(down, GROUP, across, GROUP)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-4) / E4M3_MAX
    codes = (blocks / scales[:, None, :, None]).to(E4M3).view(padded.shape)
    return codes[:n, :k].contiguous(), scales


def block_weights(model: Model) -> list[tuple[Any, Any]]:
    """Codes [E, N, K] and scales of gate/up and of down."""
    made = []
    for leg in (0, 1):
        parts = [quantize_blocks(weight) for weight in expert_weights(model, leg)]
        made.append((torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])))
    return made


def dequantize_groups(codes: Any, scales: Any) -> Any:
    """[M, K] float32."""
    return codes.float() * scales.repeat_interleave(GROUP, 1)[:, : codes.shape[1]]


def dequantize_block_weight(weights: tuple[Any, Any], expert: int) -> Any:
    """[N, K] float32 of an expert."""
    codes, scales = weights[0][expert], weights[1][expert]
    n, k = codes.shape
    wide = scales.repeat_interleave(GROUP, 0)[:n].repeat_interleave(GROUP, 1)[:, :k]
    return codes.float() * wide
