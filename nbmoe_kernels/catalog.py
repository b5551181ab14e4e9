"""Every kernel that the library launches, for tools: the compile gate, the doctor, warm-up."""

from nbmoe_kernels.create_indices import MAX_EXPERTS, make_create_indices
from nbmoe_kernels.finalize import make_moe_finalize
from nbmoe_kernels.heuristics import grouped_matmul_configs
from nbmoe_kernels.kernel import Kernel
from nbmoe_kernels.matmul_grouped_sm80 import make_matmul_grouped
from nbmoe_kernels.matmul_grouped_swiglu_sm80 import make_matmul_grouped_swiglu
from nbmoe_kernels.quantize_grouped import make_quantize_grouped

_WIDE_COPY_K, _NARROW_COPY_K = 64, 48
"""Values of K whose rows allow 16-byte copies, and only 8-byte copies."""


def catalog() -> tuple[Kernel, ...]:
    """All kernels in all tile shapes; of capacities and flags, the ends."""
    wide = grouped_matmul_configs(_WIDE_COPY_K)
    narrow = grouped_matmul_configs(_NARROW_COPY_K)
    return (
        make_create_indices(64),
        make_create_indices(MAX_EXPERTS),
        make_quantize_grouped(),
        *(make_matmul_grouped(config) for config in wide),
        make_matmul_grouped(narrow[-1]),
        *(make_matmul_grouped_swiglu(config, True) for config in wide),
        make_matmul_grouped_swiglu(narrow[-1], False),
        make_moe_finalize(),
    )
