"""Calls of the matmuls: every pair of operands with every epilogue, at shapes of a few blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe import layouts, ops
from nbmoe.activation import GatedActivation
from nbmoe.formats import MXFP4, MXFP8, NVFP4, PAIRS
from tests.fp8_operands import make_problem
from tests.ops.operands import make_product
from tests.strategies import Slots, activations, scale_bytes

Calls = dict[str, Callable[[str], Any]]
"""By name, what runs an operation on the backend that it is given."""

SMALL, MIDDLE, LARGE = range(3)
"""Tile shapes."""

EXPECTED = {SMALL: 0, MIDDLE: 120, LARGE: 1000}
"""Rows to tell an operation of three slots to expect, so that it takes that tile shape."""

EXPERTS, IDS = 3, (-1, 0, 2)
LONG, LONG_BF16, SHORT = 160, 72, 32
"""Values of K: two stages, the last of them in part, so that buffers are handed over; and one."""

OAI = GatedActivation("swigluoai", 1.702, 7.0)
GELU = GatedActivation("gelu_tanh")


def counts(size: int, rows: int) -> tuple[int, int, int]:
    """Rows of the slots: masked ones; none; with small tiles two blocks, the second in part.

    All are a multiple of 8, so no array has padding behind the last row that one row more could hit
    unnoticed. Interpreting a large tile takes a second, however few of its rows are used.
    """
    last = rows + 1 if size == SMALL else 3
    return -last % 8, 0, last


def plain(pair: Any, size: int = SMALL) -> Callable[[str], Any]:
    """Matmul of block-scaled operands, with all that its epilogue may add."""
    slots = Slots(counts(size, 16 if pair[0] is NVFP4 else 32), IDS, EXPERTS, 0)
    width = LONG if size == SMALL else SHORT
    p = make_product(7, slots, 24, width, row_scales=True, bias=True, pair=pair)
    matmul: Any = ops.grouped_matmul_block_scaled
    keywords: Any = p.keywords | {"estimated_total_m": EXPECTED[size]}
    return lambda backend: matmul(*p.operands, p.expert_scales, **keywords, backend=backend)


def swiglu(
    pair: Any, size: int = SMALL, activation: Any = None, match_bf16: bool = True
) -> Callable[[str], Any]:
    """Matmul, activation and quantization."""
    slots = Slots(counts(size, 16 if pair[0] is NVFP4 else 32), IDS, EXPERTS, 0)
    p = make_product(8, slots, 64, SHORT, row_scales=True, bias=True, pair=pair)
    keywords: Any = p.keywords | {"activation": activation, "match_bf16": match_bf16}
    keywords |= {"estimated_total_m": EXPECTED[size], "expert_scales": p.expert_scales}
    if pair[0] is NVFP4:
        keywords["c_input_scales"] = np.array([0.5, 2, 1], np.float32)
    fused = ops.grouped_matmul_blocked_swiglu
    return lambda backend: fused(*p.operands, **keywords, backend=backend)


def ragged(packed: bool, size: int = SMALL) -> Callable[[str], Any]:
    """Matmul of bf16 rows, with bf16 weights or packed MXFP4 weights."""
    rng = np.random.default_rng(9)
    width = SHORT if size != SMALL else LONG if packed else LONG_BF16
    slots = Slots(counts(size, 16), IDS, EXPERTS, 0)
    rows = activations(rng, slots.rows, width, "gauss")
    bias = activations(rng, EXPERTS, 24, "gauss")
    op: Any = ops.grouped_matmul_ragged
    weight: Any = (activations(rng, EXPERTS * 24, width, "gauss").reshape(EXPERTS, 24, width),)
    if packed:
        op = ops.grouped_matmul_w4a16
        codes = rng.integers(0, 256, (EXPERTS, 24, width // 2), dtype=np.uint8)
        scales = scale_bytes(rng, (EXPERTS, 24, width // 32), MXFP4)
        weight = codes, layouts.interleave_scales(scales)
    keywords: Any = {"bias": bias, "estimated_total_m": EXPECTED[size]}
    return lambda backend: op(rows, *weight, slots.starts, slots.ids, **keywords, backend=backend)


def dense() -> Callable[[str], Any]:
    """Logits of a router: no slots, a float32 result with an odd number of columns."""
    rng = np.random.default_rng(10)
    x, gate = (activations(rng, rows, SHORT, "gauss") for rows in (17, 7))
    return lambda backend: ops.router_logits(x, gate, backend=backend)


def fp8(scaling: str, size: int = SMALL, scales_type: Any = np.float32) -> Callable[[str], Any]:
    """Grouped matmul of FP8 operands."""
    rows, width = [*counts(size, 16)], LONG if size == SMALL else SHORT
    types: Any = {"rowwise": scaling == "rowwise", "scales_type": scales_type}
    p = make_problem(rows, 24, width, expert_ids=[*IDS], **types)
    op: Any = ops.grouped_dynamic_scaled_fp8_matmul
    if scaling == "rowwise":
        op = ops.grouped_rowwise_dynamic_scaled_fp8_matmul
    keywords: Any = {"bias": p.bias, "estimated_total_m": EXPECTED[size]}
    return lambda backend: op(*p.arguments(), **keywords, backend=backend)


def batched() -> Callable[[str], Any]:
    """FP8 matmul of two batches."""
    p = [make_problem([8], 24, SHORT, seed=seed) for seed in range(2)]
    a, a_scales = (np.stack([getattr(q, x) for q in p]) for x in ("hidden", "a_scales"))
    b, b_scales = (np.concatenate([getattr(q, x) for q in p]) for x in ("weight", "b_scales"))
    matmul = ops.batched_dynamic_scaled_fp8_matmul
    return lambda backend: matmul(a, b, a_scales, b_scales, backend=backend)


def name_of(pair: Any) -> str:
    """A pair of formats as kernels are called."""
    return pair[0].name if pair[0] is pair[1] else f"{pair[0].name}_{pair[1].name}"


def smallest() -> Calls:
    """Every pair and epilogue at its smallest tile shape."""
    return {
        **{f"plain_{name_of(pair)}": plain(pair) for pair in PAIRS},
        **{f"swiglu_{name_of(pair)}": swiglu(pair) for pair in PAIRS},
        "swiglu_nvfp4_unrounded": swiglu(PAIRS[0], match_bf16=False),
        "plain_bf16": ragged(packed=False),
        "plain_bf16_mxfp4": ragged(packed=True),
        "dense_bf16": dense(),
        "fp8_block128": fp8("block128"),
        "fp8_rowwise": fp8("rowwise"),
        "fp8_batched": batched(),
    }


def others() -> Calls:
    """Larger tile shapes, and variants that the smallest leave out."""
    import ml_dtypes

    w4a8 = (MXFP8, MXFP4)
    return {
        "plain_mxfp8": plain((MXFP8, MXFP8), MIDDLE),
        "plain_mxfp8_mxfp4": plain(w4a8, LARGE),
        "plain_bf16": ragged(False, LARGE),
        "plain_bf16_mxfp4": ragged(True, MIDDLE),
        "swiglu_mxfp4_swigluoai": swiglu((MXFP4, MXFP4), MIDDLE, OAI),
        "swiglu_mxfp8_gelu_tanh": swiglu((MXFP8, MXFP8), SMALL, GELU),
        "swiglu_mxfp8_mxfp4": swiglu(w4a8, LARGE),
        "fp8_block128_bf16": fp8("block128", LARGE, ml_dtypes.bfloat16),
        "fp8_rowwise": fp8("rowwise", MIDDLE),
    }
