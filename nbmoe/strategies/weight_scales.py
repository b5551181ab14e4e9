"""Block scales of an expert's two weights, from rows as checkpoints hold them to tiles."""

from __future__ import annotations

from typing import Any

from nbmoe import ops
from nbmoe.arrays import describe
from nbmoe.errors import DeviceError, LayoutError, ScaleError, ShapeError, message
from nbmoe.formats import BlockFormat
from nbmoe.validate import Call
from nbmoe.validate.elements import scales_of

ROWS = "(E, rows, K/block)"


def tile_weight_scales(
    api: str, fmt: BlockFormat, gate_up: Any, down: Any, device: Any = None, **run: Any
) -> tuple[Any, Any]:
    """Lays the row-major scales of both weights out in tiles, padding with byte 0.

    Args:
        api: Public function, for messages.
        fmt: Format of the weights.
        gate_up: (E, 2D, H/block) scale bytes.
        down: (E, H, D/block) scale bytes.
        device: Where the scales are and stay: "cpu", "cuda", "cuda:<ordinal>", an ordinal, or None
            for wherever that is.
        **run: `backend`, `stream` and `validate`, see `nbmoe.ops`.

    Returns:
        The two, (E, ceil(rows/128), ceil(columns/4), 32, 4, 4).

    Raises:
        LayoutError: scales are in tiles already, or have gaps.
        ShapeError: they are not (E, rows, columns), or of different numbers of experts.
        DeviceError: they are elsewhere, or there is no such device.
        ScaleError, ArgTypeError, DTypeError: they are None, no arrays, or of another type.
    """
    call, experts = Call(api, run.get("validate")), []
    for arg, scales in (("gate_up", gate_up), ("down", down)):
        if scales is not None and len(shape := describe(api, arg, scales).shape) == 6:
            hint = "scales are laid out in tiles once"
            got = f"shape {shape}, interleaved already"
            raise LayoutError(message(api, arg, ROWS, got, hint))
        found = call.array(arg, scales, scales_of(fmt), ROWS, missing=ScaleError)
        for symbol, size in zip(("rows", "K/block"), found.shape[1:], strict=True):
            call.positive(arg, symbol, size)
        _check_device(api, arg, device, found.kind.on_gpu, found.device)
        experts.append(found.shape[0])
    if experts[0] != experts[1]:
        rule = f"scales of {experts[0]} experts, as gate_up"
        raise ShapeError(message(api, "down", rule, f"of {experts[1]}"))
    return (
        ops.block_scales_interleave(gate_up, fmt.block, **run),
        ops.block_scales_interleave(down, fmt.block, **run),
    )


def _check_device(api: str, arg: str, device: Any, on_gpu: bool, ordinal: int | None) -> None:
    if device is None:
        return
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    kind, _, number = name.partition(":")
    is_cpu = name in ("cpu", "host")
    if not is_cpu and not (kind in ("cuda", "gpu") and (not number or number.isdecimal())):
        rule = "'cpu', 'cuda', 'cuda:<ordinal>' or an ordinal"
        raise DeviceError(message(api, "device", rule, repr(device)))
    elsewhere = on_gpu and number and ordinal is not None and int(number) != ordinal
    if is_cpu == on_gpu or elsewhere:
        place = f"GPU {ordinal}" if on_gpu else "the host"
        hint = "move them first"
        raise DeviceError(message(api, arg, f"scales on {name}", f"some on {place}", hint))
