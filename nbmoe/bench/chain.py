"""The chain of a format, from tokens to the rows of the down projection: what formats share."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nbmoe.bench import exact, floors
from nbmoe.bench.entry import Case, Entry, Step, arrays, in_turn
from nbmoe.bench.exact import F64Array
from nbmoe.bench.floors import Work
from nbmoe.bench.routed import Routed
from nbmoe.reference import oracle

Positions = Any
"""int64 array of positions."""


class Chain(abc.ABC):
    """One format at one problem. Steps are made once, when they are asked for.

    Args:
        routed: The tokens.

    Attributes:
        activations: Name of the activations' format in `floors`.
        weights: Name of the weights' format in `floors`.
    """

    activations: str
    weights: str

    def __init__(self, routed: Routed) -> None:
        self.routed = routed
        self.memory, self.problem = routed.memory, routed.problem
        self.model = self.problem.model
        self._made: dict[tuple[str, str], Step] = {}
        self._exact: dict[tuple[Any, ...], F64Array] = {}

    @abc.abstractmethod
    def variants(self) -> tuple[str, ...]:
        """Kinds of operands that the matmuls can have."""

    def missing(self, variant: str) -> str:
        """Why this version of the library cannot take such operands, empty if it can."""
        return ""

    @abc.abstractmethod
    def legs(self, variant: str) -> tuple[str, ...]:
        """Legs of a layer with such operands, from tokens to down; each is a step."""

    @abc.abstractmethod
    def extra_legs(self, variant: str) -> tuple[str, ...]:
        """Steps beside those."""

    @abc.abstractmethod
    def make(self, leg: str, variant: str) -> Step:
        """Runs a step for the first time."""

    @abc.abstractmethod
    def rows(self, leg: int, variant: str, positions: Positions) -> F64Array:
        """Dequantized operand rows of a matmul, 0 for gate/up and 1 for down."""

    @abc.abstractmethod
    def weight(self, leg: int, expert: int, columns: Positions) -> F64Array:
        """Dequantized weight rows of a matmul."""

    def inner_rows(self, result: Any, positions: Positions) -> F64Array | None:
        """Dequantized rows of a `swiglu` or `activate` result, None for what cannot be read."""
        return None

    def inner_block(self) -> int:
        """Columns of the activation that share a scale [elements]."""
        return 1

    interleaved = True
    """Whether gate and up columns take turns."""
    same_bytes = True
    """Whether all variants give the same bytes."""

    def _same(self, leg: str) -> str:
        return leg if self.same_bytes else ""

    def get(self, leg: str, variant: str) -> Step:
        """A step; made on first use."""
        key = leg, variant
        if key not in self._made:
            self._made[key] = self.make(leg, variant)
        return self._made[key]

    def cases(self) -> Iterator[Case]:
        """Every leg, then the pair and the layer, of every variant."""
        for variant in self.variants():
            if self.missing(variant):
                continue
            legs = self.legs(variant) + self.extra_legs(variant)
            for leg in dict.fromkeys(legs):
                yield Case(leg, variant, self._leg(leg, variant))
            yield Case("pair", variant, self._pair(variant))
            if "quantize" in legs:
                yield Case("layer", variant, self._layer(variant))

    def _leg(self, leg: str, variant: str) -> Callable[[], Entry]:
        def make() -> Entry:
            done = self.get(leg, variant)
            outputs, error = tuple(arrays(done.result)), self._error(leg, variant, done.result)
            same = leg if leg in ("gate_up", "down") else ""
            return Entry(done.call, outputs, self._work(leg), error, same=self._same(same))

        return make

    def _pair(self, variant: str) -> Callable[[], Entry]:
        def make() -> Entry:
            steps = [self.get(leg, variant) for leg in self.pair_legs(variant)]
            done = in_turn(*steps)
            matmuls = [self.get(leg, variant).result for leg in ("gate_up", "down")]

            def error() -> float:
                return max(self._matmul_error(i, variant, matmuls[i]) for i in (0, 1))

            work = floors.pair(self.problem, self.activations, self.weights)
            return Entry(done.call, tuple(matmuls), work, error, same=self._same("pair"))

        return make

    def pair_legs(self, variant: str) -> tuple[str, ...]:
        """Steps of both matmuls and of whatever converts their operands."""
        return ("gate_up", "down")

    def _layer(self, variant: str) -> Callable[[], Entry]:
        def make() -> Entry:
            legs = self.legs(variant)
            steps = [self.get(leg, variant) for leg in legs]
            combine = self.routed.combine(steps[-1].result)
            done = in_turn(self.routed.route, *steps, combine)
            work = floors.layer(self.problem, self.activations, self.weights)
            parts = ("route", *legs, "combine")
            outputs = (combine.result,)
            return Entry(done.call, outputs, work, None, parts, self._same("layer"))

        return make

    def _work(self, leg: str) -> Work:
        arguments = self.problem, self.activations
        if leg in ("gate_up", "down"):
            return floors.matmul(self.problem, leg == "down", *(self.activations, self.weights))
        if leg == "swiglu":
            return floors.fused(*arguments, self.weights)
        if leg == "activate":
            return floors.activate(*arguments)
        if leg in ("prepare", "prepare_inner"):
            return floors.prepare(self.problem, leg == "prepare_inner", self.activations)
        return floors.quantize(*arguments)

    def _error(self, leg: str, variant: str, result: Any) -> Callable[[], float] | None:
        if leg in ("gate_up", "down"):
            return lambda: self._matmul_error(int(leg == "down"), variant, result)
        if leg in ("swiglu", "activate"):
            rows = self.inner_rows(result, self.problem.sampled_rows[:1])
            return None if rows is None else lambda: self._inner_error(variant, result)
        return None

    def _product(self, leg: int, variant: str, columns: Positions) -> F64Array:
        """Exact outputs of sampled rows; computed once for all variants of the same operands."""
        key = leg, self.same_bytes or variant, columns.tobytes()
        if key not in self._exact:
            self._exact[key] = exact.product(
                self.problem,
                lambda at: self.rows(leg, variant, at),
                lambda expert, of: self.weight(leg, expert, of),
                columns,
            )
        return self._exact[key]

    def _matmul_error(self, leg: int, variant: str, result: Any) -> float:
        columns = exact.sampled_columns(self.model.matmuls[leg][0])
        wanted = self._product(leg, variant, columns)
        found = exact.sample_bf16(self.memory.read, result, self.problem)
        return exact.relative_error(found[:, columns], wanted)

    def _inner_error(self, variant: str, result: Any) -> float:
        d = self.model.moe_dim
        columns = exact.sampled_columns(d, self.inner_block())
        if self.interleaved:
            both = np.concatenate([2 * columns, 2 * columns + 1])
        else:
            both = np.concatenate([columns, d + columns])
        wanted = self._product(0, variant, both)
        gate, up = wanted[:, : len(columns)], wanted[:, len(columns) :]
        z = oracle.gated_activation(gate, up, self.model.activation)
        found = self.inner_rows(result, self.problem.sampled_rows)
        assert found is not None, "only results that can be read have an error"
        return exact.relative_error(found[:, columns], z)
