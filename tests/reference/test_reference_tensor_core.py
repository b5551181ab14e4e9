"""P1: the fast product equals the definition, and both equal an H200."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbmoe.errors import DTypeError, ShapeError
from nbmoe.reference.tensor_core import BFLOAT16, E4M3, F16, fused_dot, matmul

GOLDEN = Path(__file__).parents[1] / "golden" / "tensor_core"
FORMATS = {
    "f16": (np.float16, F16),
    "bf16": (ml_dtypes.bfloat16, BFLOAT16),
    "e4m3": (ml_dtypes.float8_e4m3fn, E4M3),
}
EACH_FORMAT = pytest.mark.parametrize("fmt", FORMATS)


def products(a, b, c, fmt):
    """`matmul` on bit patterns: (tiles, M, K), (tiles, N, K), (tiles, M, N) to (tiles, M, N)."""
    dtype = FORMATS[fmt][0]
    start = [None] * len(a) if c is None else c.view(np.float32)
    tiles = [matmul(x.view(dtype), y.view(dtype), z) for x, y, z in zip(a, b, start, strict=True)]
    return np.stack(tiles).view(np.uint32)


def dots(a, b, c, fmt):
    """`matmul` on many independent dots: (count, K), (count, K), (count,) to (count,)."""
    size = 64  # as many are computed in a square and its diagonal kept
    out = np.empty(len(c), np.uint32)
    for i in range(0, len(c), size):
        part = slice(i, i + size)
        square = np.repeat(c[part, None], len(c[part]), axis=1)
        out[part] = np.diagonal(products(a[None, part], b[None, part], square[None], fmt)[0])
    return out


def scalar_dots(a, b, c, fmt):
    operand = FORMATS[fmt][1]
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return np.array([fused_dot(x, y, z, operand) for x, y, z in rows], np.uint32)


@EACH_FORMAT
@pytest.mark.parametrize("name", ["random", "chain1024"])
def test_fast_product_equals_the_card(name, fmt):
    z = np.load(GOLDEN / f"{name}_{fmt}.npz")
    np.testing.assert_array_equal(products(z["A"], z["B"], z["C"], fmt), z["D"])
    np.testing.assert_array_equal(products(z["A"], z["B"], None, fmt), z["D_from_zero"])


@pytest.mark.parametrize("name", ["targeted_f16", "targeted_bf16", "clamp_bf16", "targeted_e4m3"])
def test_both_models_equal_the_card_on_probes(name):
    z, fmt = np.load(GOLDEN / f"{name}.npz"), name.split("_")[1]
    np.testing.assert_array_equal(dots(z["a"], z["b"], z["c"], fmt), z["d"])
    np.testing.assert_array_equal(scalar_dots(z["a"], z["b"], z["c"], fmt), z["d"])


@EACH_FORMAT
def test_definition_equals_the_card_on_random_steps(fmt):
    z = np.load(GOLDEN / f"random_{fmt}.npz")
    rng = np.random.default_rng(0)
    tile, m, n = (rng.integers(0, size, 5000) for size in z["D"].shape)
    got = scalar_dots(z["A"][tile, m], z["B"][tile, n], z["C"][tile, m, n], fmt)
    np.testing.assert_array_equal(got, z["D"][tile, m, n])


def test_fast_product_equals_cublas():
    z = np.load(GOLDEN / "cublas_f16.npz")
    np.testing.assert_array_equal(products(z["A"], z["B"], None, "f16"), z["D_from_zero"])


def any_bits(rng, shape, fmt):
    return rng.integers(0, 1 << FORMATS[fmt][1].bits, shape)


def patterns(make, rng, fmt, count=1500):
    """Operands of a step each, as `matmul` takes them."""
    operand = FORMATS[fmt][1]
    return make(rng, (count, operand.step), fmt).astype(f"u{operand.bits // 8}")


def with_exponents(low, high):
    """Operands whose exponent fields lie between two fractions of the range."""

    def make(rng, shape, fmt):
        operand = FORMATS[fmt][1]
        sign = operand.bits - 1
        top = (1 << (sign - operand.mantissa_bits)) - 1
        field = rng.integers(round(low * top), max(round(high * top), 1), shape)
        mantissa = rng.integers(0, 1 << operand.mantissa_bits, shape)
        zero = rng.random(shape) < 0.1
        bits = rng.integers(0, 2, shape) << sign | field << operand.mantissa_bits | mantissa
        return np.where(zero, bits & 1 << sign, bits)

    return make


def accumulators(rng, count):
    """Any bits, values near one, zeros of both signs, subnormals."""
    near_one = rng.standard_normal(count).astype(np.float32).view(np.uint32)
    kinds = [
        rng.integers(0, 1 << 32, count),
        near_one,
        rng.integers(0, 2, count) << 31,
        rng.integers(0, 1 << 23, count) | rng.integers(0, 2, count) << 31,
    ]
    return np.choose(rng.integers(0, 4, count), kinds).astype(np.uint32)


@EACH_FORMAT
@pytest.mark.parametrize(
    "make",
    [
        any_bits,
        with_exponents(0, 0.05),
        with_exponents(0, 1),
        with_exponents(0.2, 0.3),
        with_exponents(0.45, 0.55),
        with_exponents(0.9, 1),
    ],
    ids=["any bits", "subnormal", "wide", "small", "near one", "near overflow"],
)
def test_fast_product_equals_the_definition(make, fmt):
    rng = np.random.default_rng(1)
    a, b = (patterns(make, rng, fmt) for _ in range(2))
    c = accumulators(rng, 1500)
    np.testing.assert_array_equal(dots(a, b, c, fmt), scalar_dots(a, b, c, fmt))


@EACH_FORMAT
def test_fast_product_equals_the_definition_under_cancellation(fmt):
    rng = np.random.default_rng(2)
    a, b = (patterns(with_exponents(0.4, 0.6), rng, fmt) for _ in range(2))
    a[:, 8:14], b[:, 8:14] = a[:, 0:6] ^ (1 << FORMATS[fmt][1].bits - 1), b[:, 0:6]
    c = accumulators(rng, 1500)
    np.testing.assert_array_equal(dots(a, b, c, fmt), scalar_dots(a, b, c, fmt))


BITS16 = st.one_of(
    st.integers(0, 0xFFFF),
    st.sampled_from([0, 0x8000, 1, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7F80]),
)
BITS32 = st.one_of(
    st.integers(0, 0xFFFFFFFF),
    st.sampled_from([0, 0x80000000, 1, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000]),
)


@EACH_FORMAT
@given(
    a=st.lists(BITS16, min_size=32, max_size=32),
    b=st.lists(BITS16, min_size=32, max_size=32),
    c=BITS32,
)
@settings(deadline=None)
def test_one_step_of_anything(fmt, a, b, c):
    dtype, operand = FORMATS[fmt]
    a, b = ([x & (1 << operand.bits) - 1 for x in bits[: operand.step]] for bits in (a, b))
    x, y = (np.array([bits], f"u{operand.bits // 8}").view(dtype) for bits in (a, b))
    got = matmul(x, y, np.array([[c]], np.uint32).view(np.float32))
    assert int(got.view(np.uint32)[0, 0]) == fused_dot(a, b, c, operand)


def test_chain_is_steps_in_order():
    rng = np.random.default_rng(3)
    a = rng.standard_normal((3, 96)).astype(np.float16)
    b = rng.standard_normal((600, 96)).astype(np.float16)  # several column blocks
    acc = None
    for k in range(0, 96, 16):
        acc = matmul(a[:, k : k + 16], b[:, k : k + 16], acc)
    np.testing.assert_array_equal(matmul(a, b), acc)
    assert (matmul(a, b) != matmul(a[:, ::-1], b[:, ::-1])).any(), "the order of steps must show"


def test_order_inside_a_step_and_zero_steps_do_not_show():
    rng = np.random.default_rng(4)
    a = rng.standard_normal((20, 64)).astype(np.float16)
    b = rng.standard_normal((30, 64)).astype(np.float16)
    shuffled = np.concatenate([k + rng.permutation(16) for k in range(0, 64, 16)])
    np.testing.assert_array_equal(matmul(a, b), matmul(a[:, shuffled], b[:, shuffled]))
    padding = [(0, 0), (0, 32)]
    np.testing.assert_array_equal(matmul(a, b), matmul(np.pad(a, padding), np.pad(b, padding)))


def test_rows_do_not_depend_on_other_rows():
    rng = np.random.default_rng(5)
    a = rng.standard_normal((9, 64)).astype(np.float16)
    a[4] = np.nan
    b = rng.standard_normal((300, 64)).astype(np.float16)
    together = matmul(a, b).view(np.uint32)
    for m in range(9):
        np.testing.assert_array_equal(matmul(a[m : m + 1], b).view(np.uint32)[0], together[m])
    assert (together[4] == 0x7FFFFFFF).all()


@pytest.mark.parametrize("shape", [(0, 5, 32), (4, 0, 32), (4, 5, 0)])
def test_empty_products_are_zero(shape):
    m, n, k = shape
    out = matmul(np.zeros((m, k), np.float16), np.zeros((n, k), np.float16))
    assert out.shape == (m, n)
    assert out.dtype == np.float32
    assert (out == 0).all()


def test_initial_accumulators_are_not_changed():
    c = np.ones((1, 1), np.float32)
    matmul(np.ones((1, 16), np.float16), np.ones((1, 16), np.float16), c)
    assert c[0, 0] == 1


def test_bad_operands():
    half = np.zeros((2, 16), np.float16)
    with pytest.raises(DTypeError, match="float32 and float16"):
        matmul(half.astype(np.float32), half)
    with pytest.raises(DTypeError, match="float16 and bfloat16"):
        matmul(half, half.astype(ml_dtypes.bfloat16))
    with pytest.raises(ShapeError, match="K % 16 == 0"):
        matmul(half[:, :8], half[:, :8])
    with pytest.raises(ShapeError, match=r"\(2, 16\) and \(2, 8\)"):
        matmul(half, half[:, :8])
    with pytest.raises(ShapeError, match=r"c: expected \(2, 2\)"):
        matmul(half, half, np.zeros((2, 3), np.float32))
