"""Launches of the matmul kernels, for their mutants to be run on."""

from collections.abc import Callable
from typing import Any

import numpy as np

from emulate.mutate.slots import EXPERTS, slots, unwritten

Arguments = tuple[Any, ...]
_KINDS = ("nvfp4", "mxfp4", "mxfp8", "bf16", "e4m3")


def _pipeline(kernel: Any) -> tuple[str, str, int, int]:
    """Of a matmul's name: operand kinds, rows of a block, and a K that fills the stages once and
    goes on."""
    head, tail = kernel.name.split("_sm80_")
    kinds = [kind for kind in head.split("_") if kind in _KINDS]
    parts = {part[0]: part for part in tail.split("_")[:4]}
    stages, copy_bytes = int(parts["s"][1:]), int(parts["c"][1:])
    block_rows = int(parts["m"][1:].partition("n")[0])
    return kinds[-2:][0], kinds[-1], block_rows, 128 * stages + (32 if copy_bytes == 16 else 48)


def _codes(random: np.random.Generator, kind: str, elements: int) -> np.ndarray:
    """Bytes of codes, none of them NaN."""
    if kind == "bf16":
        floats = random.standard_normal(elements).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if kind in ("mxfp8", "e4m3"):
        return (random.integers(0, 256, elements) & 0xBF).astype(np.uint8)
    return random.integers(0, 256, elements // 2).astype(np.uint8)


def _scales(random: np.random.Generator, kind: str, tiles: int, k: int) -> np.ndarray:
    """Bytes from 2^-3 to 2^3 in tiles of 128 rows."""
    if kind == "nvfp4":
        return random.integers(0x20, 0x50, tiles * -(-k // 64) * 512).astype(np.uint8)
    return random.integers(124, 131, tiles * -(-k // 128) * 512).astype(np.uint8)


def mega_ffn(kernel: Any) -> tuple[int, Callable[[], Arguments]]:
    """Grid and arguments of the portable MegaFFN: both matmuls, scratch between them."""
    up_n = down_n = 128
    a_kind, b_kind, block_rows, k = _pipeline(kernel)
    kinds = {parameter.name: parameter.dtype for parameter in kernel.params}
    scale_type = np.uint16 if kinds["c_swiglu_scales"] == "u16" else np.uint32

    def args() -> Arguments:
        random = np.random.default_rng(3)
        rows, starts, offsets = slots(block_rows + 1)
        moe_dim, tiles = up_n // 2, 1 + -(-(block_rows + 1) // 128)
        codes = unwritten(rows * moe_dim * (8 if a_kind == "mxfp8" else 4) // 32)
        scales = unwritten(tiles * 512 // np.dtype(scale_type).itemsize, scale_type)
        segments = -(-rows // block_rows) + len(EXPERTS)
        by_name = {
            "output": unwritten(rows * down_n // 2),
            "c_packed": codes,
            "c_swiglu_scales": scales,
            "counters": np.zeros(segments, np.uint32),
            "c_bytes": codes.view(np.uint8),
            "c_scale_bytes": scales.view(np.uint8),
            "hidden": _codes(random, a_kind, rows * k),
            "up_weight": _codes(random, b_kind, 2 * up_n * k),
            "down_weight": _codes(random, b_kind, 2 * down_n * moe_dim),
            "a_scales": _scales(random, a_kind, tiles, k),
            "up_b_scales": _scales(random, b_kind, 2, k),
            "down_b_scales": _scales(random, b_kind, 2, moe_dim),
            "expert_start": starts,
            "a_scale_offsets": offsets,
            "expert_ids": EXPERTS,
            "up_scales": np.array([0.75, 1.25], np.float32) / np.float32(1024),
            "down_scales": np.array([1.5, 0.5], np.float32),
            "c_input_scales": np.array([2.0, 1.0, 0.5], np.float32),
            "a_row_scales": random.integers(0x3F00, 0x4000, rows).astype(np.uint16),
            "up_bias": np.sort(random.integers(0x3C00, 0x4080, 2 * up_n)).astype(np.uint16),
            "down_bias": np.sort(random.integers(0x3C00, 0x4080, 2 * down_n)).astype(np.uint16),
            "segments": segments,
            "num_active": len(EXPERTS),
            "num_rows": rows,
            "up_n": up_n,
            "up_k": k,
            "down_n": down_n,
            "down_k": moe_dim,
            "alpha": np.float32(1.5),
            "limit": np.float32(4.0),
            **dict.fromkeys(("has_up_scales", "has_down_scales", "has_row_scales"), 1),
            **dict.fromkeys(("has_up_bias", "has_down_bias"), 1),
        }
        scalars = {name: np.uint32(v) for name, v in by_name.items() if isinstance(v, int)}
        return tuple((by_name | scalars)[parameter.name] for parameter in kernel.params)

    return 2, args


def matmul(kernel: Any) -> tuple[int, Callable[[], Arguments]]:
    """Grid and arguments of any of them, by the names of its parameters."""
    n = 128
    a_kind, b_kind, block_rows, k = _pipeline(kernel)
    is_fp8 = a_kind == "e4m3"
    kinds = {parameter.name: parameter.dtype for parameter in kernel.params}

    def args() -> Arguments:
        random = np.random.default_rng(3)
        rows, starts, offsets = slots(block_rows + 1)
        tiles = 1 + -(-(block_rows + 1) // 128)
        code_bits = 8 if a_kind == "mxfp8" else 4
        scale_type = np.float32 if kinds["b_scales"] == "f32" else np.uint16
        by_name = {
            "output": unwritten(rows * n // 2),
            "c_packed": unwritten(rows * n // 2 * code_bits // 32),
            "c_swiglu_scales": unwritten(3 * 128),
            "hidden": _codes(random, a_kind, rows * k),
            "weight": _codes(random, b_kind, 2 * n * k),
            "a_scales": _scales(random, a_kind, tiles, k),
            "b_scales": _scales(random, b_kind, 2 * -(-n // 128), k),
            "expert_start": starts,
            "a_scale_offsets": offsets,
            "expert_ids": EXPERTS,
            # Small, so that neither SwiGLU's limit nor its blocks' scales saturate.
            "expert_scales": np.array([0.75, 1.25], np.float32) / np.float32(1024),
            "c_input_scales": np.array([2.0, 1.0, 0.5], np.float32),
            "a_row_scales": random.integers(0x3F00, 0x4000, rows).astype(np.uint16),
            # Ascending, so that the last element sets its block's scale and a loop that leaves it
            # out shows.
            "bias": np.sort(random.integers(0x3C00, 0x4080, 2 * n)).astype(np.uint16),
            "num_active": len(EXPERTS),
            "num_rows": rows,
            "n": n,
            "k": k,
            "has_row_scales": 1,
            "has_expert_scales": 1,
            "has_bias": 1,
            "alpha": np.float32(1.5),
            "limit": np.float32(4.0),
            "a_scale_stride": 1 if "rowwise" in kernel.name else rows,
            "b_scale_stride_e": n,
            "b_scale_stride_n": 1,
        }
        if is_fp8:
            for name, count in (("a_scales", rows), ("b_scales", 2 * n)):
                values = random.integers(0x3F00, 0x4000, count * -(-k // 128)).astype(np.uint32)
                bits = values << 16 if scale_type is np.float32 else values.astype(np.uint16)
                by_name[name] = bits.view(scale_type)
        if kinds.get("output") == "f32":
            by_name["output"] = unwritten(rows * n, np.float32)
        if kinds.get("c_swiglu_scales") == "u16":
            by_name["c_swiglu_scales"] = unwritten(3 * 256, np.uint16)
        scalars = {name: np.uint32(v) for name, v in by_name.items() if isinstance(v, int)}
        return tuple((by_name | scalars)[parameter.name] for parameter in kernel.params)

    # The row blocks of the masked slot, of nobody, and the full one of the third slot.
    return 3, args
