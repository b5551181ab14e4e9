"""`MoE`: a mixture-of-experts layer with bfloat16 weights."""

from __future__ import annotations

from nbmoe.checkpoints import ExpertWeights
from nbmoe.errors import ConfigError, message
from nbmoe.nn.layer import MoELayer
from nbmoe.nn.moe_quantized import MoEQuantized


class MoE(MoEQuantized):
    """Router, bfloat16 experts and combination of one MoE layer.

        gate -> moe_create_indices -> gather_rows -> grouped_matmul_ragged -> gated_activation
             -> grouped_matmul_ragged -> (shared experts) -> moe_finalize

    Arguments and attributes are those of `MoEQuantized`; the weights' format is "bf16".
    """

    def _check_format(self, weights: ExpertWeights) -> None:
        if weights.format != "bf16":
            hint = "MoEQuantized is the layer of quantized weights"
            raise ConfigError(message(self._api, "weights", "bf16 weights", weights.format, hint))


def make_layer(weights: ExpertWeights, *, backend: str | None = None) -> MoELayer:
    """The layer for weights of any format: `MoE` for bf16, `MoEQuantized` otherwise.

    Args:
        weights: The layer in host memory.
        backend: As in `MoEQuantized`.

    Raises:
        As `MoEQuantized`.
    """
    return (MoE if weights.format == "bf16" else MoEQuantized)(weights, backend=backend)
