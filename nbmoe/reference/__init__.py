"""The specification as plain numpy: the public ops with the same names, arguments and bytes.

Every kernel on every backend equals these functions byte for byte. Read them in the order of the
data: routing, quantize, matmul, swiglu, combine. `float32` and `tensor_core` hold the arithmetic,
`oracle` the same layer in float64 with no rounding at all, to measure errors against.
"""

from nbmoe.reference.combine import moe_finalize
from nbmoe.reference.matmul import grouped_matmul_block_scaled
from nbmoe.reference.quantize import grouped_quantize_dynamic_block_scaled
from nbmoe.reference.routing import RoutingIndices, moe_create_indices, route
from nbmoe.reference.swiglu import grouped_matmul_blocked_swiglu

__all__ = [
    "RoutingIndices",
    "grouped_matmul_block_scaled",
    "grouped_matmul_blocked_swiglu",
    "grouped_quantize_dynamic_block_scaled",
    "moe_create_indices",
    "moe_finalize",
    "route",
]
