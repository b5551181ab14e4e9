"""Launches of the routing kernels and of those that move rows, for their mutants to be run on."""

from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.mutate.slots import unwritten

Launch = tuple[Any, Callable[[], tuple[Any, ...]]]


def _scalars(*numbers: int) -> tuple[np.uint32, ...]:
    return tuple(np.uint32(number) for number in numbers)


def _bf16_pairs(random: np.random.Generator, count: int) -> np.ndarray:
    floats = random.standard_normal(2 * count).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)


def _route(kernel: Any) -> Launch:
    """Nearly as many experts as there is room for, two parts of K, a bias, a shared expert."""
    tokens, experts, top_k = 7, 126, 3

    def args() -> tuple[Any, ...]:
        random = np.random.default_rng(7)
        arrays = {
            "topk_ids": unwritten(tokens * (top_k + 1), np.int32),
            "topk_weights": unwritten(tokens * (top_k + 1), np.float32),
            "logits": random.standard_normal(2 * tokens * experts).astype(np.float32),
            "bias": random.standard_normal(experts).astype(np.float32),
            "correction_bias": random.standard_normal(experts).astype(np.float32),
            **_index_buffers(tokens * (top_k + 1), experts + 1),
        }
        numbers = {"num_tokens": tokens, "num_experts": experts, "num_parts": 2, "top_k": top_k}
        numbers |= {"has_bias": 1, "has_correction": 1, "n_groups": 7, "topk_group": 3}
        numbers |= {"scoring": 0, "renormalize": 1, "shared_slot": 1, "lane_bits": 1}
        numbers |= {"tokens_per_warp": 1, "groups_per_warp": 1}
        by_name: dict[str, Any] = {name: np.uint32(number) for name, number in numbers.items()}
        by_name |= arrays | {"factor": np.float32(1.5)}
        return tuple(by_name[parameter.name] for parameter in kernel.params)

    return 1 if "_grouped" in kernel.name else 2, args


def _router_logits(kernel: Any) -> Launch:
    """More experts and tokens than a tile has, more of K than is on its way at once."""
    tokens, experts, hidden = 9, 18, 456

    def args() -> tuple[Any, ...]:
        random = np.random.default_rng(10)
        return (
            unwritten(tokens * experts, np.float32),
            _bf16_pairs(random, tokens * hidden // 2),
            _bf16_pairs(random, experts * hidden // 2),
            *_scalars(tokens, experts, hidden // 2),
        )

    return (2, 2), args


def _index_buffers(slots: int, experts: int) -> dict[str, Any]:
    words = {
        "token_expert_order": slots,
        "expert_start_indices": experts + 1,
        "restore_token_order": slots,
        "expert_ids": experts,
        "expert_usage_stats": 2,
        "scales_offset": experts,
    }
    buffers: dict[str, Any] = {name: unwritten(count) for name, count in words.items()}
    return buffers | {"expert_ids": buffers["expert_ids"].view(np.int32)}


def _create_indices(kernel: Any) -> Launch:
    """One slot, expert or group more than some loop handles at once; an empty expert."""
    many = "_many_" in kernel.name
    blocks, slots, groups_per_warp = (2, 12289, 13) if many else (1, 2500, 5)
    experts = 65 if many else 40

    def args() -> tuple[Any, ...]:
        random = np.random.default_rng(1)
        ids = random.integers(-1, experts, slots).astype(np.int32)
        ids[ids == 7] = 8  # an empty expert
        outputs = _index_buffers(slots, experts).values()
        return (*outputs, ids, *_scalars(slots, experts, groups_per_warp))

    return blocks, args


def _gather_rows(kernel: Any) -> Launch:
    rows, columns = 7, 1040

    def args() -> tuple[Any, ...]:
        random = np.random.default_rng(8)
        order = random.permutation(2 * rows)[:rows].astype(np.uint32)
        order[1] = 0xFFFFFFFF
        return (
            unwritten(rows * columns // 2),
            _bf16_pairs(random, rows * columns // 2),
            order,
            random.random(2 * rows).astype(np.float32),
            *_scalars(2, rows, columns // 2, 1),
        )

    return (2, 2), args


def _finalize(kernel: Any) -> Launch:
    tokens, top_k, columns = 3, 9, 1040

    def args() -> tuple[Any, ...]:
        random = np.random.default_rng(6)
        rows = tokens * top_k
        down = _bf16_pairs(random, rows * columns // 2)
        restore = random.permutation(rows).astype(np.uint32)
        restore[1] = 0xFFFFFFFF
        return (
            unwritten(tokens * columns // 2),
            down,
            restore,
            random.random(rows).astype(np.float32),
            _bf16_pairs(random, tokens * columns // 2),
            *_scalars(top_k, columns // 2, 1),
        )

    return (tokens, 2), args


def _reciprocal(kernel: Any) -> Launch:
    count = 300

    def args() -> tuple[Any, ...]:
        scales = np.random.default_rng(9).random(count).astype(np.float32)
        return unwritten(count, np.float32), scales, np.uint32(count)

    return -(-count // kernel.threads), args


ROUTING: dict[str, Callable[[Any], Launch]] = {
    "router_logits": _router_logits,
    "route_": _route,
    "moe_create_indices": _create_indices,
    "gather_rows": _gather_rows,
    "moe_finalize": _finalize,
    "reciprocal": _reciprocal,
}
