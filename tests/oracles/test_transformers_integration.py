"""Tiny models of transformers whose experts run through nbmoe, against transformers' own eager."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbmoe.codecs import decode_e2m1, unpack_nibbles
from nbmoe.errors import ConfigError, RoutingError, ScaleError, UnsupportedError

pytestmark = pytest.mark.oracles
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("nbmoe.integrations.transformers")

DOCS = Path(__file__).parents[2] / "docs" / "transformers.md"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}


def qwen() -> Any:
    config = transformers.Qwen3MoeConfig(
        **SIZES, intermediate_size=64, moe_intermediate_size=32, num_experts=4
    )
    return seeded(transformers.Qwen3MoeForCausalLM, config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(**SIZES, intermediate_size=32, num_local_experts=4)
    return seeded(transformers.GptOssForCausalLM, config)


def seeded(model_class: Any, config: Any) -> Any:
    """With weights large enough that experts matter."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for module in experts_of(model):
            for name, parameter in module.named_parameters():
                deviation = 0.5 if "bias" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0, deviation)
        for name, parameter in model.named_parameters():
            # Choices that rounding does not change.
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.normal_(0, 1)
    return model


def experts_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "has_gate")]


def routed(module: Any, tokens: int = 11) -> tuple[Any, Any, Any]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 64, generator=g).bfloat16().float()
    ids = torch.rand(tokens, 4, generator=g).topk(2).indices
    return x, ids, torch.rand(tokens, 2, generator=g)


def error(got: Any, want: Any) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("make", [qwen, gpt_oss])
@pytest.mark.parametrize(
    ("how", "bound"),
    [
        ({"format": "bf16"}, 0.01),
        ({"format": "mxfp8"}, 0.08),
        ({"format": "fp8_block"}, 0.08),
        ({"format": "fp8_row"}, 0.08),
        ({"format": "nvfp4", "input_scale": 4 / 2688}, 0.3),
        ({"format": "mxfp4"}, 0.4),
    ],
    ids=lambda how: how["format"] if isinstance(how, dict) else "",
)
def test_experts_compute_what_eager_does(make: Any, how: Any, bound: float) -> None:
    """As near as a format of 8, 4 bits or none allows; swapped halves would be 1 or more."""
    model = make()
    module = experts_of(model)[0]
    operands = routed(module)
    with torch.no_grad():
        want = module(*operands)
        assert integration.use_nbmoe(model, **how, backend="reference") is model
        got = module(*operands)
    assert got.dtype is want.dtype and error(got, want) < bound


@pytest.mark.parametrize("make", [qwen, gpt_oss])
def test_rounded_weights_are_multiplied_exactly(make: Any) -> None:
    """Eager with the weights that MXFP4's codes stand for: what differs is bf16's rounding."""
    model = make()
    module = experts_of(model)[0]
    integration.use_nbmoe(model, "mxfp4", activations="bf16", backend="reference")
    got = module(*routed(module))
    with torch.no_grad():
        for parameter in (module.gate_up_proj, module.down_proj):
            rows = parameter.transpose(1, 2) if module.is_transposed else parameter
            values = torch.from_numpy(mxfp4_values(rows.float().numpy()))
            parameter.copy_(values.transpose(1, 2) if module.is_transposed else values)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        want = module(*routed(module))
    assert error(got, want) < 0.01


def mxfp4_values(rows: Any) -> Any:
    """By the smallest power of two that keeps a block within 6, to the nearest code."""
    blocks = rows.reshape(*rows.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(amax / 6)))
    grid = decode_e2m1(unpack_nibbles(np.arange(256, dtype=np.uint8)))
    grid = np.unique(grid)
    scaled = blocks / scale
    middles = (grid[1:] + grid[:-1]) / 2
    assert not np.isin(scaled, middles).any(), "no ties"
    return (grid[np.searchsorted(middles, scaled)] * scale).reshape(rows.shape).astype(np.float32)


@pytest.mark.parametrize("make", [qwen, gpt_oss])
def test_a_model_runs(make: Any) -> None:
    model = make()
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        want = model(ids).logits
        integration.use_nbmoe(model, "bf16", backend="emulate")
        got = model(ids).logits
        again = model(ids).logits
        for module in experts_of(model):
            del module.gate_up_proj, module.down_proj
        without = model(ids).logits
    assert error(got, want) < 0.02
    assert torch.equal(got, again) and torch.equal(got, without)


def test_ids_of_other_ranks_and_twice_the_same() -> None:
    model = qwen()
    module = experts_of(model)[0]
    integration.use_nbmoe(model, "bf16", backend="reference")
    x, ids, weights = routed(module)
    ids[:, 1] = 4
    with torch.no_grad():
        got = module(x, ids, weights)
        assert torch.equal(got, module(x, ids[:, :1].contiguous(), weights[:, :1]))
    ids[3] = 2
    with pytest.raises(RoutingError, match="different experts"):
        module(x, ids, weights)


def test_torch_takes_the_operator() -> None:
    model = qwen()
    module = experts_of(model)[0]
    integration.use_nbmoe(model, "bf16", backend="reference")
    x, ids, weights = routed(module)
    operands = (x.bfloat16(), ids.int(), weights, module.nbmoe_number)
    torch.library.opcheck(torch.ops.nbmoe.routed_experts.default, operands)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, ids, weights), module(x, ids, weights))


def test_what_is_refused() -> None:
    model = qwen()
    module = experts_of(model)[0]
    with pytest.raises(ConfigError, match=r"format: expected one of .*got 'int4'"):
        integration.use_nbmoe(model, "int4")
    with pytest.raises(ScaleError, match=r"input_scale: expected a float for nvfp4.*/ 2688"):
        integration.use_nbmoe(model, "nvfp4")
    with pytest.raises(ScaleError, match="None for mxfp8"):
        integration.use_nbmoe(model, "mxfp8", input_scale=1.0)
    with pytest.raises(ConfigError, match="model: expected a model with experts"):
        integration.use_nbmoe(torch.nn.Linear(4, 4), "mxfp8")
    with pytest.raises(UnsupportedError, match="weights x activations"):
        integration.use_nbmoe(model, "mxfp8", activations="bf16")
    model.set_experts_implementation("nbmoe")
    with pytest.raises(ConfigError, match=r"use_nbmoe has prepared.*use_nbmoe\(model"):
        module(*routed(module))
    module.act_fn = torch.nn.ReLU()
    with pytest.raises(UnsupportedError, match="with ReLU"):
        integration.use_nbmoe(model, "mxfp8")


def test_the_docs_example_runs() -> None:
    text = DOCS.read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(text, "docs/transformers.md", "exec"), names)
    assert torch.isfinite(names["logits"]).all()
