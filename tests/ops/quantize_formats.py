"""The block formats as arguments of the quantizing operations, with shapes of their results."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nbmoe import layouts
from nbmoe.arrays import named_dtype
from nbmoe.formats import FORMATS, SCALE_RULES
from tests.ops.compare import Shapes
from tests.strategies import Slots

ARGUMENTS: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "mxfp4": {"sf_vector_size": 32, "scales_type": "float8_e8m0fnu"},
    "mxfp8": {
        "sf_vector_size": 32,
        "scales_type": "float8_e8m0fnu",
        "out_type": "float8_e4m3fn",
    },
}
"""What names a format in a call of a quantizer."""

MX_RULES = [(name, rule) for name in ("mxfp4", "mxfp8") for rule in SCALE_RULES]
ALL_RULES = [("nvfp4", "rceil"), *MX_RULES]


def result_shapes(name: str, rows: int, k: int, tiles: int) -> Shapes:
    """Shapes and element types of codes and scales."""
    fmt = FORMATS[name]
    across = layouts.ceil_div(k, fmt.tile_columns)
    return (
        ((rows, fmt.packed_k(k)), named_dtype(fmt.codes_dtype)),
        ((tiles, across, *layouts.TILE_SHAPE), named_dtype(fmt.scales_dtype)),
    )


def slot_shapes(name: str, rows: int, slots: Slots, k: int) -> Shapes:
    """The same for rows in slots."""
    return result_shapes(name, rows, k, layouts.activation_tiles(rows, len(slots.counts)))


EVERY_BF16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def every_bf16(block: int, sparse: bool) -> NDArray[Any]:
    """Rows of 512 bf16: each bf16 begins a block of fractions of itself, on e2m1's boundaries.

    Then each bf16 of magnitude up to 6 stands in a block whose largest is 6.

    Args:
        block: Elements of a block.
        sparse: Whether one in 4,099 will do.
    """
    values = EVERY_BF16[::4099] if sparse else EVERY_BF16
    sixths = [6, 0, -6, 5, 4, 3.5, 3, -2.5, 2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25]
    fractions = np.float32([*sixths, *[-1.03 * f for f in sixths]][:block]) / np.float32(6)
    with np.errstate(all="ignore"):
        own = values[:, None] * fractions
    below = values[np.abs(values) <= 6]
    held = np.zeros((-(-below.size // (block - 1)), block), np.float32)
    held[:, 1:].flat[: below.size] = below
    held[:, 0] = 6
    flat = np.concatenate([own, held]).ravel()
    rows = np.zeros((-(-flat.size // 512), 512), np.float32)
    rows.flat[: flat.size] = flat
    return rows.astype(ml_dtypes.bfloat16)
