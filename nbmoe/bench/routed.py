"""Tokens of a problem where the kernels run, and the steps that every format shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nbmoe import ops
from nbmoe.bench import floors
from nbmoe.bench.entry import Case, Entry, Step, in_turn, step
from nbmoe.bench.exact import F64Array, relative_error
from nbmoe.bench.memory import Memory
from nbmoe.bench.routing import Problem
from nbmoe.codecs import decode_bf16
from nbmoe.ops.route_indices import route_with_indices


class Routed:
    """A problem's tokens, and its routing as the kernels compute it.

    Args:
        memory: Where arrays live.
        problem: Tokens and their routing.
    """

    def __init__(self, memory: Memory, problem: Problem) -> None:
        model = problem.model
        self.memory, self.problem = memory, problem
        self.x = memory.tokens(problem.tokens, model.hidden)
        self.ones = memory.put(np.ones(model.experts, np.float32))
        keys: dict[str, Any] = {"scoring": model.scoring}
        if not model.scoring.endswith("_after_topk"):
            keys["renormalize"] = True
        scores = memory.put(problem.scores)
        ids, self.weights, self.indices = route_with_indices(scores, model.top_k, **keys)
        out = (ids, self.weights, *self.indices)
        self.route = Step(
            out,
            lambda s: route_with_indices(scores, model.top_k, **keys, out=out, stream=s),
        )
        choose = step(ops.route, scores, model.top_k, **keys)
        group = step(ops.moe_create_indices, choose.result[0], model.experts)
        in_two = in_turn(choose, group).call
        self.route_in_two = Step((*choose.result, *group.result), in_two)

    @property
    def slots(self) -> tuple[Any, Any, Any]:
        """Starts, scale offsets and ids of the slots."""
        r = self.indices
        return r.expert_start_indices, r.scales_offset, r.expert_ids

    @property
    def plain_slots(self) -> tuple[Any, Any]:
        """Starts and ids of the slots."""
        return self.indices.expert_start_indices, self.indices.expert_ids

    @property
    def gather(self) -> dict[str, Any]:
        """Arguments of a quantizer that gathers."""
        order = self.indices.token_expert_order
        return {"indices": order, "indices_divisor": self.problem.model.top_k}

    def combine(self, down: Any) -> Step:
        """The weighted sum of a token's rows."""
        return step(ops.moe_finalize, down, self.indices.restore_token_order, self.weights)

    def combine_error(self, down: Any, out: Any) -> float:
        """Relative error of the first and the last token."""
        read, top_k = self.memory.read, self.problem.model.top_k
        places = read(self.indices.restore_token_order).reshape(-1, top_k)
        weights = read(self.weights).astype(np.float64)
        found: list[F64Array] = []
        exact: list[F64Array] = []
        for token in sorted({0, self.problem.tokens - 1}):
            rows = np.asarray([decode_bf16(read(down[int(at)])) for at in places[token]])
            exact.append(weights[token] @ rows.astype(np.float64))
            found.append(decode_bf16(read(out[token])).astype(np.float64))
        return relative_error(np.asarray(found), np.asarray(exact))

    def cases(self) -> Iterator[Case]:
        """What does not depend on a format: logits, routing and combining."""
        problem, model = self.problem, self.problem.model

        def logits() -> Entry:
            gate = self.memory.bf16(model.experts, model.hidden)
            done = step(ops.router_logits, self.x, gate)
            return Entry(done.call, (done.result,), floors.logits(problem))

        def route(done: Step) -> Entry:
            return Entry(done.call, done.result, floors.route(problem), same="route")

        def combine() -> Entry:
            down = self.memory.bf16(problem.rows, model.hidden)
            done = self.combine(down)
            return Entry(
                done.call,
                (done.result,),
                floors.combine(problem),
                lambda: self.combine_error(down, done.result),
            )

        yield Case("logits", "", logits)
        yield Case("route", "", lambda: route(self.route))
        yield Case("route", "in two operations", lambda: route(self.route_in_two))
        yield Case("combine", "", combine)
