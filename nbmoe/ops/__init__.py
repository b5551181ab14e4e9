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
from nbmoe.ops.matmul import grouped_matmul_block_scaled
from nbmoe.ops.quantize import grouped_quantize_dynamic_block_scaled
from nbmoe.ops.routing import RoutingIndices, moe_create_indices, route
from nbmoe.ops.swiglu import grouped_matmul_blocked_swiglu

__all__ = [
    "RoutingIndices",
    "grouped_matmul_block_scaled",
    "grouped_matmul_blocked_swiglu",
    "grouped_quantize_dynamic_block_scaled",
    "moe_create_indices",
    "moe_finalize",
    "route",
]
