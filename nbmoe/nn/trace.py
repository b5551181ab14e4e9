"""`MoETrace`: everything one forward pass computed, and how long each stage took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]
U32Array = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False, kw_only=True)
class MoETrace:
    """Results and intermediates of one forward pass, in host memory.

    T tokens, k = top-k, M = T * k routed rows, E experts, H = hidden size, D = moe dim.

    Attributes:
        logits: f32 [T, E].
        topk_ids: i32 [T, k].
        topk_weights: f32 [T, k].
        token_expert_order: u32 [M], the source index t * k + j of each routed row.
        expert_start_indices: u32 [E + 1], first routed row of each expert.
        scales_offset: u32 [E], where each expert's scale tiles begin [128-row tiles].
        hidden_codes: u8 [M, H/2], the quantized routed rows.
        hidden_scales: u8, their block scales in 5-D tiles.
        inner_codes: u8 [M, D/2], the quantized activation between the two matmuls.
        inner_scales: u8, its block scales in 5-D tiles.
        down: bf16 [M, H], output of the second matmul.
        output: bf16 [T, H].
        seconds: Wall time of each stage in execution order. On a GPU each is measured to the end of
            its kernels, which costs a synchronization a stage that a plain call does not have.
    """

    logits: F32Array
    topk_ids: npt.NDArray[np.int32]
    topk_weights: F32Array
    token_expert_order: U32Array
    expert_start_indices: U32Array
    scales_offset: U32Array
    hidden_codes: U8Array
    hidden_scales: U8Array
    inner_codes: U8Array
    inner_scales: U8Array
    down: npt.NDArray[Any]
    output: npt.NDArray[Any]
    seconds: dict[str, float]


@dataclass
class StageClock:
    """Measures stages; without `synchronize` and never entered it costs a context manager.

    Attributes:
        synchronize: Waits until the device has finished, None to measure nothing.
        on_start: Called with each stage's name, for progress displays.
        seconds: Wall time of each finished stage.
    """

    synchronize: Callable[[], None] | None = None
    on_start: Callable[[str], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the body as stage `name`."""
        if self.on_start is not None:
            self.on_start(name)
        if self.synchronize is None:
            yield
            return
        begin = time.perf_counter()
        yield
        self.synchronize()
        self.seconds[name] = time.perf_counter() - begin
