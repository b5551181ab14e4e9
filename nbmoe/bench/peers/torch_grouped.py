"""torch's own grouped matmuls: bf16, and FP8 with a scale a row."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from nbmoe.bench.models import Model
from nbmoe.bench.peers.base import Pair, Peer, missing_modules
from nbmoe.bench.routing import Problem


class TorchBf16(Peer):
    """`torch._grouped_mm`."""

    name, activations, weights = "torch bf16", "bf16", "bf16"

    def available(self) -> str | None:
        return missing_modules("torch")

    def make_weights(self, model: Model) -> Any:
        import torch

        from nbmoe.bench.peers.tensors import expert_weights

        return [torch.stack(list(expert_weights(model, leg))) for leg in (0, 1)]

    def make_pairs(self, weights: Any, problem: Problem) -> Iterator[tuple[str, Pair]]:
        import torch

        from nbmoe.bench.peers.tensors import Rows

        rows = Rows(problem)
        made: list[Any] = [None, None]

        def call() -> None:
            for leg in (0, 1):
                weight = weights[leg].transpose(-2, -1)
                made[leg] = torch._grouped_mm(rows.inputs[leg], weight, offs=rows.ends)

        def error() -> float:
            return rows.error(made[0], rows.inputs[0], lambda expert: weights[0][expert])

        yield "", Pair(call, lambda: made, error)


class TorchFp8(Peer):
    """`torch._scaled_grouped_mm`."""

    name, activations, weights = "torch fp8 rows", "fp8_row", "fp8_row"

    def available(self) -> str | None:
        return missing_modules("torch")

    def make_weights(self, model: Model) -> Any:
        import torch

        from nbmoe.bench.peers.tensors import expert_weights, quantize_rows

        made = []
        for leg in (0, 1):
            parts = [quantize_rows(weight) for weight in expert_weights(model, leg)]
            made.append((torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])))
        return made

    def make_pairs(self, weights: Any, problem: Problem) -> Iterator[tuple[str, Pair]]:
        import torch

        from nbmoe.bench.peers.tensors import Rows, quantize_rows

        rows = Rows(problem)
        operands = [quantize_rows(x) for x in rows.inputs]
        multiply = functools.partial(
            torch._scaled_grouped_mm, offs=rows.ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        made: list[Any] = [None, None]

        def call() -> None:
            for leg, ((codes, scales), (weight, factors)) in enumerate(
                zip(operands, weights, strict=True)
            ):
                made[leg] = multiply(codes, weight.transpose(-2, -1), scales, factors)

        def error() -> float:
            codes, scales = operands[0]
            weight, factors = weights[0]
            values = codes.float() * scales[:, None]
            return rows.error(
                made[0], values, lambda expert: weight[expert].float() * factors[expert][:, None]
            )

        yield "", Pair(call, lambda: made, error)
