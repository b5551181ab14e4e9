"""Which experts each token goes to: the draw that torch makes on a GPU, made without torch.

The peers' benchmarks draw `torch.rand(T, E, device="cuda")` with seed 0 and take each token's k
largest. With the same numbers here the same experts are active for everyone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbmoe.bench.models import Model
from nbmoe.errors import ConfigError, message

F32Array = npt.NDArray[np.float32]
U32Array = npt.NDArray[np.uint32]

SKEWS = ("uniform", "zipf", "one-expert")
SAMPLED_ROWS = 6

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
# torch gives each of so many threads four numbers in turn: 256 a block, 8 blocks on an SM.
_BLOCK, _RESIDENT_THREADS, _PER_THREAD = 256, 2048, 4


def philox(counters: U32Array, key: tuple[int, int]) -> U32Array:
    """Philox-4x32 with 10 rounds (Salmon et al., 2011): four random words of each counter.

    Args:
        counters: (n, 4).
        key: Two words.

    Returns:
        (n, 4).
    """
    a, b, c, d = (counters[:, i].astype(np.uint64) for i in range(4))
    first, second = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        shift = np.uint64(32)
        a, b = (right >> shift) ^ b ^ np.uint64(first), right & _LOW
        c, d = (left >> shift) ^ d ^ np.uint64(second), left & _LOW
        first = (first + _KEY_STEPS[0]) & 0xFFFFFFFF
        second = (second + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([a, b, c, d], axis=1).astype(np.uint32)


def uniform_draw(rows: int, columns: int, seed: int, processors: int = 132) -> F32Array:
    """What `torch.rand(rows, columns, device="cuda")` gives after `manual_seed(seed)`.

    Args:
        rows: Tokens.
        columns: Experts.
        seed: Of torch's generator.
        processors: Multiprocessors of the GPU, which bound the threads that draw.
    """
    size = rows * columns
    blocks = min(-(-size // _BLOCK), processors * (_RESIDENT_THREADS // _BLOCK))
    threads = blocks * _BLOCK
    calls = -(-size // (threads * _PER_THREAD))
    # Counter: call in the low half, thread in the high half. Number i of a thread's call lies
    # `threads` elements behind number i - 1.
    counters = np.zeros((calls, threads, 4), np.uint32)
    counters[..., 0] = np.arange(calls, dtype=np.uint32)[:, np.newaxis]
    counters[..., 2] = np.arange(threads, dtype=np.uint32)
    words = philox(counters.reshape(-1, 4), (seed & 0xFFFFFFFF, seed >> 32))
    words = words.reshape(calls, threads, 4).transpose(0, 2, 1).ravel()[:size]
    # (0, 1], each operation rounded to float32; torch turns the 1 around to 0.
    values = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    values[values == 1] = 0
    return values.reshape(rows, columns)


@dataclass(frozen=True, eq=False)
class Problem:
    """Tokens of a model and where they go; all on the host.

    Attributes:
        model: The layer.
        tokens: T.
        skew: "uniform"; "zipf", where expert e is wanted 1 / (e + 1) as often as the first; or
            "one-expert", where every token also goes to expert 0.
        seed: Of the draw.
    """

    model: Model
    tokens: int
    skew: str = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.skew not in SKEWS:
            raise ConfigError(message("bench", "--skew", f"one of {', '.join(SKEWS)}", self.skew))

    @functools.cached_property
    def scores(self) -> F32Array:
        """[T, E]: logits whose k largest are the ids."""
        draw = uniform_draw(self.tokens, self.model.experts, self.seed)
        if self.skew == "zipf":
            # The k largest of log(weight) + Gumbel noise are k weighted draws without replacement.
            noise = -np.log(-np.log(np.clip(draw, 1e-30, 1 - 2.0**-24)))
            draw = noise - np.log(np.arange(1, self.model.experts + 1))
        elif self.skew == "one-expert":
            draw[:, 0] = 2
        return np.ascontiguousarray(draw, np.float32)

    @functools.cached_property
    def ids(self) -> npt.NDArray[np.int32]:
        """[T, k] expert ids, best first."""
        order = np.argsort(-self.scores, axis=1, kind="stable")
        return np.ascontiguousarray(order[:, : self.model.top_k], np.int32)

    @property
    def rows(self) -> int:
        """Routed rows, S = T k."""
        return self.tokens * self.model.top_k

    @functools.cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """[E] rows of each expert."""
        return np.bincount(self.ids.ravel(), minlength=self.model.experts)

    @functools.cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """[E + 1] first row of each expert."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def active(self) -> int:
        """Experts with at least one row."""
        return int((self.counts > 0).sum())

    @functools.cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """[S] source t * k + j of each row, rows grouped by expert and by source inside."""
        return np.argsort(self.ids.ravel(), kind="stable")

    @functools.cached_property
    def row_experts(self) -> npt.NDArray[np.int64]:
        """[S] expert of each row."""
        return np.repeat(np.arange(self.model.experts), self.counts)

    @functools.cached_property
    def sampled_rows(self) -> npt.NDArray[np.int64]:
        """A few rows, the first and the last among them, to compare with float64."""
        return np.unique(np.linspace(0, self.rows - 1, SAMPLED_ROWS).astype(np.int64))
