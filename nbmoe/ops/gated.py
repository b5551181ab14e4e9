"""Gated activation of a matmul's bf16 result."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.activation import GatedActivation, take_activation
from nbmoe.ops.launch import allocate, compiling, executor, flat, host_view, store
from nbmoe.validate import BF16, Call
from nbmoe.validate.call import MAX_BLOCKS_Y

COLUMNS = 16  # of a thread
BLOCK_COLUMNS = 128 * COLUMNS  # of a thread block
"""Columns that a thread handles."""


def gated_activation(
    gate_up: Any,
    *,
    activation: GatedActivation | None = None,
    interleaved: bool = False,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Activates every gate, times its up value, in float32, and rounds once to bfloat16.

    `nbmoe.reference.activation` states the formulas and their roundings.

    Args:
        gate_up: (M, 2D) bfloat16, D % 16 == 0, gate columns then up columns.
        activation: What to apply, None for `g * sigmoid(g) * u`. Its gated_activation_fn, if any,
            is compiled into the kernel, without contracting `a * b + c`; constants in it should be
            numpy.float32, since Numba takes Python's floats as float64.
        interleaved: Whether the columns are gate 0, up 0, gate 1, ... instead.
        out: `(M, D)` bfloat16 to write.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`.

    Returns:
        (M, D) bfloat16.

    Raises:
        ArgTypeError: `activation` is no GatedActivation, or `interleaved` no bool.
        ConfigError: Numba cannot compile its gated_activation_fn.
        UnsupportedError: `gate_up` is float16.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
    """
    call = Call("gated_activation", validate)
    chosen_activation = take_activation(call.api, activation)
    interleaved = call.boolean("interleaved", interleaved)
    x = call.array("gate_up", gate_up, BF16, "(M, 2D)")
    rows, n = x.shape
    call.multiple("gate_up", "2D", n, 2 * COLUMNS, "D % 16 == 0")
    call.at_most("gate_up", "2D", n, 2 * BLOCK_COLUMNS * MAX_BLOCKS_Y)
    shape = (rows, n // 2)
    if out is not None:
        call.output("out", out, BF16, "(M, D)", shape)
    chosen = call.place(backend, stream)
    result = call.outputs.get("out") or allocate(call, "z", shape, BF16)
    if rows == 0:
        return result.owner
    if chosen.name == "reference":
        z = reference.gated_activation(
            host_view(x), activation=chosen_activation, interleaved=interleaved
        )
        store(result, z)
        return result.owner

    from nbmoe_kernels.gated_activate import launch_gated_activate

    with compiling(call, chosen_activation):
        launch_gated_activate(
            executor(chosen, call),
            *flat(chosen, result, x),
            activation=chosen_activation.kernel_activation,
            alpha=chosen_activation.alpha,
            limit=chosen_activation.limit,
            num_rows=rows,
            num_cols=n // 2,
            is_interleaved=interleaved,
            stream=call.stream,
        )
    return result.owner
