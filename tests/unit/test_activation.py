"""`GatedActivation` refuses what it cannot mean, and the helpers of whole arrays."""

from typing import Any

import numpy as np
import pytest

from nbmoe.activation import (
    SILU,
    GatedActivation,
    make_concatenated_gated_activation_fn,
    make_interleaved_gated_activation_fn,
    make_stacked_gated_activation_fn,
    take_activation,
)
from nbmoe.errors import ArgTypeError, ConfigError, RangeError


def relu_gate(gate: Any, up: Any) -> Any:
    return max(gate, 0) * up


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"fused_activation": "gelu"}, ConfigError, "gelu_tanh.*'gelu'"),
    ({"fused_activation": None}, ArgTypeError, "a name, got None"),
    ({"alpha": 1.0}, ConfigError, "silu takes no alpha"),
    ({"fused_activation": "gelu_tanh", "alpha": 1.0}, ConfigError, "gelu_tanh takes no alpha"),
    ({"fused_activation": "gelu_tanh", "limit": 1.0}, ConfigError, "gelu_tanh takes no limit"),
    ({"limit": -1.0}, RangeError, "limit >= 0, got -1.0"),
    ({"limit": float("nan")}, RangeError, "limit: expected a finite float32, got nan"),
    ({"limit": float("inf")}, RangeError, "limit: .* got inf"),
    ({"limit": 1e39}, RangeError, "finite float32"),
    ({"limit": 1e-60}, RangeError, "finite float32"),
    ({"limit": "7"}, ArgTypeError, "limit: expected a number, got str '7'"),
    ({"limit": True}, ArgTypeError, "limit: expected a number, got bool"),
    (
        {"fused_activation": "swigluoai", "limit": 7.0},
        RangeError,
        "alpha: expected alpha other than 0 for swigluoai, got",
    ),
    (
        {"fused_activation": "swigluoai", "alpha": 1.7},
        RangeError,
        "limit: expected limit other than 0 for swigluoai, got",
    ),
    (
        {"fused_activation": "swigluoai", "alpha": float("inf"), "limit": 7.0},
        RangeError,
        "alpha: .* got inf",
    ),
    (
        {"fused_activation": "swigluoai", "alpha": 1.7, "limit": -7.0},
        RangeError,
        "limit >= 0, got -7.0",
    ),
    ({"gated_activation_fn": relu_gate, "limit": 1.0}, ConfigError, "beside silu with limit 1.0"),
    ({"gated_activation_fn": relu_gate, "alpha": 1.0}, ConfigError, "silu takes no alpha"),
    (
        {"gated_activation_fn": relu_gate, "fused_activation": "gelu_tanh"},
        ConfigError,
        "beside gelu_tanh",
    ),
    ({"gated_activation_fn": "silu"}, ArgTypeError, "a Python function of two scalars"),
    ({"gated_activation_fn": np.maximum}, ArgTypeError, "got ufunc"),
    ({"gated_activation_fn": lambda g: g}, ArgTypeError, r"<lambda>\(g\)"),
]


@pytest.mark.parametrize(("fields", "error", "text"), BAD)
def test_bad_fields(fields: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        GatedActivation(**fields)
    assert str(caught.value).startswith("GatedActivation(): ")
    assert isinstance(caught.value, ValueError | TypeError)


def test_kernel_parameters() -> None:
    oai = GatedActivation("swigluoai", alpha=1.702, limit=7)
    assert oai.kernel_parameters() == {
        "activation": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    assert SILU.kernel_parameters() == {
        "activation": "silu",
        "swiglu_alpha": 0.0,
        "swiglu_limit": 0.0,
    }
    with pytest.raises(ConfigError, match="named activation"):
        GatedActivation(gated_activation_fn=relu_gate).kernel_parameters()
    assert SILU.kernel_activation == "silu"
    assert GatedActivation(gated_activation_fn=relu_gate).kernel_activation is relu_gate


def test_is_frozen() -> None:
    with pytest.raises(AttributeError):
        SILU.limit = 3.0  # type: ignore[misc]


def test_take_activation() -> None:
    custom = GatedActivation(gated_activation_fn=relu_gate)
    assert take_activation("f", None) is SILU
    assert take_activation("f", custom) is custom
    with pytest.raises(ArgTypeError, match=r"f\(\): activation: .* got str 'gelu'"):
        take_activation("f", "gelu")
    with pytest.raises(ConfigError, match=r"f\(\): activation: expected a named activation"):
        take_activation("f", custom, fused=True)


def test_helpers_of_whole_arrays() -> None:
    x = np.float32([[1, -2, 3, 4], [-1, 5, 6, -7]])

    def act(gate: Any) -> Any:
        return 10 * gate

    np.testing.assert_array_equal(
        make_concatenated_gated_activation_fn(act)(x), [[30, -80], [-60, -350]]
    )
    # The limit comes after the activation, and bounds a gate on one side only.
    np.testing.assert_array_equal(
        make_concatenated_gated_activation_fn(act, 5.0)(x), [[15, -80], [-50, -25]]
    )
    np.testing.assert_array_equal(
        make_interleaved_gated_activation_fn(act)(x), [[-20, 120], [-50, -420]]
    )
    np.testing.assert_array_equal(
        make_stacked_gated_activation_fn(act)(x[:, :2], x[:, 2:]), [[30, -80], [-60, -350]]
    )
    with pytest.raises(RangeError, match="above 0"):
        make_concatenated_gated_activation_fn(act, 0.0)
