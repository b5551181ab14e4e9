"""The public operations, one verb a file, in the order of the data.

Every operation takes numpy arrays or arrays of a GPU and returns the same kind. All take

* `backend`: "gpu", "emulate", "cudasim", "reference", or None to let `NBMOE_BACKEND` or else the
  place of the operands decide (`nbmoe.backend`);
* `stream`: where a GPU runs it; torch operands default to torch's current stream;
* `out`: buffers for the results (a tuple for several), which makes a call free of allocation;
* `validate`: "shapes", "metadata" or "full" (`nbmoe.validate`), None for "metadata" on the host and
  "shapes", which never waits for the GPU, on a GPU.

`nbmoe.reference` has the same functions in numpy: the specification.
"""

from nbmoe.ops.combine import moe_finalize
from nbmoe.ops.dequantize import mxfp4_dequant
from nbmoe.ops.gated import gated_activation
from nbmoe.ops.interleave import block_scales_interleave
from nbmoe.ops.matmul import grouped_matmul_block_scaled
from nbmoe.ops.matmul_fp8 import (
    batched_dynamic_scaled_fp8_matmul,
    grouped_dynamic_scaled_fp8_matmul,
    grouped_rowwise_dynamic_scaled_fp8_matmul,
)
from nbmoe.ops.matmul_ragged import grouped_matmul_ragged, grouped_matmul_w4a16
from nbmoe.ops.mega_ffn import mega_ffn_nvfp4
from nbmoe.ops.mega_ffn_scratch import mega_ffn_arrival_count_size, mega_ffn_workspace_size
from nbmoe.ops.prepare_fp8 import prepare_fp8_tokens, prepare_fp8_weights
from nbmoe.ops.prepare_tokens import prepare_tokens
from nbmoe.ops.prepare_w4a8 import prepare_w4a8_weights
from nbmoe.ops.prepare_weights import prepare_weights
from nbmoe.ops.quantize import (
    grouped_quantize_dynamic_block_scaled,
    quantize_dynamic_block_scaled,
)
from nbmoe.ops.quantize_fp8 import quantize_dynamic_scaled_float8
from nbmoe.ops.quantize_fp8_tensor import (
    quantize_static_scaled_float8,
    quantize_tensor_dynamic_scaled_float8,
)
from nbmoe.ops.router import route, router_logits
from nbmoe.ops.routing import RoutingIndices, gather_rows, moe_create_indices
from nbmoe.ops.row_scaled import grouped_quantize_nvfp4_row_scaled
from nbmoe.ops.silu_quantize import fused_silu_quantize
from nbmoe.ops.swiglu import grouped_matmul_blocked_swiglu

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
    "mega_ffn_arrival_count_size",
    "mega_ffn_nvfp4",
    "mega_ffn_workspace_size",
    "moe_create_indices",
    "moe_finalize",
    "mxfp4_dequant",
    "prepare_fp8_tokens",
    "prepare_fp8_weights",
    "prepare_tokens",
    "prepare_w4a8_weights",
    "prepare_weights",
    "quantize_dynamic_block_scaled",
    "quantize_dynamic_scaled_float8",
    "quantize_static_scaled_float8",
    "quantize_tensor_dynamic_scaled_float8",
    "route",
    "router_logits",
]
