"""How rows of bfloat16 are multiplied by experts' weights, one class a kind of weights.

Each quantizes rows as its weights demand and multiplies them: by gate and up, or by down.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from nbmoe import ops
from nbmoe.arrays import BFLOAT16, named_dtype
from nbmoe.checkpoints.stack import ExpertStack
from nbmoe.errors import ConfigError, message
from nbmoe.layouts import ceil_div, interleave_scales
from nbmoe.nn.experts import Put
from nbmoe.nn.preparation import FP8_FORMATS, Prepare
from nbmoe.nn.run import Groups, Run
from nbmoe.ops.quantize_fp8_tensor import WORKSPACE_SIZE
from nbmoe.prepared.fp8 import fp8_token_shape
from nbmoe.prepared.tokens import token_shape
from nbmoe.scale_specs import padded_rows
from nbmoe.strategies import Fp8Strategy

Leg = Literal["gate_up", "down"]
_INPUTS = {"gate_up": "hidden", "down": "inner"}
_E4M3 = named_dtype("float8_e4m3fn")
BLOCK = 128
"""Rows and columns of an FP8 weight block, and elements of an activation group."""


class Product(Protocol):
    """Weights of all experts.

    Attributes:
        quantizes: Whether rows are quantized first.
        inner_size: Columns of gate or up, padding included [elements].
        prepared: Whether weights and rows are prepared (`nbmoe.prepared`).
    """

    quantizes: bool
    inner_size: int
    prepared: bool

    def quantize(self, rows: Any, leg: Leg, groups: Groups, run: Run) -> tuple[Any, ...]:
        """Rows (M, K) bfloat16 as `multiply` takes them."""
        ...

    def multiply(self, operands: tuple[Any, ...], leg: Leg, groups: Groups, run: Run) -> Any:
        """(M, N) bfloat16, a buffer of the workspace."""
        ...


class _Weights:
    """Codes, scales and biases on the backend."""

    quantizes = False

    def __init__(self, stack: ExpertStack, put: Put, prepare: Prepare | None = None) -> None:
        self.inner_size = stack.moe_dim
        self._codes: dict[str, Any] = {"gate_up": put(stack.gate_up), "down": put(stack.down)}
        self._scales = {
            "gate_up": self._prepare_scales(stack.gate_up_scales, put),
            "down": self._prepare_scales(stack.down_scales, put),
        }
        biases = {"gate_up": stack.gate_up_bias, "down": stack.down_bias}
        self._biases = {leg: None if b is None else put(b) for leg, b in biases.items()}
        self._columns = {leg: codes.shape[1] for leg, codes in self._codes.items()}
        self.prepared = prepare is not None
        if prepare is not None:
            for leg in self._codes:
                self._codes[leg] = prepare(self._codes[leg], self._scales[leg], stack.format)
                if stack.format not in FP8_FORMATS:
                    self._scales[leg] = None

    def quantize(self, rows: Any, leg: Leg, groups: Groups, run: Run) -> tuple[Any, ...]:
        """The rows themselves, prepared if the weights are."""
        if not self.prepared:
            return (rows,)
        m, k = rows.shape
        shape = token_shape(m, groups.ids.shape[0], k)
        out = run.scratch(f"{_INPUTS[leg]}_tokens", shape, np.uint8)
        tokens = ops.prepare_tokens(
            rows, None, groups.starts, format="bf16", out=out, **run.options
        )
        return (tokens,)

    def _prepare_scales(self, scales: npt.NDArray[Any] | None, put: Put) -> Any:
        return None if scales is None else put(scales)

    def _output(self, leg: Leg, rows: int, run: Run) -> dict[str, Any]:
        """Keywords that every matmul takes."""
        return {
            "bias": self._biases[leg],
            "estimated_total_m": rows,
            "out": run.array(leg, (rows, self._columns[leg]), BFLOAT16),
            "stream": run.stream,
        }


class Bf16Product(_Weights):
    """bfloat16 rows by bfloat16 weights."""

    def multiply(self, operands: tuple[Any, ...], leg: Leg, groups: Groups, run: Run) -> Any:
        """See `Product`."""
        return ops.grouped_matmul_ragged(
            operands[0],
            self._codes[leg],
            groups.starts,
            groups.ids,
            routed_before=True,
            backend=run.workspace.backend,
            **self._output(leg, groups.rows, run),
        )


class W4A16Product(_Weights):
    """bfloat16 rows by MXFP4 weights, which become bfloat16 on their way."""

    def multiply(self, operands: tuple[Any, ...], leg: Leg, groups: Groups, run: Run) -> Any:
        """See `Product`."""
        return ops.grouped_matmul_w4a16(
            operands[0],
            self._codes[leg],
            self._scales[leg],
            groups.starts,
            groups.ids,
            routed_before=True,
            backend=run.workspace.backend,
            **self._output(leg, groups.rows, run),
        )

    def _prepare_scales(self, scales: npt.NDArray[Any] | None, put: Put) -> Any:
        assert scales is not None, "the stack's checks demand it"
        return put(interleave_scales(scales))


class Fp8Product(_Weights):
    """FP8 rows by FP8 weights, quantized and multiplied by `Fp8Strategy`.

    A static input scale is the largest of the experts', so that a token is quantized alike for all
    of them.
    """

    quantizes = True

    def __init__(
        self,
        stack: ExpertStack,
        put: Put,
        strategy: Fp8Strategy,
        prepare: Prepare | None = None,
    ) -> None:
        """Uploads a stack.

        Args:
            stack: FP8 weights with scales as the strategy's config says.
            put: Moves an array to the backend.
            strategy: What quantizes and multiplies.
            prepare: Prepares weights, and so tokens; None to prepare neither.

        Raises:
            ConfigError: As of `pad_moe_dim`.
        """
        self.strategy = strategy
        if strategy.granularity == "block":
            stack = pad_moe_dim(stack)
        super().__init__(stack, put, prepare)
        scales = {"gate_up": stack.gate_up_input_scale, "down": stack.down_input_scale}
        self._input_scales = {
            leg: None if s is None else put(s.max(keepdims=True)) for leg, s in scales.items()
        }

    def quantize(self, rows: Any, leg: Leg, groups: Groups, run: Run) -> tuple[Any, ...]:
        """Codes and scales as `Fp8Strategy.grouped_quantize` gives them, or prepared and None."""
        if not self.prepared:
            return self._quantize(rows, leg, groups, run)
        strategy, name = self.strategy, _INPUTS[leg]
        shape = fp8_token_shape(rows.shape[0], groups.ids.shape[0], rows.shape[1])
        scales_shapes = {"block": shape[:2], "row": (1, shape[1]), "tensor": (1,)}
        scales_shape = scales_shapes[strategy.granularity]
        out = (
            run.scratch(f"{name}_tokens", shape, np.uint8),
            run.scratch(f"{name}_token_scales", scales_shape, np.float32),
        )
        if strategy.granularity == "block" and not run.keeps:
            tokens = strategy.grouped_quantize(
                rows,
                strategy.group_size,
                self._input_scales[leg],
                *groups.slots,
                layout="prepared",
                out=out,
                stream=run.stream,
            )
            return tokens, None
        codes, scales = self._quantize(rows, leg, groups, run)
        return ops.prepare_fp8_tokens(codes, scales, groups.starts, out=out, **run.options), None

    def _quantize(self, rows: Any, leg: Leg, groups: Groups, run: Run) -> tuple[Any, Any]:
        strategy, name = self.strategy, _INPUTS[leg]
        m, k = rows.shape
        out: Any = run.array(f"{name}_codes", (m, k), _E4M3)
        workspace = None
        if strategy.granularity != "tensor":
            columns = padded_rows(m, strategy.scales_type)
            count = ceil_div(k, BLOCK) if strategy.granularity == "block" else 1
            kind = named_dtype(strategy.scales_type)
            out = out, run.array(f"{name}_scales", (count, columns), kind)
        elif not strategy.config.is_static:
            out = out, run.array(f"{name}_scales", (1,), np.float32)
            workspace = run.workspace.array("fp8 maxima", (WORKSPACE_SIZE,), np.float32)
        codes, scales = strategy.grouped_quantize(
            rows,
            strategy.group_size,
            self._input_scales[leg],
            *groups.slots,
            workspace=workspace,
            out=out,
            stream=run.stream,
        )
        run.found[f"{run.prefix}{name}_scales"] = scales
        return codes, scales

    def multiply(self, operands: tuple[Any, ...], leg: Leg, groups: Groups, run: Run) -> Any:
        """See `Product`."""
        return self.strategy.grouped_matmul(
            self._codes[leg],
            self._scales[leg],
            expert_inputs=(*operands, groups.starts, groups.ids, None),
            routed_before=True,
            **self._output(leg, groups.rows, run),
        )


def pad_moe_dim(stack: ExpertStack) -> ExpertStack:
    """Pads D with zero weights to whole blocks, so that no block spans gate and up.

    Raises:
        ConfigError: D has to be padded, and the activation is a function, whose value at 0 is
            not known to be 0.
    """
    padding = -stack.moe_dim % BLOCK
    if padding == 0:
        return stack
    if stack.activation.gated_activation_fn is not None:
        rule = f"a named activation if D = {stack.moe_dim} is no multiple of {BLOCK}"
        got = "one with gated_activation_fn"
        raise ConfigError(message("MoEQuantized", "activation", rule, got))
    experts, _, hidden = stack.gate_up.shape
    halves = stack.gate_up.reshape(experts, 2, stack.moe_dim, hidden)
    gate_up = np.pad(halves, ((0, 0), (0, 0), (0, padding), (0, 0)))
    down = np.pad(stack.down, ((0, 0), (0, 0), (0, padding)))
    bias = stack.gate_up_bias
    if bias is not None:
        bias = np.pad(bias.reshape(experts, 2, -1), ((0, 0), (0, 0), (0, padding)))
        bias = bias.reshape(experts, -1)
    return dataclasses.replace(
        stack,
        gate_up=gate_up.reshape(experts, -1, hidden),
        down=down,
        gate_up_bias=bias,
    )
