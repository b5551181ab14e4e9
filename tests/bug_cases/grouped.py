"""Small grouped problems for the bug cases, quantized by the specification."""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nbmoe import ops, reference
from nbmoe.formats import NVFP4, BlockFormat
from nbmoe.layouts import scales_offset

BF16 = ml_dtypes.bfloat16


def types(fmt: BlockFormat) -> dict[str, Any]:
    """Keywords that name a block format to the quantizers."""
    scales = "float8_e4m3fn" if fmt is NVFP4 else fmt.scales_dtype
    return {
        "sf_vector_size": fmt.block,
        "scales_type": scales,
        "out_type": fmt.codes_dtype,
    }


def bf16(rng: np.random.Generator, *shape: int) -> NDArray[Any]:
    """Normal bfloat16."""
    return rng.standard_normal(shape, dtype=np.float32).astype(BF16)


def starts_of(counts: list[int]) -> NDArray[np.uint32]:
    """Row offsets of slots with so many rows."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)


def quantize_weights(w: NDArray[Any], fmt: BlockFormat) -> tuple[NDArray[Any], NDArray[Any]]:
    """Codes and scale tiles of (E, N, K) weights."""
    pairs = [reference.quantize_dynamic_block_scaled(expert, **types(fmt)) for expert in w]
    codes, scales = zip(*pairs, strict=True)
    return np.stack(codes), np.stack(scales)


@dataclass(frozen=True)
class Problem:
    """Operands of a grouped matmul."""

    fmt: BlockFormat
    counts: list[int]
    x: NDArray[Any]
    hidden: NDArray[Any]
    a_scales: NDArray[Any]
    weight: NDArray[Any]
    b_scales: NDArray[Any]
    ids: NDArray[np.int32]

    @property
    def starts(self) -> NDArray[np.uint32]:
        """(S + 1,) row offsets."""
        return starts_of(self.counts)

    @property
    def factors(self) -> dict[str, Any]:
        """Keywords that NVFP4 needs."""
        one = np.ones(len(self.weight), np.float32)
        return {"expert_scales": one} if self.fmt.has_tensor_scale else {}

    def rows(self, slot: int) -> slice:
        """Rows of a slot."""
        return slice(int(self.starts[slot]), int(self.starts[slot + 1]))

    def change(self, **parts: Any) -> "Problem":
        """The problem with some operands replaced."""
        return replace(self, **parts)

    def product(self, kernels: Any, **kwargs: Any) -> Any:
        """The grouped matmul on a backend."""
        return kernels(ops.grouped_matmul_block_scaled, *self._operands(), **self._keys(kwargs))

    def swiglu(self, kernels: Any, **kwargs: Any) -> Any:
        """The fused grouped matmul on a backend."""
        ones = np.ones(len(self.ids), np.float32)
        extra = {"c_input_scales": ones} if self.fmt.has_tensor_scale else {}
        keys = self._keys(extra | kwargs)
        return kernels(ops.grouped_matmul_blocked_swiglu, *self._operands(), **keys)

    def _operands(self) -> tuple[Any, ...]:
        offsets = scales_offset(self.starts)
        first = (self.hidden, self.weight, self.a_scales, self.b_scales)
        return (*first, self.starts, offsets, self.ids)

    def _keys(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"format": self.fmt.name, **self.factors, **kwargs}


def problem(
    fmt: BlockFormat, counts: list[int], n: int = 64, k: int = 64, seed: int = 0
) -> Problem:
    """Random rows and weights, one expert a slot."""
    rng = np.random.default_rng(seed)
    x, w = bf16(rng, sum(counts), k), bf16(rng, len(counts), n, k)
    starts, ids = starts_of(counts), np.arange(len(counts), dtype=np.int32)
    ones = np.ones(len(counts), np.float32) if fmt.has_tensor_scale else None
    hidden, a_scales = reference.grouped_quantize_dynamic_block_scaled(
        x, starts, scales_offset(starts), ids, ones, **types(fmt)
    )
    return Problem(fmt, counts, x, hidden, a_scales, *quantize_weights(w, fmt), ids)
