"""Real torch and jax: their arrays go in as they are, and what comes back is theirs."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops
from nbmoe.arrays import Kind, describe, like_operand, named_dtype, to_numpy
from nbmoe.checkpoints import read_layer
from nbmoe.errors import DTypeError, LayoutError, UnsupportedError
from nbmoe.nn import make_layer, random_tokens

pytestmark = pytest.mark.oracles
torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

FIXTURES = Path(__file__).parents[1] / "fixtures"
BF16 = np.dtype(ml_dtypes.bfloat16)
RANDOM = np.random.default_rng(0)
DOWN = RANDOM.standard_normal((6, 16), np.float32).astype(BF16)
RESTORE = np.array([5, 0, 3, 4, 1, 2], np.uint32)
WEIGHTS = RANDOM.standard_normal((3, 2), np.float32)
EXPECTED = ops.moe_finalize(DOWN, RESTORE, WEIGHTS, backend="reference")
NAMES = ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "uint8", "uint32", "int32", "float32")


def to_torch(x: np.ndarray) -> Any:
    """A tensor of its own memory with the same bits."""
    bits = torch.from_numpy(x.view(np.uint8).copy())
    return bits.view(getattr(torch, x.dtype.name)).reshape(x.shape)


def to_jax(x: np.ndarray) -> Any:
    return jnp.array(x)


@pytest.mark.parametrize("name", [*NAMES, "uint16", "float4_e2m1fn_x2"])
def test_torch_is_seen_where_it_is(name: str) -> None:
    bits = RANDOM.integers(0, 256, (4, 32), np.uint8)
    x = torch.from_numpy(bits).view(getattr(torch, name))
    a = describe("api", "x", x)
    assert (a.kind, a.dtype, a.shape) == (Kind.TORCH_HOST, name, tuple(x.shape))
    assert a.pointer == x.data_ptr() and a.view is not None
    assert a.view.tobytes() == bits.tobytes()
    a.view.view(np.uint8)[0, 0] ^= 0xFF
    assert bits[0, 0] == x.view(torch.uint8)[0, 0]  # one memory
    part = describe("api", "x", x[:, 1:3])
    assert part.strides == (32, x.element_size()) and not part.extent.is_contiguous


@pytest.mark.parametrize("name", ["quint8", "complex64", "bool", "float16"])
def test_torch_types_that_no_operation_takes(name: str) -> None:
    x = torch.empty((6, 16), dtype=getattr(torch, name))
    error = UnsupportedError if name == "float16" else DTypeError
    with pytest.raises(error, match=name):
        ops.moe_finalize(x, RESTORE, WEIGHTS, backend="reference")


@pytest.mark.parametrize("backend", ["reference", "emulate"])
def test_torch_in_torch_out(backend: str) -> None:
    operands = tuple(map(to_torch, (DOWN, RESTORE, WEIGHTS)))
    result = ops.moe_finalize(*operands, backend=backend)
    assert isinstance(result, torch.Tensor) and result.dtype is torch.bfloat16
    assert to_numpy(result).tobytes() == EXPECTED.tobytes()
    out = torch.full((3, 16), float("nan"), dtype=torch.bfloat16)
    pointer = out.data_ptr()
    assert ops.moe_finalize(*operands, out=out, backend=backend) is out
    assert out.data_ptr() == pointer and torch.equal(out, result)


def test_torch_output_that_autograd_watches() -> None:
    out = torch.zeros((3, 16), dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(LayoutError, match="out: expected a writeable array"):
        ops.moe_finalize(*map(to_torch, (DOWN, RESTORE, WEIGHTS)), out=out, backend="reference")


@pytest.mark.parametrize("name", NAMES)
def test_jax_is_seen_where_it_is(name: str) -> None:
    x = jnp.arange(32, dtype=jnp.uint8).reshape(4, 8).astype(getattr(jnp, name))
    a = describe("api", "x", x)
    assert (a.kind, a.dtype, a.shape) == (Kind.JAX_HOST, name, x.shape)
    assert a.pointer == x.unsafe_buffer_pointer() and not a.writeable
    assert a.view is not None and a.view.tobytes() == np.asarray(x).tobytes()


@pytest.mark.parametrize("backend", ["reference", "emulate"])
def test_jax_in_jax_out(backend: str) -> None:
    operands = tuple(map(to_jax, (DOWN, RESTORE, WEIGHTS)))
    before = [np.asarray(x).tobytes() for x in operands]
    results = [ops.moe_finalize(*operands, backend=backend) for _ in range(3)]
    assert len({r.unsafe_buffer_pointer() for r in results}) == 3
    for result in results:
        assert isinstance(result, jax.Array) and result.dtype == jnp.bfloat16
        assert np.asarray(result).tobytes() == EXPECTED.tobytes()
        doubled = np.asarray(result + result)  # jax computes with it
        assert doubled.tobytes() == (EXPECTED + EXPECTED).tobytes()
    assert [np.asarray(x).tobytes() for x in operands] == before
    assert not np.asarray(jnp.zeros((3, 16), jnp.bfloat16)).any()  # zeros are still zeros


@pytest.mark.parametrize("to_framework", [to_torch, to_jax])
@pytest.mark.parametrize("name", NAMES)
def test_host_results_become_theirs(to_framework: Any, name: str) -> None:
    x = np.arange(24, dtype=np.uint8).view(named_dtype(name))
    like = describe("api", "x", to_framework(WEIGHTS))
    moved = like_operand(x, like)
    assert type(moved) is type(like.owner)
    assert to_numpy(moved).dtype == x.dtype and to_numpy(moved).tobytes() == x.tobytes()


@pytest.mark.parametrize("to_framework", [to_torch, to_jax])
def test_layers_take_them_too(to_framework: Any) -> None:
    layer = make_layer(read_layer(FIXTURES / "tiny_mo_MXFP8_DEFAULT_CFG"), backend="reference")
    x = random_tokens(5, layer.hidden_size, 0)
    result = layer(to_framework(x))
    assert type(result) is type(to_framework(x))
    assert to_numpy(result).tobytes() == layer(x).tobytes()


def test_jax_is_no_output() -> None:
    out = jnp.zeros((3, 16), jnp.bfloat16)
    with pytest.raises(LayoutError, match="out: expected a writeable array"):
        ops.moe_finalize(DOWN, RESTORE, WEIGHTS, out=out, backend="reference")
    assert not np.asarray(out).any()


def test_inside_jit_is_refused() -> None:
    def traced(down: Any) -> Any:
        return ops.moe_finalize(down, RESTORE, WEIGHTS, backend="reference")

    with pytest.raises(TypeError, match=r"down: .*outside of jax\.jit"):
        jax.jit(traced)(to_jax(DOWN))


def test_frameworks_mix_by_dlpack() -> None:
    """A tensor that jax exports and one of torch's, in one call: the first decides the kind."""
    result = ops.moe_finalize(to_torch(DOWN), to_jax(RESTORE), WEIGHTS, backend="reference")
    assert isinstance(result, torch.Tensor)
    assert to_numpy(result).tobytes() == EXPECTED.tobytes()
