"""Operands of a checked block-scaled product, as the reference and the kernels take them."""

from __future__ import annotations

from typing import Any

from nbmoe.arrays import Array
from nbmoe.backend import Backend
from nbmoe.ops.launch import executor, flat, host_view
from nbmoe.validate import Call
from nbmoe.validate.product import Product


def optional_view(operand: Array | None) -> Any:
    """A host operand that may be missing."""
    return None if operand is None else host_view(operand)


def reference_arguments(p: Product) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that both matmuls of the reference share."""
    s = p.slots
    operands = (p.hidden, p.weight, p.a_scales, p.b_scales, s.starts, s.offsets, s.ids)
    return tuple(map(host_view, operands)), {
        "expert_scales": optional_view(p.expert_scales),
        "a_row_scales": optional_view(p.a_row_scales),
        "bias": optional_view(p.bias),
        "format": p.a_format,
        "weight_format": p.b_format,
    }


def launch_product(
    launch: Any,
    chosen: Backend,
    call: Call,
    p: Product,
    outputs: tuple[Array, ...],
    extra: tuple[Array | None, ...] = (),
    **keywords: Any,
) -> None:
    """Launches a matmul of `nbmoe_kernels` with the tile shape for its sizes.

    Args:
        launch: The launcher.
        chosen: Backend.
        call: The call.
        p: Its operands.
        outputs: What the kernel writes.
        extra: Operands between `expert_scales` and `a_row_scales`.
        **keywords: Further keywords of the launcher.
    """
    from nbmoe_kernels.heuristics import grouped_matmul_config

    s = p.slots
    operands = (p.hidden, p.weight, p.a_scales, p.b_scales, s.starts, s.offsets, s.ids)
    launch(
        executor(chosen, call),
        *flat(chosen, *outputs, *operands, p.expert_scales, *extra, p.a_row_scales, p.bias),
        num_active=s.count,
        num_rows=p.num_rows,
        n=p.n,
        k=p.k,
        has_row_scales=p.a_row_scales is not None,
        has_expert_scales=p.expert_scales is not None,
        has_bias=p.bias is not None,
        config=grouped_matmul_config(
            p.a_format.name, p.b_format.name, p.n, p.k, s.count, p.estimated_total_m
        ),
        stream=call.stream,
        **keywords,
    )
