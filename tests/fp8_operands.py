"""Random operands of FP8 matmuls, made without the code under test."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
ODD_SCALES = np.float32([0, 1e-45, 1e-39, 1e-30, 1e-23, 3e4])


@dataclass
class Fp8Problem:
    """Operands of a grouped matmul; scales are a block of 128, or a row where K is one block."""

    starts: NDArray[np.uint32]
    expert_ids: NDArray[np.int32]
    hidden: NDArray[np.uint8]
    weight: NDArray[np.uint8]
    a_scales: NDArray[Any]
    b_scales: NDArray[Any]
    bias: NDArray[Any]

    def arguments(self) -> tuple[Any, ...]:
        """hidden, weight, a_scales, b_scales, expert_start, expert_ids."""
        operands = (self.hidden, self.weight, self.a_scales, self.b_scales)
        return *operands, self.starts, self.expert_ids

    def slots(self) -> list[tuple[slice, int]]:
        """Rows and expert of each slot that has both."""
        bounds = zip(self.starts[:-1], self.starts[1:], self.expert_ids, strict=True)
        return [(slice(int(b), int(e)), int(i)) for b, e, i in bounds if i >= 0 and b < e]


def codes(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """e4m3 codes, all but NaN equally likely, so from subnormals to the largest."""
    drawn = rng.integers(0, 254, shape, dtype=np.uint8)
    return np.where(drawn >= 127, drawn + 1, drawn).astype(np.uint8)


def scales(rng: np.random.Generator, shape: tuple[int, ...], odd: bool) -> NDArray[np.float32]:
    """Positive scales, with `odd` a tenth of them 0, subnormal or far away."""
    usual = np.exp2(rng.uniform(-10, 2, shape)).astype(np.float32)
    hit = (rng.random(shape) < 0.1) & odd
    return np.where(hit, rng.choice(ODD_SCALES, shape), usual).astype(np.float32)


def make_problem(
    counts: list[int],
    n: int,
    k: int,
    *,
    expert_ids: list[int] | None = None,
    rowwise: bool = False,
    scales_type: Any = np.float32,
    odd_scales: bool = False,
    spare_rows: int = 0,
    seed: int = 0,
) -> Fp8Problem:
    """A problem whose rows are `counts` for each slot, and some that no slot owns."""
    rng = np.random.default_rng(seed)
    ids = list(range(len(counts))) if expert_ids is None else expert_ids
    experts = max(len(counts), 1 + max(ids))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    m = int(starts[-1]) + spare_rows
    blocks = -(-k // 128)
    a_shape = (m, 1) if rowwise else (blocks, -(-m // 8) * 8)
    b_shape = (experts, n, 1) if rowwise else (experts, -(-n // 128), blocks)
    a_scales = scales(rng, a_shape, odd_scales)
    if not rowwise:
        a_scales[:, m:] = np.nan  # no row has these
    return Fp8Problem(
        starts,
        np.array(ids, np.int32),
        codes(rng, (m, k)),
        codes(rng, (experts, n, k)),
        a_scales.astype(scales_type),
        scales(rng, b_shape, odd_scales).astype(scales_type),
        rng.standard_normal((experts, n), dtype=np.float32).astype(ml_dtypes.bfloat16),
    )


def exact_result(problem: Fp8Problem, bias: bool = False) -> tuple[Any, Any]:
    """float64 results, and how far the specification's may be before its rounding to bf16.

    A tensor-core step cuts 17 addends 2**-25 below the largest and the sum to 24 bits; no addend
    exceeds the sum of all magnitudes. A block's fma and scale product round once each.
    """
    m, k = problem.hidden.shape
    n = problem.weight.shape[1]
    result, bound = np.zeros((m, n)), np.zeros((m, n))
    per_step = 17 * 2.0**-25 + 2.0**-23
    rowwise = problem.b_scales.ndim == 3 and problem.b_scales.shape[1:] == (n, 1)
    a_scales, b_scales = problem.a_scales.astype(float), problem.b_scales.astype(float)
    for rows, expert in problem.slots():
        a, b = E4M3_VALUES[problem.hidden[rows]], E4M3_VALUES[problem.weight[expert]]
        width = k if rowwise else 128
        for block, begin in enumerate(range(0, k, width)):
            columns = slice(begin, begin + width)
            if rowwise:
                scale = a_scales[rows] * b_scales[expert].T
            else:
                scale = a_scales[block, rows, None] * b_scales[expert, np.arange(n) // 128, block]
            magnitude = np.abs(a[:, columns]) @ np.abs(b[:, columns]).T
            result[rows] += a[:, columns] @ b[:, columns].T * scale
            steps = -(-min(width, k - begin) // 64) * 4
            # Blocks after this one round the sum that it is part of.
            roundings = 3 + -(-k // width) - block
            bound[rows] += magnitude * scale * (steps * per_step + roundings * 2.0**-24) * 1.01
            # Products of scales below the smallest float32.
            bound[rows] += 2.0**-149 * (1 + magnitude * (1 + b_scales[expert].max()))
        if bias:
            result[rows] += problem.bias[expert].astype(float)
            bound[rows] += np.abs(result[rows]) * 2.0**-24
    return result, bound
