"""Weights and activations of a layer in float64, dequantized from any format."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from nbmoe import codecs
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.codecs import decode_bf16
from nbmoe.formats import E4M3, FORMATS
from nbmoe.layouts import ceil_div
from nbmoe.nn.trace import MoETrace
from nbmoe.reference import oracle

F64Array = npt.NDArray[np.float64]
_BLOCK = 128


def exact_weight(stack: ExpertStack, leg: Literal["gate_up", "down"], expert: int) -> F64Array:
    """The weight [N, K] of one expert, all scales applied.

    Args:
        stack: Weights in any format.
        leg: Which of the two.
        expert: Which expert.
    """
    codes, scales = getattr(stack, leg), getattr(stack, f"{leg}_scales")
    if stack.format == "bf16":
        return decode_bf16(codes[expert]).astype(np.float64)
    if stack.format in FORMATS:
        factors = getattr(stack, f"{leg}_weight_scale")
        factor = 1.0 if factors is None else float(factors[expert])
        fmt = FORMATS[stack.format]
        return oracle.dequantize(codes[expert], scales[expert], fmt, factor)
    values = codecs.decode(codes[expert].view(np.uint8), E4M3).astype(np.float64)
    scale = scales[expert].astype(np.float64)
    if stack.format == "fp8_block":
        n, k = values.shape
        parts = 2 if leg == "gate_up" else 1
        rows = _of_blocks(n // parts)
        blocks = ceil_div(n // parts, _BLOCK)
        row = np.concatenate([part * blocks + rows for part in range(parts)])
        scale = scale[row][:, _of_blocks(k)]
    result: F64Array = values * scale
    return result


def exact_bias(
    stack: ExpertStack, leg: Literal["gate_up", "down"], expert: int
) -> F64Array | float:
    """The bias [N] of one expert, 0 where there is none."""
    bias = getattr(stack, f"{leg}_bias")
    return 0.0 if bias is None else decode_bf16(bias[expert]).astype(np.float64)


def exact_rows(stack: ExpertStack, trace: MoETrace, name: Literal["hidden", "inner"]) -> F64Array:
    """What a matmul of a trace saw: its quantized rows, or the bfloat16 ones.

    Args:
        stack: Weights of all slots of the trace.
        trace: What a layer computed.
        name: "hidden" for the input of gate and up, "inner" for that of down.

    Returns:
        [M, K] float64.
    """
    codes, scales = getattr(trace, f"{name}_codes"), getattr(trace, f"{name}_scales")
    if codes is None:
        rows = trace.rows if name == "hidden" else trace.inner
        assert rows is not None, "a path without codes keeps its rows"
        return decode_bf16(rows).astype(np.float64)
    if stack.activation_format in FORMATS:
        groups = (trace.expert_start_indices, trace.scales_offset)
        fmt = FORMATS[stack.activation_format]
        values = oracle.dequantize_groups(codes, scales, *groups, fmt)
        return values * _input_scales(stack, trace, name)[:, np.newaxis]
    values = codecs.decode(codes.view(np.uint8), E4M3).astype(np.float64)
    factors = scales.astype(np.float64)  # of groups by rows, of rows, or one
    if factors.ndim == 2:
        factors = factors[:, : len(codes)].T
    if stack.activation_format == "fp8_block":
        factors = factors[:, _of_blocks(codes.shape[1])]
    result: F64Array = values * factors
    return result


def _input_scales(stack: ExpertStack, trace: MoETrace, name: str) -> F64Array:
    """The NVFP4 input scale of each row; 1 for MX formats."""
    rows = len(trace.token_expert_order)
    scales = stack.gate_up_input_scale if name == "hidden" else stack.down_input_scale
    if scales is None:
        return np.ones(rows)
    exact = 1.0 / (np.float32(1) / scales).astype(np.float64)  # what the kernels divide by
    if name == "hidden":
        return np.full(rows, exact.max())
    starts = trace.expert_start_indices.astype(np.int64)
    return np.repeat(exact, starts[1:] - starts[:-1])


def _of_blocks(size: int) -> npt.NDArray[np.int64]:
    """The block of each of `size` rows or columns."""
    return np.arange(size) // _BLOCK
