"""P1, P5: prepared weights equal the layout's definition on every backend."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import codecs, layouts, ops
from nbmoe.arrays import named_dtype
from nbmoe.formats import FORMATS
from nbmoe.prepared import PreparedWeights, pack_weights
from nbmoe_kernels.prepared_weights import prepared_bytes
from tests.ops.compare import POISONS, assert_same, poisoned

SIZES = (
    ("nvfp4", 2, 136, 208),
    ("nvfp4", 1, 8, 16),
    ("mxfp4", 2, 72, 160),
    ("mxfp8", 2, 136, 96),
    ("bf16", 2, 72, 72),
    ("bf16", 1, 136, 64),
)


def operands(format: str, experts: int, n: int, k: int) -> tuple[Any, Any]:
    """A weight of all bit patterns and its scales, NaN too."""
    rng = np.random.default_rng(n * k)
    if format == "bf16":
        return rng.integers(0, 1 << 16, (experts, n, k), np.uint16), None
    fmt = FORMATS[format]
    weight = rng.integers(0, 256, (experts, n, fmt.packed_k(k)), np.uint8)
    down, across = layouts.tile_counts(n, k // fmt.block)
    return weight, rng.integers(0, 256, (experts, down, across, 32, 4, 4), np.uint8)


@pytest.mark.parametrize(("format", "experts", "n", "k"), SIZES)
def test_equals_the_definition(kernels: Any, format: str, experts: int, n: int, k: int) -> None:
    """Also that every byte is written, and that bytes of no scale in a tile do not matter."""
    weight, tiles = operands(format, experts, n, k)
    expected = pack_weights(weight, tiles, format=format)
    for byte in POISONS:
        out = poisoned((((prepared_bytes(format, experts, n, k),), np.uint8),), byte)
        keywords = {"format": format, "validate": "shapes"}
        got = kernels(ops.prepare_weights, weight, tiles, out=out, **keywords)
        assert_same(got.data, expected.data)
    assert (got.format, got.num_experts, got.n, got.k) == (format, experts, n, k)
    assert type(got) is PreparedWeights
    got = ops.prepare_weights(weight, tiles, format=format, backend="reference", validate="shapes")
    assert_same(got.data, expected.data)


@pytest.mark.parametrize("expert_row_column", [(0, 0, 0), (1, 71, 95), (1, 64, 47)])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_of_mxfp8_makes_its_scale_nan(
    kernels: Any, expert_row_column: tuple[int, int, int], code: int
) -> None:
    weight = np.full((2, 72, 96), 0x7E, np.uint8)
    weight[expert_row_column] = code
    tiles = np.full((2, 1, 1, 32, 4, 4), 127, np.uint8)
    got = kernels(ops.prepare_weights, weight, tiles, format="mxfp8")
    assert_same(got.data, pack_weights(weight, tiles, format="mxfp8").data)
    assert (got.data == 0xFF).sum() == 1


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "bf16"])
def test_element_types_tell_the_format(format: str) -> None:
    if format == "bf16":
        weight, tiles = np.zeros((1, 8, 16), ml_dtypes.bfloat16), None
    else:
        fmt = FORMATS[format]
        weight = np.zeros((1, 8, fmt.packed_k(64)), named_dtype(fmt.codes_dtype))
        tiles = np.zeros((1, 1, 1, 32, 4, 4), named_dtype(fmt.scales_dtype))
    assert ops.prepare_weights(weight, tiles, backend="reference").format == format


def test_values_survive(kernels: Any) -> None:
    """Independent of the packing: each code times its scale is where its row and column are."""
    packed = codecs.pack_nibbles(np.tile(np.arange(16, dtype=np.uint8), (1, 8, 4)))
    tiles = np.full((1, 1, 1, 32, 4, 4), 0x38, np.uint8)
    data = kernels(ops.prepare_weights, packed, tiles, format="nvfp4").data
    # Thread 4 owns rows 2 and 3; its half 0 has the codes 0, 1, 2, 3: 1 << 6, 2 << 3, 3.
    assert int.from_bytes(data[64:66].tobytes(), "little") == 0x53
    # Codes 12 to 15 in half 3: magnitudes 4 to 7 and every sign.
    assert int.from_bytes(data[70:72].tobytes(), "little") == 0xF000 | 4 << 9 | 5 << 6 | 6 << 3 | 7
