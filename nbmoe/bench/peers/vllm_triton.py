"""vLLM's Triton kernel for experts, `fused_moe_kernel`, in FP8 with 1x128 and 128x128 scales.

It is taken from an installed vLLM, or from a folder with its `fused_moe.py` and `configs/`, which
the variable NBMOE_BENCH_VLLM_FUSED_MOE names: the two functions that it needs are cut out, so that
the rest of vLLM need not be there.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbmoe.bench.models import Model
from nbmoe.bench.peers.base import Pair, Peer, missing_modules
from nbmoe.bench.routing import Problem

VARIABLE = "NBMOE_BENCH_VLLM_FUSED_MOE"
_FUNCTIONS = ("write_zeros_to_output", "fused_moe_kernel")
_PACKAGE = "vllm.model_executor.layers.fused_moe"

# Rows, columns, warps and stages of tiles that are tried beside the tuned ones.
_TILES = ((16, 64, 4, 4), (16, 128, 4, 3), (32, 128, 4, 3), (64, 128, 4, 4), (128, 128, 8, 3))


class VllmTriton(Peer):
    """The fastest of a few tile shapes and of vLLM's tuned one."""

    name, activations, weights = "vLLM Triton fp8", "fp8_group", "fp8_block"

    def available(self) -> str | None:
        missing = missing_modules("torch", "triton")
        if missing or source_folder():
            return missing
        return f"vllm is not installed, and {VARIABLE} names no folder with fused_moe.py"

    def make_weights(self, model: Model) -> Any:
        from nbmoe.bench.peers.tensors import block_weights

        return block_weights(model)

    def make_pairs(self, weights: Any, problem: Problem) -> Iterator[tuple[str, Pair]]:
        from nbmoe.bench.peers.tensors import Rows, quantize_groups

        rows = Rows(problem)
        operands = [quantize_groups(x) for x in rows.inputs]
        configs = [tile_config(*tile) for tile in _TILES]
        tuned = tuned_config(problem)
        if tuned is not None and tuned not in configs:
            configs.append(tuned)
        for config in configs:
            label = "x".join(str(config[f"BLOCK_SIZE_{axis}"]) for axis in "MN")
            yield label, _pair(weights, rows, operands, config)


def tile_config(rows: int, columns: int, warps: int, stages: int) -> dict[str, int]:
    """Arguments of the kernel for a tile shape."""
    sizes = {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": columns, "BLOCK_SIZE_K": 128}
    return {**sizes, "GROUP_SIZE_M": 16, "num_warps": warps, "num_stages": stages}


def tuned_config(problem: Problem) -> dict[str, int] | None:
    """vLLM's tuned tile for the nearest number of tokens on an H200, None if it has none."""
    folder, model = source_folder(), problem.model
    if folder is None:
        return None
    name = f"E={model.experts},N={model.moe_dim},device_name=NVIDIA_H200,dtype=fp8_w8a8"
    path = folder / "configs" / f"{name},block_shape=[128,128].json"
    if not path.exists():
        return None
    table = {int(k): v for k, v in json.loads(path.read_text()).items() if k.isdigit()}
    config: dict[str, int] = table[min(table, key=lambda tokens: abs(tokens - problem.tokens))]
    return config


def source_folder() -> Path | None:
    """Where `fused_moe.py` lies, None if it is not here."""
    if named := os.environ.get(VARIABLE):
        folder = Path(named)
        return folder if (folder / "fused_moe.py").exists() else None
    if importlib.util.find_spec("vllm") is None:
        return None
    spec = importlib.util.find_spec("vllm")
    parts = _PACKAGE.split(".")[1:]
    for root in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(root).joinpath(*parts)
        if (folder / "fused_moe.py").exists():
            return folder
    return None


@functools.cache
def _kernel() -> Any:
    folder = source_folder()
    assert folder is not None, "available() has been asked"
    source = (folder / "fused_moe.py").read_text()
    lines = source.splitlines(keepends=True)
    text = "import triton\nimport triton.language as tl\n"
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS:
            first = node.decorator_list[0].lineno - 1
            text += "\n\n" + "".join(lines[first : node.end_lineno])
    # Triton reads the source of a function from its file, which must stay.
    path = Path(tempfile.mkdtemp(prefix="nbmoe-bench-")) / "fused_moe_kernel.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fused_moe_kernel


def _pair(weights: Any, rows: Any, operands: Any, config: dict[str, int]) -> Pair:
    import torch
    import triton.language as tl

    from nbmoe.bench.peers.tensors import DEVICE, dequantize_block_weight, dequantize_groups

    kernel, size = _kernel(), rows.problem.rows
    block = config["BLOCK_SIZE_M"]
    places, total = rows.padded(block)
    # Padding rows name a row past the last.
    sources = torch.full((total,), size, dtype=torch.int32, device=DEVICE)
    sources[places] = torch.arange(size, dtype=torch.int32, device=DEVICE)
    blocks = (rows.counts + block - 1) // block
    experts = torch.repeat_interleave(torch.arange(len(blocks), device=DEVICE), blocks).int()
    padded = torch.tensor([total], dtype=torch.int32, device=DEVICE)
    outputs = [
        torch.empty(size, n, dtype=torch.bfloat16, device=DEVICE)
        for n, _ in rows.problem.model.matmuls
    ]
    keys = dict(
        MUL_ROUTED_WEIGHT=False,
        top_k=1,
        compute_type=tl.bfloat16,
        use_fp8_w8a8=True,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        per_channel_quant=False,
        naive_block_assignment=False,
        HAS_BIAS=False,
        SPLIT_K=1,
        SWAP_AB=block < 64 and config["BLOCK_SIZE_N"] >= 64,
        **{key: value for key, value in config.items() if key != "SPLIT_K"},
    )

    def multiply(leg: int) -> None:
        (codes, scales), (weight, factors), out = operands[leg], weights[leg], outputs[leg]
        _, n, k = weight.shape
        grid = -(-total // block) * -(-n // config["BLOCK_SIZE_N"])
        kernel[(grid,)](
            *(codes, weight, out, None, scales, factors, None, sources, experts, padded),
            *(n, k, total, size),
            *codes.stride(),
            *(weight.stride(0), weight.stride(2), weight.stride(1)),
            *out.stride(),
            *scales.stride(),
            *(factors.stride(0), factors.stride(2), factors.stride(1)),
            *(0, 0, 128, 128),
            **keys,
        )

    def error() -> float:
        values = dequantize_groups(*operands[0])
        return float(
            rows.error(
                outputs[0], values, lambda expert: dequantize_block_weight(weights[0], expert)
            )
        )

    def call() -> None:
        for leg in (0, 1):
            multiply(leg)

    return Pair(call, lambda: outputs, error)
