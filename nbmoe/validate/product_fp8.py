"""Checks of the operands of FP8 matmuls: e4m3 codes, and scales a block, a row or a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nbmoe.arrays import Array
from nbmoe.errors import DTypeError, ScaleError, ShapeError
from nbmoe.layouts import ceil_div
from nbmoe.validate.call import Call
from nbmoe.validate.elements import FP8, Elements
from nbmoe.validate.grouped import Groups, check_groups, check_slot_count, take_groups
from nbmoe.validate.product import take_bias, take_total_m, take_weight_sizes
from nbmoe.validate.routing import first

BLOCK = 128
MULTIPLE_OF_K = 8
SCALES = Elements(("float32", "bfloat16", "uint16"), "or bfloat16", 4)


@dataclass(frozen=True)
class Fp8Product:
    """Operands and sizes of a grouped FP8 matmul, checked, but for its scales."""

    hidden: Array
    weight: Array
    groups: Groups
    bias: Array | None
    num_rows: int
    num_experts: int
    n: int
    k: int
    estimated_total_m: int


def take_fp8_product(
    call: Call,
    hidden: Any,
    weight: Any,
    expert_start: Any,
    expert_ids: Any,
    bias: Any,
    estimated_total_m: Any,
) -> Fp8Product:
    """Takes the operands of a grouped matmul, except the scales, and checks that they fit.

    Raises:
        ShapeError, LayoutError, DTypeError, ArgTypeError, RangeError: an operand does not fit.
    """
    a = call.array("hidden", hidden, FP8, "(M, K)")
    b = call.array("weight", weight, FP8, "(E, N, K)")
    groups = take_groups(call, "expert_start", expert_start, expert_ids)
    num_rows, k = a.shape
    total_m = take_total_m(call, estimated_total_m, num_rows)
    call.multiple("hidden", "K", k, MULTIPLE_OF_K, "pad K with zeros")
    num_experts, n = take_weight_sizes(call, b, k, None)
    check_slot_count(call, groups, "weight", num_experts)
    taken_bias = take_bias(call, bias, num_experts, n)
    return Fp8Product(a, b, groups, taken_bias, num_rows, num_experts, n, k, total_m)


def take_block_scales(
    call: Call, a_scales: Any, b_scales: Any, lead: tuple[int, ...], m: int, n: int, k: int
) -> tuple[Array, Array]:
    """Takes scales of groups of 128 and of blocks of 128 x 128.

    Args:
        call: The call.
        a_scales: (ceil(K/128), Mpad), or (B, ceil(K/128), Mpad) in a batch of B.
        b_scales: (E or B, ceil(N/128), ceil(K/128)).
        lead: (B,) in a batch, else ().
        m: Rows of the activations.
        n: Rows of a weight.
        k: Elements of a row.

    Returns:
        Both.

    Raises:
        ScaleError: one is None.
        DTypeError: they are not of one type.
        ShapeError, LayoutError, ArgTypeError: as `Call.array`.
    """
    batch = "B, " if lead else ""
    symbols = f"({batch}ceil(K/128), Mpad)", f"({batch or 'E, '}ceil(N/128), ceil(K/128))"
    a = call.array("a_scales", a_scales, SCALES, symbols[0], missing=ScaleError)
    b = call.array("b_scales", b_scales, SCALES, symbols[1], missing=ScaleError)
    _check_types(call, a, b)
    across = ceil_div(k, BLOCK)
    numbers = ", ".join(map(str, (*lead, across)))
    hint = "scales of activations are transposed" if a.shape[-2] == m != across else ""
    rule = f"{symbols[0]} = ({numbers}, Mpad) with Mpad >= M = {m}"
    call.shape("a_scales", (*lead, across, None), rule, hint)
    if a.shape[-1] < m:
        raise ShapeError(call.message("a_scales", rule, f"shape {a.shape}"))
    down = ceil_div(n, BLOCK)
    rule = f"{symbols[1]} with ({down}, {across}) blocks"
    experts = lead[0] if lead else call.inputs["weight"].shape[0]
    call.shape("b_scales", (experts, down, across), rule)
    return a, b


def _check_types(call: Call, a_scales: Array, b_scales: Array) -> None:
    if (a_scales.dtype == "float32") != (b_scales.dtype == "float32"):
        rule = f"scales of the type of a_scales, {a_scales.dtype}"
        raise DTypeError(call.message("b_scales", rule, b_scales.dtype))


def take_row_scales(
    call: Call, a_scales: Any, b_scales: Any, p: Fp8Product
) -> tuple[Array, int, Array, tuple[int, int]]:
    """Takes scales of rows or of whole tensors.

    Args:
        call: The call.
        a_scales: (M, 1), (1, Mpad) or (1,).
        b_scales: (E, N, 1), (E, 1, 1) or (E,), of the same type.
        p: The other operands.

    Returns:
        `a_scales` and the step from row to row, `b_scales` and the steps from expert to expert and
        from row to row [elements].

    Raises:
        ScaleError: one is None.
        DTypeError: they are not of one type.
        ShapeError, LayoutError, ArgTypeError: as `Call.array`.
    """
    symbols = "(M, 1) or (1, Mpad) or (1,)"
    a = call.array("a_scales", a_scales, SCALES, symbols, missing=ScaleError)
    if not (a.size == 1 or (len(a.shape) == 2 and _is_row(a.shape, p.num_rows))):
        rule = f"{symbols} with M = {p.num_rows}"
        raise ShapeError(call.message("a_scales", rule, f"shape {a.shape}"))
    symbols = "(E, N, 1) or (E, 1, 1) or (E,)"
    b = call.array("b_scales", b_scales, SCALES, symbols, missing=ScaleError)
    _check_types(call, a, b)
    experts, n = p.num_experts, p.n
    if b.shape not in ((experts, n, 1), (experts, 1, 1), (experts,)):
        rule = f"{symbols} with E = {experts}, N = {n}"
        raise ShapeError(call.message("b_scales", rule, f"shape {b.shape}"))
    b_steps = (n, 1) if b.size == experts * n else (1, 0)
    return a, int(a.size > 1), b, b_steps


def _is_row(shape: tuple[int, ...], rows: int) -> bool:
    return shape == (rows, 1) or (shape[0] == 1 and shape[1] >= rows)


def check_fp8_product(call: Call, p: Fp8Product, b_scales: Array) -> None:
    """Checks the routing metadata and the weight's scales ("metadata").

    Raises:
        RoutingError: routing metadata contradicts itself or the operands.
        ScaleError: a scale of the weight is NaN, infinite or negative.
    """
    if call.checks("metadata"):
        check_groups(call, p.groups, p.num_rows, "hidden", p.num_experts, "weight")
        check_fp8_scales(call, "b_scales", call.data(b_scales))


def check_fp8_scales(call: Call, arg: str, scales: NDArray[Any]) -> None:
    """Refuses float32 or bfloat16 scales that are NaN, infinite or negative; 0 is legal.

    Raises:
        ScaleError: there is one.
    """
    is_f32 = scales.dtype == np.float32
    bits: NDArray[Any] = scales.view(np.uint32 if is_f32 else np.uint16)
    infinity = 0x7F800000 if is_f32 else 0x7F80
    zero = 0x80000000 if is_f32 else 0x8000  # -0 is no harm
    bad = np.greater_equal(bits, infinity) & np.not_equal(bits, zero)
    if bad.any():
        at = tuple(int(i) for i in np.unravel_index(first(bad), bits.shape))
        got = f"bits {int(bits[at]):#x} for expert {at[0]}, at {at}"
        raise ScaleError(call.message(arg, "finite scales >= 0", got))
