"""What a forward pass found, as lines for people and as a dictionary for programs."""

from __future__ import annotations

import math
from typing import Any

from nbmoe.cli.drawing import seconds, table
from nbmoe.nn import MoEQuantized, MoETrace
from nbmoe.nn.comparison import Comparison

ERROR_LIMIT = 1e-2
"""Largest arithmetic error of a correct layer; bf16 rounding alone gives about 2.4e-3."""

_RUNS = {
    "route": "route on the host, moe_create_indices",
    "quantize": "grouped_quantize_dynamic_block_scaled",
    "gate_up + SwiGLU": "grouped_matmul_blocked_swiglu",
    "down": "grouped_matmul_block_scaled",
    "combine": "moe_finalize",
}
_WHERE = {
    "gpu": "on the GPU",
    "emulate": "the GPU kernels, compiled for this CPU",
    "cudasim": "the GPU kernels, interpreted on this CPU",
    "reference": "the specification in numpy, no kernels",
}


def layer_lines(source: str, layer: MoEQuantized, tokens: int, origin: str) -> str:
    """Describes the layer, its input and where it runs."""
    rule = "weights scaled to sum 1" if layer.renormalize else "weights as they are"
    backend = layer.backend
    return table(
        [
            ("layer", source),
            ("experts", f"{layer.num_experts}, top {layer.top_k}, {rule}"),
            ("sizes", f"hidden {layer.hidden_size}, moe dim {layer.moe_dim}"),
            ("tokens", f"{tokens} x {layer.hidden_size} bf16, {origin}"),
            ("rows", f"{tokens * layer.top_k} routed to experts"),
            ("backend", f"{backend.name}: {_WHERE[backend.name]}"),
            ("because", backend.reason),
        ]
    )


def time_lines(trace: MoETrace, first_pass: float | None) -> str:
    """Time per stage, and of a first pass that compiled [s]."""
    rows = [("stage", "time", "runs")]
    rows += [(name, seconds(value), _RUNS[name]) for name, value in trace.seconds.items()]
    rows.append(("total", seconds(sum(trace.seconds.values())), ""))
    if first_pass is not None:
        rows.append(
            ("first pass", seconds(first_pass), "compiles kernels or finds them in a cache")
        )
    return table(rows)


def error_lines(errors: Comparison) -> str:
    """The three relative L2 errors and what each means."""
    return table(
        [
            (
                "relative error",
                f"{errors.arithmetic:.2e}",
                f"against float64 on the same quantized activations (limit {ERROR_LIMIT:.0e})",
            ),
            ("", f"{errors.inner:.2e}", "between the matmuls, from quantizing to NVFP4"),
            ("", f"{errors.total:.2e}", "against float64 on activations that are not quantized"),
        ]
    )


def as_dictionary(
    source: str,
    layer: MoEQuantized,
    trace: MoETrace,
    first_pass: float | None,
    errors: Comparison,
) -> dict[str, Any]:
    """Everything that the lines say, for --json; an error that is not finite is None."""
    starts = trace.expert_start_indices.astype(int)
    return {
        "source": source,
        "backend": layer.backend.name,
        "reason": layer.backend.reason,
        "num_experts": layer.num_experts,
        "hidden_size": layer.hidden_size,
        "moe_dim": layer.moe_dim,
        "top_k": layer.top_k,
        "renormalize": layer.renormalize,
        "tokens": len(trace.output),
        "rows_per_expert": (starts[1:] - starts[:-1]).tolist(),
        "seconds": trace.seconds,
        "first_pass_seconds": first_pass,
        "relative_error": _finite(errors.arithmetic),
        "inner_relative_error": _finite(errors.inner),
        "unquantized_relative_error": _finite(errors.total),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
