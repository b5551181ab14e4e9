"""Finds the fastest Hopper config of each problem, with whatever measures a launch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nbmoe_kernels.heuristics_sm90 import hopper_matmul_candidates, rows_per_busy_slot
from nbmoe_kernels.hopper_table import Measurement, Shape
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig

_NOISE = 1.01
"""A candidate that is preferred stays so unless another is faster by more than this."""


@dataclass(frozen=True)
class TuningProblem:
    """A grouped matmul to tune: formats, sizes, and the rows that routing gives its slots."""

    a_format: str
    b_format: str
    n: int
    k: int
    num_active: int
    total_rows: int

    @property
    def rows(self) -> int:
        """Of a slot that has any, on average."""
        return rows_per_busy_slot(self.num_active, self.total_rows)

    def candidates(self) -> tuple[HopperMatmulConfig, ...]:
        """The configs that nothing speaks against, the preferred ones first."""
        found = hopper_matmul_candidates(
            self.a_format, self.b_format, self.n, self.k, self.num_active, self.total_rows
        )
        return tuple(c.config for c in found if not c.rejected)


Time = Callable[[TuningProblem, HopperMatmulConfig], float]
"""Microseconds of a launch."""
Progress = Callable[[int, int, TuningProblem, HopperMatmulConfig], None]
"""Told before each measurement: how many are done, of how many, and what comes."""


def tune(
    problems: Iterable[TuningProblem], time: Time, progress: Progress
) -> tuple[Measurement, ...]:
    """Measures all candidates of all problems; the fastest of each.

    Args:
        problems: what to tune.
        time: measures one launch.
        progress: is told what comes next.
    """
    work = [(problem, problem.candidates()) for problem in problems]
    total = sum(len(candidates) for _, candidates in work)
    done = 0
    found = []
    for problem, candidates in work:
        times = []
        for config in candidates:
            progress(done, total, problem, config)
            times.append(time(problem, config))
            done += 1
        best = min(times)
        config = next(c for c, t in zip(candidates, times, strict=True) if t <= _NOISE * best)
        found.append(_measurement(problem, config, times[candidates.index(config)]))
    return tuple(found)


def _measurement(
    problem: TuningProblem, config: HopperMatmulConfig, microseconds: float
) -> Measurement:
    return Measurement(
        problem.a_format,
        problem.b_format,
        problem.n,
        problem.k,
        problem.num_active,
        problem.rows,
        Shape.of(config),
        round(microseconds, 2),
    )
