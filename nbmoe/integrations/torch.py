"""nbmoe's layers in PyTorch: a module, and the custom operators behind it.

    nbmoe::moe_layer(Tensor x, int layer) -> Tensor
    nbmoe::moe_layer_out(Tensor x, int layer, Tensor(a!) out) -> ()

``x`` and ``out`` are bfloat16 (T, H), and ``layer`` is the number that `register_layer` gives. They
have fake kernels, so torch.compile takes a model with them as one graph, and run on torch's current
stream, so a torch.cuda.graph holds them after one call with as many tokens. There is no backward:
layers are for inference.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from nbmoe.checkpoints import read_layer
from nbmoe.errors import ArgTypeError, message
from nbmoe.integrations.numbers import Numbers
from nbmoe.nn import MoELayer, make_layer

__all__ = ["MoEModule", "register_layer"]

_layers: Numbers[MoELayer] = Numbers("nbmoe::moe_layer", "a layer")


def register_layer(layer: MoELayer) -> int:
    """The number by which the operators know a layer, the same each time.

    The layer is not kept: it lives as long as somebody has it.

    Raises:
        ArgTypeError: `layer` is no `nbmoe.nn.MoELayer`.
    """
    if not isinstance(layer, MoELayer):
        got = f"{type(layer).__name__} {layer!r}"[:80]
        raise ArgTypeError(message("register_layer", "layer", "an nbmoe.nn.MoELayer", got))
    return _layers.of(layer)


@torch.library.custom_op("nbmoe::moe_layer", mutates_args=())
def moe_layer(x: torch.Tensor, layer: int) -> torch.Tensor:
    """A layer's output for tokens (T, H)."""
    result: torch.Tensor = _layers.get(layer)(x)
    return result


@moe_layer.register_fake
def _(x: torch.Tensor, layer: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("nbmoe::moe_layer_out", mutates_args=("out",))
def moe_layer_out(x: torch.Tensor, layer: int, out: torch.Tensor) -> None:
    """As `moe_layer`, into a tensor of the caller's."""
    _layers.get(layer)(x, out=out)


@moe_layer_out.register_fake
def _(x: torch.Tensor, layer: int, out: torch.Tensor) -> None:
    return None


class MoEModule(torch.nn.Module):
    """A layer of nbmoe as a module: bfloat16 (..., H) in, the same shape out.

    The weights are the layer's, quantized and where its backend computes: they are no parameters,
    and `to` moves nothing. Tokens have to be there, too: on the GPU for backend "gpu", else on the
    host. Several streams need several layers.

    Attributes:
        layer: The `nbmoe.nn.MoELayer`.
    """

    def __init__(self, layer: MoELayer) -> None:
        """Wraps a layer.

        Raises:
            ArgTypeError: `layer` is none.
        """
        super().__init__()
        self._number = register_layer(layer)
        self.layer = layer

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int | None = None,
        *,
        backend: str | None = None,
    ) -> MoEModule:
        """A layer of a checkpoint folder, bf16 ones included.

        Arguments and errors are those of `nbmoe.nn.MoEQuantized.from_checkpoint`.
        """
        return cls(make_layer(read_layer(path, layer), backend=backend))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Routes tokens, computes their experts and combines the results.

        Args:
            hidden_states: bfloat16 (..., H).

        Raises:
            DTypeError, ShapeError, DeviceError: as of `nbmoe.nn.MoELayer`.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        result: torch.Tensor = torch.ops.nbmoe.moe_layer(tokens, self._number)
        return result.reshape(hidden_states.shape)

    def extra_repr(self) -> str:
        """The layer in words."""
        layer = self.layer
        sizes = f"{layer.num_experts} experts, top {layer.top_k}, {layer.hidden_size}"
        return f"{sizes} x {layer.moe_dim}, {layer.strategy}, {layer.backend.name}"

    def __deepcopy__(self, memo: Any) -> MoEModule:
        """Another module of the same layer, whose weights never change."""
        return type(self)(self.layer)

    def __getstate__(self) -> Any:
        rule = "no pickling: the weights are where the layer's backend computes"
        hint = "make the module where it is needed, from the checkpoint"
        raise ArgTypeError(message(type(self).__name__, "module", rule, "pickle", hint))
