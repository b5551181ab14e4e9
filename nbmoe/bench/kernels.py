"""Measures the NVFP4 kernels on a GPU: `python -m nbmoe.bench.kernels [--json FILE]`.

Prints the copy bandwidth of the card, the grouped quantize beside it, the stages of a Qwen3-30B MoE
FFN, and what launching each kernel costs the host.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ml_dtypes
import numpy as np

from nbmoe import ops
from nbmoe.arrays import to_backend
from nbmoe.bench.launches import SCRATCH_BYTES, launchers
from nbmoe.bench.timing import Spread, Timer
from nbmoe.layouts import activation_tiles, ceil_div, scales_offset

QUANTIZE_ROWS, QUANTIZE_COLUMNS, QUANTIZE_EXPERTS = 65536, 4096, 64
QWEN3_30B = {"experts": 128, "top_k": 8, "hidden": 2048, "moe_dim": 768}
TOKENS = (1, 16, 128, 4096)


def random_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """e4m3 bytes of values from 1/8 to 1."""
    return rng.integers(0x20, 0x39, shape).astype(np.uint8)


def measure_copy(timer: Timer) -> dict[str, Any]:
    """Device-to-device copy of as many bytes as the quantize problem reads."""
    nbytes = 2 * QUANTIZE_ROWS * QUANTIZE_COLUMNS
    source = timer.device.allocate(nbytes, stream=timer.stream)
    target = timer.device.allocate(nbytes, stream=timer.stream)
    time = timer.gpu(lambda stream: target.copy_from(source, stream=stream))
    return {"case": "copy", "time": time, "TB/s": 2 * nbytes / time.median / 1e6}


def measure_quantize(timer: Timer) -> dict[str, Any]:
    """Grouped quantize of 65,536 x 4,096 bf16 over 64 experts."""
    rows, columns, experts = QUANTIZE_ROWS, QUANTIZE_COLUMNS, QUANTIZE_EXPERTS
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), np.float32).astype(ml_dtypes.bfloat16)
    starts = np.linspace(0, rows, experts + 1).astype(np.uint32)
    host = (x, starts, scales_offset(starts), np.arange(experts, dtype=np.int32))
    arrays = [to_backend(a, "gpu") for a in (*host, np.ones(experts, np.float32))]
    tiles = activation_tiles(rows, experts)
    codes = to_backend(np.empty((rows, columns // 2), np.uint8), "gpu")
    scales = to_backend(np.empty((tiles, ceil_div(columns, 64), 32, 4, 4), np.uint8), "gpu")

    def call(stream: Any) -> None:
        ops.grouped_quantize_dynamic_block_scaled(*arrays, out=(codes, scales), stream=stream)

    time = timer.gpu(call)
    moved = rows * columns * (2 + 1 / 2 + 1 / 16)
    return {"case": "grouped quantize", "time": time, "TB/s": moved / time.median / 1e6}


def ffn_stages(tokens: int) -> list[tuple[str, Callable[[Any], Any]]]:
    """The launches of a Qwen3-30B FFN on random weights and routing, on device arrays."""
    experts, top_k, hidden, moe_dim = QWEN3_30B.values()
    rng = np.random.default_rng(tokens)

    def put(array: np.ndarray[Any, Any]) -> Any:
        return to_backend(array, "gpu")

    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    x = rng.standard_normal((tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
    weights = rng.random((tokens, top_k), np.float32)

    def weight(rows: int, columns: int) -> tuple[Any, Any]:
        codes = rng.integers(0, 256, (experts, rows, columns // 2)).astype(np.uint8)
        tiles = (experts, ceil_div(rows, 128), ceil_div(columns, 64), 32, 4, 4)
        return put(codes), put(random_scales(rng, tiles))

    w13, w13_scales = weight(2 * moe_dim, hidden)
    w2, w2_scales = weight(hidden, moe_dim)
    x, ids, weights, ones = put(x), put(ids), put(weights), put(np.ones(experts, np.float32))
    routing = ops.moe_create_indices(ids, experts)
    slots = (routing.expert_start_indices, routing.scales_offset, routing.expert_ids)
    gather: dict[str, Any] = {"indices": routing.token_expert_order, "indices_divisor": top_k}
    quantized = ops.grouped_quantize_dynamic_block_scaled(x, *slots, ones, **gather)
    hint: dict[str, Any] = {"estimated_total_m": tokens * top_k}
    swiglu: dict[str, Any] = {"expert_scales": ones, "c_input_scales": ones, **hint}
    first = (quantized[0], w13, quantized[1], w13_scales, *slots)
    activated = ops.grouped_matmul_blocked_swiglu(*first, **swiglu)
    second = (activated[0], w2, activated[1], w2_scales, *slots, ones)
    down = ops.grouped_matmul_block_scaled(*second, **hint)
    out = ops.moe_finalize(down, routing.restore_token_order, weights)
    return [
        ("create indices", lambda s: ops.moe_create_indices(ids, experts, out=routing, stream=s)),
        (
            "quantize",
            lambda s: ops.grouped_quantize_dynamic_block_scaled(
                x, *slots, ones, **gather, out=quantized, stream=s
            ),
        ),
        (
            "gate/up + swiglu",
            lambda s: ops.grouped_matmul_blocked_swiglu(*first, **swiglu, out=activated, stream=s),
        ),
        (
            "down",
            lambda s: ops.grouped_matmul_block_scaled(*second, **hint, out=down, stream=s),
        ),
        (
            "finalize",
            lambda s: ops.moe_finalize(
                down, routing.restore_token_order, weights, out=out, stream=s
            ),
        ),
    ]


def measure_ffn(timer: Timer, tokens: int) -> list[dict[str, Any]]:
    """Every stage of the FFN by itself."""
    return [
        {"case": f"Qwen3-30B T={tokens} {name}", "time": timer.gpu(call)}
        for name, call in ffn_stages(tokens)
    ]


def measure_launches(timer: Timer) -> list[dict[str, Any]]:
    """Host time of launching each kernel: the launchers below the public ops' checks."""
    scratch = timer.device.allocate(SCRATCH_BYTES, stream=timer.stream)
    scratch.fill(0, stream=timer.stream)
    return [
        {"case": f"launch {name}", "time": timer.host(call)}
        for name, call in launchers(int(scratch.handle)).items()
    ]


def write_json(
    path: str, module: str, argv: list[str] | None, timer: Timer, rows: list[dict[str, Any]]
) -> None:
    """Writes rows with the card, the date and the command that made them."""
    result = {
        "date": datetime.date.today().isoformat(),
        "card": timer.device.name,
        "command": " ".join([f"python -m {module}", *(sys.argv[1:] if argv is None else argv)]),
        "unit": "us: median, low and high of repeated runs with a cold L2",
        "rows": [{**row, "time": asdict(row["time"])} for row in rows],
    }
    with open(path, "w") as file:
        json.dump(result, file, indent=1)


def main(argv: list[str] | None = None) -> int:
    """Runs every measurement and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m nbmoe.bench.kernels", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args(argv)
    timer = Timer()
    rows = [measure_copy(timer), measure_quantize(timer), *measure_launches(timer)]
    for tokens in TOKENS:
        rows += measure_ffn(timer, tokens)
    for row in rows:
        time: Spread = row["time"]
        rate = f"{row['TB/s']:8.2f} TB/s" if "TB/s" in row else ""
        spread = f"({time.low:.1f} to {time.high:.1f})"
        print(f"{row['case']:<40}{time.median:10.1f} us  {spread:<22}{rate}")
    if options.json:
        write_json(options.json, "nbmoe.bench.kernels", argv, timer, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
