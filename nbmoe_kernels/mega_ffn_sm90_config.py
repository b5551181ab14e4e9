"""Which tile shape a Hopper MegaFFN runs with: the fused gate/up matmul's, for both matmuls."""

from dataclasses import replace

from nbmoe_kernels.matmul_sm90_swiglu_config import FusedMatmulConfig, fused_matmul_config

_MOST_WIDTHS = 4
"""With five widths and two ends of a tile a consumer's registers do not hold what all share."""


def mega_ffn_pays(moe_dim: int, k: int, num_active: int, total_rows: int) -> bool:
    """Whether one launch is faster than the kernels that it stands for.

    Args:
        moe_dim: D.
        k: columns of the gate/up matmul.
        num_active: expert slots.
        total_rows: rows of all slots.
    """
    return False


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
