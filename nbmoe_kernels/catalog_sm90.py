"""The kernels that only compute capability 9.0 runs, in shapes that are chosen for real problems.

The problems are those of Qwen3-30B's experts: few rows, of which the weights' bytes are the cost,
and many, of which products are.
"""

from nbmoe_kernels.heuristics_fp8_sm90 import fp8_hopper_config
from nbmoe_kernels.heuristics_sm90 import hopper_matmul_config
from nbmoe_kernels.kernel import Kernel
from nbmoe_kernels.matmul_fp8_sm90_config import Fp8HopperConfig
from nbmoe_kernels.matmul_grouped_fp8_sm90 import make_matmul_grouped_fp8_sm90
from nbmoe_kernels.matmul_grouped_sm90 import make_matmul_grouped_sm90
from nbmoe_kernels.matmul_grouped_swiglu_sm90 import make_matmul_grouped_swiglu_sm90
from nbmoe_kernels.matmul_sm90_config import HopperMatmulConfig
from nbmoe_kernels.matmul_sm90_swiglu_config import FusedMatmulConfig, fused_matmul_config
from nbmoe_kernels.mega_ffn_sm90 import make_mega_ffn_sm90
from nbmoe_kernels.mega_ffn_sm90_config import mega_ffn_config

_N, _K, _SLOTS = 1536, 2048, 128
_FEW, _SOME, _MANY = 128, 1024, 32768
"""Rows of all slots."""


def hopper_catalog() -> tuple[Kernel, ...]:
    """Of formats, epilogues and tile shapes each at least once."""
    return (
        *(make_matmul_grouped_sm90(config) for config in plain_configs()),
        *(make_matmul_grouped_swiglu_sm90(*variant) for variant in fused_variants()),
        *(make_mega_ffn_sm90(*variant) for variant in ffn_variants()),
        *(make_matmul_grouped_fp8_sm90(*variant) for variant in fp8_variants()),
    )


def plain_configs() -> tuple[HopperMatmulConfig, ...]:
    """Of `make_matmul_grouped_sm90`."""
    return (
        hopper_matmul_config("nvfp4", "nvfp4", _N, _K, _SLOTS, _FEW),
        hopper_matmul_config("nvfp4", "nvfp4", _N, _K, _SLOTS, _SOME),
        hopper_matmul_config("nvfp4", "nvfp4", _N, _K, _SLOTS, _MANY),
        hopper_matmul_config("mxfp8", "mxfp8", _N, _K, _SLOTS, _FEW),
        hopper_matmul_config("bf16", "bf16", _N, _K, _SLOTS, _FEW),
    )


def fused_variants() -> tuple[tuple[FusedMatmulConfig, bool, str, str], ...]:
    """Arguments of `make_matmul_grouped_swiglu_sm90`."""
    many = fused_matmul_config("nvfp4", "nvfp4", _N, _K, _SLOTS, _MANY)
    mx = fused_matmul_config("mxfp4", "mxfp4", _N, _K, _SLOTS, _FEW)
    return (
        (mx, True, "swigluoai", "packed"),
        (many, True, "silu", "prepared"),
    )


def ffn_variants() -> tuple[tuple[FusedMatmulConfig, bool, str], ...]:
    """Arguments of `make_mega_ffn_sm90`."""
    few = mega_ffn_config("mxfp8", "mxfp4", _N // 2, _K, _SLOTS, _SOME)
    many = mega_ffn_config("nvfp4", "nvfp4", _N // 2, _K, _SLOTS, _MANY)
    return (few, False, "swigluoai"), (many, True, "silu")


def fp8_variants() -> tuple[tuple[Fp8HopperConfig, str, str], ...]:
    """Arguments of `make_matmul_grouped_fp8_sm90`."""
    return (
        (fp8_hopper_config(_N, _K, _SLOTS, _FEW), "block128", "f32"),
        (fp8_hopper_config(_N, _K, _SLOTS, _MANY), "block128", "bf16"),
        (fp8_hopper_config(_N, _K, _SLOTS, _FEW, "mxfp4"), "rowwise", "f32"),
    )
