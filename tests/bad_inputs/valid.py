"""One valid call of each operation, small but with no two sizes alike, to spoil in one place."""

from typing import Any

import ml_dtypes
import numpy as np

from nbmoe import layouts

EXPERTS, TOP_K, TOKENS, HIDDEN, MOE_DIM = 4, 2, 65, 80, 48
ROWS = TOKENS * TOP_K
COUNTS = (3, 0, 125, 2)
TILES = layouts.activation_tiles(ROWS, EXPERTS)
POISON = 0xAA

Arguments = dict[str, Any]


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    """A buffer whose every byte is the poison."""
    buffer = np.empty(shape, dtype)
    buffer.view(np.uint8)[...] = POISON
    return buffer


def _slots() -> Arguments:
    starts = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.uint32)
    return {
        "starts": starts,
        "offsets": layouts.scales_offset(starts),
        "expert_ids": np.arange(EXPERTS, dtype=np.int32),
    }


def _scale_tiles(rng: np.random.Generator, rows: int, k: int, lead: tuple[int, ...] = ()) -> Any:
    scales = rng.integers(0x20, 0x40, (*lead, rows, k // 16), dtype=np.uint8)
    return layouts.interleave_scales(scales)


def route() -> Arguments:
    """Arguments of `route`."""
    rng = np.random.default_rng(1)
    return {
        "logits": rng.standard_normal((TOKENS, EXPERTS), dtype=np.float32),
        "top_k": TOP_K,
        "renormalize": True,
        "out": (poisoned((TOKENS, TOP_K), np.int32), poisoned((TOKENS, TOP_K), np.float32)),
    }


def moe_create_indices() -> Arguments:
    """Arguments of `moe_create_indices`."""
    first = np.arange(TOKENS, dtype=np.int32) % EXPERTS
    lengths = (ROWS, EXPERTS + 1, ROWS, EXPERTS, 2, EXPERTS)
    types = (np.uint32, np.uint32, np.uint32, np.int32, np.uint32, np.uint32)
    return {
        "topk_ids": np.stack([first, (first + 1) % EXPERTS], axis=1).astype(np.int32),
        "num_experts": EXPERTS,
        "out": tuple(poisoned((n,), t) for n, t in zip(lengths, types, strict=True)),
    }


def grouped_quantize_dynamic_block_scaled() -> Arguments:
    """Arguments of `grouped_quantize_dynamic_block_scaled`, gathering."""
    rng = np.random.default_rng(2)
    slots = _slots()
    return {
        "input": rng.standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16),
        "row_offsets": slots["starts"],
        "scales_offsets": slots["offsets"],
        "expert_ids": slots["expert_ids"],
        "sf_tensor": rng.uniform(1, 2, EXPERTS).astype(np.float32),
        "sf_vector_size": 16,
        "indices": rng.permutation(ROWS).astype(np.uint32),
        "indices_divisor": TOP_K,
        "out": (
            poisoned((ROWS, HIDDEN // 2), np.uint8),
            poisoned((TILES, layouts.ceil_div(HIDDEN, 64), 32, 4, 4), np.uint8),
        ),
    }


def grouped_matmul_block_scaled() -> Arguments:
    """Arguments of `grouped_matmul_block_scaled`: a down projection."""
    return _product(MOE_DIM, HIDDEN) | {"out": poisoned((ROWS, HIDDEN), ml_dtypes.bfloat16)}


def grouped_matmul_blocked_swiglu() -> Arguments:
    """Arguments of `grouped_matmul_blocked_swiglu`."""
    return _product(HIDDEN, 2 * MOE_DIM) | {
        "c_input_scales": np.full(EXPERTS, 3, np.float32),
        "match_bf16": True,
        "out": (
            poisoned((ROWS, MOE_DIM // 2), np.uint8),
            poisoned((TILES, layouts.ceil_div(MOE_DIM, 64), 32, 4, 4), np.uint8),
        ),
    }


def _product(k: int, n: int) -> Arguments:
    rng = np.random.default_rng(3)
    slots = _slots()
    return {
        "hidden": rng.integers(0, 256, (ROWS, k // 2), dtype=np.uint8),
        "weight": rng.integers(0, 256, (EXPERTS, n, k // 2), dtype=np.uint8),
        "a_scales": _scale_tiles(rng, 128 * TILES, k),
        "b_scales": _scale_tiles(rng, n, k, (EXPERTS,)),
        "expert_start": slots["starts"],
        "a_scale_offsets": slots["offsets"],
        "expert_ids": slots["expert_ids"],
        "expert_scales": rng.uniform(0.5, 2, EXPERTS).astype(np.float32),
        "estimated_total_m": ROWS,
        "a_row_scales": rng.uniform(0.5, 2, ROWS).astype(ml_dtypes.bfloat16),
    }


def moe_finalize() -> Arguments:
    """Arguments of `moe_finalize`."""
    rng = np.random.default_rng(4)
    return {
        "down": rng.standard_normal((ROWS, HIDDEN)).astype(ml_dtypes.bfloat16),
        "restore_token_order": rng.permutation(ROWS).astype(np.uint32),
        "weights": rng.uniform(0, 1, (TOKENS, TOP_K)).astype(np.float32),
        "out": poisoned((TOKENS, HIDDEN), ml_dtypes.bfloat16),
    }


VALID = {
    f.__name__: f
    for f in (
        route,
        moe_create_indices,
        grouped_quantize_dynamic_block_scaled,
        grouped_matmul_block_scaled,
        grouped_matmul_blocked_swiglu,
        moe_finalize,
    )
}
