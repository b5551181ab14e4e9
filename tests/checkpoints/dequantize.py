"""Weights as numbers, by decode tables that are ml_dtypes' and not the project's."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from nbmoe.checkpoints.stack import ExpertStack

BLOCK = 128


def nibbles(codes: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """f64 [..., 2K] of packed e2m1 codes [..., K]."""
    pair = [codes >> 4, codes & 15] if high_first else [codes & 15, codes >> 4]
    flat = np.stack(pair, axis=-1).reshape(*codes.shape[:-1], -1)
    return flat.view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def e4m3(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def e8m0(scales: np.ndarray) -> np.ndarray:
    return scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def blocks_to_elements(scales: np.ndarray, n: int, k: int) -> np.ndarray:
    """[E, N, K] of scales of 128 x 128 blocks whose last ones may be partial."""
    return np.repeat(np.repeat(scales, BLOCK, axis=1)[:, :n], BLOCK, axis=2)[:, :, :k]


def _matrix(format_name: str, codes: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """f64 [E, N, K] of one projection without second-level scales."""
    if format_name == "bf16":
        return codes.astype(np.float64)
    assert scales is not None
    if format_name == "nvfp4":
        return nibbles(codes) * np.repeat(e4m3(scales), 16, axis=-1)
    if format_name == "mxfp4":
        return nibbles(codes) * np.repeat(e8m0(scales), 32, axis=-1)
    if format_name == "mxfp8":
        return e4m3(codes) * np.repeat(e8m0(scales), 32, axis=-1)
    if format_name == "fp8_block":
        values = e4m3(codes)
        return values * blocks_to_elements(scales.astype(np.float64), *values.shape[1:])
    return e4m3(codes) * scales


def projections(stack: ExpertStack) -> dict[str, np.ndarray]:
    """f64 weights of a stack: gate and up [E, D, H], down [E, H, D]."""
    halves = {}
    for i, name in enumerate(("gate_proj", "up_proj")):
        rows = slice(i * stack.moe_dim, (i + 1) * stack.moe_dim)
        scales = stack.gate_up_scales
        if scales is not None:
            half = scales.shape[1] // 2
            scales = scales[:, i * half : (i + 1) * half]
        halves[name] = _matrix(stack.format, stack.gate_up[:, rows], scales)
    halves["down_proj"] = _matrix(stack.format, stack.down, stack.down_scales)
    for names, factor in (
        (("gate_proj", "up_proj"), stack.gate_up_weight_scale),
        (("down_proj",), stack.down_weight_scale),
    ):
        for name in names:
            if factor is not None:
                halves[name] = halves[name] * factor.astype(np.float64)[:, None, None]
    return halves


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
