"""The consumers of a Hopper MegaFFN, and where there are some the warps that finish gate/up tiles.

A tile of either matmul is multiplied the same way; a gate/up tile ends with the fused epilogue and
an arrival at its segment's counter, a down tile with stores of the output.

Synchronisation: that of `matmul_sm90_ring`, `matmul_sm90_tiles` and `mega_ffn_counters`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.mbarrier import mbarrier_wait
from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.matmul_epilogue import expert_scale_of
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_consumer import MakeEpilogue
from nbmoe_kernels.matmul_sm90_epilogue import make_store_tile
from nbmoe_kernels.matmul_sm90_finisher import FINISHERS, MakeTake
from nbmoe_kernels.matmul_sm90_multiply import make_multiply
from nbmoe_kernels.matmul_sm90_multiply_few import make_multiply_few
from nbmoe_kernels.matmul_sm90_tiles import PLACES, make_next_tile
from nbmoe_kernels.mega_ffn_order import is_down_tile, segment_of, tile_of
from nbmoe_kernels.mega_ffn_sm90_counters import make_arrive
from nbmoe_kernels.warp_arrival import arrive_for_warp

_WARPGROUP = 128
_MEET, _FINISHERS_MEET = 1, 3
"""Named barriers: a warpgroup's (also its epilogue's), and the finishers'."""
_ONE, _TAKEN = np.uint32(1), 1 << 31


def _make_run_tile(
    config: HopperMatmulConfig, widths: tuple[int, ...], make_epilogue: MakeEpilogue
) -> Callable[..., Any]:
    """A device function that multiplies a tile by the narrowest width that holds it."""
    width, accumulators = widths[0], widths[0] // 2
    make = make_multiply_few if config.warp_products else make_multiply
    multiply = make(config, width)
    prepare, fuse = make_epilogue(config, width)
    _, store = make_store_tile(config, width)
    first_kept, first_taken = config.kept_at // 8, config.kept_at // 8 + config.warpgroups
    stores_later = config.stores_later
    arrive = make_arrive(_MEET, _WARPGROUP)

    @device_function
    def run(smem, bars, ring, seen, tile, expert_scale, k64, sizes, up_args, down_args, counters):
        stage, parity = ring
        expert, row, rows, word = tile
        acc = cuda.local.array(accumulators, np.float32)
        prepared = prepare(expert, row, up_args)
        stage, parity = multiply(acc, smem, bars, stage, parity, k64, rows)
        m_tile = tile_of(word)
        group = np.uint32(np.uint32(cuda.threadIdx.x) >> np.uint32(7))
        up_n, down_n = sizes
        if is_down_tile(word):
            store(
                acc, smem, np.uint32(0), expert, expert_scale, row, rows, m_tile, down_n, down_args
            )
        elif stores_later:
            taken = np.uint32(seen >> np.uint32(31))
            mbarrier_wait(bars, np.uint32(np.uint32(first_taken) + group), taken)
            fuse(acc, smem, prepared, expert, expert_scale, row, rows, m_tile, up_n, up_args)
            arrive_for_warp(bars, np.uint32(np.uint32(first_kept) + group))
        else:
            fuse(acc, smem, prepared, expert, expert_scale, row, rows, m_tile, up_n, up_args)
            arrive(counters, segment_of(word), group)
        return stage, parity

    if len(widths) == 1:
        return run
    run_wider = _make_run_tile(config, widths[1:], make_epilogue)

    @device_function
    def choose(
        smem, bars, ring, seen, tile, expert_scale, k64, sizes, up_args, down_args, counters
    ):
        if tile[2] <= np.uint32(width):
            return run(
                smem,
                bars,
                ring,
                seen,
                tile,
                expert_scale,
                k64,
                sizes,
                up_args,
                down_args,
                counters,
            )
        return run_wider(
            smem, bars, ring, seen, tile, expert_scale, k64, sizes, up_args, down_args, counters
        )

    return choose


def make_consume_ffn(config: HopperMatmulConfig, make_epilogue: MakeEpilogue) -> Callable[..., Any]:
    """``consume(words, smem, bars, up, down, counters)``: all of a block's tiles.

    ``up`` and ``down`` are (n, 64-blocks of K, experts' scales, whether there are some, args of the
    epilogue).
    """
    next_tile = make_next_tile(config)
    run_tile = _make_run_tile(config, config.widths, make_epilogue)

    @device_function
    def consume(words, smem, bars, up, down, counters):
        up_n, up_k64, up_scales, has_up_scales, up_args = up
        down_n, down_k64, down_scales, has_down_scales, down_args = down
        stage, parity = np.uint32(0), np.uint32(0)
        # Tiles that were told, and the parity of results that were taken: one register of few. The
        # place for results is free before anything was left there.
        seen = np.uint32(_TAKEN)
        _, _, expert, row, rows, word = next_tile(words, bars, np.uint32(0), np.uint32(0))
        while rows > np.uint32(0):
            if is_down_tile(word):
                k64 = down_k64
                expert_scale = expert_scale_of(down_scales, has_down_scales, expert)
            else:
                k64 = up_k64
                expert_scale = expert_scale_of(up_scales, has_up_scales, expert)
            # A masked segment has no stages and sums of 0.
            if expert < np.int32(0):
                k64 = np.uint32(0)
            stage, parity = run_tile(
                smem, bars, (stage, parity), seen, (expert, row, rows, word), expert_scale, k64,
                (up_n, down_n), up_args, down_args, counters,
            )  # fmt: skip
            if not is_down_tile(word):
                seen = np.uint32(seen ^ np.uint32(_TAKEN))
            seen = np.uint32(seen + _ONE)
            place = np.uint32(seen & np.uint32(PLACES - 1))
            told = np.uint32(np.uint32(seen // np.uint32(PLACES)) & _ONE)
            _, _, expert, row, rows, word = next_tile(words, bars, place, told)

    return consume


def make_finish_ffn(config: HopperMatmulConfig, make_take: MakeTake) -> Callable[..., Any]:
    """``finish(words, smem, bars, n, args, counters)``: the gate/up tiles of a block."""
    next_tile = make_next_tile(config)
    prepare, take = make_take(config)
    first_kept, warpgroups = config.kept_at // 8, config.warpgroups
    first_finisher = config.consumers + 32
    arrive = make_arrive(_FINISHERS_MEET, FINISHERS)

    @device_function
    def finish(words, smem, bars, n, args, counters):
        finisher = np.uint32(np.uint32(cuda.threadIdx.x) - np.uint32(first_finisher))
        kept = np.uint32(0)
        place, told, expert, row, rows, word = next_tile(words, bars, np.uint32(0), np.uint32(0))
        while rows > np.uint32(0):
            if not is_down_tile(word):
                prepared = prepare(expert, row, args)
                group = np.uint32(0)
                while group < np.uint32(warpgroups):
                    barrier = np.uint32(np.uint32(first_kept) + group)
                    mbarrier_wait(bars, barrier, kept)
                    take(smem, group, finisher, prepared, row, rows, tile_of(word), n, args)
                    arrive_for_warp(bars, np.uint32(barrier + np.uint32(warpgroups)))
                    arrive(counters, segment_of(word), np.uint32(0))
                    group = np.uint32(group + _ONE)
                kept = np.uint32(kept ^ _ONE)
            place, told, expert, row, rows, word = next_tile(words, bars, place, told)

    return finish
