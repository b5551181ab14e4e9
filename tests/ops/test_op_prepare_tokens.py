"""Prepared tokens equal the layout's definition byte for byte, whatever kernel makes them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nbmoe import codecs, errors, layouts, ops
from nbmoe.formats import FORMATS
from nbmoe.prepared import pack_tokens
from nbmoe.prepared.tokens import token_shape
from tests.ops.compare import assert_equals_reference, assert_same
from tests.strategies import MANY, MX_WIDTHS, WIDTHS, Slots, seeds, slots

prepare = ops.prepare_tokens
BF16_WIDTHS = (8, 64, 72, 120)
BLOCK_FORMATS = ("nvfp4", "mxfp4", "mxfp8")


def widths(format: str) -> Any:
    """Values of K, most of which end inside a panel."""
    by_format = {"nvfp4": WIDTHS, "bf16": BF16_WIDTHS}
    return st.sampled_from(by_format.get(format, MX_WIDTHS))


def tokens(format: str, rows: int, k: int, tiles: int, seed: int) -> tuple[Any, Any]:
    """Any codes under any scales, NaN included, or any bfloat16."""
    rng = np.random.default_rng(seed)
    if format == "bf16":
        return rng.integers(0, 1 << 16, (rows, k), np.uint16).view(codecs.BF16), None
    fmt = FORMATS[format]
    codes = rng.integers(0, 256, (rows, fmt.packed_k(k)), np.uint8)
    across = layouts.ceil_div(k, fmt.tile_columns)
    return codes, rng.integers(0, 256, (tiles, across, 32, 4, 4), np.uint8)


def prepared_equals_reference(kernels: Any, *args: Any, **kwargs: Any) -> None:
    """`assert_equals_reference` for a result that is no array."""

    def data(*args: Any, **kwargs: Any) -> Any:
        return prepare(*args, **kwargs).data

    assert_equals_reference(kernels, data, *args, **kwargs)


@pytest.mark.parametrize("format", [*BLOCK_FORMATS, "bf16"])
@given(slots(), st.data(), seeds)
@example(Slots((MANY, 0, 130, 1), (2, 0, 1, 3), 4, 0), None, 0)
def test_equals_reference(
    hopper_kernels: Any, format: str, slots: Slots, data: Any, seed: int
) -> None:
    k = 96 if data is None else data.draw(widths(format))
    if format == "bf16" and data is None:
        k = 72
    hidden, scales = tokens(format, slots.rows, k, slots.tiles, seed)
    offsets = None if format == "bf16" else slots.offsets
    shape = token_shape(slots.rows, len(slots.counts), k)
    args = (hidden, scales, slots.starts, offsets)
    prepared_equals_reference(hopper_kernels, ((shape, np.uint8),), *args, format=format)


@pytest.mark.parametrize(("format", "k"), [("nvfp4", 80), ("mxfp4", 160), ("bf16", 320)])
@pytest.mark.parametrize("rows", [1, 9, 129])
@pytest.mark.parametrize("spare_tiles", [0, 40])
def test_rows_without_slots(
    hopper_kernels: Any, format: str, k: int, rows: int, spare_tiles: int
) -> None:
    """Scales may have more tiles than the rows need; no panel is written for those."""
    hidden, scales = tokens(format, rows, k, layouts.ceil_div(rows, 128) + spare_tiles, rows)
    shape = token_shape(rows, 1, k)
    prepared_equals_reference(hopper_kernels, ((shape, np.uint8),), hidden, scales, format=format)
    prepared = hopper_kernels(prepare, hidden, scales, format=format)
    assert_same(prepared.data, pack_tokens(hidden, scales, format=format).data)
    fields = (prepared.format, prepared.num_rows, prepared.num_slots, prepared.k)
    assert fields == (format, rows, 1, k)


@pytest.mark.parametrize("count", [128, 129, 256, 300])
def test_many_slots(hopper_kernels: Any, count: int) -> None:
    """As many slots as a warp looks at together, and more."""
    counts = tuple(int(s in (7, 126, 127, 200, count - 1)) for s in range(count))
    slots = Slots(counts, tuple(range(count)), count, 0)
    hidden, scales = tokens("nvfp4", slots.rows, 16, slots.tiles, 0)
    shape = token_shape(slots.rows, count, 16)
    args = (hidden, scales, slots.starts, slots.offsets)
    prepared_equals_reference(hopper_kernels, ((shape, np.uint8),), *args)


def test_no_rows(hopper_kernels: Any) -> None:
    hidden, scales = tokens("nvfp4", 0, 64, 0, 0)
    prepared = hopper_kernels(
        prepare, hidden, scales, np.zeros(3, np.uint32), np.zeros(2, np.uint32)
    )
    assert prepared.data.shape == (1, 16, 128)


def test_format_follows_the_element_types() -> None:
    codes, scales = tokens("mxfp4", 3, 64, 1, 0)
    e8m0 = codecs_dtype("float8_e8m0fnu")
    assert prepare(codes, scales, backend="reference").format == "nvfp4"
    assert prepare(codes, scales[:, :1].view(e8m0), backend="reference").format == "mxfp4"
    bf16 = np.zeros((3, 8), codecs.BF16)
    assert prepare(bf16, backend="reference").format == "bf16"


def codecs_dtype(name: str) -> Any:
    """The numpy type of a name."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


CODES, SCALES = tokens("nvfp4", 3, 64, 2, 0)
STARTS, OFFSETS = np.array([0, 1, 3], np.uint32), np.array([0, 1], np.uint32)
ROWS = np.zeros((3, 64), codecs.BF16)
REFUSED = {
    "no scales": (errors.ScaleError, (CODES, None), {"format": "nvfp4"}),
    "scales of bf16": (errors.ConfigError, (ROWS, SCALES), {"format": "bf16"}),
    "unknown format": (errors.ConfigError, (CODES, SCALES), {"format": "e4m3"}),
    "no name": (errors.ArgTypeError, (CODES, SCALES), {"format": 4}),
    "offsets without slots": (errors.ConfigError, (CODES, SCALES, None, OFFSETS), {}),
    "slots without offsets": (errors.ConfigError, (CODES, SCALES, STARTS), {}),
    "offsets of bf16": (errors.ConfigError, (ROWS, None, STARTS, OFFSETS), {}),
    "no slot": (errors.ShapeError, (CODES, SCALES, STARTS[:1], OFFSETS), {}),
    "offsets of other slots": (errors.ShapeError, (CODES, SCALES, STARTS, OFFSETS[:1]), {}),
    "width": (errors.ShapeError, (ROWS[:, :36].copy(),), {}),
    "narrow tiles": (errors.ShapeError, (CODES, SCALES[:, :0]), {}),
    "few tiles": (errors.ShapeError, (CODES, SCALES[:0]), {}),
    "buffer": (errors.ShapeError, (ROWS,), {"out": np.zeros((1, 8, 128), np.uint8)}),
    "starts": (errors.RoutingError, (CODES, SCALES, STARTS + 1, OFFSETS), {}),
    "scale offsets": (errors.RoutingError, (CODES, SCALES, STARTS, OFFSETS + 1), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    error, args, kwargs = REFUSED[name]
    with pytest.raises(error, match=r"prepare_tokens"):
        prepare(*args, backend="reference", **kwargs)
