"""Every kernel that the library launches, for tools: the compile gate, the doctor, warm-up."""

from nbmoe_kernels.catalog_sm90 import hopper_catalog
from nbmoe_kernels.create_indices import MAX_EXPERTS, make_create_indices
from nbmoe_kernels.dequantize_mxfp4 import make_dequantize_mxfp4
from nbmoe_kernels.finalize import make_moe_finalize
from nbmoe_kernels.gated_activate import make_gated_activate
from nbmoe_kernels.gated_quantize import make_gated_quantize
from nbmoe_kernels.gather_rows import make_gather_rows
from nbmoe_kernels.heuristics import grouped_matmul_configs
from nbmoe_kernels.interleave_scales import make_interleave_scales
from nbmoe_kernels.kernel import Kernel
from nbmoe_kernels.matmul_config import MatmulConfig
from nbmoe_kernels.matmul_grouped_fp8_sm80 import make_matmul_grouped_fp8
from nbmoe_kernels.matmul_grouped_sm80 import make_matmul_grouped
from nbmoe_kernels.matmul_grouped_swiglu_sm80 import make_matmul_grouped_swiglu
from nbmoe_kernels.mega_ffn_sm80 import make_mega_ffn_sm80
from nbmoe_kernels.prepare_fp8 import make_prepare_fp8_tokens, make_prepare_fp8_weights
from nbmoe_kernels.prepare_tokens import make_prepare_tokens
from nbmoe_kernels.prepare_w4a8 import make_fold_row_scales, make_prepare_w4a8
from nbmoe_kernels.prepare_weights import make_prepare_weights
from nbmoe_kernels.prepared_tokens import TOKEN_FORMATS
from nbmoe_kernels.prepared_weights import UNIT_KINDS
from nbmoe_kernels.quantize_fp8_groups import make_quantize_fp8_groups
from nbmoe_kernels.quantize_fp8_prepared import make_quantize_fp8_prepared
from nbmoe_kernels.quantize_fp8_rows import make_quantize_fp8_rows
from nbmoe_kernels.quantize_fp8_tensor import (
    make_fp8_tensor_amax,
    make_quantize_fp8_static,
    make_quantize_fp8_tensor,
)
from nbmoe_kernels.quantize_grouped import make_quantize
from nbmoe_kernels.reciprocal import make_reciprocal
from nbmoe_kernels.route_grouped import make_route_logits_grouped, make_route_sigmoid_grouped
from nbmoe_kernels.route_logits import make_route_logits
from nbmoe_kernels.route_sigmoid import make_route_sigmoid
from nbmoe_kernels.router_logits import make_router_logits
from nbmoe_kernels.row_scales import make_row_scales

_WIDE_COPY_K, _NARROW_COPY_K = 64, 48
"""Values of K whose rows allow 16-byte copies, and only 8-byte copies."""


def catalog() -> tuple[Kernel, ...]:
    """All kernels; of tile shapes, formats, capacities and flags each at least once."""
    return (*_routing(), *_quantizers(), *_matmuls(), *hopper_catalog(), make_moe_finalize())


def _routing() -> tuple[Kernel, ...]:
    return (
        make_router_logits(),
        make_route_logits(128),
        make_route_logits(MAX_EXPERTS),
        make_route_sigmoid(128),
        make_route_sigmoid(MAX_EXPERTS),
        make_route_logits_grouped(128),
        make_route_sigmoid_grouped(128),
        make_create_indices(64),
        make_create_indices(MAX_EXPERTS),
        make_create_indices(128, many_blocks=True),
        make_create_indices(MAX_EXPERTS, many_blocks=True),
        make_gather_rows(),
    )


def _quantizers() -> tuple[Kernel, ...]:
    return (
        make_quantize("grouped"),
        make_quantize("grouped", "mxfp4"),
        make_quantize("grouped", "mxfp4", "even"),
        make_quantize("grouped", "mxfp8"),
        make_quantize("grouped", "mxfp8", "floor"),
        make_quantize("rows", "mxfp8"),
        make_quantize("row_scaled"),
        make_quantize("grouped", layout="prepared"),
        make_quantize("grouped", "mxfp8", layout="prepared"),
        make_row_scales(),
        make_interleave_scales(),
        make_reciprocal(),
        make_dequantize_mxfp4(False),
        make_dequantize_mxfp4(True),
        *(make_prepare_weights(kind) for kind in UNIT_KINDS),
        *(make_prepare_tokens(format) for format in TOKEN_FORMATS),
        make_prepare_tokens("nvfp4", has_slots=False),
        make_prepare_fp8_weights(),
        make_prepare_fp8_tokens("f32"),
        make_prepare_fp8_tokens("bf16"),
        make_quantize_fp8_prepared(),
        make_fold_row_scales(),
        make_prepare_w4a8(),
        make_gated_quantize("nvfp4", "rceil", "silu"),
        make_gated_quantize("mxfp4", "rceil", "gelu_tanh"),
        make_gated_quantize("mxfp8", "rceil", "swigluoai"),
        make_gated_quantize("nvfp4", "rceil", "silu", "prepared"),
        make_gated_activate("swigluoai"),
        make_quantize_fp8_groups(),
        make_quantize_fp8_rows("bf16x8"),
        make_quantize_fp8_rows("bf16"),
        make_fp8_tensor_amax("bf16x8"),
        make_fp8_tensor_amax("bf16"),
        make_quantize_fp8_tensor("bf16x8"),
        make_quantize_fp8_tensor("bf16"),
        *(make_quantize_fp8_static(kind) for kind in ("bf16x8", "bf16", "f16", "f32")),
    )


def _shape(a_format: str, b_format: str, index: int) -> MatmulConfig:
    return grouped_matmul_configs(a_format, b_format, _WIDE_COPY_K)[index]


def _matmuls() -> tuple[Kernel, ...]:
    wide = grouped_matmul_configs("nvfp4", "nvfp4", _WIDE_COPY_K)
    narrow = grouped_matmul_configs("nvfp4", "nvfp4", _NARROW_COPY_K)[-1]
    small, middle, large = range(3)
    return (
        *(make_matmul_grouped(config) for config in wide),
        make_matmul_grouped(narrow),
        make_matmul_grouped(_shape("mxfp4", "mxfp4", small)),
        make_matmul_grouped(_shape("mxfp8", "mxfp8", middle)),
        make_matmul_grouped(_shape("mxfp8", "mxfp4", large)),
        make_matmul_grouped(_shape("bf16", "bf16", small), "f32"),
        make_matmul_grouped(_shape("bf16", "bf16", large)),
        make_matmul_grouped(_shape("bf16", "mxfp4", middle)),
        *(make_matmul_grouped_swiglu(config) for config in wide),
        make_matmul_grouped_swiglu(narrow, match_bf16=False),
        make_matmul_grouped_swiglu(_shape("mxfp4", "mxfp4", middle), activation="swigluoai"),
        make_matmul_grouped_swiglu(_shape("mxfp8", "mxfp8", small), activation="gelu_tanh"),
        make_matmul_grouped_swiglu(_shape("mxfp8", "mxfp4", large)),
        make_mega_ffn_sm80(_shape("nvfp4", "nvfp4", small)),
        make_mega_ffn_sm80(_shape("mxfp8", "mxfp8", middle), False, "swigluoai"),
        make_matmul_grouped_fp8(_shape("e4m3", "e4m3", small), "block128", "f32"),
        make_matmul_grouped_fp8(_shape("e4m3", "e4m3", large), "block128", "bf16"),
        make_matmul_grouped_fp8(_shape("e4m3", "e4m3", middle), "rowwise", "f32"),
    )
