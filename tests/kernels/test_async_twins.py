"""Twins of mbarriers, bulk copies and TMA against models written out here."""

import numpy as np
import pytest
from numba import njit

from nbmoe_kernels.device import bulk, mbarrier, tma
from nbmoe_kernels.device.tensor_map import MAP_BYTES, encode_tensor_map
from tests.kernels.tiles import swizzled

ZERO = np.uint32(0)


def compiled(stub):
    return njit(error_model="numpy")(stub.op.twin)


class PhaseModel:
    """A barrier as counts, to compare words with."""

    def __init__(self, count):
        self.count = self.pending = count
        self.awaited = self.phase = 0

    def update(self, arrivals, nbytes):
        self.pending -= arrivals
        self.awaited += nbytes
        if self.pending == 0 and self.awaited == 0:
            self.phase += 1
            self.pending = self.count


def test_mbarrier_follows_counts_and_bytes():
    init, arrive, arrive_count = (
        compiled(s)
        for s in (
            mbarrier.mbarrier_init,
            mbarrier.mbarrier_arrive,
            mbarrier.mbarrier_arrive_count,
        )
    )
    expect, arrive_expect, wait = (
        compiled(s)
        for s in (
            mbarrier.mbarrier_expect,
            mbarrier.mbarrier_arrive_expect,
            mbarrier.mbarrier_wait,
        )
    )
    load = compiled(bulk.bulk_load)
    rng = np.random.default_rng(0)
    source, target = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    for count in (1, 2, 7, 1048575):
        bar = np.full(3, 0xAAAA, np.uint64)
        init(bar, np.uint32(1), np.uint32(count))
        model = PhaseModel(count)
        for _ in range(200):
            assert wait(bar, np.uint32(1), np.uint32((model.phase + 1) % 2))
            assert not wait(bar, np.uint32(1), np.uint32(model.phase % 2))
            nbytes = 16 * int(rng.integers(1, 4096))
            action = rng.integers(0, 5)
            if action == 0 and model.pending > 1:
                expect(bar, np.uint32(1), np.uint32(nbytes))
                model.update(0, nbytes)
            elif action == 1:
                arrive_expect(bar, np.uint32(1), np.uint32(nbytes))
                model.update(1, nbytes)
            elif action == 2 and model.pending > 1:
                many = int(rng.integers(1, model.pending))
                arrive_count(bar, np.uint32(1), np.uint32(many))
                model.update(many, 0)
            elif action == 3:
                arrive(bar, np.uint32(1))
                model.update(1, 0)
            # Bytes may come before they are expected.
            if model.awaited:
                nbytes = min(model.awaited, 1 << 20) if rng.random() < 0.8 else nbytes
                if model.awaited - nbytes > -(1 << 19):
                    load(target, ZERO, source, np.uint64(0), np.uint32(nbytes), bar, np.uint32(1))
                    model.update(0, -nbytes)
            # Neither counter may leave its field.
            if model.pending == model.count and model.awaited < 0:
                expect(bar, np.uint32(1), np.uint32(-model.awaited))
                model.awaited = 0
        assert list(bar[[0, 2]]) == [0xAAAA, 0xAAAA]


def test_mbarrier_refuses_bad_counts():
    for count in (0, 1 << 20):
        with pytest.raises(ValueError, match=r"1\.\.1048575"):
            compiled(mbarrier.mbarrier_init)(np.zeros(1, np.uint64), ZERO, np.uint32(count))


def test_bulk_copies_move_bytes():
    source = np.random.default_rng(1).integers(0, 256, 4096).astype(np.uint8)
    bar = np.zeros(1, np.uint64)
    target = np.zeros(4096, np.uint8)
    n = np.uint32(1008)
    compiled(bulk.bulk_load)(target, np.uint32(32), source, np.uint64(160), n, bar, ZERO)
    np.testing.assert_array_equal(target[32:1040], source[160:1168])
    assert not target[:32].any() and not target[1040:].any()
    back = np.zeros(4096, np.uint8)
    compiled(bulk.bulk_store)(back, np.uint64(16), target, np.uint32(32), n)
    np.testing.assert_array_equal(back[16:1024], source[160:1168])


@pytest.mark.parametrize(
    ("start", "nbytes", "error"),
    [(8, 16, ValueError), (0, 24, ValueError), (4096, 16, IndexError), (0, 4112, IndexError)],
)
def test_bulk_copies_refuse_bad_places(start, nbytes, error):
    source, target, bar = np.zeros(8192, np.uint8), np.zeros(4096, np.uint8), np.zeros(1, np.uint64)
    with pytest.raises(error, match="bulk copy"):
        compiled(bulk.bulk_load)(
            target, np.uint32(start), source, np.uint64(0), np.uint32(nbytes), bar, ZERO
        )


ROWS, ROW_BYTES, STRIDE, BOX = 37, 200, 208, 24


def matrix_and_map():
    """A matrix with stride, its bytes 1 to 255, and its tensor map behind other bytes."""
    storage = np.random.default_rng(2).integers(1, 256, (ROWS, STRIDE)).astype(np.uint8)
    encoded = encode_tensor_map(
        storage.ctypes.data, ROWS, ROW_BYTES, BOX, stride=STRIDE, target="emulator"
    )
    assert encoded.dtype == np.uint8 and encoded.size == MAP_BYTES
    return storage, np.concatenate([np.zeros(64, np.uint8), encoded])


def box_of(storage, column, row):
    """The box's bytes, zeros outside, and which of them are inside."""
    y, x = row + np.arange(BOX)[:, None], column + np.arange(128)[None, :]
    inside = (y >= 0) & (y < ROWS) & (x >= 0) & (x < ROW_BYTES)
    return np.where(inside, storage[y % ROWS, x % STRIDE], 0).astype(np.uint8), inside, y, x


COORDINATES = [(0, 0), (128, 16), (72, 13), (-32, -5), (192, 30), (-128, 0), (0, 37), (200, 0)]


@pytest.mark.parametrize(("column", "row"), COORDINATES)
def test_tma_load_swizzles_and_fills_with_zeros(column, row):
    storage, tensor_map = matrix_and_map()
    memory = np.full(8192, 0xEE, np.uint8)
    bar = np.zeros(2, np.uint64)
    compiled(mbarrier.mbarrier_init)(bar, np.uint32(1), np.uint32(1))
    compiled(mbarrier.mbarrier_arrive_expect)(bar, np.uint32(1), np.uint32(128 * BOX))
    place = 2048
    compiled(tma.tma_load(BOX))(
        memory,
        np.uint32(place),
        tensor_map,
        np.uint64(64),
        np.int32(column),
        np.int32(row),
        bar,
        np.uint32(1),
    )
    want = swizzled(box_of(storage, column, row)[0], place, 8192)
    np.testing.assert_array_equal(memory, want)
    # Bytes outside count as well: the phase is complete.
    assert compiled(mbarrier.mbarrier_wait)(bar, np.uint32(1), ZERO)


@pytest.mark.parametrize(("column", "row"), COORDINATES)
def test_tma_store_leaves_out_what_is_outside(column, row):
    storage, tensor_map = matrix_and_map()
    before = storage.copy()
    box = np.random.default_rng(3).integers(0, 256, (BOX, 128)).astype(np.uint8)
    compiled(tma.tma_store(BOX))(
        tensor_map,
        np.uint64(64),
        np.int32(column),
        np.int32(row),
        swizzled(box, 1024, 8192),
        np.uint32(1024),
    )
    _, inside, y, x = box_of(before, column, row)
    before[np.broadcast_to(y, inside.shape)[inside], np.broadcast_to(x, inside.shape)[inside]] = (
        box[inside]
    )
    np.testing.assert_array_equal(storage, before)


def test_tma_refuses_what_is_no_map_or_no_place():
    storage, tensor_map = matrix_and_map()
    memory, bar = np.zeros(8192, np.uint8), np.zeros(1, np.uint64)

    def load(rows, index, place):
        compiled(tma.tma_load(rows))(
            memory,
            np.uint32(place),
            tensor_map,
            np.uint64(index),
            np.int32(0),
            np.int32(0),
            bar,
            ZERO,
        )

    load(BOX, 64, 1024)
    assert storage.any()
    with pytest.raises(ValueError, match="no tensor map"):
        load(BOX, 0, 1024)
    with pytest.raises(ValueError, match="another number of rows"):
        load(8, 64, 1024)
    with pytest.raises(ValueError, match="multiple of 128"):
        load(BOX, 64, 1040)
    with pytest.raises(IndexError, match="past the end"):
        load(BOX, 64, 8192 - 128 * (BOX - 1))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"address": 8}, "multiples of 16"),
        ({"stride": 24}, "multiples of 16"),
        ({"box_rows": 0}, "box_rows"),
        ({"box_rows": 257}, "box_rows"),
        ({"rows": 0}, "rows >= 1"),
        ({"row_bytes": 272, "stride": 256}, "row_bytes <= stride"),
    ],
)
def test_tensor_map_refuses_what_tma_cannot_do(options, match):
    good = {"address": 4096, "rows": 4, "row_bytes": 256, "box_rows": 4}
    encode_tensor_map(**good, target="emulator")
    with pytest.raises(ValueError, match=match):
        encode_tensor_map(**{**good, **options}, target="emulator")
