"""`MoELayer.capture` where there is no GPU to capture on, and what it is given."""

from typing import Any

import pytest

from nbmoe.errors import ArgTypeError, DeviceError, RangeError
from nbmoe.nn import MoEQuantized
from tests.nn.weights import random_layer


def test_only_a_gpu_has_graphs(fast_backend: str) -> None:
    if fast_backend == "gpu":
        pytest.skip("there are graphs: tests/nn/test_nn_gpu.py")
    layer = MoEQuantized(random_layer(1, "nvfp4", ""), backend=fast_backend)
    rule = f"MoEQuantized.capture.*backend: expected gpu.*got '?{fast_backend}.*call the layer"
    with pytest.raises(DeviceError, match=rule):
        layer.capture(4)


@pytest.mark.parametrize(
    ("tokens", "error"), [(0, RangeError), (-1, RangeError), (1.5, ArgTypeError)]
)
def test_tokens_are_counted_from_one(tokens: Any, error: type[Exception]) -> None:
    layer = MoEQuantized(random_layer(1, "nvfp4", ""), backend="reference")
    with pytest.raises(error, match="tokens"):
        layer.capture(tokens)
