"""Where a consumer's thread finds its share of the first unit of a stage."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from nbmoe_kernels.device.op import device_function
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_operands import codes_offset, make_scales_offset


def make_first_places(config: HopperMatmulConfig) -> Callable[..., Any]:
    """``first_places() -> codes, scales``: bytes after the stage's first, in its first unit."""
    weights_at, group_bytes = config.weights_at, config.stage_blocks * config.b.unit_bytes
    scales_offset = make_scales_offset(config.b.unit)

    @device_function
    def first_places():
        thread = np.uint32(cuda.threadIdx.x)
        group = np.uint32(thread >> np.uint32(7))
        thread = np.uint32(thread & np.uint32(127))
        unit_at = np.uint32(np.uint32(weights_at) + np.uint32(group * np.uint32(group_bytes)))
        codes = np.uint32(unit_at + codes_offset(thread))
        return codes, np.uint32(unit_at + scales_offset(thread))

    return first_places
