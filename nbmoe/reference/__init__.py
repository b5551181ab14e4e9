"""The specification as plain numpy: the public ops with the same names, arguments and bytes.

Every kernel on every backend equals these functions byte for byte. Read them in the order of the
data: routing, quantize, matmul, swiglu, combine. `float32` and `tensor_core` hold the arithmetic,
`oracle` the same layer in float64 with no rounding at all, to measure errors against.
"""

from nbmoe.reference.combine import moe_finalize
from nbmoe.reference.dequantize import mxfp4_dequant
from nbmoe.reference.gated import fused_silu_quantize, gated_activation
from nbmoe.reference.matmul import grouped_matmul_block_scaled
from nbmoe.reference.matmul_fp8 import (
    batched_dynamic_scaled_fp8_matmul,
    grouped_dynamic_scaled_fp8_matmul,
    grouped_rowwise_dynamic_scaled_fp8_matmul,
)
from nbmoe.reference.matmul_ragged import grouped_matmul_ragged, grouped_matmul_w4a16
from nbmoe.reference.quantize import (
    block_scales_interleave,
    grouped_quantize_dynamic_block_scaled,
    grouped_quantize_nvfp4_row_scaled,
    quantize_dynamic_block_scaled,
)
from nbmoe.reference.quantize_fp8 import (
    quantize_dynamic_scaled_float8,
    quantize_static_scaled_float8,
    quantize_tensor_dynamic_scaled_float8,
)
from nbmoe.reference.router import route, router_logits
from nbmoe.reference.routing import RoutingIndices, gather_rows, moe_create_indices
from nbmoe.reference.swiglu import grouped_matmul_blocked_swiglu

__all__ = [
    "RoutingIndices",
    "batched_dynamic_scaled_fp8_matmul",
    "block_scales_interleave",
    "fused_silu_quantize",
    "gated_activation",
    "gather_rows",
    "grouped_dynamic_scaled_fp8_matmul",
    "grouped_matmul_block_scaled",
    "grouped_matmul_blocked_swiglu",
    "grouped_matmul_ragged",
    "grouped_matmul_w4a16",
    "grouped_quantize_dynamic_block_scaled",
    "grouped_quantize_nvfp4_row_scaled",
    "grouped_rowwise_dynamic_scaled_fp8_matmul",
    "moe_create_indices",
    "moe_finalize",
    "mxfp4_dequant",
    "quantize_dynamic_block_scaled",
    "quantize_dynamic_scaled_float8",
    "quantize_static_scaled_float8",
    "quantize_tensor_dynamic_scaled_float8",
    "route",
    "router_logits",
]
