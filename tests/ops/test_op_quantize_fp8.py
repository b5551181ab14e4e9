"""P1-P3, P5, P7, P8: the FP8 quantizers equal the reference byte for byte."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nbmoe import ops, reference
from nbmoe.layouts import ceil_div
from nbmoe.scale_specs import padded_rows
from tests.ops.compare import POISONS, as_bytes, assert_equals_reference, assert_same, poisoned
from tests.strategies import VALUES, activations, seeds

dynamic = ops.quantize_dynamic_scaled_float8
static = ops.quantize_static_scaled_float8
of_tensor = ops.quantize_tensor_dynamic_scaled_float8

STORED = {"float32": np.float32, "bfloat16": np.uint16, "float8_e8m0fnu": np.uint8}
ROWS = (1, 2, 7, 8, 9, 17)
SHAPES = ((128, 128), (704, 128), (192, 64), (96, 32), (80, -1), (264, 256), (15, -1), (16, 3))
"""(K, group): whole groups and partial ones, one group, rows, sizes that no vector fits."""
some_types = st.sampled_from(tuple(STORED))


def shapes(m: int, k: int, group: int, scales_type: str) -> Any:
    groups = 1 if group == -1 else ceil_div(k, group)
    scales = (groups, padded_rows(m, scales_type))
    return ((m, k), np.uint8), (scales, STORED[scales_type])


def offsets(bound: int) -> NDArray[np.uint32]:
    """Row offsets of three slots, one of them empty, that end at `bound`."""
    return np.array([0, bound // 2, bound // 2, bound], np.uint32)


@given(st.sampled_from(ROWS), st.sampled_from(SHAPES), some_types, st.sampled_from(VALUES), seeds)
@example(9, (704, 128), "float32", "nan rows", 0)
@example(9, (704, 128), "float8_e8m0fnu", "infinite", 0)
@example(3, (200, -1), "bfloat16", "infinite", 0)
@example(2, (2 * 256 * 8 + 8, -1), "float32", "heavy", 0)  # more than a block's items
@example(1, (1, -1), "float32", "gauss", 0)
def test_dynamic_equals_reference(
    kernels: Any, m: int, shape: tuple[int, int], scales_type: str, kind: str, seed: int
) -> None:
    k, group = shape
    x = activations(np.random.default_rng(seed), m, k, kind)
    options = {"group_size_or_per_token": group, "scales_type": scales_type}
    assert_equals_reference(kernels, dynamic, shapes(m, k, group, scales_type), x, **options)


@given(st.sampled_from(ROWS), st.sampled_from(SHAPES), some_types, st.integers(0, 17), seeds)
@example(8, (128, 128), "float32", 8, 0)  # the bound is the last row: the padding stays, too
@example(9, (15, -1), "bfloat16", 0, 0)
def test_rows_from_the_bound_on_are_not_touched(
    kernels: Any, m: int, shape: tuple[int, int], scales_type: str, bound: int, seed: int
) -> None:
    """P7: neither codes, nor scales, nor padding; and their input is not looked at."""
    k, group = shape
    bound = min(bound, m)
    x = activations(np.random.default_rng(seed), m, k, "gauss")
    x[bound:] = np.nan
    options = {"group_size_or_per_token": group, "scales_type": scales_type}
    layout = shapes(m, k, group, scales_type)
    assert_equals_reference(kernels, dynamic, layout, x, row_offsets=offsets(bound), **options)
    for byte in POISONS:
        buffers = poisoned(layout, byte)
        codes, scales = kernels(dynamic, x, row_offsets=offsets(bound), out=buffers, **options)
        assert (codes[bound:] == byte).all()
        assert (as_bytes(scales[:, bound:]) == byte).all()
        if bound:
            alone = reference.quantize_dynamic_scaled_float8(x[:bound], **options)
            assert_same(codes[:bound], alone[0])
            assert_same(scales[:, :bound], alone[1][:, :bound])


@pytest.mark.parametrize("scales_type", STORED)
def test_padding_of_scales_is_zero(kernels: Any, scales_type: str) -> None:
    layout = shapes(5, 256, 128, scales_type)
    x = activations(np.random.default_rng(0), 5, 256, "gauss")
    buffers = poisoned(layout, 0xAA)
    _, scales = kernels(
        dynamic, x, group_size_or_per_token=128, scales_type=scales_type, out=buffers
    )
    assert scales.shape[1] * scales.itemsize == (32 if scales_type == "float32" else 16)
    assert not as_bytes(scales[:, 5:]).any() and as_bytes(scales[:, :5]).any(axis=-1).all()


@given(st.sampled_from(SHAPES), some_types, st.integers(0, 8), seeds)
def test_row_alone_equals_row_in_batch(
    kernels: Any, shape: tuple[int, int], scales_type: str, at: int, seed: int
) -> None:
    """P3: also beside rows of NaN and infinity."""
    k, group = shape
    rng = np.random.default_rng(seed)
    x = np.concatenate([activations(rng, 5, k, "nan rows"), activations(rng, 4, k, "infinite")])
    x[at] = activations(rng, 1, k, "gauss")[0]
    options = {"group_size_or_per_token": group, "scales_type": scales_type}
    codes, scales = kernels(dynamic, x, **options)
    alone = kernels(dynamic, x[at : at + 1].copy(), **options)
    assert_same(codes[at], alone[0][0])
    assert_same(scales[:, at], alone[1][:, 0])


@pytest.mark.parametrize("amax_floor", [0.0, 1e-12, 0.37, 448.0])
def test_floor_of_e8m0_scales(kernels: Any, amax_floor: float) -> None:
    x = activations(np.random.default_rng(1), 7, 256, "tiny")
    options = {"group_size_or_per_token": 64, "scales_type": "float8_e8m0fnu"}
    assert_equals_reference(
        kernels, dynamic, shapes(7, 256, 64, "float8_e8m0fnu"), x, amax_floor=amax_floor, **options
    )


@pytest.mark.parametrize("scale_ub", [2.0**-100, 1.0, 448.0, 3e38])
def test_bound_of_scales(kernels: Any, scale_ub: float) -> None:
    x = activations(np.random.default_rng(2), 7, 96, "infinite")
    for scales_type in ("float32", "bfloat16"):
        layout = shapes(7, 96, 32, scales_type)
        options = {"group_size_or_per_token": 32, "scales_type": scales_type}
        assert_equals_reference(kernels, dynamic, layout, x, scale_ub=scale_ub, **options)
        assert_equals_reference(
            kernels, of_tensor, (layout[0], ((1,), np.float32)), x, scale_ub=scale_ub
        )


@given(
    st.sampled_from(ROWS),
    st.sampled_from((8, 15, 96, 704)),
    st.one_of(st.none(), st.integers(0, 17)),
    st.sampled_from(VALUES),
    seeds,
)
@example(17, 704, 16, "nan rows", 0)
@example(3, 15, 0, "gauss", 0)
def test_tensor_dynamic_equals_reference(
    kernels: Any, m: int, k: int, bound: int | None, kind: str, seed: int
) -> None:
    x = activations(np.random.default_rng(seed), m, k, kind)
    bounded = {} if bound is None else {"row_offsets": offsets(min(bound, m))}
    workspace = np.full(1024, 0xFFFFFFFF, np.uint32)  # NaN, the largest of all
    layout = ((m, k), np.uint8), ((1,), np.float32)
    for byte in POISONS:
        got = kernels(of_tensor, x, workspace=workspace, out=poisoned(layout, byte), **bounded)
        expected = of_tensor(x, out=poisoned(layout, byte), backend="reference", **bounded)
        assert_same(got, expected)
    assert_same(kernels(of_tensor, x, **bounded)[1], expected[1])


FLOATS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


@given(
    st.sampled_from(tuple(FLOATS)),
    st.sampled_from(((9, 80), (5, 15), (1, 1))),
    st.sampled_from((0.013, 1.0, 448.0, 1e-40, 3e38)),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 9)),
    st.sampled_from(VALUES),
    seeds,
)
@example("f16", (9, 80), 0.013, True, 3, "nan rows", 0)
@example("bf16", (9, 80), 1e-40, True, None, "infinite", 0)  # infinity times 0
def test_static_equals_reference(
    kernels: Any,
    dtype: str,
    shape: tuple[int, int],
    scale: float,
    inverted: bool,
    bound: int | None,
    kind: str,
    seed: int,
) -> None:
    with np.errstate(all="ignore"):
        x = activations(np.random.default_rng(seed), *shape, kind).astype(FLOATS[dtype])
    bounded = {} if bound is None else {"row_offsets": offsets(min(bound, shape[0]))}
    layout = ((shape, np.uint8),)
    options = {"scale_is_inverted": inverted, **bounded}
    got = assert_equals_reference(kernels, static, layout, x, scale, **options)
    # The scale may be an array beside the operand: the kernel reads it.
    in_array = np.array([scale], np.float32)
    buffer = poisoned(layout, POISONS[0])
    assert_same(kernels(static, x, in_array, out=buffer, **options), got)
    assert_equals_reference(kernels, static, layout, x, in_array, **options)


def every_bf16(kernels: Any) -> NDArray[Any]:
    """All bf16 patterns as rows of 8; the simulator, which interprets, gets some of them."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    if kernels.name == "cudasim":
        bits = bits[::509][:128].copy()
    return bits.view(ml_dtypes.bfloat16).reshape(-1, 8)


@pytest.mark.parametrize("scale", [1.0, 0.3, 7.7e-3, 3e5])
def test_every_value_under_a_static_scale(kernels: Any, scale: float) -> None:
    x = every_bf16(kernels)
    assert_equals_reference(kernels, static, ((x.shape, np.uint8),), x, scale)


@pytest.mark.parametrize("scales_type", STORED)
def test_every_value_as_a_largest_magnitude(kernels: Any, scales_type: str) -> None:
    """Each bf16 pattern, NaN and infinity included, decides the scale of a group of its own."""
    amax = every_bf16(kernels).reshape(-1, 1)
    parts = np.float32([1, -1, 0.5, 0.251, -0.0627, 0.01, 2**-9, 0])
    with np.errstate(all="ignore"):
        x = (amax.astype(np.float32) * parts).astype(ml_dtypes.bfloat16).reshape(-1, 64)
    got = kernels(dynamic, x, group_size_or_per_token=8, scales_type=scales_type)
    expected = reference.quantize_dynamic_scaled_float8(
        x, group_size_or_per_token=8, scales_type=scales_type
    )
    assert_same(got, expected)


def test_results_have_the_types_of_the_format(kernels: Any) -> None:
    x = activations(np.random.default_rng(0), 3, 16, "gauss")
    for scales_type in STORED:
        codes, scales = dynamic(x, scales_type=scales_type, backend="reference")
        assert (codes.dtype.name, scales.dtype.name) == ("float8_e4m3fn", scales_type)
    codes, scale = of_tensor(x, backend="reference")
    assert (codes.dtype.name, scale.dtype.name) == ("float8_e4m3fn", "float32")


def test_no_rows(kernels: Any) -> None:
    """P8."""
    x = np.zeros((0, 256), np.uint16)
    codes, scales = kernels(dynamic, x, group_size_or_per_token=128)
    assert codes.shape == (0, 256) and scales.shape == (2, 0)
    assert kernels(static, x, 1.0).shape == (0, 256)
    codes, scale = kernels(of_tensor, x)
    assert codes.shape == (0, 256) and scale == 0
