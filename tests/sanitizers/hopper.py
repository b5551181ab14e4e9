"""Small runs of everything that prepared operands go through, compared with the reference.

    python -m tests.sanitizers.hopper [matmul | fused | ffn | fp8 | operands]

Shapes are small since a sanitizer slows kernels down a hundredfold; of rows as many are announced
as choose narrow tiles, and then wide ones.
"""

import sys
from typing import Any

import numpy as np

from nbmoe import layouts, ops
from nbmoe.formats import FORMATS, NVFP4, PAIRS
from nbmoe.prepared import pack_tokens, pack_weights, unpack_tokens
from nbmoe.prepared.fp8 import pack_fp8_tokens, pack_fp8_weights
from nbmoe.prepared.w4a8 import pack_w4a8_weights
from tests.conftest import Kernels
from tests.fp8_operands import make_problem
from tests.kernels.test_mega_ffn_sm90 import problem
from tests.ops.operands import Product, make_product
from tests.ops.prepared_operands import prepared_product, prepared_rows
from tests.ops.test_mega_ffn import arguments
from tests.strategies import Slots, activations

GPU = Kernels("gpu")
SLOTS = Slots((17, 0, 3, 140), (2, -1, 0, 1), 4, 5)
ANNOUNCED = (0, 40, 100_000)
"""Rows of all slots to expect: narrow tiles, middle ones, wide ones."""
N, K = 136, 352


def same(got: Any, wanted: Any, what: str) -> None:
    """Fails if the rows that slots own differ."""
    used = int(SLOTS.starts[-1])
    if np.asarray(got)[:used].tobytes() != np.asarray(wanted)[:used].tobytes():
        raise SystemExit(f"{what}: the bytes differ from the reference's")


def compare(what: str, op: Any, *args: Any, **keywords: Any) -> None:
    """An operation on the GPU and in the reference, for every number of announced rows."""
    wanted = op(*args, **keywords, backend="reference")
    for rows in ANNOUNCED:
        same(GPU(op, *args, **keywords, estimated_total_m=rows), wanted, f"{what}, {rows} rows")


def product(seed: int, pair: Any, n: int) -> Product:
    return make_product(seed, SLOTS, n, K, row_scales=True, bias=True, pair=pair)


def matmul() -> None:
    """Every pair of block-scaled operands, and bf16 rows."""
    op: Any = ops.grouped_matmul_block_scaled
    for pair in PAIRS:
        p = product(1, pair, N)
        what = f"matmul of {pair[0].name} and {pair[1].name}"
        compare(what, op, *prepared_product(p), p.expert_scales, **p.keywords)
    p = product(2, (FORMATS["mxfp8"], FORMATS["mxfp4"]), N)
    rows = activations(np.random.default_rng(3), SLOTS.rows, K, "gauss")
    dense = activations(np.random.default_rng(4), 4 * N, K, "gauss").reshape(4, N, K)
    routing = SLOTS.starts, SLOTS.ids
    packed = prepared_rows(rows, p.weight, p.b_scales, SLOTS)
    compare("w4a16", ops.grouped_matmul_w4a16, *packed, None, *routing, bias=p.bias)
    plain = prepared_rows(rows, dense, None, SLOTS)
    compare("matmul of bf16", ops.grouped_matmul_ragged, *plain, *routing, bias=p.bias)


def fused() -> None:
    """Matmul, activation and requantization to prepared tokens."""
    op: Any = ops.grouped_matmul_blocked_swiglu
    for pair in PAIRS:
        p = product(5, pair, 192)
        keywords = {**p.keywords, "expert_scales": p.expert_scales, "layout": "prepared"}
        if pair[0] is NVFP4:
            keywords["c_input_scales"] = np.float32([0.5, 2, 1, 3])
        args = prepared_product(p)
        wanted = op(*args, **keywords, backend="reference")
        for rows in ANNOUNCED:
            got = GPU(op, *args, **keywords, estimated_total_m=rows)
            values = [unpack_tokens(x, SLOTS.starts) for x in (got, wanted)]
            same(*values, f"fused matmul of {pair[0].name}, {rows} rows")


def ffn() -> None:
    """Gate/up, activation, requantization and down in one launch."""
    for fmt in (NVFP4, FORMATS["mxfp8"]):
        p = problem(9, fmt, K, 96, N, SLOTS, bias=True, row_scales=fmt is NVFP4)
        wanted = p.expected()
        for rows in ANNOUNCED:
            given = arguments(p, prepared=True, estimated_total_m=rows)
            got = GPU(ops.mega_ffn_nvfp4, **given)
            same(got.view(np.uint16), wanted, f"ffn of {fmt.name}, {rows} rows")


def fp8() -> None:
    """Scales of 128-blocks and of rows, and folded MXFP4 weights."""
    by_block: Any = ops.grouped_dynamic_scaled_fp8_matmul
    by_row: Any = ops.grouped_rowwise_dynamic_scaled_fp8_matmul
    for op, rowwise in ((by_block, False), (by_row, True)):
        p = make_problem([*SLOTS.counts], N, K, expert_ids=[*SLOTS.ids], rowwise=rowwise)
        tokens = pack_fp8_tokens(p.hidden, p.a_scales, p.starts)
        weights = pack_fp8_weights(p.weight)
        args = (tokens, weights, None, p.b_scales, p.starts, p.expert_ids)
        compare("fp8", op, *args, bias=p.bias)
        if rowwise:
            rng = np.random.default_rng(6)
            codes = rng.integers(0, 256, (4, N, K // 2), np.uint8)
            scales = layouts.interleave_scales(rng.integers(120, 134, (4, N, K // 32), np.uint8))
            folded = pack_w4a8_weights(codes, scales)
            compare("w4a8", op, tokens, folded, None, None, p.starts, p.expert_ids, bias=p.bias)


def operands() -> None:
    """What makes prepared weights and tokens."""
    rows = activations(np.random.default_rng(7), SLOTS.rows, K, "gauss")
    routing = (SLOTS.starts, SLOTS.offsets)
    for fmt in FORMATS.values():
        p = product(8, (fmt, fmt), N)
        made = GPU(ops.prepare_weights, p.weight, p.b_scales, format=fmt.name)
        wanted: Any = pack_weights(p.weight, p.b_scales, format=fmt.name)
        if made.data.tobytes() != wanted.data.tobytes():
            raise SystemExit(f"prepare_weights of {fmt.name}: the bytes differ")
        tokens = GPU(ops.prepare_tokens, p.hidden, p.a_scales, *routing, format=fmt.name)
        wanted = pack_tokens(p.hidden, p.a_scales, *routing, format=fmt.name)
        values = [unpack_tokens(x, SLOTS.starts) for x in (tokens, wanted)]
        same(*values, f"prepare_tokens of {fmt.name}")
    factors = np.float32([1, 0.5, 2, 1])
    both = np.concatenate([rows, rows[::-1]], axis=1)
    quantizers: Any = (
        (ops.grouped_quantize_dynamic_block_scaled, rows),
        (ops.fused_silu_quantize, both),
    )
    for op, x in quantizers:
        args = (x, *routing, SLOTS.ids, factors)
        got = GPU(op, *args, layout="prepared")
        wanted = op(*args, layout="prepared", backend="reference")
        same(*(unpack_tokens(r, SLOTS.starts) for r in (got, wanted)), op.__name__)


GROUPS = {"matmul": matmul, "fused": fused, "ffn": ffn, "fp8": fp8, "operands": operands}


def main(argv: list[str]) -> int:
    """Run the named groups, or all."""
    for name in argv or GROUPS:
        GROUPS[name]()
        print(f"{name}: the reference's bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
