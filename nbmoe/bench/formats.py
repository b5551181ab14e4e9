"""Measures a Qwen3-30B MoE FFN in every format on a GPU: `python -m nbmoe.bench.formats`.

One row a format and number of tokens: the quantizer that gathers, gate/up with its activation and
requantization, down. Formats without a fused kernel (FP8, bf16) show the sum of their launches.
Weights and codes are random bytes; routing is uniform.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.arrays import to_backend
from nbmoe.bench.kernels import QWEN3_30B, write_json
from nbmoe.bench.timing import Timer
from nbmoe.formats import MXFP4, MXFP8, NVFP4, PAIRS, BlockFormat
from nbmoe.layouts import ceil_div

TOKENS = (1, 16, 128, 4096)
Call = Callable[[Any], Any]
Stages = dict[str, Call]


class Problem:
    """Tokens and a routing of them, on the GPU."""

    def __init__(self, tokens: int) -> None:
        experts, top_k, self.hidden, self.moe_dim = QWEN3_30B.values()
        self.rng = np.random.default_rng(tokens)
        ids = np.argsort(self.rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
        x = self.rng.standard_normal((tokens, self.hidden), np.float32)
        self.x = put(x.astype(ml_dtypes.bfloat16))
        self.ones = put(np.ones(experts, np.float32))
        self.experts, self.rows, self.top_k = experts, tokens * top_k, top_k
        r = ops.moe_create_indices(put(ids), experts)
        self.slots = (r.expert_start_indices, r.scales_offset, r.expert_ids)
        self.plain_slots = (r.expert_start_indices, r.expert_ids)
        self.order = r.token_expert_order

    def random(self, low: int, high: int, shape: tuple[int, ...], dtype: Any = np.uint8) -> Any:
        """Random integers on the GPU; a few million, repeated, since a layer has billions."""
        return put(np.resize(self.rng.integers(low, high, 1 << 22, dtype), shape))

    def codes(self, *shape: int) -> Any:
        """Random bytes below 0x78: no e4m3 NaN."""
        return self.random(0, 0x78, shape)

    def weight(self, fmt: BlockFormat, n: int, k: int) -> tuple[Any, Any]:
        """Random codes and scale tiles of every expert's (n, k) weight."""
        tiles = (self.experts, ceil_div(n, 128), ceil_div(k, fmt.tile_columns), 32, 4, 4)
        near_one = (0x30, 0x39) if fmt is NVFP4 else (124, 128)
        return self.codes(self.experts, n, fmt.packed_k(k)), self.random(*near_one, tiles)


def put(array: np.ndarray[Any, Any]) -> Any:
    """Moves an array to the GPU."""
    return to_backend(array, "gpu")


def stage(op: Any, *args: Any, **keys: Any) -> tuple[Any, Call]:
    """The results of an operation, and a call that repeats it into the same buffers."""
    out = op(*args, **keys)
    return out, lambda stream: op(*args, **keys, out=out, stream=stream)


def in_turn(*calls: Call) -> Call:
    """One call of several."""

    def run(stream: Any) -> None:
        for call in calls:
            call(stream)

    return run


def block_stages(p: Problem, a: BlockFormat, b: BlockFormat) -> Stages:
    """The launches of a block-scaled FFN with activations `a` and weights `b`."""
    w13, s13 = p.weight(b, 2 * p.moe_dim, p.hidden)
    w2, s2 = p.weight(b, p.hidden, p.moe_dim)
    keys = {"format": a.name, "weight_format": b.name, "estimated_total_m": p.rows}
    ones, inner = None, {}
    if a.has_tensor_scale:
        ones, inner = p.ones, {"c_input_scales": p.ones}
        keys["expert_scales"] = ones
    q, quantize = stage(
        ops.grouped_quantize_dynamic_block_scaled,
        *(p.x, *p.slots, ones),
        sf_vector_size=a.block,
        scales_type="float8_e4m3fn" if a is NVFP4 else "float8_e8m0fnu",
        out_type=a.codes_dtype,
        indices=p.order,
        indices_divisor=p.top_k,
    )
    z, gate_up = stage(
        ops.grouped_matmul_blocked_swiglu, q[0], w13, q[1], s13, *p.slots, **keys, **inner
    )
    _, down = stage(ops.grouped_matmul_block_scaled, z[0], w2, z[1], s2, *p.slots, **keys)
    return {"quantize": quantize, "gate/up": gate_up, "down": down}


def fp8_stages(p: Problem) -> Stages:
    """The launches of an FP8 FFN with 1x128 activations and 128x128 weights."""
    k, d = p.hidden, p.moe_dim
    w13, w2 = p.codes(p.experts, 2 * d, k), p.codes(p.experts, k, d)

    def scales(n: int, width: int) -> Any:
        return put(np.ones((p.experts, ceil_div(n, 128), ceil_div(width, 128)), np.float32))

    quantizer = functools.partial(
        ops.quantize_dynamic_scaled_float8, group_size_or_per_token=128, row_offsets=p.slots[0]
    )
    matmul = functools.partial(ops.grouped_dynamic_scaled_fp8_matmul, estimated_total_m=p.rows)
    x, gather = stage(ops.gather_rows, p.x, p.order, divisor=p.top_k)
    q, quantize = stage(quantizer, x)
    h, gate_up = stage(matmul, q[0], w13, q[1], scales(2 * d, k), *p.plain_slots)
    z, activate = stage(ops.gated_activation, h, activation=GatedActivation())
    zq, requantize = stage(quantizer, z)
    _, down = stage(matmul, zq[0], w2, zq[1], scales(k, d), *p.plain_slots)
    return {
        "quantize": in_turn(gather, quantize),
        "gate/up": in_turn(gate_up, activate, requantize),
        "down": down,
    }


def bf16_stages(p: Problem, is_w4a16: bool) -> Stages:
    """The launches of an FFN with bf16 activations, and MXFP4 or bf16 weights."""
    k, d = p.hidden, p.moe_dim

    def weight(n: int, width: int) -> tuple[Any, ...]:
        if is_w4a16:
            return p.weight(MXFP4, n, width)
        return (p.random(0x3C00, 0x3F80, (p.experts, n, width), np.uint16),)

    op = ops.grouped_matmul_w4a16 if is_w4a16 else ops.grouped_matmul_ragged
    matmul = functools.partial(op, estimated_total_m=p.rows)
    x, gather = stage(ops.gather_rows, p.x, p.order, divisor=p.top_k)
    h, gate_up = stage(matmul, x, *weight(2 * d, k), *p.plain_slots)
    z, activate = stage(ops.gated_activation, h, activation=GatedActivation())
    _, down = stage(matmul, z, *weight(k, d), *p.plain_slots)
    return {"quantize": gather, "gate/up": in_turn(gate_up, activate), "down": down}


def all_stages(p: Problem) -> dict[str, Callable[[], Stages]]:
    """The stages of every format, made when they are called for."""
    names = {(MXFP8, MXFP4): "W4A8 (MXFP4 x MXFP8)"}
    made: dict[str, Callable[[], Stages]] = {
        names.get((a, b), a.name.upper()): functools.partial(block_stages, p, a, b)
        for a, b in PAIRS
    }
    made["FP8 128-block"] = functools.partial(fp8_stages, p)
    made["W4A16 (MXFP4)"] = functools.partial(bf16_stages, p, True)
    made["bf16"] = functools.partial(bf16_stages, p, False)
    return made


def main(argv: list[str] | None = None) -> int:
    """Measures every format and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m nbmoe.bench.formats", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    options = parser.parse_args(argv)
    timer, rows = Timer(), []
    print(f"{'format':<22}{'T':>6}{'quantize':>12}{'gate/up':>12}{'down':>12}   us")
    for tokens in TOKENS:
        problem = Problem(tokens)
        for name, make in all_stages(problem).items():
            times = {stage: timer.gpu(call) for stage, call in make().items()}
            rows += [
                {"case": f"{name} T={tokens} {stage}", "time": time}
                for stage, time in times.items()
            ]
            print(f"{name:<22}{tokens:>6}" + "".join(f"{t.median:12.1f}" for t in times.values()))
    if options.json:
        write_json(options.json, "nbmoe.bench.formats", argv, timer, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
