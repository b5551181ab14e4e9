"""Valid calls of the router, of what moves rows, and of the combination."""

from collections.abc import Callable

import numpy as np

from nbmoe.operand import named_dtype
from tests.bad_inputs.sizes import Arguments, Sizes, bf16, factors, poisoned

BF16 = named_dtype("bfloat16")


def router_logits(sizes: Sizes) -> Arguments:
    """`router_logits`."""
    hidden = 16 * sizes.hidden_blocks
    return {
        "x": bf16(1, sizes.tokens, hidden),
        "weight": bf16(2, sizes.experts, hidden),
        "out": poisoned((sizes.tokens, sizes.experts), np.float32),
    }


def route(sizes: Sizes) -> Arguments:
    """`route` by logits."""
    shape = (sizes.tokens, sizes.top_k)
    return {
        "logits": np.float32(bf16(1, sizes.tokens, sizes.experts)),
        "top_k": sizes.top_k,
        "renormalize": True,
        "bias": factors(2, sizes.experts),
        "out": (poisoned(shape, np.int32), poisoned(shape, np.float32)),
    }


def route_sigmoid(sizes: Sizes) -> Arguments:
    """`route` by sigmoids, in groups, beside a shared expert."""
    shape = (sizes.tokens, sizes.top_k + 1)
    groups = 2 if sizes.experts > 1 else 1
    return route(sizes) | {
        "scoring": "sigmoid",
        "correction_bias": factors(3, sizes.experts),
        "n_groups": groups,
        "topk_group": groups,
        "routed_scaling_factor": 2.5,
        "shared_slot": True,
        "out": (poisoned(shape, np.int32), poisoned(shape, np.float32)),
    }


def create_indices(sizes: Sizes) -> Arguments:
    """`moe_create_indices`."""
    first = np.arange(sizes.tokens, dtype=np.int32)[:, np.newaxis]
    rows, experts = sizes.rows, sizes.experts
    lengths = (rows, experts + 1, rows, experts, 2, experts)
    types = (np.uint32, np.uint32, np.uint32, np.int32, np.uint32, np.uint32)
    ids = (first + np.arange(sizes.top_k, dtype=np.int32)) % np.int32(experts)
    return {
        "topk_ids": ids.astype(np.int32),
        "num_experts": experts,
        "out": tuple(poisoned((n,), t) for n, t in zip(lengths, types, strict=True)),
    }


def gather_rows(sizes: Sizes) -> Arguments:
    """`gather_rows`, weighted."""
    hidden = 8 * sizes.hidden_blocks
    return {
        "input": bf16(1, sizes.tokens, hidden),
        "order": np.random.default_rng(2).permutation(sizes.rows).astype(np.uint32),
        "divisor": sizes.top_k,
        "weights": factors(3, sizes.tokens, sizes.top_k),
        "out": poisoned((sizes.rows, hidden), BF16),
    }


def finalize(sizes: Sizes) -> Arguments:
    """`moe_finalize`, beside a shared expert."""
    hidden = 16 * sizes.hidden_blocks
    return {
        "down": bf16(1, sizes.rows, hidden),
        "restore_token_order": np.random.default_rng(2).permutation(sizes.rows).astype(np.uint32),
        "weights": factors(3, sizes.tokens, sizes.top_k),
        "shared": bf16(4, sizes.tokens, hidden),
        "out": poisoned((sizes.tokens, hidden), BF16),
    }


CALLS: dict[str, Callable[[Sizes], Arguments]] = {
    "router_logits": router_logits,
    "route:softmax": route,
    "route:sigmoid": route_sigmoid,
    "moe_create_indices": create_indices,
    "gather_rows": gather_rows,
    "moe_finalize": finalize,
}
