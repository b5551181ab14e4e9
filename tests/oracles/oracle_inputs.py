"""Inputs on which quantizers are compared, all exact in bf16."""

from __future__ import annotations

import hashlib

import numpy as np

ROWS, COLUMNS = 16, 256
SCALE_SHAPES = [(128, 4), (130, 6), (256, 16), (1, 1), (300, 33)]
E2M1_TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def bf16_exact(x: np.ndarray) -> np.ndarray:
    """Cuts float32 mantissas to bf16's."""
    return (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def families(block: int) -> dict[str, np.ndarray]:
    """Named (ROWS, COLUMNS) float32 matrices, made for blocks of `block` elements."""
    rng = np.random.default_rng(20)
    shape = ROWS, COLUMNS
    normal = rng.standard_normal(shape)
    power = np.exp2(rng.integers(-6, 6, (ROWS, COLUMNS // block))).repeat(block, axis=1)
    ties = rng.choice([0, 6, *E2M1_TIES], shape) * rng.choice([-1, 1], shape)
    ties[:, ::block] = 6
    zeros = normal.copy()
    zeros[:, :block] = 0
    zeros[3] = 0
    return {
        "normal": bf16_exact(normal),
        "heavy tail": bf16_exact(rng.standard_t(2, shape)),
        "ties": bf16_exact(ties),
        "ties at many exponents": bf16_exact(ties * power),
        "wide": bf16_exact(normal * power),
        "zero blocks": bf16_exact(zeros),
    }


def every_block() -> np.ndarray:
    """(65536, 32) float32: every bf16, infinities and NaNs too, times fractions on ties of e2m1."""
    sixths = [6, 0, -6, 5, 4, 3.5, 3, -2.5, 2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25]
    fractions = np.array([*sixths, *(-1.03 * f for f in sixths)], np.float32) / np.float32(6)
    bf16 = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return bf16_exact(bf16[:, None] * fractions)


def comparable(x: np.ndarray, flushes: bool) -> np.ndarray:
    """Which blocks of `every_block` a library quantizes by the specification.

    Blocks with a NaN have no code to agree on: libraries convert each element on its own. Libraries
    that flush subnormal products (`flushes`) lose elements of blocks below 2**-118.
    """
    amax = magnitudes(x)
    return np.where(np.isnan(amax), False, (amax == 0) | (amax >= 2.0**-118) | (not flushes))


def digests(x: np.ndarray, flushes: bool, codes: np.ndarray, scales: np.ndarray) -> list[str]:
    """SHA-256 of the scales of blocks without NaN and of the comparable blocks' codes."""
    finite = ~np.isnan(magnitudes(x))
    parts = scales[finite], codes[comparable(x, flushes)]
    return [hashlib.sha256(np.ascontiguousarray(part).tobytes()).hexdigest() for part in parts]


def magnitudes(x: np.ndarray) -> np.ndarray:
    """Largest magnitude of each row, NaN if any element is."""
    return np.abs(x).max(axis=1)


def block_maxima() -> np.ndarray:
    """float32 largest magnitudes of MX blocks: every bf16 between 2**-100 and 2**100."""
    bits = np.arange(27 << 7, 227 << 7, dtype=np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def scale_matrix(rows: int, columns: int) -> np.ndarray:
    """A (rows, columns) uint8 matrix of scale bytes, none of them 0."""
    return np.random.default_rng(rows).integers(1, 256, (rows, columns)).astype(np.uint8)
