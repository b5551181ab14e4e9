"""Every op of the table, those of the cached factories included, as tests want them.

A factory may have more arguments than are listed; each instruction and each kind of qualifier is.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import nbmoe_kernels.catalog  # noqa: F401  declares the ops of the shipped kernels
from nbmoe_kernels.device import (
    atomics,
    bulk,
    column_store,
    grid_dependency,  # noqa: F401
    matrix,
    mbarrier,  # noqa: F401
    memory,
    mma,  # noqa: F401
    sync,
    tile,
    tma,
    warp,
    wgmma,
    wgmma_block,
    wgmma_fp8_block,
)
from nbmoe_kernels.device.op import TABLE, Op

LOAD_DISPLACEMENTS, BLOCK_DISPLACEMENTS = (0, 64), (0, 1024)


def instances() -> Iterator[Any]:
    """The ops of every factory for the arguments that tests cover."""
    for operation, dtype in (
        *itertools.product(("add", "min", "max", "and", "or", "xor", "exch"), ("u32", "u64")),
        ("add", "f32"),
        ("add", "i32"),
        ("min", "i32"),
        ("max", "i64"),
    ):
        for space in ("global", "shared"):
            yield atomics.atomic(operation, dtype, space=space)
            if operation != "exch":
                yield atomics.reduction(operation, dtype, space=space)
    for order, scope in itertools.product(
        ("relaxed", "acquire", "release", "acq_rel"), ("cta", "cluster", "gpu", "sys")
    ):
        yield atomics.atomic("add", order=order, scope=scope)
        yield atomics.compare_and_swap(order=order, scope=scope)
        if order in ("relaxed", "acquire"):
            yield atomics.load(order=order, scope=scope)
            yield atomics.wait_ge(order=order, scope=scope)
        if order in ("relaxed", "release"):
            yield atomics.store(order=order, scope=scope)
            yield atomics.reduction("add", order=order, scope=scope)
    yield atomics.reduction("add", space="shared", scope="cta")
    for dtype, space in itertools.product(("u32", "u64"), ("global", "shared")):
        yield atomics.compare_and_swap(dtype, space=space)
        yield atomics.load(dtype, space=space)
        yield atomics.store(dtype, space=space)
        yield atomics.wait_ge(dtype, space=space)
    yield atomics.load("f32")
    yield atomics.store("i64")
    for nbytes in (4, 8, 16):
        yield memory.cp_async(nbytes)
    for open_groups in (0, 1):
        yield memory.cp_async_wait(open_groups)
        yield bulk.bulk_wait(open_groups)
        yield wgmma.wgmma_wait(open_groups)
    for count, transpose in itertools.product((1, 2, 4), (False, True)):
        yield matrix.load_matrices(count, transpose=transpose)
        yield matrix.store_matrices(count, transpose=transpose)
    for operation in ("add", "min", "max"):
        yield warp.reduce_lanes(operation, "u32")
        yield warp.reduce_lanes(operation, "i32")
    for operation in ("and", "or", "xor"):
        yield warp.reduce_lanes(operation)
    for order, scope in itertools.product(("acq_rel", "sc"), ("cta", "cluster", "gpu", "sys")):
        yield sync.fence(order, scope)
    yield sync.set_max_registers(40, increase=False)
    yield sync.set_max_registers(232, increase=True)
    for n in (8, 64, 256):
        yield tile.store_accumulators_bf16(n)
        yield column_store.store_tokens_bf16(n)
        yield wgmma_fp8_block.wgmma_fp8_block(n)
        yield wgmma_fp8_block.wgmma_fp8_block(n, 0, 3)
        yield wgmma_fp8_block.wgmma_fp8_block(n, 3, 4)
        yield wgmma_fp8_block.wgmma_fp8_block_of_registers(n)
        yield wgmma_fp8_block.hand_over(n)
        yield wgmma_block.settle(n // 2)
        yield tile.store_pairs_bf16(n)
    for n, dtype in ((8, "f16"), (16, "bf16")):
        for displacement in BLOCK_DISPLACEMENTS:
            yield wgmma_block.wgmma_block(n, dtype, displacement)
    for displacement in LOAD_DISPLACEMENTS:
        yield matrix.load_matrices(4, displacement=displacement)
        yield memory.load_shared_words(displacement)
        yield memory.load_shared_pair(displacement)
        yield memory.load_shared_half(displacement)
    for box_rows in (8, 64):
        yield tma.tma_load(box_rows)
        yield tma.tma_store(box_rows)
    for dtype, in_registers in itertools.product(("f16", "bf16", "e4m3"), (False, True)):
        for n in (8, 64, 256):
            yield wgmma.wgmma(n, dtype, a_in_registers=in_registers)


def all_ops() -> dict[str, Op]:
    """The project's ops by name.

    Kernels that other tests make in the same process ask factories for widths and displacements
    without number: of those, the ones above stand for all.
    """
    made = {stub.op.name: stub.op for stub in instances()}
    plain = {
        name: op
        for name, op in TABLE.items()
        if op.twin.__module__.startswith("nbmoe_kernels.")
        and "<locals>" not in op.twin.__qualname__
    }
    return dict(sorted({**plain, **made}.items()))
