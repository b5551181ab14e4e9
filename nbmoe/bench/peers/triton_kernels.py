"""triton_kernels' `matmul_ogs`: bf16 rows, MXFP4 weights; it gathers and scatters on its way."""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbmoe.bench.models import Model
from nbmoe.bench.peers.base import Pair, Peer, missing_modules
from nbmoe.bench.routing import Problem

_WARPS = 8
_NOT_CHOSEN = -1000.0


class TritonKernels(Peer):
    """Gate/up with gathered rows, down with scattered ones."""

    name, activations, weights = "triton_kernels mxfp4", "bf16", "mxfp4"

    def available(self) -> str | None:
        return missing_modules("torch", "triton", "triton_kernels", "triton_kernels.matmul_ogs")

    def make_weights(self, model: Model) -> Any:
        import torch
        from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
        from triton_kernels.numerics_details.mxfp import downcast_to_mxfp
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        from nbmoe.bench.peers.tensors import expert_weights

        made = []
        for leg in (0, 1):
            weight = torch.stack(list(expert_weights(model, leg)))
            codes, scales = downcast_to_mxfp(
                weight.transpose(-2, -1).contiguous(), torch.uint8, axis=1
            )
            of_codes, keys = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
            of_scales, scale_keys = layout.make_default_matmul_mxfp4_w_scale_layout(
                mx_axis=1, num_warps=_WARPS
            )
            swizzled = convert_layout(wrap_torch_tensor(codes, dtype=FP4), of_codes, **keys)
            config = PrecisionConfig(
                weight_scale=convert_layout(wrap_torch_tensor(scales), of_scales, **scale_keys),
                flex_ctx=FlexCtx(),
            )
            made.append((swizzled, config, codes, scales))
        return made

    def make_pairs(self, weights: Any, problem: Problem) -> Iterator[tuple[str, Pair]]:
        import torch
        from triton_kernels.matmul_ogs import matmul_ogs
        from triton_kernels.numerics_details.mxfp import upcast_from_mxfp
        from triton_kernels.routing import routing

        from nbmoe.bench.peers.tensors import DEVICE, Rows

        rows, model = Rows(problem), problem.model
        # Its router takes logits; small integers are exact and choose what the problem chose.
        logits = torch.full((problem.tokens, model.experts), _NOT_CHOSEN, device=DEVICE)
        ids = torch.as_tensor(problem.ids, device=DEVICE).long()
        ranks = torch.arange(model.top_k, 0, -1, device=DEVICE).float()
        logits.scatter_(1, ids, ranks.expand_as(ids))
        data, gather, scatter = routing(logits.bfloat16(), model.top_k)
        generator = torch.Generator(DEVICE).manual_seed(problem.seed + 2)
        shape = problem.tokens, model.hidden
        tokens = torch.randn(*shape, device=DEVICE, generator=generator).bfloat16()
        (w13, config13, codes, scales), (w2, config2, _, _) = weights
        made: list[Any] = [None, None]

        def call() -> None:
            made[0] = matmul_ogs(
                tokens, w13, None, data, gather_indx=gather, precision_config=config13
            )
            made[1] = matmul_ogs(
                rows.inputs[1], w2, None, data, scatter_indx=scatter, precision_config=config2
            )

        def weight(expert: int) -> Any:
            one = slice(expert, expert + 1)
            wide = upcast_from_mxfp(codes[one], scales[one], torch.bfloat16, axis=1)
            return wide[0].transpose(0, 1).float()

        def error() -> float:
            sources = torch.as_tensor(problem.order // model.top_k, device=DEVICE)
            output = made[0].view(problem.rows, -1)
            return float(rows.error(output, tokens[sources], weight))

        yield "", Pair(call, lambda: made, error)
