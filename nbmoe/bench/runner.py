"""Runs what was asked for, one row at a time; what cannot run becomes a row that says why."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nbmoe.bench import floors
from nbmoe.bench.chain import Chain
from nbmoe.bench.entry import Case
from nbmoe.bench.formats import FORMATS
from nbmoe.bench.memory import Memory, digest
from nbmoe.bench.models import Model
from nbmoe.bench.peers import Peer
from nbmoe.bench.peers.base import Pair
from nbmoe.bench.routed import Routed
from nbmoe.bench.routing import Problem
from nbmoe.bench.row import OURS, Row
from nbmoe.bench.timing import Launch

_NOTE_CHARACTERS = 300
OTHER_BYTES = "OTHER BYTES than the first of the same leg"
_TRIAL_RUNS = 5
"""Runs that choose the fastest of a peer's ways."""
_WRONG = 2e-2
"""A way with a larger relative error does not compute the product; formats of 8 bits stay below a
fifth of it, since errors are against the dequantized operands."""


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        models: Layers.
        tokens: Numbers of tokens.
        skew: Of the routing.
        formats: Ours, by name.
        legs: Of a layer; peers run the pair.
        peers: Those that can run.
        seed: Of the routing.
        runs: Measured repetitions.
        time_limit: No new row begins after so long [s]; 0 for none.
        once: Whether to call everything once and time nothing, to fill the caches of compilers.
    """

    models: tuple[Model, ...]
    tokens: tuple[int, ...]
    formats: tuple[str, ...]
    legs: tuple[str, ...]
    peers: tuple[Peer, ...] = ()
    skew: str = "uniform"
    seed: int = 0
    runs: int = 15
    time_limit: float = 0
    once: bool = False


@dataclass
class Runner:
    """Runs a plan.

    Args:
        plan: What to run.
        timer: A `nbmoe.bench.timing.Timer`, or what stands in for one.
        memory: Where our arrays live.
        on_row: Called with each row as it is done.
    """

    plan: Plan
    timer: Any
    memory: Memory
    on_row: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)

    def run(self) -> list[Row]:
        """All rows, models first, then formats and peers, then tokens."""
        self._begin = time.monotonic()
        for model in self.plan.models:
            problems = [
                Problem(model, tokens, self.plan.skew, self.plan.seed)
                for tokens in self.plan.tokens
            ]
            self._run_ours(model, problems)
            for peer in self.plan.peers:
                self._run_peer(peer, model, problems)
        return self.rows

    def _run_ours(self, model: Model, problems: list[Problem]) -> None:
        routed: list[tuple[Routed, dict[str, float]]] = []
        for problem in problems:
            with self._attempt(self._row(problem, "", "", "route")):
                place = Routed(self.memory, problem)
                parts: dict[str, float] = {}
                routed.append((place, parts))
                self._run_cases(problem, "", place.cases(), parts)
        for name in self.plan.formats:
            weights = None
            for place, parts in routed:
                if self._is_late:
                    return
                with self._attempt(self._row(place.problem, name, "", "pair")):
                    if weights is None:
                        weights = FORMATS[name].make_weights(self.memory, model)
                    chain = FORMATS[name].make_chain(place, weights)
                    self._note_missing(chain, name)
                    self._run_cases(place.problem, name, chain.cases(), dict(parts))
            del weights
            self._forget()

    def _note_missing(self, chain: Chain, name: str) -> None:
        for variant in chain.variants():
            if reason := chain.missing(variant):
                row = self._row(chain.problem, name, variant, "pair")
                row.note = reason
                self._done(row)

    def _run_cases(
        self, problem: Problem, name: str, cases: Iterator[Case], parts: dict[str, float]
    ) -> None:
        """Runs cases; `parts` collects the times of legs, which a layer's row names."""
        seen: dict[str, str] = {}
        for case in cases:
            if case.leg.removesuffix("_inner") not in self.plan.legs or self._is_late:
                continue
            row = self._row(problem, name, case.variant, case.leg)
            with self._attempt(row):
                entry = case.make()
                row.work = entry.work
                if self.plan.once:
                    entry.call(self.timer.stream)
                    self.timer.sync()
                    continue
                launch = self.timer.capture(entry.call)
                row.times = self.timer.measure(launch, self.plan.runs)
                for array in entry.outputs:
                    self.memory.clear(array)
                launch()
                self.timer.sync()
                row.digest = digest([self.memory.read(array) for array in entry.outputs])
                if entry.same and seen.setdefault(entry.same, row.digest) != row.digest:
                    row.note = OTHER_BYTES
                if entry.error is not None:
                    row.error = entry.error()
                parts[f"{case.leg} {case.variant}"] = row.times.dirty.median
                of_legs = {
                    leg: parts.get(f"{leg} {case.variant}", parts.get(f"{leg} "))
                    for leg in entry.parts
                }
                row.others = {leg: us for leg, us in of_legs.items() if us is not None}
                self._done(row)

    def _run_peer(self, peer: Peer, model: Model, problems: list[Problem]) -> None:
        weights = None
        for problem in problems:
            if "pair" not in self.plan.legs or self._is_late:
                break
            row = self._row(problem, f"{peer.weights} x {peer.activations}", "", "pair")
            row.library = peer.name
            with self._attempt(row), self._torch_stream():
                if weights is None:
                    weights = peer.make_weights(model)
                row.work = floors.pair(problem, peer.activations, peer.weights)
                self._run_pairs(row, peer.make_pairs(weights, problem))
                if row.note or not self.plan.once:
                    self._done(row)
        del weights
        self._forget()

    def _run_pairs(self, row: Row, pairs: Iterator[tuple[str, Pair]]) -> None:
        """Tries all ways of a peer, then measures the fastest one."""
        best: tuple[float, str, Pair, Launch] | None = None
        failures = []
        for label, pair in pairs:
            try:
                if self.plan.once:
                    pair.call()
                    self.timer.sync()
                    continue
                launch = torch_graph(pair.call)
                trial = self.timer.measure(launch, _TRIAL_RUNS).dirty.median
                off_by = pair.error()
            except Exception as error:
                failures.append(f"{label}: {brief(error)}")
                continue
            row.others[label] = round(trial, 2)
            if not off_by <= _WRONG:
                failures.append(f"{label}: wrong, error {off_by:.1e}")
                continue
            if best is None or trial < best[0]:
                best = trial, label, pair, launch
        row.note = "; ".join(failures)
        if best is not None:
            _, row.variant, pair, launch = best
            row.times = self.timer.measure(launch, self.plan.runs)
            row.digest = digest([bytes_of(tensor) for tensor in pair.outputs()])
            row.error = pair.error()

    def _row(self, problem: Problem, name: str, variant: str, leg: str) -> Row:
        return Row(problem.model.name, problem.tokens, OURS, name, variant, leg)

    def _done(self, row: Row) -> None:
        self.rows.append(row)
        self.on_row(row)

    @property
    def _is_late(self) -> bool:
        limit = self.plan.time_limit
        return bool(limit) and time.monotonic() - self._begin > limit

    @contextmanager
    def _attempt(self, row: Row) -> Iterator[None]:
        """Turns a failure into a note on the row; everything else goes on."""
        try:
            yield
        except Exception as error:
            row.note = "; ".join(part for part in (row.note, brief(error)) if part)
            self._done(row)

    @contextmanager
    def _torch_stream(self) -> Iterator[None]:
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(int(self.timer.stream.handle))):
            yield

    def _forget(self) -> None:
        gc.collect()
        self.timer.forget()
        if self.plan.peers:
            import torch

            torch.cuda.empty_cache()


def brief(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_NOTE_CHARACTERS]


def torch_graph(call: Callable[[], Any]) -> Launch:
    """Captures torch's kernels; the launch is on torch's current stream."""
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        call()
    graph.replay()
    torch.cuda.synchronize()
    launch: Launch = graph.replay
    return launch


def bytes_of(tensor: Any) -> Any:
    """A torch tensor's bytes as numpy."""
    import torch

    return tensor.contiguous().view(torch.uint8).cpu().numpy()
