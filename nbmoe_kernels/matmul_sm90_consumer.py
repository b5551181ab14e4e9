"""The consumers of the Hopper matmuls: warpgroups that take tiles, multiply them and finish them.

Products are those of `matmul_sm90_multiply` or, for few tokens, of `matmul_sm90_multiply_few`.
Synchronisation: the mbarriers of `matmul_sm90_ring` and `matmul_sm90_tiles`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.matmul_epilogue import expert_scale_of
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_multiply import make_multiply
from nbmoe_kernels.matmul_sm90_multiply_few import make_multiply_few
from nbmoe_kernels.matmul_sm90_tiles import make_next_tile
from nbmoe_kernels.warp_arrival import arrive_for_warp

MakeEpilogue = Callable[[HopperMatmulConfig, int], tuple[Callable[..., Any], Callable[..., Any]]]
"""Of a config and a width: ``prepare(expert, row, args)``, which asks for what a tile's end needs
before its products, and ``epilogue(acc, smem, prepared, expert, expert_scale, row, rows, m_tile, n,
args)``."""


def _make_run_tile(
    config: HopperMatmulConfig, widths: tuple[int, ...], make_epilogue: MakeEpilogue
) -> Callable[..., Any]:
    """A device function that multiplies a tile by the narrowest width that holds it."""
    width, accumulators = widths[0], widths[0] // 2
    make = make_multiply_few if config.warp_products else make_multiply
    multiply = make(config, width)
    prepare, epilogue = make_epilogue(config, width)
    first_kept, first_taken = config.kept_at // 8, config.kept_at // 8 + config.warpgroups
    stores_later = config.stores_later

    @device_function
    def run(
        smem, bars, stage, parity, k64, taken, expert, expert_scale, row, rows, m_tile, n, args
    ):
        acc = cuda.local.array(accumulators, np.float32)
        prepared = prepare(expert, row, args)
        stage, parity = multiply(acc, smem, bars, stage, parity, k64, rows)
        if stores_later:
            group = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))
            mbarrier_wait(bars, np.uint32(np.uint32(first_taken) + group), taken)
            epilogue(acc, smem, prepared, expert, expert_scale, row, rows, m_tile, n, args)
            arrive_for_warp(bars, np.uint32(np.uint32(first_kept) + group))
        else:
            epilogue(acc, smem, prepared, expert, expert_scale, row, rows, m_tile, n, args)
        return stage, parity

    if len(widths) == 1:
        return run
    run_wider = _make_run_tile(config, widths[1:], make_epilogue)

    @device_function
    def choose(
        smem, bars, stage, parity, k64, taken, expert, expert_scale, row, rows, m_tile, n, args
    ):
        if rows <= np.uint32(width):
            return run(
                smem, bars, stage, parity, k64, taken, expert, expert_scale, row, rows, m_tile, n,
                args,
            )  # fmt: skip
        return run_wider(
            smem, bars, stage, parity, k64, taken, expert, expert_scale, row, rows, m_tile, n, args
        )

    return choose


def make_consume(config: HopperMatmulConfig, make_epilogue: MakeEpilogue) -> Callable[..., Any]:
    """``consume(words, smem, bars, n, k64, expert_scales, has_expert_scales, args)``.

    All of a block's tiles; ``args`` is a tuple that goes to the epilogue as it is.
    """
    next_tile = make_next_tile(config)
    run_tile = _make_run_tile(config, config.widths, make_epilogue)

    @device_function
    def consume(words, smem, bars, n, k64, expert_scales, has_expert_scales, args):
        stage, parity = np.uint32(0), np.uint32(0)
        # The place for results is free before anything was left there.
        taken = np.uint32(1)
        place, told, expert, row, rows, m_tile = next_tile(words, bars, np.uint32(0), np.uint32(0))
        while rows > np.uint32(0):
            # Asked for here, so that it is there when the products are.
            expert_scale = expert_scale_of(expert_scales, has_expert_scales, expert)
            # A masked segment has no stages and sums of 0.
            blocks = k64 if expert >= np.int32(0) else np.uint32(0)
            stage, parity = run_tile(
                smem, bars, stage, parity, blocks, taken, expert, expert_scale, row, rows, m_tile,
                n, args,
            )  # fmt: skip
            taken = np.uint32(taken ^ np.uint32(1))
            place, told, expert, row, rows, m_tile = next_tile(words, bars, place, told)

    return consume
