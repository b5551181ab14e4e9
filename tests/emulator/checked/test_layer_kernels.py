"""The kernels between the matmuls of a layer have no findings, in any order the same bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbmoe import backend, ops
from nbmoe.ops.route_indices import route_with_indices
from nbmoe_kernels import create_indices
from nbmoe_kernels.create_indices import MAX_EXPERTS
from nbmoe_kernels.reciprocal import launch_reciprocal
from tests.emulator.checked.orders import check_orders
from tests.strategies import activations, expert_choice

SCHEDULES = ("fifo", "random:0", "random:1", "pct:3:1")
NO_ROW = 2**32 - 1


def reciprocal() -> Any:
    """An operation only launches it for arrays of a GPU."""
    scales = np.random.default_rng(1).uniform(0.1, 9, 300).astype(np.float32)
    out = np.zeros_like(scales)
    launch_reciprocal(backend.executor("emulate"), out, scales, count=300)
    return out


def _in_many_blocks(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with indices made by more than one block, though there are few slots."""

    def run() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(create_indices, "ONE_BLOCK_SLOTS", 0)
            return call()

    return run


def calls() -> dict[str, Callable[[], Any]]:
    """Rows are of two blocks of columns; tokens, scales and experts of more than one block."""
    rng = np.random.default_rng(0)
    x = activations(rng, 4, 1032, "gauss")
    down = activations(rng, 6, 1032, "gauss")
    order = np.array([3, NO_ROW, 7, 0, 0], np.uint32)
    restore = np.array([0, 5, 3, NO_ROW, 1, 2, 4, NO_ROW], np.uint32)
    logits = rng.standard_normal((5, 80)).astype(np.float32)
    bias, correction = rng.standard_normal((2, 40)).astype(np.float32)
    wide_logits = rng.standard_normal((2, 600)).astype(np.float32)
    weights = rng.uniform(0, 1, (4, 2)).astype(np.float32)
    ids = expert_choice(rng, 70, 3, 600, "masked")
    more_ids = expert_choice(rng, 260, 2, 70, "masked")
    here: dict[str, Any] = {"backend": "emulate"}
    shared: dict[str, Any] = {"num_parts": 2, "bias": bias, "shared_slot": True, **here}
    groups = {"scoring": "sigmoid", "n_groups": 4, "topk_group": 2, "correction_bias": correction}
    gate = activations(rng, 18, 1032, "gauss")
    return {
        "router_logits": lambda: ops.router_logits(
            np.concatenate([x, x, x])[:9, :456].copy(), gate[:, :456].copy(), **here
        ),
        "route": lambda: ops.route(logits, 4, renormalize=True, **shared),
        "route_many": lambda: ops.route(logits, 34, scoring="softmax_after_topk", **here),
        "route_groups": lambda: ops.route(logits, 4, **groups, renormalize=True, **shared),
        "route_sigmoid": lambda: ops.route(logits, 34, scoring="sigmoid", **here),
        "create_indices": lambda: ops.moe_create_indices(ids, MAX_EXPERTS, **here),
        "create_indices_many": _in_many_blocks(
            lambda: ops.moe_create_indices(more_ids, 70, **here)
        ),
        "create_indices_many_wide": _in_many_blocks(
            lambda: ops.moe_create_indices(more_ids, MAX_EXPERTS, **here)
        ),
        "route_grouped": lambda: _flat(route_with_indices(logits, 4, renormalize=True, **shared)),
        "route_sigmoid_grouped": lambda: _flat(
            route_with_indices(logits, 4, **groups, renormalize=True, **shared)
        ),
        "route_wide": lambda: ops.route(wide_logits, 3, **here),
        "route_sigmoid_wide": lambda: ops.route(wide_logits, 3, scoring="sigmoid", **here),
        "gather_rows": lambda: ops.gather_rows(x, order, divisor=2, **here),
        "gather_weighted": lambda: ops.gather_rows(x, order, divisor=2, weights=weights, **here),
        "finalize": lambda: ops.moe_finalize(down, restore, weights, shared=x, **here),
        "reciprocal": reciprocal,
    }


def _flat(routing: Any) -> tuple[Any, ...]:
    ids, weights, indices = routing
    return ids, weights, *indices


CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_no_finding_and_the_same_bytes(name: str) -> None:
    schedules = SCHEDULES[:2] if name.startswith("create_indices_many") else SCHEDULES
    check_orders(CALLS[name], CALLS[name](), schedules)
