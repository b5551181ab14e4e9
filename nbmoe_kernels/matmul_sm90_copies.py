"""The copies that fill a stage of a Hopper matmul: weights, and the tokens they are multiplied by.

Synchronisation: the arrival at ``full`` of a stage, with all bytes to come, is that of its weights.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmoe_kernels.device.bulk import bulk_load, bulk_load_once
from nbmoe_kernels.device.mbarrier import mbarrier_arrive_expect
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.sync import elect
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig


def make_copies(config: HopperMatmulConfig) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``load_weights(smem, bars, weights, stage, blocks, rows, source, group_pitch)`` and
    ``load_tokens(smem, bars, tokens, stage, blocks, rows, source, panel_pitch)``, by a whole warp.

    ``blocks`` 64-blocks of K and ``rows`` tokens; ``source`` is the first byte, the pitches are
    those from a warpgroup's weights to the next one's, and from a 64-block's tokens to the next's.
    """
    stage_bytes, stage_blocks = config.stage_bytes, config.stage_blocks
    first_full = config.barriers_at // 8
    weights_at, panel_bytes = config.weights_at, config.panel_bytes
    unit_bytes, warpgroups = config.b.unit_bytes, config.warpgroups
    group_bytes = stage_blocks * unit_bytes

    @device_function
    def load_weights(smem, bars, weights, stage, blocks, rows, source, group_pitch):
        """Announce a stage and ask for its weights, which begin at byte ``source``."""
        full = np.uint32(np.uint32(first_full) + stage)
        weight_bytes = np.uint32(blocks * np.uint32(unit_bytes))
        token_bytes = np.uint32(blocks * np.uint32(rows << np.uint32(7)))
        all_weights = np.uint32(weight_bytes * np.uint32(warpgroups))
        at = np.uint32(np.uint32(stage * np.uint32(stage_bytes)) + np.uint32(weights_at))
        if elect() == np.uint32(1):
            mbarrier_arrive_expect(bars, full, np.uint32(all_weights + token_bytes))
            for group in unroll(range(warpgroups)):
                bulk_load_once(
                    smem,
                    np.uint32(at + np.uint32(group * group_bytes)),
                    weights,
                    source + np.uint64(group) * group_pitch,
                    weight_bytes,
                    bars,
                    full,
                )

    @device_function
    def load_tokens(smem, bars, tokens, stage, blocks, rows, source, panel_pitch):
        full = np.uint32(np.uint32(first_full) + stage)
        at = np.uint32(stage * np.uint32(stage_bytes))
        nbytes = np.uint32(rows << np.uint32(7))
        if elect() == np.uint32(1):
            for q in unroll(range(stage_blocks)):
                if np.uint32(q) < blocks:
                    bulk_load(
                        smem,
                        np.uint32(at + np.uint32(q * panel_bytes)),
                        tokens,
                        source + np.uint64(q) * panel_pitch,
                        nbytes,
                        bars,
                        full,
                    )

    return load_weights, load_tokens
