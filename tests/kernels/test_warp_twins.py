"""Twins of warp ops, matrix loads and atomics against their definitions."""

import itertools

import numpy as np
import pytest
from numba import njit

from nbmoe_kernels.device import atomics, matrix, sync, warp
from nbmoe_kernels.device.op import NUMPY_TYPES

LANES = np.arange(32)


def compiled(stub):
    return njit(error_model="numpy")(stub.op.twin)


def some_words(seed, low=0, high=2**32):
    return np.random.default_rng(seed).integers(low, high, 32, dtype=np.uint64).astype(np.uint32)


def test_shuffles_by_definition():
    value, source = some_words(1), some_words(2, high=64)
    for distance in (0, 3, 31, 37):
        step, number = distance % 32, np.uint32(distance)
        np.testing.assert_array_equal(
            compiled(warp.shuffle_xor)(value, number), value[LANES ^ step]
        )
        up = np.where(LANES >= step, LANES - step, LANES)
        np.testing.assert_array_equal(compiled(warp.shuffle_up)(value, number), value[up])
        down = np.where(LANES + step < 32, LANES + step, LANES)
        np.testing.assert_array_equal(compiled(warp.shuffle_down)(value, number), value[down])
    np.testing.assert_array_equal(compiled(warp.shuffle_from)(value, source), value[source % 32])


def test_matches_by_definition():
    value = some_words(3, high=5)
    masks = compiled(warp.match_any)(value)
    for lane in LANES:
        assert masks[lane] == sum(1 << int(o) for o in LANES if value[o] == value[lane])
    assert not compiled(warp.match_all)(value).any()
    same = np.full(32, 77, np.uint32)
    assert (compiled(warp.match_all)(same) == 0xFFFFFFFF).all()


@pytest.mark.parametrize("number", [0, 1, 5, 32])
def test_votes_by_definition(number):
    predicate = np.zeros(32, np.uint32)
    predicate[np.random.default_rng(4).permutation(32)[:number]] = some_words(5, low=1)[:number]
    votes = compiled(warp.vote_all)(predicate), compiled(warp.vote_any)(predicate)
    assert (votes[0] == (number == 32)).all() and (votes[1] == (number > 0)).all()
    mask = sum(1 << int(lane) for lane in LANES if predicate[lane])
    assert (compiled(warp.ballot)(predicate) == mask).all()


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        *itertools.product(("add", "min", "max"), ("u32", "i32")),
        *itertools.product(("and", "or", "xor"), ("u32",)),
    ],
)
def test_reductions_by_definition(operation, dtype):
    ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "add": np.add}
    ufunc |= {"min": np.minimum, "max": np.maximum}
    value = some_words(6) & some_words(7) | np.uint32(8)
    value = value.view(NUMPY_TYPES[dtype])
    got = compiled(warp.reduce_lanes(operation, dtype))(value)
    want = ufunc[operation].reduce(value, dtype=value.dtype)
    assert got.dtype == value.dtype and (got == want).all()


def test_elect_and_count_bits():
    assert compiled(sync.elect)().sum() == 1
    assert compiled(warp.count_bits)(np.uint32(0xF00F0001)) == 9


def matrices(seed, count):
    """Matrices (count, 8, 8) of u16, rows of them scattered in words, and the lanes' rows."""
    rng = np.random.default_rng(seed)
    held = rng.integers(0, 65536, (count, 8, 8)).astype(np.uint16)
    memory = rng.integers(0, 2**32, 256, dtype=np.uint64).astype(np.uint32)
    rows = (4 * rng.permutation(64)[:32]).astype(np.uint32)
    for lane in range(8 * count):
        memory[rows[lane] :][:4] = held[lane // 8, lane % 8].view(np.uint32)
    return held, memory, rows


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transpose", [False, True])
def test_matrix_loads_and_stores_by_definition(count, transpose):
    held, memory, rows = matrices(8, count)
    words = compiled(matrix.load_matrices(count, transpose=transpose))(memory, rows)
    words = words.reshape(32, count)
    for lane, i in itertools.product(range(32), range(count)):
        m = held[i].T if transpose else held[i]
        low, high = m[lane // 4, lane % 4 * 2], m[lane // 4, lane % 4 * 2 + 1]
        assert words[lane, i] == int(low) | int(high) << 16
    blank = np.full(256, 0xABABABAB, np.uint32)
    store = compiled(matrix.store_matrices(count, transpose=transpose))
    store(blank, rows, *(np.ascontiguousarray(words[:, i]) for i in range(count)))
    want = np.full(256, 0xABABABAB, np.uint32)
    for lane in range(8 * count):
        want[rows[lane] :][:4] = memory[rows[lane] :][:4]
    np.testing.assert_array_equal(blank, want)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("displacement", [0, 4])
def test_matrix_rows_past_the_end_of_an_array(count, displacement):
    memory, words = np.zeros(64, np.uint32), [np.zeros(32, np.uint32)] * count
    rows = np.full(32, 60 - displacement, np.uint32)
    rows[8 * count :] = 0xFFFFFFF0  # lanes that name no row
    load = compiled(matrix.load_matrices(count, displacement=displacement))
    store = compiled(matrix.store_matrices(count))
    load(memory, rows)
    store(memory, rows, *words)
    for row in (rows[0] + 1, 0xFFFFFFF0 - displacement):
        rows[8 * count - 1] = row
        with pytest.raises(IndexError, match="past the end"):
            load(memory, rows)
        if not displacement or row > 64:
            with pytest.raises(IndexError, match="past the end"):
                store(memory, rows, *words)


COMBINED = {
    "add": lambda old, value, bits: (old + value) % bits,
    "min": lambda old, value, bits: min(old, value),
    "max": lambda old, value, bits: max(old, value),
    "and": lambda old, value, bits: old & value,
    "or": lambda old, value, bits: old | value,
    "xor": lambda old, value, bits: old ^ value,
    "exch": lambda old, value, bits: value,
}


@pytest.mark.parametrize("dtype", ["u32", "u64"])
@pytest.mark.parametrize("operation", COMBINED)
def test_atomics_by_definition(operation, dtype):
    kind = NUMPY_TYPES[dtype]
    bits = 2 ** (8 * kind().itemsize)
    rng = np.random.default_rng(9)
    fetch = compiled(atomics.atomic(operation, dtype))
    reduce = None if operation == "exch" else compiled(atomics.reduction(operation, dtype))
    for _ in range(50):
        words = rng.integers(0, 2**64 - 1, 2, dtype=np.uint64).astype(kind)
        old, value = (int(word) for word in words)
        target = np.array([1, old, 1], kind)
        assert fetch(target, np.uint64(1), kind(value)) == old
        want = COMBINED[operation](old, value, bits)
        assert target.tolist() == [1, want, 1]
        if reduce is not None:
            target[1] = old
            reduce(target, np.uint64(1), kind(value))
            assert target.tolist() == [1, want, 1]


@pytest.mark.parametrize(
    ("operation", "dtype", "old", "value", "want"),
    [
        ("min", "i32", -5, 3, -5),
        ("max", "i64", -5, 3, 3),
        ("add", "i32", 2**31 - 1, 1, -(2**31)),
        ("add", "f32", 2.0**24, 1.0, 2.0**24),
    ],
)
def test_atomics_of_other_types(operation, dtype, old, value, want):
    kind = NUMPY_TYPES[dtype]
    target = np.array([old], kind)
    assert compiled(atomics.atomic(operation, dtype))(target, np.uint64(0), kind(value)) == old
    assert target[0] == want and target.dtype == kind


def test_compare_and_swap_stores_only_what_was_expected():
    swap = compiled(atomics.compare_and_swap("u64"))
    target = np.array([2**40], np.uint64)
    assert swap(target, np.uint64(0), np.uint64(5), np.uint64(6)) == 2**40
    assert target[0] == 2**40
    assert swap(target, np.uint64(0), np.uint64(2**40), np.uint64(6)) == 2**40
    assert target[0] == 6


def test_atomic_loads_stores_and_waits():
    counter = np.zeros(2, np.uint32)
    compiled(atomics.store())(counter, np.uint64(1), np.uint32(7))
    assert compiled(atomics.load())(counter, np.uint64(1)) == 7
    wait = compiled(atomics.wait_ge())
    assert [wait(counter, np.uint64(1), np.uint32(v)) for v in (0, 7, 8)] == [True, True, False]
    counter[1] = 0x80000000  # unsigned
    assert wait(counter, np.uint64(1), np.uint32(1))
