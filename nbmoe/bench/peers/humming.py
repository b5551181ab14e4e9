"""Humming: NVFP4 and MXFP4 weights with bf16 or FP8 tokens, and FP8 with FP8."""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nbmoe.bench.models import Model
from nbmoe.bench.peers.base import Pair, Peer, missing_modules
from nbmoe.bench.routing import Problem

_BF16 = {"dtype": "bfloat16"}
_E4M3_ROWS = {"dtype": "float8e4m3"}
_E4M3_GROUPS = {"dtype": "float8e4m3", "group_size": 128}
_NVFP4 = {
    "dtype": "float4e2m1",
    "group_size": 16,
    "scale_dtype": "float8e4m3",
    "scale_2_type": "tensor",
}
_MXFP4 = {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}
_FP8 = {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128}
_GEMM_TYPES = ("grouped_contiguous", "indexed")
_SEED = 7


class Humming(Peer):
    """One pair of formats; its own heuristics choose the tiles.

    Args:
        name: Of the pair.
        weights: Name of the weights' format.
        activations: Name of the rows' format.
        configs: What Humming calls them, weights first.
    """

    def __init__(
        self,
        name: str,
        weights: str,
        activations: str,
        configs: tuple[dict[str, Any], dict[str, Any]],
    ) -> None:
        self.name, self.weights, self.activations = name, weights, activations
        self._configs = configs

    def available(self) -> str | None:
        return missing_modules("torch", "humming")

    def make_weights(self, model: Model) -> Any:
        _cache_folders()
        import torch
        from humming.layer import HummingLayer
        from humming.schema import HummingWeightSchema

        from nbmoe.bench.peers.tensors import DEVICE

        weight_config, input_config = self._configs
        generator = torch.Generator(DEVICE).manual_seed(_SEED)
        layers = []
        for n, k in self._sizes(model):
            layer = HummingLayer(
                shape_n=n,
                shape_k=k,
                num_experts=model.experts,
                weight_config=dict(weight_config),
                input_config=dict(input_config),
                torch_dtype=torch.bfloat16,
                **self._padding(model),
            ).to(DEVICE)
            shape = (model.experts, n, k)
            values = torch.randn(
                *shape, device=DEVICE, generator=generator, dtype=torch.bfloat16
            ).mul_(0.05)
            tensors = HummingWeightSchema.quant_tensor(
                values, layer.weight_schema, torch.bfloat16, allow_negative_scale=False
            )
            del values
            layer.load_from_tensors(tensors)
            schema = layer.weight_schema
            layer.transform()
            layers.append((layer, schema, tensors))
            torch.cuda.empty_cache()
        return layers

    def make_pairs(self, weights: Any, problem: Problem) -> Iterator[tuple[str, Pair]]:
        layers = [layer for layer, _, _ in weights]
        _compile([_configs(layer, problem.rows, kind) for kind in _GEMM_TYPES for layer in layers])
        for gemm_type in _GEMM_TYPES:
            yield gemm_type, self._pair(weights, problem, gemm_type)

    def _sizes(self, model: Model) -> tuple[tuple[int, int], ...]:
        hidden, inner = model.hidden, model.moe_dim
        if self._is_fp8:  # blocks of 128 must be whole
            hidden, inner = (-(-size // 128) * 128 for size in (hidden, inner))
        return (2 * inner, hidden), (hidden, inner)

    @property
    def _is_fp8(self) -> bool:
        return self._configs[0] is _FP8

    def _padding(self, model: Model) -> dict[str, int]:
        whole = model.hidden % 128 == 0 and model.moe_dim % 128 == 0
        n, k = (1, 1) if whole or self._is_fp8 else (256, 128)
        return {"pad_n_to_multiple": n, "pad_k_to_multiple": k}

    def _pair(self, weights: Any, problem: Problem, gemm_type: str) -> Pair:
        import torch

        from nbmoe.bench.peers.tensors import DEVICE, Rows

        rows, sizes = Rows(problem), self._sizes(problem.model)
        order = torch.as_tensor(problem.order, device=DEVICE)
        calls, outputs, checks = [], [], []
        for leg, (layer, schema, tensors) in enumerate(weights):
            config, compute, tuning = _configs(layer, problem.rows, gemm_type)
            by_column = "use_m_major_input_scale" in compute
            x = rows.inputs[leg]
            x = torch.nn.functional.pad(x, (0, sizes[leg][1] - x.shape[1]))
            if gemm_type == "indexed":
                x, keys = _indexed(rows, order, x, leg, tuning["block_shape"][0])
            else:
                starts = torch.as_tensor(problem.starts, device=DEVICE)
                keys = {"expert_layout": starts, "top_k": problem.model.top_k}
            codes, scales, values = _quantize(config, x, by_column)
            out = torch.empty(
                problem.rows,
                config.shape_n - config.pad_shape_n,
                dtype=torch.bfloat16,
                device=DEVICE,
            )
            keys |= {"inputs": codes, "outputs": out, "input_scale": scales}
            keys |= {"compute_config": json.dumps(compute), "tuning_config": json.dumps(tuning)}
            calls.append((layer, keys))
            outputs.append(out)
            checks.append((schema, tensors, values))

        def call() -> None:
            for layer, keys in calls:
                layer(**keys)

        def found() -> list[Any]:
            # Indexed outputs lie by source, grouped ones by expert.
            return [out[order] for out in outputs] if gemm_type == "indexed" else outputs

        def error() -> float:
            schema, tensors, values = checks[0]
            if gemm_type == "indexed":
                values = values[order // problem.model.top_k]

            def weight(expert: int) -> Any:
                one = {key: value[expert : expert + 1] for key, value in tensors.items()}
                return schema.dequant_tensors(one)[0].float()

            return float(rows.error(found()[0], values, weight))

        return Pair(call, found, error)


def _configs(layer: Any, rows: int, gemm_type: str) -> tuple[Any, dict[str, Any], Any]:
    """Configs of a layer, of what it computes, and of the tiles that Humming chooses."""
    from humming.tune import get_heuristics_config

    config = layer.humming_config
    compute: dict[str, Any] = {"gemm_type": gemm_type}
    by_column = gemm_type != "indexed" and config.is_group_input_scale
    if by_column:
        compute["use_m_major_input_scale"] = True
    tuning = get_heuristics_config(
        config, shape_m=rows, gemm_type=gemm_type, use_m_major_input_scale=by_column, device=0
    )
    return config, compute, tuning


def _compile(configs: list[tuple[Any, dict[str, Any], Any]]) -> None:
    """Compiles kernels at the same time; one that cannot be compiled fails again at its call."""
    import torch
    from humming.kernel.humming import HummingKernel

    def compile_one(of_kernel: tuple[Any, dict[str, Any], Any]) -> None:
        config, compute, tuning = of_kernel
        with contextlib.suppress(Exception), torch.cuda.device(0):
            HummingKernel.prepare_kernels(
                config.to_str(), json.dumps(compute), json.dumps(tuning), device=0
            )

    with ThreadPoolExecutor(len(configs)) as pool:
        list(pool.map(compile_one, configs))


def _indexed(rows: Any, order: Any, x: Any, leg: int, block: int) -> tuple[Any, dict[str, Any]]:
    """Rows by source, and Humming's index of them: tiles of `block` rows of one expert."""
    import torch

    from nbmoe.bench.peers.tensors import DEVICE

    problem = rows.problem
    size, top_k = problem.rows, problem.model.top_k if leg == 0 else 1
    places, total = rows.padded(block)
    sources = torch.full((total,), size, dtype=torch.int32, device=DEVICE)
    sources[places] = order.int()
    tiles = (rows.counts + block - 1) // block
    experts = torch.repeat_interleave(torch.arange(len(tiles), device=DEVICE), tiles).int()
    return x[: size // top_k].contiguous(), {
        "sorted_ids": sources,
        "expert_ids": experts,
        "num_tokens_padded": torch.tensor(total, dtype=torch.int32, device=DEVICE),
        "top_k": top_k,
    }


def _quantize(config: Any, x: Any, by_column: bool) -> tuple[Any, Any, Any]:
    """Codes, scales and dequantized values of rows, as the layer wants them."""
    import torch

    from nbmoe.bench.peers.tensors import dequantize_groups, quantize_groups, quantize_rows

    if config.a_dtype.num_bits == 16:
        return x, None, x.float()
    if not config.is_group_input_scale:
        codes, scales = quantize_rows(x)
        return codes, scales[:, None].contiguous(), codes.float() * scales[:, None]
    codes, scales = quantize_groups(x)
    values = dequantize_groups(codes, scales)
    if by_column:
        wide = torch.nn.functional.pad(scales.t(), (0, -scales.shape[0] % 4))
        return codes, wide.contiguous(), values
    return codes, scales.contiguous(), values


def _cache_folders() -> None:
    """Humming reads these when it is imported; the folders must exist."""
    for name in ("CACHE", "TMP"):
        default = Path(tempfile.gettempdir()) / "nbmoe-bench-humming" / name.lower()
        folder = os.environ.setdefault(f"HUMMING_{name}_DIR", str(default))
        Path(folder).mkdir(parents=True, exist_ok=True)


HUMMING = (
    Humming("Humming nvfp4 w4a16", "nvfp4", "bf16", (_NVFP4, _BF16)),
    Humming("Humming mxfp4 w4a16", "mxfp4", "bf16", (_MXFP4, _BF16)),
    Humming("Humming mxfp4 w4a8", "mxfp4", "fp8_row", (_MXFP4, _E4M3_ROWS)),
    Humming("Humming fp8", "fp8_block", "fp8_group", (_FP8, _E4M3_GROUPS)),
)
