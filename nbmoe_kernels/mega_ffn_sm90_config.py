"""Whether a layer takes a Hopper MegaFFN, and with which tile shape: pure functions.

The shape is the fused gate/up matmul's, for both matmuls.
"""

import functools
from dataclasses import replace

from nbmoe_kernels.config_report import report_choice
from nbmoe_kernels.heuristics_sm90 import fusing_pays
from nbmoe_kernels.matmul_sm90_swiglu_config import FusedMatmulConfig, fused_matmul_config

_MOST_WIDTHS = 4
"""With five widths and two ends of a tile a consumer's registers do not hold what all share."""
_LEAST_ROWS, _LEAST_COLUMNS = 16, 2048
"""From here on one launch is faster than two, the fused gate/up matmul and down's. On an H200, us,
NVFP4, two and one at 1, 16 and 128 tokens:

    DeepSeek-V3 EP8, 1, 16, 128 rows, D = 2,048    25.7 32.8   102.7 100.9   202.0 190.6
    gpt-oss-20b, 4, 64, 512 rows, D = 2,880        38.5 57.1   119.5 113.2   164.9 155.6
    Qwen3-30B, 8, 128, 1,024 rows, D = 768         17.6 26.0    68.0  68.9   109.4 111.2

At 4,096 tokens three kernels are faster than either."""


@functools.lru_cache(maxsize=4096)
def mega_ffn_pays(
    a_format: str, b_format: str, moe_dim: int, num_active: int, total_rows: int
) -> bool:
    """Whether one launch is faster than the kernels that it stands for.

    Args:
        a_format: kind of the tokens.
        b_format: kind of both weights.
        moe_dim: D.
        num_active: expert slots.
        total_rows: rows of all slots.
    """
    objection = ""
    if (a_format, b_format) != ("nvfp4", "nvfp4"):
        objection = "only nvfp4 was measured"
    elif total_rows < _LEAST_ROWS:
        objection = f"blocks wait for each other longer than a launch takes at {total_rows} rows"
    elif moe_dim < _LEAST_COLUMNS:
        objection = f"tiles of {moe_dim} columns are over before waiting pays"
    elif not fusing_pays(num_active, total_rows):
        objection = "activating beside many rows' products takes longer than a kernel for it"
    one, several = "one launch", "a kernel a step"
    report_choice(
        f"FFN {a_format} x {b_format}, moe dim {moe_dim}, {num_active} slots, {total_rows} rows",
        several if objection else one,
        [(one, objection) if objection else (several, "one launch is faster from here on")],
    )
    return not objection


def mega_ffn_config(
    a_format: str,
    b_format: str,
    moe_dim: int,
    k: int,
    num_active: int,
    estimated_total_m: int | None,
) -> FusedMatmulConfig:
    """The shape of `fused_matmul_config` for the gate/up matmul, with no more widths than fit.

    Args:
        a_format: kind of the tokens.
        b_format: kind of both weights.
        moe_dim: D, half of the gate/up matmul's weight rows.
        k: columns of the gate/up matmul.
        num_active: expert slots.
        estimated_total_m: expected rows of all slots, a hint; None counts as many.
    """
    config = fused_matmul_config(a_format, b_format, 2 * moe_dim, k, num_active, estimated_total_m)
    first, *others = config.widths
    return replace(config, widths=(first, *others[max(len(others) + 1 - _MOST_WIDTHS, 0) :]))
