"""`nbmoe tune`: measures the Hopper configs on this GPU and writes the table that choices use."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbmoe.bench.models import DEFAULT_MODELS, MODELS, find_model
from nbmoe.cli.options import positive_counts
from nbmoe.errors import ConfigError, DeviceError, message
from nbmoe_kernels.hopper_table import PACKAGED, VARIABLE, write_table

if TYPE_CHECKING:
    from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
    from nbmoe_kernels.tuning import TuningProblem

PAIRS = (
    "nvfp4:nvfp4",
    "mxfp4:mxfp4",
    "mxfp8:mxfp8",
    "mxfp8:mxfp4",
    "bf16:bf16",
    "bf16:mxfp4",
)
_TOKENS = (1, 16, 64, 128, 512, 4096)
_HOPPER = (9, 0)
_BAR = 24


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "tune",
        help="measure the tile shapes of the Hopper matmul on this GPU",
        description="Needs a GPU of compute capability 9.0 that nobody else uses meanwhile.",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=DEFAULT_MODELS,
        metavar="NAME",
        help=f"whose matmuls to measure, out of {', '.join(MODELS)}; "
        f"by default {', '.join(DEFAULT_MODELS)}",
    )
    parser.add_argument(
        "--tokens",
        type=positive_counts,
        default=_TOKENS,
        metavar="T,T,...",
        help=f"batch sizes, by default {','.join(map(str, _TOKENS))}",
    )
    parser.add_argument(
        "--pairs",
        nargs="+",
        choices=PAIRS,
        default=PAIRS,
        metavar="PAIR",
        help=f"formats of tokens and weights, out of {', '.join(PAIRS)}; by default all",
    )
    parser.add_argument(
        "--table",
        type=Path,
        default=PACKAGED,
        metavar="FILE",
        help="what to write, by default the table of this installation; "
        f"{VARIABLE}=FILE makes choices use another one",
    )
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0.

    Raises:
        ConfigError: a model is unknown, or the table cannot be written.
        DeviceError: there is no such GPU here.
    """
    from nbmoe_kernels.tuning import tune

    problems = tuning_problems(args.models, args.tokens, args.pairs)
    target: Path = args.table
    # Better found before minutes of measuring.
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(message("tune", "--table", "a file that can be written", target))
    stopwatch = make_stopwatch()
    measurements = tune(problems, stopwatch, show_progress)
    print(file=sys.stderr)
    about = {
        "card": stopwatch.card,
        "date": datetime.date.today().isoformat(),
        "command": f"nbmoe {' '.join(sys.argv[1:])}",
        "unit": "us, median with a cold L2 cache",
    }
    write_table(target, about, measurements)
    for m in measurements:
        shape = f"{m.shape.widths} x {m.shape.warpgroups}, {m.shape.blocks_per_sm} an SM"
        sizes = f"n {m.n} k {m.k} slots {m.num_active} rows {m.rows}"
        print(f"{m.a_format} x {m.b_format}  {sizes:<40}{m.microseconds:9.1f} us  {shape}")
    print(f"wrote {target}")
    return 0


def tuning_problems(
    models: Sequence[str], tokens: Sequence[int], pairs: Sequence[str]
) -> tuple[TuningProblem, ...]:
    """Both matmuls of the models, for each pair of formats and batch size.

    Of batches that choices do not tell apart the largest is measured.

    Raises:
        ConfigError: a model is unknown.
    """
    from nbmoe_kernels.tuning import TuningProblem

    found = (
        TuningProblem(a_format, b_format, n, k, model.experts, count * model.top_k)
        for a_format, _, b_format in (pair.partition(":") for pair in pairs)
        for model in map(find_model, models)
        for n, k in model.matmuls
        for count in sorted(tokens)
    )
    return tuple({replace(p, total_rows=p.rows): p for p in found}.values())


def show_progress(
    done: int, total: int, problem: TuningProblem, config: HopperMatmulConfig
) -> None:
    """One line that grows; on something that is no terminal a line every tenth."""
    filled = _BAR * done // total
    what = f"n {problem.n} k {problem.k} rows {problem.rows}: {config.name}"
    line = f"[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{total} {what}"
    if sys.stderr.isatty():
        print(f"\r{line:.118}\033[K", end="", file=sys.stderr, flush=True)
    elif done % max(total // 10, 1) == 0:
        print(line, file=sys.stderr, flush=True)


def make_stopwatch() -> Any:
    """What measures a launch on the current GPU.

    Raises:
        DeviceError: there is none of compute capability 9.0.
    """
    from nbmoe.backend import problem
    from nbmoe.gpus import find_gpus

    rule = "a GPU of compute capability 9.0, whose configs are measured"
    trouble = problem("gpu")
    if trouble is not None:
        raise DeviceError(message("tune", "GPU", rule, trouble.reason, trouble.remedy))
    gpus, _ = find_gpus()
    if gpus[0].capability != _HOPPER:
        got = "{} of {}.{}".format(gpus[0].name, *gpus[0].capability)
        raise DeviceError(message("tune", "GPU", rule, got))
    return Stopwatch()


class Stopwatch:
    """Times launches on random operands, which it keeps for the next config of the problem."""

    def __init__(self) -> None:
        """Takes the current GPU."""
        from nbmoe.backend import executor
        from nbmoe.bench.timing import Timer

        self.timer = Timer()
        self.card = str(self.timer.device.name)
        self._run = executor("gpu")
        self._held: tuple[TuningProblem | None, dict[str, Any]] = (None, {})

    def __call__(self, problem: TuningProblem, config: HopperMatmulConfig) -> float:
        """Microseconds of a launch."""
        from nbmoe.arrays import describe
        from nbmoe_kernels.matmul_grouped_sm90 import launch_matmul_grouped_sm90

        if self._held[0] != problem:
            self._held = (None, {})
            self._held = (problem, random_operands(problem))
        pointers: dict[str, Any] = {
            name: describe("tune", name, a).pointer for name, a in self._held[1].items()
        }

        def call(stream: Any) -> None:
            launch_matmul_grouped_sm90(
                self._run,
                **pointers,
                expert_scales=0,
                a_row_scales=0,
                bias=0,
                num_active=problem.num_active,
                num_rows=problem.total_rows,
                n=problem.n,
                k=problem.k,
                has_row_scales=False,
                has_expert_scales=False,
                has_bias=False,
                config=config,
                stream=stream,
            )

        try:
            return float(self.timer.measure(self.timer.capture(call)).clean.median)
        finally:
            self.timer.forget()


def random_operands(problem: TuningProblem, backend: str = "gpu") -> dict[str, Any]:
    """Operands of the launcher on a backend; speed depends on their sizes and the routing only."""
    from nbmoe.arrays import to_backend
    from nbmoe_kernels.prepared_tokens import prepared_token_bytes
    from nbmoe_kernels.prepared_weights import UNIT_KINDS, k64_count, n64_count

    rng = np.random.default_rng(0)
    slots, rows = problem.num_active, problem.total_rows
    units = slots * n64_count(problem.n) * k64_count(problem.k)
    weights = units * UNIT_KINDS[problem.b_format].unit_bytes
    tokens = prepared_token_bytes(rows, slots, problem.k)
    counts = np.bincount(rng.integers(0, slots, rows), minlength=slots)
    starts = np.concatenate([[0], np.cumsum(counts)])
    arrays: dict[str, Any] = {
        "output": np.zeros(rows * problem.n, np.uint16),
        "tokens": np.resize(rng.integers(0, 0x3C, 1 << 20).astype(np.uint8), tokens),
        "weights": np.resize(rng.integers(0, 256, (1 << 20) + 1).astype(np.uint8), weights),
        "expert_start": starts.astype(np.uint32),
        "expert_ids": np.arange(slots, dtype=np.int32),
    }
    return {name: to_backend(array, backend) for name, array in arrays.items()}
