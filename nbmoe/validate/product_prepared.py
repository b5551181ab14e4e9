"""Checks of prepared operands of grouped matmuls: tokens and weights that kernels read as they are.

Prepared operands hold their scales, so the arguments for scales are None beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nbmoe.arrays import Array
from nbmoe.backend import Backend
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DeviceError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.formats import PAIRS, block_format
from nbmoe.gpus import find_gpus
from nbmoe.prepared.tokens import PreparedTokens, token_shape
from nbmoe.prepared.weights import PreparedWeights
from nbmoe.validate.call import FLAT, Call
from nbmoe.validate.elements import F32, PREPARED, ROW_SCALES
from nbmoe.validate.grouped import Groups, check_groups, check_slot_count, take_groups
from nbmoe.validate.product import take_bias, take_total_m
from nbmoe.validate.scales import check_factors, check_row_scales
from nbmoe_kernels.prepared_weights import prepared_bytes

BLOCK_PAIRS = tuple((a.name, b.name) for a, b in PAIRS)
"""Formats of prepared tokens and weights that the block-scaled matmuls multiply."""
MAX_SLOTS = 1024
"""Slots whose places a kernel keeps in shared memory."""
CAPABILITY = (9, 0)
"""The compute capability whose kernels read prepared operands."""

_MADE_BY = {"hidden": "prepare_tokens", "weight": "prepare_weights"}


@dataclass(frozen=True)
class PreparedProduct:
    """Operands of a grouped matmul of prepared tokens and weights, checked."""

    tokens: PreparedTokens
    weights: PreparedWeights
    hidden: Array
    weight: Array
    groups: Groups
    expert_scales: Array | None
    a_row_scales: Array | None
    bias: Array | None
    estimated_total_m: int

    @property
    def num_rows(self) -> int:
        """M."""
        return self.tokens.num_rows

    @property
    def n(self) -> int:
        """N, rows of an expert's weight."""
        return self.weights.n


def are_prepared(call: Call, hidden: Any, weight: Any) -> bool:
    """Whether both operands are prepared.

    Raises:
        ArgTypeError: only one of them is.
    """
    tokens, weights = isinstance(hidden, PreparedTokens), isinstance(weight, PreparedWeights)
    if tokens != weights:
        arg, value = ("weight", weight) if tokens else ("hidden", hidden)
        rule = "PreparedWeights beside PreparedTokens"
        if weights:
            rule = "PreparedTokens beside PreparedWeights"
        hint = f"nbmoe.ops.{_MADE_BY[arg]} makes them"
        raise ArgTypeError(call.message(arg, rule, type(value).__name__, hint))
    return tokens


def take_prepared(
    call: Call,
    hidden: PreparedTokens,
    weight: PreparedWeights,
    expert_start: Any,
    expert_ids: Any,
    *,
    pairs: Iterable[tuple[str, str]],
    unused: dict[str, Any],
    expert_scales: Any = None,
    a_row_scales: Any = None,
    bias: Any = None,
    format: Any = None,
    weight_format: Any = None,
    estimated_total_m: Any = None,
) -> PreparedProduct:
    """Takes prepared operands and checks that they fit each other.

    Args:
        call: The call.
        hidden: M rows.
        weight: Weights of E experts.
        expert_start: (S + 1,) uint32.
        expert_ids: (S,) int32.
        pairs: Formats of tokens and weights that the operation multiplies.
        unused: Arguments that have to be None beside prepared operands, by name.
        expert_scales: (E,) float32; NVFP4 needs them.
        a_row_scales: (M,) bfloat16, for NVFP4.
        bias: (E, N) bfloat16.
        format: What the caller says that the tokens are, or None.
        weight_format: The same of the weights.
        estimated_total_m: Sizing hint.

    Raises:
        ConfigError: formats contradict each other or what the caller says, or an argument came
            that has to be None.
        ShapeError: sizes contradict each other.
        UnsupportedError: there are more slots than a kernel has room for.
        ScaleError, DTypeError, LayoutError, ArgTypeError, RangeError: as for other operands.
    """
    for arg, value in unused.items():
        if value is not None:
            rule = "None beside prepared operands, which hold their scales"
            raise ConfigError(call.message(arg, rule, type(value).__name__))
    _check_formats(call, hidden, weight, tuple(pairs), format, weight_format)
    tokens = call.array("hidden", hidden.data, PREPARED, "(ceil(K/64), R, 128)")
    weights = call.array("weight", weight.data, PREPARED, FLAT)
    groups = take_groups(call, "expert_start", expert_start, expert_ids)
    factors: Array | None = None
    if hidden.format == "nvfp4" or expert_scales is not None:
        factors = call.array("expert_scales", expert_scales, F32, "(E,)", missing=ScaleError)
    if hidden.format != "nvfp4" and a_row_scales is not None:
        rule = "None: only NVFP4 has row scales"
        raise ConfigError(call.message("a_row_scales", rule, f"some beside {hidden.format}"))
    row_scales = call.optional("a_row_scales", a_row_scales, ROW_SCALES, "(M,)")
    total_m = take_total_m(call, estimated_total_m, hidden.num_rows)
    _check_sizes(call, hidden, weight, groups)
    experts, rows = weight.num_experts, hidden.num_rows
    if factors is not None:
        call.shape("expert_scales", (experts,), f"(E,) = ({experts},), E from weight")
    if row_scales is not None:
        call.shape("a_row_scales", (rows,), f"(M,) = ({rows},), M from hidden")
    added = take_bias(call, bias, experts, weight.n)
    return PreparedProduct(
        hidden, weight, tokens, weights, groups, factors, row_scales, added, total_m
    )


def _check_formats(
    call: Call,
    hidden: PreparedTokens,
    weight: PreparedWeights,
    pairs: tuple[tuple[str, str], ...],
    format: Any,
    weight_format: Any,
) -> None:
    given = (("format", format, hidden.format), ("weight_format", weight_format, weight.format))
    for arg, said, found in given:
        if said is not None and block_format(said, call.api, arg).name != found:
            what = "tokens" if arg == "format" else "weights"
            got = f"{what} prepared as {found}"
            raise ConfigError(call.message(arg, f"{found} or None", str(said), got))
    if (hidden.format, weight.format) not in pairs:
        rule = f"a pair of formats: {', '.join(f'{a} x {b}' for a, b in pairs)}"
        got = f"{hidden.format} x {weight.format}"
        hint = "quantize the tokens for these weights"
        raise ConfigError(call.message("weight", rule, got, hint))


def _check_sizes(
    call: Call, hidden: PreparedTokens, weight: PreparedWeights, groups: Groups
) -> None:
    call.multiple("weight", "N", weight.n, 8)
    if hidden.k != weight.k:
        rule = f"K = {hidden.k}, that of hidden"
        raise ShapeError(call.message("weight", rule, f"K = {weight.k}"))
    if hidden.num_slots != groups.count:
        rule = f"tokens prepared for {groups.count} slots, those of expert_ids"
        got = f"tokens prepared for {hidden.num_slots}"
        raise ShapeError(call.message("hidden", rule, got, "the places of rows depend on it"))
    if groups.count > MAX_SLOTS:
        rule = f"at most {MAX_SLOTS} slots with prepared operands"
        hint = "multiply operands in the documented layouts"
        raise UnsupportedError(call.message("expert_ids", rule, f"{groups.count} slots", hint))
    check_slot_count(call, groups, "weight", weight.num_experts)
    shape: tuple[int, ...] = token_shape(hidden.num_rows, hidden.num_slots, hidden.k)
    call.shape("hidden", shape, f"data of shape {shape}, as M, S and K say")
    shape = (prepared_bytes(weight.format, weight.num_experts, weight.n, weight.k),)
    call.shape("weight", shape, f"data of shape {shape}, as E, N and K say")


def check_prepared(call: Call, p: PreparedProduct, chosen: Backend) -> None:
    """Checks the GPU, and what the operands' elements say ("metadata", "full").

    Raises:
        DeviceError: the GPU's kernels cannot read prepared operands.
        RoutingError: routing metadata contradicts itself or the operands.
        ScaleError: a factor is not finite and positive.
    """
    if chosen.on_gpu:
        check_capability(call, p.hidden.device or 0)
    if call.checks("metadata"):
        experts = p.weights.num_experts
        check_groups(call, p.groups, p.num_rows, "hidden", experts, "weight")
        if p.expert_scales is not None:
            check_factors(call, "expert_scales", call.data(p.expert_scales), "expert")
    if call.checks("full") and p.a_row_scales is not None:
        check_row_scales(call, "a_row_scales", call.data(p.a_row_scales))


def reads_prepared(ordinal: int = 0) -> bool:
    """Whether the kernels of a GPU read prepared operands."""
    gpus, _ = find_gpus()
    return ordinal < len(gpus) and gpus[ordinal].capability == CAPABILITY


def check_capability(call: Call, ordinal: int) -> None:
    """Refuses a GPU whose kernels cannot read prepared operands.

    Raises:
        DeviceError: it is such a GPU.
    """
    gpus, _ = find_gpus()
    if ordinal < len(gpus) and not reads_prepared(ordinal):
        have = "{}.{}".format(*gpus[ordinal].capability)
        rule = "prepared operands on a GPU of compute capability {}.{}".format(*CAPABILITY)
        got = f"{gpus[ordinal].name} with {have}"
        hint = "other GPUs multiply operands in the documented layouts"
        raise DeviceError(call.message("hidden", rule, got, hint))
