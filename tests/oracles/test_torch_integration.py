"""Layers as torch modules and custom operators: torch's own checks, and the layer's bytes."""

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest

from nbmoe.arrays import to_numpy
from nbmoe.checkpoints import read_layer
from nbmoe.errors import ArgTypeError, ConfigError, DTypeError, ShapeError
from nbmoe.nn import make_layer, random_tokens

pytestmark = pytest.mark.oracles
torch = pytest.importorskip("torch")
integration = pytest.importorskip("nbmoe.integrations.torch")

FIXTURES = Path(__file__).parents[1] / "fixtures"
FIXTURE = FIXTURES / "tiny_mo_MXFP8_DEFAULT_CFG"
DOCS = Path(__file__).parents[2] / "docs" / "torch.md"


def tokens_of(layer: Any, count: int, seed: int = 0) -> Any:
    x = random_tokens(count, layer.hidden_size, seed)
    return torch.from_numpy(x.view("int16")).view(torch.bfloat16)


def bits(x: Any) -> bytes:
    return to_numpy(x).tobytes()


@pytest.fixture(scope="module")
def layer() -> Any:
    return make_layer(read_layer(FIXTURE), backend="reference")


@pytest.fixture(scope="module")
def module(layer: Any) -> Any:
    return integration.MoEModule(layer)


def test_the_module_is_the_layer(layer: Any, module: Any) -> None:
    x = tokens_of(layer, 6)
    wanted = bits(layer(x))
    assert bits(module(x)) == wanted
    assert module(x.reshape(2, 3, -1)).shape == (2, 3, layer.hidden_size)
    assert bits(module(x.reshape(2, 3, -1))) == wanted
    assert bits(module(x.T.contiguous().T)) == wanted  # a view that is not contiguous
    assert module(x[:0]).shape == (0, layer.hidden_size)
    assert not list(module.parameters()) and not module.state_dict()
    assert f"top {layer.top_k}" in repr(module) and "reference" in repr(module)


def test_torch_checks_the_operators(layer: Any) -> None:
    number = integration.register_layer(layer)
    x = tokens_of(layer, 5)
    torch.library.opcheck(torch.ops.nbmoe.moe_layer.default, (x, number))
    out = torch.zeros_like(x)
    torch.library.opcheck(torch.ops.nbmoe.moe_layer_out.default, (x, number, out))
    torch.ops.nbmoe.moe_layer_out(x, number, out)
    assert bits(out) == bits(layer(x))


def test_compile_takes_it_as_one_graph(layer: Any, module: Any) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = module

        def forward(self, x: Any) -> Any:
            return x + self.experts(x * 2)

    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for count in (4, 7):
        x = tokens_of(layer, count, seed=count)
        assert bits(compiled(x)) == bits(block(x))


def test_numbers_are_kept_and_layers_are_not() -> None:
    layer = make_layer(read_layer(FIXTURE), backend="reference")
    number = integration.register_layer(layer)
    assert integration.register_layer(layer) == number
    x = tokens_of(layer, 2)
    del layer
    gc.collect()
    with pytest.raises(
        ConfigError, match=f"layer that still exists, got {number}.*keep the object"
    ):
        torch.ops.nbmoe.moe_layer(x, number)


def test_what_is_refused(layer: Any, module: Any) -> None:
    x = tokens_of(layer, 3)
    with pytest.raises(DTypeError, match="bfloat16"):
        module(x.float())
    with pytest.raises(ShapeError, match=f"T, {layer.hidden_size}"):
        module(x[:, :-1])
    with pytest.raises(ArgTypeError, match="MoELayer, got str"):
        integration.MoEModule("layer")
    with pytest.raises(ArgTypeError, match=r"no pickling.*from the checkpoint"):
        pickle.dumps(module)


def test_copies_share_the_layer(layer: Any, module: Any) -> None:
    model = torch.nn.Sequential(module, torch.nn.Identity())
    other = copy.deepcopy(model)
    assert other[0] is not module and other[0].layer is layer
    x = tokens_of(layer, 2)
    assert bits(other(x)) == bits(module(x))


def test_the_docs_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = DOCS.read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(DOCS.parents[1])
    names: dict[str, Any] = {}
    exec(compile(text, "docs/torch.md", "exec"), names)
    assert names["y"].shape == names["x"].shape and torch.isfinite(names["y"]).all()
