"""The layer: right against independent float64, deterministic, and safe at its edges."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import safetensors

from nbmoe.checkpoints import read_layer
from nbmoe.checkpoints.router import Router
from nbmoe.errors import ArgTypeError, ConfigError, DTypeError, ShapeError
from nbmoe.nn import MoEQuantized, random_tokens, random_weights
from nbmoe.nn.comparison import compare_with_float64

CHECKPOINTS = ["tiny_modelopt_nvfp4", "tiny_ct_NVFP4"]


def bytes_of(array):
    assert array.dtype == ml_dtypes.bfloat16
    return array.tobytes()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_error_against_float64(fixtures, name, number, fast_backend):
    weights = read_layer(fixtures / name, number)
    x = random_tokens(16, weights.hidden_size, seed=0)
    trace = MoEQuantized(weights, backend=fast_backend).trace(x)
    errors = compare_with_float64(weights, x, trace)
    assert errors.arithmetic < 1e-2
    assert 0.07 < errors.inner < 0.11  # what NVFP4 costs one activation tensor
    assert errors.total < 0.25


def bf16_original_layer(folder, x):
    """Layer 0 in float64 from the bf16 checkpoint, written from the model's definition."""
    blob = (folder / "model.safetensors").read_bytes()
    tensors = {
        name: np.frombuffer(bytearray(entry["data"]), ml_dtypes.bfloat16)
        .reshape(entry["shape"])
        .astype(np.float64)
        for name, entry in safetensors.deserialize(blob)
        if name.startswith("model.layers.0.mlp.")
    }
    logits = x @ tensors["model.layers.0.mlp.gate.weight"].T
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    out = np.zeros_like(x)
    for t, row in enumerate(odds):
        chosen = np.argsort(-row)[:2]
        for e in chosen:
            prefix = f"model.layers.0.mlp.experts.{e}."
            gate, up, down = (tensors[f"{prefix}{p}_proj.weight"] for p in ("gate", "up", "down"))
            g = gate @ x[t]
            out[t] += row[e] / row[chosen].sum() * (down @ (g / (1 + np.exp(-g)) * (up @ x[t])))
    return out


def test_error_against_the_bf16_original(fixtures, fast_backend):
    layer = MoEQuantized.from_checkpoint(fixtures / "tiny_ct_NVFP4", backend=fast_backend)
    x = random_tokens(32, 128, seed=3)
    exact = bf16_original_layer(fixtures / "tiny_ct_NVFP4_bf16", x.astype(np.float64))
    error = np.linalg.norm(layer(x).astype(np.float64) - exact) / np.linalg.norm(exact)
    # Four quantizations of about 0.095 each (input, gate/up, inner, down), partly in products.
    assert 0.15 < error < 0.28


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_backends_agree(fixtures, name, backend):
    tokens = 5 if backend == "cudasim" else 33  # it takes seconds
    x = random_tokens(tokens, 128, seed=4)
    expected = MoEQuantized.from_checkpoint(fixtures / name, backend="reference").trace(x)
    found = MoEQuantized.from_checkpoint(fixtures / name, backend=backend).trace(x)
    for field in dataclasses.fields(found):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "seconds":
            continue
        if left is None or right is None:
            assert left is right, field.name
            continue
        assert left.tobytes() == right.tobytes(), field.name


def test_numbers_of_tokens(fixtures, fast_backend):
    layer = MoEQuantized.from_checkpoint(fixtures / "tiny_modelopt_nvfp4", backend=fast_backend)
    x = random_tokens(129, 128, seed=6)
    most = layer(x)
    for tokens in (0, 1, 2, 127, 128):
        y = layer(x[:tokens])
        assert y.shape == (tokens, 128)
        # Batch invariance: a token's result does not depend on which others are there.
        assert bytes_of(y) == bytes_of(most[:tokens])


def test_nan_stays_in_its_row(fixtures, fast_backend):
    layer = MoEQuantized.from_checkpoint(fixtures / "tiny_ct_NVFP4", backend=fast_backend)
    x = random_tokens(9, 128, seed=7)
    clean = layer(x)
    x[4] = np.nan
    y = layer(x)
    assert np.isnan(y[4].astype(np.float32)).all()
    keep = [0, 1, 2, 3, 5, 6, 7, 8]
    assert bytes_of(y[keep]) == bytes_of(clean[keep])


def test_all_tokens_on_one_expert(fixtures, fast_backend):
    weights = read_layer(fixtures / "tiny_ct_NVFP4")
    gate = np.zeros_like(weights.router.weight)
    gate[2, 0] = 100
    one = dataclasses.replace(weights, router=Router(weight=gate, top_k=1))
    x = random_tokens(130, 128, seed=8)
    x[:, 0] = 1
    trace = MoEQuantized(one, backend=fast_backend).trace(x)
    assert trace.expert_start_indices.tolist() == [0, 0, 0, 130, 130]
    assert compare_with_float64(one, x, trace).arithmetic < 1e-2


@pytest.mark.parametrize(("hidden", "moe"), [(80, 48), (704, 16), (16, 176)])
def test_sizes_that_64_does_not_divide(hidden, moe, fast_backend):
    weights = random_weights(num_experts=5, hidden_size=hidden, moe_dim=moe, top_k=3, seed=hidden)
    x = random_tokens(21, hidden, seed=9)
    trace = MoEQuantized(weights, backend=fast_backend).trace(x)
    errors = compare_with_float64(weights, x, trace)
    assert errors.arithmetic < 1e-2
    assert errors.inner < 0.2


def test_routing_weights_are_the_configs(fixtures):
    weights = read_layer(fixtures / "tiny_ct_NVFP4")
    x = random_tokens(5, 128, seed=10)
    sums = {}
    for renormalize in (True, False):
        router = dataclasses.replace(weights.router, renormalize=renormalize)
        layer = dataclasses.replace(weights, router=router)
        trace = MoEQuantized(layer, backend="reference").trace(x)
        sums[renormalize] = trace.topk_weights.sum(axis=1)
    assert np.allclose(sums[True], 1, atol=1e-6)
    assert (sums[False] < 0.99).all()


def test_uint16_bit_patterns_are_bf16(fixtures, fast_backend):
    layer = MoEQuantized.from_checkpoint(fixtures / "tiny_ct_NVFP4", backend=fast_backend)
    x = random_tokens(3, 128, seed=11)
    assert bytes_of(layer(x.view(np.uint16))) == bytes_of(layer(x))


def test_trace_is_the_call(fixtures, fast_backend):
    layer = MoEQuantized.from_checkpoint(fixtures / "tiny_ct_NVFP4", backend=fast_backend)
    x = random_tokens(6, 128, seed=12)
    seen = []
    trace = layer.trace(x, on_stage=seen.append)
    assert tuple(seen) == ("route", "quantize", "gate_up + activation", "down", "combine")
    assert tuple(seen) == tuple(trace.seconds)
    assert all(value > 0 for value in trace.seconds.values())
    assert bytes_of(trace.output) == bytes_of(layer(x))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: x.astype(np.float32), DTypeError),
        (lambda x: x[:, :64], ShapeError),
        (lambda x: x[0], ShapeError),
        (lambda x: x.tolist(), ArgTypeError),
        (lambda x: None, ArgTypeError),
    ],
)
def test_bad_input(fixtures, change, error):
    layer = MoEQuantized.from_checkpoint(fixtures / "tiny_ct_NVFP4", backend="reference")
    with pytest.raises(error, match=r"^MoEQuantized\(\): x: "):
        layer(change(random_tokens(4, 128, seed=0)))


def test_unknown_backend(fixtures):
    with pytest.raises(ConfigError, match="'tpu'"):
        MoEQuantized.from_checkpoint(fixtures / "tiny_ct_NVFP4", backend="tpu")
