"""What a layer asks of a quantization strategy."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from nbmoe.activation import GatedActivation


@runtime_checkable
class QuantStrategy(Protocol):
    """Quantizes activations and multiplies them by quantized weights.

    Sizes: R rows of input, M routed rows, S slots, E experts, K and N of a matmul, D the width of
    an expert. A slot is an entry of `expert_ids`; it owns rows expert_start[s] up to
    expert_start[s + 1] and uses weight expert_ids[s]. Arrays are numpy arrays or arrays of a GPU;
    results are of the same kind.
    """

    def quantize(self, tensor: Any, group_size: int) -> tuple[Any, Any]:
        """Quantizes all rows alike, without routing.

        Args:
            tensor: (R, K) bfloat16.
            group_size: Elements along K that share a scale [elements], -1 for a whole row.

        Returns:
            Codes (R, K) or (R, K/2), and scales in the layout that `grouped_matmul` takes.
        """
        ...

    def grouped_quantize(
        self,
        tensor: Any,
        group_size: int,
        input_scale: Any,
        expert_start: Any,
        scales_offset: Any,
        expert_ids: Any,
    ) -> tuple[Any, Any]:
        """Quantizes the rows of the slots; rows from expert_start[-1] on are not written.

        Args:
            tensor: (M, K) bfloat16, rows in the order of the slots.
            group_size: Elements along K that share a scale [elements].
            input_scale: (E,) float32 calibrated scales, by expert id, where the format has them.
            expert_start: (S + 1,) uint32 prefix sums [rows].
            scales_offset: (S,) uint32 [128-row tiles], where scales are tiled.
            expert_ids: (S,) int32 expert of each slot, -1 for none.

        Returns:
            Codes and scales.
        """
        ...

    def grouped_matmul(
        self,
        weight: Any,
        weight_scales: Any,
        expert_scales: Any = None,
        expert_inputs: tuple[Any, ...] = (),
        estimated_total_m: int | None = None,
        a_scales_max_padded_m: int = 0,
    ) -> Any:
        """Multiplies each slot's rows by its expert's weight.

        Args:
            weight: (E, N, K) or (E, N, K/2) codes.
            weight_scales: Scales of `weight`.
            expert_scales: (E,) float32 factors of the results, where the format has them.
            expert_inputs: Quantized activations and their routing, as the strategy documents.
            estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
            a_scales_max_padded_m: Accepted, without effect.

        Returns:
            (M, N) bfloat16.
        """
        ...

    def fused_silu_quantize(
        self,
        gate_up_projs: Any,
        input_scales: Any = None,
        expert_inputs: tuple[Any, ...] = (),
        max_padded_M: int = 0,
        activation: GatedActivation | None = None,
    ) -> tuple[Any, Any]:
        """Applies the gated activation to [gate | up] and quantizes the result.

        Args:
            gate_up_projs: (M, 2D) bfloat16, gate columns then up columns.
            input_scales: Calibrated scales of the result, where the format has them.
            expert_inputs: Routing of the rows, as for `grouped_matmul`.
            max_padded_M: Accepted, without effect.
            activation: The activation, None for silu.

        Returns:
            Codes of (M, D) and their scales.
        """
        ...

    def prepare_weight_scales(self, gate_up: Any, down: Any, device: Any) -> tuple[Any, Any]:
        """Brings row-major scales of both weights into the layout that the matmuls read.

        Args:
            gate_up: Scales of the gate and up weights.
            down: Scales of the down weights.
            device: Where the results are used; None for where the scales are.

        Returns:
            The two in that layout.
        """
        ...
