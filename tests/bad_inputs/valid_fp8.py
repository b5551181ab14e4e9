"""Valid calls of the FP8 quantizers and matmuls."""

from collections.abc import Callable
from functools import partial

import numpy as np

from nbmoe.layouts import ceil_div
from nbmoe.operand import named_dtype
from nbmoe.scale_specs import padded_rows
from tests.bad_inputs.sizes import Arguments, Sizes, bf16, codes, factors, poisoned

E4M3 = named_dtype("float8_e4m3fn")
BF16 = named_dtype("bfloat16")


def wide(blocks: int) -> int:
    """Elements of a dimension: whole blocks of 128, and 8 elements more if they are several."""
    return 128 if blocks == 1 else 128 * (blocks // 2) + 8


def groups(scales_type: str, sizes: Sizes) -> Arguments:
    """`quantize_dynamic_scaled_float8` in groups of 128."""
    rows, k = sizes.rows, wide(sizes.moe_blocks)
    return {
        "input": bf16(1, rows, k),
        "group_size_or_per_token": 128,
        "scales_type": scales_type,
        "row_offsets": sizes.starts(),
        "out": (
            poisoned((rows, k), E4M3),
            poisoned((ceil_div(k, 128), padded_rows(rows, scales_type)), named_dtype(scales_type)),
        ),
    }


def static(element: str, sizes: Sizes) -> Arguments:
    """`quantize_static_scaled_float8`, its scale an array beside bfloat16, else a number."""
    values = bf16(1, sizes.rows, 40).astype(named_dtype(element))
    return {
        "x": values,
        "scale": factors(2, 1) if element == "bfloat16" else 0.25,
        "scale_is_inverted": True,
        "row_offsets": sizes.starts(),
        "out": poisoned(values.shape, E4M3),
    }


def tensor(sizes: Sizes) -> Arguments:
    """`quantize_tensor_dynamic_scaled_float8`."""
    values = bf16(1, sizes.rows, 40)
    return {
        "x": values,
        "row_offsets": sizes.starts(),
        "workspace": poisoned((1024,), np.float32),
        "out": (poisoned(values.shape, E4M3), poisoned((1,), np.float32)),
    }


def operands(sizes: Sizes, k: int, n: int) -> Arguments:
    """What both grouped matmuls take, but for scales."""
    return {
        "hidden": codes(1, "float8_e4m3fn", sizes.rows, k),
        "weight": codes(2, "float8_e4m3fn", sizes.experts, n, k),
        **sizes.groups(),
        "bias": bf16(3, sizes.experts, n),
        "estimated_total_m": sizes.rows,
        "out": poisoned((sizes.rows, n), BF16),
    }


def block_matmul(scales_type: str, sizes: Sizes) -> Arguments:
    """`grouped_dynamic_scaled_fp8_matmul`."""
    k, n = wide(sizes.moe_blocks), 16 * sizes.hidden_blocks
    across = ceil_div(k, 128)
    a_scales = factors(4, across, padded_rows(sizes.rows, scales_type))
    b_scales = factors(5, sizes.experts, ceil_div(n, 128), across)
    dtype = named_dtype(scales_type)
    arguments = operands(sizes, k, n)
    return arguments | {"a_scales": a_scales.astype(dtype), "b_scales": b_scales.astype(dtype)}


def row_matmul(sizes: Sizes) -> Arguments:
    """`grouped_rowwise_dynamic_scaled_fp8_matmul`."""
    n = 8 * sizes.hidden_blocks
    scales = {"a_scales": factors(4, sizes.rows, 1), "b_scales": factors(5, sizes.experts, n, 1)}
    return operands(sizes, 16 * sizes.moe_blocks, n) | scales


def tensor_matmul(sizes: Sizes) -> Arguments:
    """`grouped_rowwise_dynamic_scaled_fp8_matmul` with scales a tensor."""
    scales = {"a_scales": factors(4, 1), "b_scales": factors(5, sizes.experts)}
    return operands(sizes, 16 * sizes.moe_blocks, 8 * sizes.hidden_blocks) | scales


def batched_matmul(sizes: Sizes) -> Arguments:
    """`batched_dynamic_scaled_fp8_matmul`."""
    batch, m, k, n = sizes.experts, sizes.tokens, wide(sizes.moe_blocks), 8 * sizes.hidden_blocks
    across = ceil_div(k, 128)
    return {
        "a": codes(1, "float8_e4m3fn", batch, m, k),
        "b": codes(2, "float8_e4m3fn", batch, n, k),
        "a_scales": factors(3, batch, across, padded_rows(m, "float32")),
        "b_scales": factors(4, batch, ceil_div(n, 128), across),
        "out": poisoned((batch, m, n), BF16),
    }


CALLS: dict[str, Callable[[Sizes], Arguments]] = {
    **{
        f"quantize_dynamic_scaled_float8:{scales_type}": partial(groups, scales_type)
        for scales_type in ("float32", "bfloat16", "float8_e8m0fnu")
    },
    "quantize_static_scaled_float8:bfloat16": partial(static, "bfloat16"),
    "quantize_static_scaled_float8:float32": partial(static, "float32"),
    "quantize_tensor_dynamic_scaled_float8": tensor,
    "grouped_dynamic_scaled_fp8_matmul:float32": partial(block_matmul, "float32"),
    "grouped_dynamic_scaled_fp8_matmul:bfloat16": partial(block_matmul, "bfloat16"),
    "grouped_rowwise_dynamic_scaled_fp8_matmul:row": row_matmul,
    "grouped_rowwise_dynamic_scaled_fp8_matmul:tensor": tensor_matmul,
    "batched_dynamic_scaled_fp8_matmul": batched_matmul,
}
