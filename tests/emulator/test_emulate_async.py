"""Async work of every kind is right whenever it completes, and a missing wait shows."""

import numpy as np
import pytest
from numba import cuda, uint32, uint64

import emulate
from nbmoe_kernels.device.mbarrier import (
    mbarrier_arrive,
    mbarrier_arrive_expect,
    mbarrier_init,
    mbarrier_wait,
)
from tests.emulator import async_ops as ops

MODES = [("eager", None), ("lazy", None), *(("random", seed) for seed in range(5))]
STAGES = 3


def make_pipeline(wait: bool):
    """A ring of stages: thread 0 of warp 1 fetches, warp 0 sums; waiting for data or not."""

    def pipeline(x, out):
        buffer = cuda.shared.array(96, uint32)
        full = cuda.shared.array(3, uint64)
        empty = cuda.shared.array(3, uint64)
        t = cuda.threadIdx.x
        steps = uint32(x.size // 32)
        if t == 0:
            for s in range(STAGES):
                mbarrier_init(full, uint32(s), uint32(1))
                mbarrier_init(empty, uint32(s), uint32(32))
        cuda.syncthreads()
        if t == 32:
            for step in range(steps):
                s, turn = uint32(step % STAGES), uint32(step // STAGES)
                mbarrier_wait(empty, s, uint32((turn & uint32(1)) ^ uint32(1)))
                mbarrier_arrive_expect(full, s, uint32(128))
                for half in range(2):
                    at = uint32(16 * half)
                    ops.fetch(
                        buffer,
                        uint32(uint32(32) * s + at),
                        x,
                        uint32(uint32(32) * uint32(step) + at),
                        uint32(16),
                        full,
                        s,
                    )
        elif t < 32:
            total = uint32(0)
            for step in range(steps):
                s, turn = uint32(step % STAGES), uint32(step // STAGES)
                if wait:
                    mbarrier_wait(full, s, uint32(turn & uint32(1)))
                total = uint32(total + buffer[uint32(32) * s + uint32(31 - t)])
                mbarrier_arrive(empty, s)
            out[cuda.blockIdx.x, t] = total

    return pipeline


waiting, careless = make_pipeline(True), make_pipeline(False)
X = np.random.default_rng(1).integers(0, 2**32, 32 * 10).astype(np.uint32)
SUMS = X.reshape(10, 32).sum(axis=0, dtype=np.uint32)[::-1]


@pytest.mark.parametrize(("copies", "seed"), MODES)
def test_copies_that_an_mbarrier_counts(copies, seed):
    out = np.zeros((5, 32), np.uint32)
    emulate.launch(waiting, 5, 64, X, out, copies=copies, seed=seed)
    np.testing.assert_array_equal(out, np.tile(SUMS, (5, 1)))


def test_the_engines_agree_about_them(both):
    _, out = both(waiting, 2, 64, X, np.zeros((2, 32), np.uint32))
    np.testing.assert_array_equal(out, np.tile(SUMS, (2, 1)))


def test_a_missing_wait_shows_when_copies_are_lazy():
    out = np.zeros((1, 32), np.uint32)
    emulate.launch(careless, 1, 64, X[:96], out, copies="lazy")
    assert (out != X[:96].reshape(3, 32).sum(axis=0, dtype=np.uint32)[::-1]).all()


def never_waited(x):
    buffer = cuda.shared.array(32, uint32)
    bar = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(bar, uint32(0), uint32(1))
        ops.fetch(buffer, uint32(0), x, uint32(0), uint32(x[0]), bar, uint32(0))


@pytest.mark.parametrize("copies", ["eager", "lazy", "random"])
def test_copies_end_with_their_cta(copies):
    emulate.launch(never_waited, 100, 32, np.full(32, 32, np.uint32), copies=copies)


@pytest.mark.parametrize("copies", ["eager", "lazy"])
def test_a_copy_that_raises_names_its_issuer(copies):
    line = never_waited.__code__.co_firstlineno + 5
    with pytest.raises(emulate.KernelError, match=rf"IndexError.*thread \(0, 0, 0\).*line {line}"):
        emulate.launch(never_waited, 1, 32, np.full(8, 9, np.uint32), copies=copies)


def make_stores(wait: bool):
    def stores(out):
        buffer = cuda.shared.array(64, uint32)
        t = cuda.threadIdx.x
        buffer[t] = uint32(t)
        ops.put(out, uint32(t), buffer, uint32(t))
        ops.put_commit()
        if wait:
            ops.put_wait()
        buffer[t] = uint32(1000)

    return stores


@pytest.mark.parametrize(("copies", "seed"), MODES)
def test_bulk_stores_read_before_their_wait(copies, seed):
    out = np.zeros(64, np.uint32)
    emulate.launch(make_stores(True), 1, 64, out, copies=copies, seed=seed)
    assert out.tolist() == list(range(64))


def test_a_bulk_store_without_wait_shows_when_lazy():
    out = np.zeros(64, np.uint32)
    emulate.launch(make_stores(False), 1, 64, out, copies="lazy")
    assert (out == 1000).all()


def make_products(wait_early: bool):
    wait = ops.product_wait_but_one if wait_early else ops.product_wait

    def products(b, out):
        shared = cuda.shared.array(256, uint32)
        acc = cuda.local.array(2, np.uint32)
        a = cuda.local.array(1, np.uint32)
        t = cuda.threadIdx.x
        group = uint32(t // 128 * 128)
        shared[t] = b[t]
        cuda.syncthreads()
        acc[0] = uint32(7)
        acc[1] = uint32(t)
        a[0] = uint32(t + 1)
        ops.product(acc, a, shared, group, uint32(2))
        ops.product_commit()
        ops.product(acc, a, shared, group, uint32(1))
        ops.product(acc, a, shared, group, uint32(3))
        ops.product_commit()
        wait()
        out[0, t] = acc[0]
        out[1, t] = acc[1]
        ops.product_wait()

    return products


B = np.random.default_rng(2).integers(0, 2**32, 256).astype(np.uint32)


def expected_products(factor):
    t = np.arange(256, dtype=np.uint32)
    scaled = (t + np.uint32(1)) * np.uint32(factor)
    total = B.reshape(2, 128).sum(axis=1, dtype=np.uint32).repeat(128)
    return np.stack([np.uint32(7) + scaled * B, t + scaled * total])


@pytest.mark.parametrize(("copies", "seed"), MODES)
def test_products_of_a_warpgroup(copies, seed):
    out = np.zeros((2, 256), np.uint32)
    emulate.launch(make_products(False), 1, 256, B, out, copies=copies, seed=seed)
    np.testing.assert_array_equal(out, expected_products(6))


def test_a_wait_for_one_group_too_few_shows_when_lazy():
    out = np.zeros((2, 256), np.uint32)
    emulate.launch(make_products(True), 1, 256, B, out, copies="lazy")
    # The first warp to wait sees the first group; later ones what its last wait completed.
    right, early = out == expected_products(6), out == expected_products(2)
    assert (right | early).all()
    assert early.all(axis=0).sum() >= 64


def test_products_on_both_engines(both):
    _, out = both(make_products(False), 1, 256, B, np.zeros((2, 256), np.uint32))
    np.testing.assert_array_equal(out, expected_products(6))


def many(b, out):
    shared = cuda.shared.array(128, uint32)
    acc = cuda.local.array(2, np.uint32)
    a = cuda.local.array(1, np.uint32)
    t = cuda.threadIdx.x
    shared[t] = b[t]
    cuda.syncthreads()
    acc[0] = acc[1] = uint32(0)
    a[0] = uint32(1)
    for _ in range(50):
        ops.product(acc, a, shared, uint32(0), uint32(1))
    ops.product_commit()
    ops.product_wait()
    out[t] = acc[0]


@pytest.mark.parametrize("copies", ["eager", "lazy"])
def test_more_products_than_a_warpgroup_remembers(copies):
    out = np.zeros(128, np.uint32)
    emulate.launch(many, 3, 128, B, out, copies=copies)
    np.testing.assert_array_equal(out, B[:128] * np.uint32(50))


def never_waited_product(b, out):
    shared = cuda.shared.array(128, uint32)
    acc = cuda.local.array(2, np.uint32)
    a = cuda.local.array(1, np.uint32)
    shared[cuda.threadIdx.x] = b[0]
    cuda.syncthreads()
    ops.product(acc, a, shared, uint32(0), uint32(1))


@pytest.mark.parametrize("copies", ["eager", "lazy", "random"])
def test_products_that_nobody_waits_for(copies):
    emulate.launch(never_waited_product, 20, 128, B, B.copy(), copies=copies)


def product_out_of_bounds(b):
    shared = cuda.shared.array(128, uint32)
    acc = cuda.local.array(2, np.uint32)
    a = cuda.local.array(1, np.uint32)
    shared[cuda.threadIdx.x] = b[0]
    cuda.syncthreads()
    ops.product(acc, a, shared, uint32(1), uint32(1))
    ops.product_commit()
    ops.product_wait()


@pytest.mark.parametrize("copies", ["eager", "lazy"])
def test_a_product_that_raises_names_where_it_was_issued(copies):
    line = product_out_of_bounds.__code__.co_firstlineno + 6
    with pytest.raises(emulate.KernelError, match=rf"IndexError.*line {line} of {__file__}"):
        emulate.launch(product_out_of_bounds, 1, 128, B, copies=copies)
