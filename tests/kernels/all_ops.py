"""Every op of the table, those of the cached factories included, as tests want them.

A factory may have more arguments than are listed; each instruction and each kind of qualifier is.
"""

import itertools
import re

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
_DISPLACED = re.compile(
    r"(load_shared_words|load_shared_half|load_matrices_4|wgmma_block)_(?:\w+_)?(\d+)"
)


def declare_instances() -> None:
    """Declare the ops of every factory for the arguments that tests cover."""
    for operation, dtype in (
        *itertools.product(("add", "min", "max", "and", "or", "xor", "exch"), ("u32", "u64")),
        ("add", "f32"),
        ("add", "i32"),
        ("min", "i32"),
        ("max", "i64"),
    ):
        for space in ("global", "shared"):
            atomics.atomic(operation, dtype, space=space)
            if operation != "exch":
                atomics.reduction(operation, dtype, space=space)
    for order, scope in itertools.product(
        ("relaxed", "acquire", "release", "acq_rel"), ("cta", "cluster", "gpu", "sys")
    ):
        atomics.atomic("add", order=order, scope=scope)
        atomics.compare_and_swap(order=order, scope=scope)
        if order in ("relaxed", "acquire"):
            atomics.load(order=order, scope=scope)
            atomics.wait_ge(order=order, scope=scope)
        if order in ("relaxed", "release"):
            atomics.store(order=order, scope=scope)
            atomics.reduction("add", order=order, scope=scope)
    for dtype, space in itertools.product(("u32", "u64"), ("global", "shared")):
        atomics.compare_and_swap(dtype, space=space)
        atomics.load(dtype, space=space)
        atomics.store(dtype, space=space)
        atomics.wait_ge(dtype, space=space)
    atomics.load("f32")
    atomics.store("i64")
    for nbytes in (4, 8, 16):
        memory.cp_async(nbytes)
    for open_groups in (0, 1):
        memory.cp_async_wait(open_groups)
        bulk.bulk_wait(open_groups)
        wgmma.wgmma_wait(open_groups)
    for count, transpose in itertools.product((1, 2, 4), (False, True)):
        matrix.load_matrices(count, transpose=transpose)
        matrix.store_matrices(count, transpose=transpose)
    for operation in ("add", "min", "max"):
        warp.reduce_lanes(operation, "u32")
        warp.reduce_lanes(operation, "i32")
    for operation in ("and", "or", "xor"):
        warp.reduce_lanes(operation)
    for order, scope in itertools.product(("acq_rel", "sc"), ("cta", "cluster", "gpu", "sys")):
        sync.fence(order, scope)
    sync.set_max_registers(40, increase=False)
    sync.set_max_registers(232, increase=True)
    for n in (8, 64, 256):
        tile.store_accumulators_bf16(n)
        column_store.store_tokens_bf16(n)
        wgmma_fp8_block.wgmma_fp8_block(n)
        wgmma_fp8_block.wgmma_fp8_block_of_registers(n)
        wgmma_fp8_block.hand_over(n)
        wgmma_block.settle(n // 2)
        tile.store_pairs_bf16(n)
    for n, dtype in ((8, "f16"), (16, "bf16")):
        for displacement in BLOCK_DISPLACEMENTS:
            wgmma_block.wgmma_block(n, dtype, displacement)
    for displacement in LOAD_DISPLACEMENTS:
        matrix.load_matrices(4, displacement=displacement)
        memory.load_shared_words(displacement)
        memory.load_shared_half(displacement)
    for box_rows in (8, 64):
        tma.tma_load(box_rows)
        tma.tma_store(box_rows)
    for dtype, in_registers in itertools.product(("f16", "bf16", "e4m3"), (False, True)):
        for n in (8, 64, 256):
            wgmma.wgmma(n, dtype, a_in_registers=in_registers)


def all_ops() -> dict[str, Op]:
    """The project's ops by name.

    Other tests declare ops of their own in the same process, and kernels that they make ask for
    displacements without number: of those, the ones above stand for all.
    """
    declare_instances()
    return {
        name: op
        for name, op in sorted(TABLE.items())
        if op.twin.__module__.startswith("nbmoe_kernels.") and not _is_far(name)
    }


def _is_far(name: str) -> bool:
    displaced = _DISPLACED.fullmatch(name)
    if displaced is None:
        return False
    listed = BLOCK_DISPLACEMENTS if displaced[1] == "wgmma_block" else LOAD_DISPLACEMENTS
    return int(displaced[2]) not in listed
