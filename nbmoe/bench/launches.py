"""One small launch of each kernel, on addresses in a scratch buffer."""

from collections.abc import Callable
from typing import Any

from nbmoe.backend import executor

SCRATCH_BYTES = 1 << 20


def launchers(address: int) -> dict[str, Callable[[Any], None]]:
    """Functions that launch a kernel on a stream and do nothing else on the host.

    Args:
        address: of `SCRATCH_BYTES` zeros on the device: one expert slot without rows, so that no
            kernel has work.
    """
    from nbmoe_kernels import create_indices, finalize, quantize_grouped
    from nbmoe_kernels import matmul_grouped_sm80 as matmul
    from nbmoe_kernels import matmul_grouped_swiglu_sm80 as swiglu
    from nbmoe_kernels.heuristics import grouped_matmul_config

    run: Any = executor("gpu")
    product: dict[str, Any] = {
        "config": grouped_matmul_config("nvfp4", "nvfp4", 64, 64, 1, 1),
        **{"num_active": 1, "num_rows": 1, "n": 64, "k": 64},
        **{"has_row_scales": False, "has_expert_scales": True, "has_bias": False},
    }
    fused = product | {"match_bf16": True, "activation": "silu", "alpha": 0.0, "limit": 0.0}

    found: dict[str, Callable[[Any], None]] = {
        "create indices": lambda s: create_indices.launch_create_indices(
            run, *[address + 65536 * i for i in range(7)], num_slots=0, num_experts=1, stream=s
        ),
        "quantize": lambda s: quantize_grouped.launch_quantize_grouped(
            run,
            *[address] * 8,
            num_active=1,
            num_cols=64,
            num_tiles=1,
            indices_divisor=1,
            has_indices=False,
            stream=s,
        ),
        "matmul": lambda s: matmul.launch_matmul_grouped(run, *[address] * 11, **product, stream=s),
        "matmul + swiglu": lambda s: swiglu.launch_matmul_grouped_swiglu(
            run, *[address] * 13, **fused, stream=s
        ),
        "finalize": lambda s: finalize.launch_moe_finalize(
            run, *[address] * 5, num_tokens=1, top_k=1, num_cols=64, has_shared=False, stream=s
        ),
    }
    if run.cc == (9, 0):
        from nbmoe_kernels.heuristics_sm90 import hopper_matmul_config
        from nbmoe_kernels.matmul_grouped_sm90 import launch_matmul_grouped_sm90

        config = hopper_matmul_config("nvfp4", "nvfp4", 64, 64, 1, 1)
        found["matmul, prepared operands"] = lambda s: launch_matmul_grouped_sm90(
            run, *[address] * 8, **product | {"config": config}, stream=s
        )
    return found
