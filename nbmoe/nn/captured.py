"""`CapturedLayer`: a whole layer as one CUDA graph, for a fixed number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nbmoe.arrays import to_backend
from nbmoe.errors import DeviceError, message
from nbmoe.graphs import Graph
from nbmoe.streams import gpu_stream, synchronize
from nbmoe.validate import Call

if TYPE_CHECKING:
    from nbmoe.nn.layer import MoELayer


class CapturedLayer:
    """Routing, quantization, the experts' matmuls and the combination, in one graph.

    Write tokens to `x`, `replay`, read `out`. A replay reads the routing that its tokens ask for,
    allocates nothing and costs the host one call. It uses the layer's buffers: replays and calls of
    a layer, however many graphs it has, go to one stream, or wait for each other.

    Attributes:
        layer: The layer.
        tokens: T.
        x: bf16 [T, H] on the GPU, as uint16, zeros at first. It exports
            ``__cuda_array_interface__``; torch.as_tensor(x, device="cuda") shares its memory.
        out: bf16 [T, H] likewise.
    """

    def __init__(self, layer: MoELayer, tokens: int) -> None:
        """Computes the layer once, which loads kernels and makes room, and then captures a call.

        Args:
            layer: A layer of the gpu backend.
            tokens: T, 1 or more.

        Raises:
            ArgTypeError, RangeError: `tokens` is no int of at least 1.
            DeviceError: The layer's backend is another one.
        """
        api = f"{type(layer).__name__}.capture"
        self.tokens = Call(api, None).integer("tokens", tokens, 1)
        if not layer.backend.on_gpu:
            rule, got = "gpu: only there are CUDA graphs", layer.backend.name
            raise DeviceError(message(api, "backend", rule, got, "call the layer instead"))
        from cuda.bindings import driver

        self.layer = layer
        zeros = np.zeros((tokens, layer.hidden_size), np.uint16)
        self.x, self.out = to_backend(zeros, "gpu"), to_backend(zeros, "gpu")
        _, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        synchronize(0)  # what was uploaded: the new stream does not wait for it
        try:
            layer(self.x, out=self.out, stream=int(stream))
            synchronize(int(stream))
            self._graph = Graph(
                lambda: layer(self.x, out=self.out, stream=int(stream)), int(stream)
            )
        finally:
            driver.cuStreamDestroy(stream)

    def replay(self, stream: Any = None) -> Any:
        """Enqueues the layer.

        Args:
            stream: CUDA stream, as for `nbmoe.ops`; None for the legacy default stream.

        Returns:
            `out`, which holds the result once the stream gets there.

        Raises:
            ArgTypeError, DeviceError: `stream` is no stream of this GPU.
        """
        self._graph.launch(gpu_stream(f"{type(self).__name__}.replay", stream, ()))
        return self.out
