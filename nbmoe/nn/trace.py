"""`MoETrace`: everything one forward pass computed, and how long each stage took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmoe.arrays import BFLOAT16, to_numpy

F32Array = npt.NDArray[np.float32]
U32Array = npt.NDArray[np.uint32]

_BF16 = ("rows", "gate_up", "inner", "down")
_PLAIN = ("hidden_codes", "hidden_scales", "inner_codes", "inner_scales")
_ROUTING = ("token_expert_order", "expert_start_indices", "scales_offset")


@dataclass(frozen=True, eq=False, kw_only=True)
class MoETrace:
    """Results and intermediates of one forward pass, in host memory.

    T tokens, k = experts per token, M = T * k routed rows, E experts, H = hidden size, D = moe dim.
    A shared expert that is slot 0 counts as one of the k and of the E. What a format does not have
    is None: bf16 has no codes, and only paths without a fused activation have `gate_up`.

    Attributes:
        logits: f32 [T, routed experts].
        topk_ids: i32 [T, k].
        topk_weights: f32 [T, k].
        token_expert_order: u32 [M], the source index t * k + j of each routed row.
        expert_start_indices: u32 [E + 1], first routed row of each expert.
        scales_offset: u32 [E], where each expert's scale tiles begin [128-row tiles].
        rows: bf16 [M, H], the routed rows, where they are gathered before they are quantized.
        hidden_codes: The quantized routed rows: u8 or e4m3 [M, H], packed [M, H/2] in FP4.
        hidden_scales: Their scales, of block formats in 5-D tiles.
        gate_up: bf16 [M, 2D], output of the first matmul.
        inner: bf16 [M, D], the activation between the matmuls, where it is not quantized at once.
        inner_codes: The quantized activation.
        inner_scales: Its scales.
        down: bf16 [M, H], output of the second matmul.
        shared: bf16 [T, H], output of shared experts that are computed apart.
        shared_parts: Their own `hidden_codes` to `inner_scales` by name, T rows in one group.
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
    rows: npt.NDArray[Any] | None
    hidden_codes: npt.NDArray[Any] | None
    hidden_scales: npt.NDArray[Any] | None
    gate_up: npt.NDArray[Any] | None
    inner: npt.NDArray[Any] | None
    inner_codes: npt.NDArray[Any] | None
    inner_scales: npt.NDArray[Any] | None
    down: npt.NDArray[Any]
    shared: npt.NDArray[Any] | None
    shared_parts: dict[str, npt.NDArray[Any] | None] | None
    output: npt.NDArray[Any]
    seconds: dict[str, float]

    @classmethod
    def of(
        cls, found: dict[str, Any], output: Any, num_parts: int, seconds: dict[str, float]
    ) -> MoETrace:
        """Copies what a run left to the host.

        Args:
            found: Intermediates by name.
            output: The result.
            num_parts: Parts that the logits are in.
            seconds: Wall time of each stage.
        """
        host: dict[str, Any] = {name: _on_host(found, name) for name in (*_BF16, *_PLAIN)}
        for name in (*_ROUTING, "topk_ids", "topk_weights"):
            host[name] = to_numpy(found[name])
        shared = {name: _on_host(found, name, "shared.") for name in (*_BF16, *_PLAIN)}
        parts = to_numpy(found["logits"])
        parts = parts.reshape(len(parts), num_parts, parts.shape[1] // num_parts)
        logits = parts[:, 0].copy()
        for part in range(1, num_parts):
            logits += parts[:, part]
        return cls(
            **host,
            logits=logits,
            shared=shared["down"],
            shared_parts=None if shared["down"] is None else shared,
            output=to_numpy(output, BFLOAT16),
            seconds=seconds,
        )


def _on_host(found: dict[str, Any], name: str, prefix: str = "") -> Any:
    if prefix + name not in found:
        return None
    return to_numpy(found[prefix + name], BFLOAT16 if name in _BF16 else None)


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
