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
    """More experts than lanes, two parts of K, a bias, a shared expert."""
    tokens, experts, top_k = 5, 70, 3

    def args() -> tuple[Any, ...]:
        random = np.random.default_rng(7)
        arrays = {
            "topk_ids": unwritten(tokens * (top_k + 1), np.int32),
            "topk_weights": unwritten(tokens * (top_k + 1), np.float32),
            "logits": random.standard_normal(2 * tokens * experts).astype(np.float32),
            "bias": random.standard_normal(experts).astype(np.float32),
            "correction_bias": random.standard_normal(experts).astype(np.float32),
        }
        numbers = {"num_tokens": tokens, "num_experts": experts, "num_parts": 2, "top_k": top_k}
        numbers |= {"has_bias": 1, "has_correction": 1, "n_groups": 7, "topk_group": 3}
        numbers |= {"scoring": 0, "renormalize": 1, "shared_slot": 1}
        by_name: dict[str, Any] = {name: np.uint32(number) for name, number in numbers.items()}
        by_name |= arrays | {"factor": np.float32(1.5)}
        return tuple(by_name[parameter.name] for parameter in kernel.params)

    return 2, args


def _create_indices(kernel: Any) -> Launch:
    slots, experts = 7700, 40

    def args() -> tuple[Any, ...]:
        random = np.random.default_rng(1)
        ids = random.integers(-1, experts, slots).astype(np.int32)
        ids[ids == 7] = 8  # an empty expert
        words = (slots, experts + 1, slots, experts, 2, experts)
        order, starts, restore, numbers, stats, offsets = (unwritten(n) for n in words)
        outputs = (order, starts, restore, numbers.view(np.int32), stats, offsets)
        return (*outputs, ids, *_scalars(slots, experts))

    return 1, args


def _gather_rows(kernel: Any) -> Launch:
    rows, columns = 4, 1040

    def args() -> tuple[Any, ...]:
        random = np.random.default_rng(8)
        order = random.permutation(rows).astype(np.uint32)
        order[1] = 0xFFFFFFFF
        return (
            unwritten(rows * columns // 2),
            _bf16_pairs(random, rows * columns // 2),
            order,
            random.random(rows).astype(np.float32),
            *_scalars(2, columns // 2, 1),
        )

    return (rows, 2), args


def _finalize(kernel: Any) -> Launch:
    tokens, top_k, columns = 3, 2, 1040

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
    "route_": _route,
    "moe_create_indices": _create_indices,
    "gather_rows": _gather_rows,
    "moe_finalize": _finalize,
    "reciprocal": _reciprocal,
}
