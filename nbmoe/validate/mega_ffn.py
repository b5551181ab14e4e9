"""Checks of the operands of the whole FFN in one call: both matmuls, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nbmoe.activation import GatedActivation, take_activation
from nbmoe.arrays import Array
from nbmoe.backend import Backend
from nbmoe.errors import ArgTypeError, ConfigError, RangeError, RoutingError, ScaleError, ShapeError
from nbmoe.formats import FORMATS, BlockFormat
from nbmoe.prepared.weights import PreparedWeights
from nbmoe.validate.call import FLAT, Call
from nbmoe.validate.elements import BLOCK_CODES, F32, PREPARED
from nbmoe.validate.operand_format import operand_format
from nbmoe.validate.product import (
    Product,
    check_product,
    check_weight_tiles,
    take_bias,
    take_product,
    take_weight_scales,
    take_weight_sizes,
)
from nbmoe.validate.product_prepared import (
    BLOCK_PAIRS,
    PreparedProduct,
    are_prepared,
    check_prepared,
    take_prepared,
)
from nbmoe.validate.scales import check_factors, check_weight_scales
from nbmoe_kernels.prepared_weights import prepared_bytes

GATE_UP = {
    "hidden": "hidden_states",
    "weight": "gate_up_weight",
    "a_scales": "gate_up_a_scales",
    "b_scales": "gate_up_b_scales",
    "expert_start": "expert_start_indices",
    "expert_scales": "gate_up_expert_scales",
    "a_row_scales": "gate_up_a_row_scales",
    "bias": "gate_up_bias",
    "weight_format": "gate_up_weight",
}
DOWN = {
    "weight": "down_weight",
    "b_scales": "down_b_scales",
    "expert_scales": "down_expert_scales",
    "bias": "down_bias",
}


@dataclass(frozen=True)
class Down:
    """The down projection's operands, checked; `scales` is None and `prepared` not if they are."""

    weight: Array
    scales: Array | None
    prepared: PreparedWeights | None
    expert_scales: Array | None
    bias: Array | None
    n: int


@dataclass(frozen=True)
class FFN:
    """All operands, checked. Slots past the active ones are left out of `gate_up`.

    `num_slots` is S, by which prepared tokens are laid out.
    """

    gate_up: Product | PreparedProduct
    down: Down
    factors: Array | None
    activation: GatedActivation
    num_slots: int

    @property
    def fmt(self) -> BlockFormat:
        """Format of the tokens, and of what lies between both matmuls."""
        p = self.gate_up
        return p.a_format if isinstance(p, Product) else FORMATS[p.tokens.format]

    @property
    def weight_fmt(self) -> BlockFormat:
        """Format of both weights."""
        p = self.gate_up
        return p.b_format if isinstance(p, Product) else FORMATS[p.weights.format]

    @property
    def moe_dim(self) -> int:
        """D."""
        return self.gate_up.n // 2

    @property
    def k(self) -> int:
        """K of gate/up."""
        p = self.gate_up
        return p.k if isinstance(p, Product) else p.weights.k

    @property
    def groups(self) -> Any:
        """The active slots."""
        p = self.gate_up
        return p.slots if isinstance(p, Product) else p.groups


def take_ffn(
    call: Call,
    hidden: Any,
    gate_up: tuple[Any, Any, Any, Any, Any, Any],
    down: tuple[Any, Any, Any, Any],
    routing: tuple[Any, Any, Any],
    c_input_scales: Any,
    activation: GatedActivation,
    num_active: int,
    format: Any,
    estimated_total_m: Any,
) -> FFN:
    """Takes all operands and checks that they fit each other.

    Args:
        call: The call.
        hidden: Tokens.
        gate_up: Weight, scales of the tokens, scales of the weight, experts' factors, rows'
            factors, bias.
        down: Weight, scales, experts' factors, bias.
        routing: Row offsets, expert ids, scale offsets.
        c_input_scales: (S,) inverse input scales of down.
        activation: A named one.
        num_active: Active slots, the first ones.
        format: What the caller says that the tokens are, or None.
        estimated_total_m: Sizing hint.

    Raises:
        The errors of `grouped_matmul_blocked_swiglu` and `grouped_matmul_block_scaled`.
        ConfigError: the weights are of two formats.
    """
    weight, a_scales, b_scales, expert_scales, row_scales, bias = gate_up
    starts, ids, offsets = routing
    p: Product | PreparedProduct
    with call.naming(**GATE_UP):
        if are_prepared(call, hidden, weight):
            unused = {"a_scales": a_scales, "b_scales": b_scales, "a_scale_offsets": offsets}
            p = take_prepared(
                call, hidden, weight, starts, ids, pairs=BLOCK_PAIRS, unused=unused,
                expert_scales=expert_scales, a_row_scales=row_scales, bias=bias,
                format=format, estimated_total_m=estimated_total_m,
            )  # fmt: skip
            fmt = FORMATS[hidden.format]
        else:
            p = take_product(
                call, hidden, weight, a_scales, b_scales, starts, offsets, ids,
                expert_scales=expert_scales, a_row_scales=row_scales, bias=bias,
                format=_format_of(call, hidden) if format is None else format, weight_format=None,
                estimated_total_m=estimated_total_m,
            )  # fmt: skip
            fmt = p.a_format
        rule = f"gate and up rows, D % {fmt.block} == 0 each"
        call.multiple("weight", "N = 2D", p.n, 2 * fmt.block, rule)
    num_slots = p.slots.count if isinstance(p, Product) else p.groups.count
    factors = _take_factors(call, fmt, num_slots, c_input_scales)
    taken = _take_down(call, p, *down)
    if num_active > num_slots:
        rule = f"at most {num_slots}, the slots of expert_ids"
        raise RangeError(call.message("gate_up_num_active_experts", rule, num_active))
    if num_active == 0 and p.num_rows:
        rule = f"active experts for the {p.num_rows} rows of hidden_states"
        raise RoutingError(call.message("gate_up_num_active_experts", rule, 0))
    return FFN(_active(p, num_active), taken, factors, activation, num_slots)


def take_clamped(call: Call, clamp_activation: Any, activation: Any) -> GatedActivation:
    """The activation of a call that may ask for clamping.

    Raises:
        ArgTypeError: `clamp_activation` is no bool, `activation` no GatedActivation.
        ConfigError: clamping without alpha and limit, or an activation that is a function.
    """
    chosen = take_activation(call.api, activation, fused=True)
    if call.boolean("clamp_activation", clamp_activation) and chosen.limit == 0:
        rule = "an activation with a limit beside clamp_activation=True"
        got = "None" if activation is None else chosen.fused_activation
        hint = "pass GatedActivation('swigluoai', alpha=1.702, limit=7.0), say"
        raise ConfigError(call.message("activation", rule, got, hint))
    return chosen


def _format_of(call: Call, hidden: Any) -> str:
    """The element type says the format: bytes are NVFP4, e4m3 is MXFP8."""
    array = call.array("hidden", hidden, BLOCK_CODES, "(M, K) or (M, K/2)")
    return "mxfp8" if array.dtype == "float8_e4m3fn" else "nvfp4"


def _take_factors(call: Call, fmt: BlockFormat, count: int, c_input_scales: Any) -> Array | None:
    if fmt.has_tensor_scale:
        factors = call.array("c_input_scales", c_input_scales, F32, "(S,)", missing=ScaleError)
        call.shape("c_input_scales", (count,), f"(S,) = ({count},), one a slot")
        return factors
    if c_input_scales is not None:
        rule = f"None: {fmt.name} has no input scales"
        raise ConfigError(call.message("c_input_scales", rule, type(c_input_scales).__name__))
    return None


def _take_down(
    call: Call,
    p: Product | PreparedProduct,
    weight: Any,
    b_scales: Any,
    expert_scales: Any,
    bias: Any,
) -> Down:
    moe_dim = p.n // 2
    prepared: PreparedWeights | None = None
    scales: Array | None = None
    with call.naming(**DOWN):
        if isinstance(p, PreparedProduct):
            prepared, array = _take_prepared_down(call, p, weight, b_scales)
            experts, n, tokens = prepared.num_experts, prepared.n, p.tokens.format
        else:
            array = call.array("weight", weight, BLOCK_CODES, "(E, N, D) or (E, N, D/2)")
            scales = take_weight_scales(call, "b_scales", b_scales)
            experts, n = take_weight_sizes(call, array, moe_dim, p.b_format)
            operand_format(call, "weight", p.b_format, "weight", "b_scales")
            check_weight_tiles(call, "b_scales", experts, n, moe_dim, p.b_format)
            tokens = p.a_format.name
        if experts != (have := _experts(p)):
            rule = f"weights of {have} experts, as gate_up_weight"
            raise ShapeError(call.message("weight", rule, f"{experts}"))
        factors: Array | None = None
        if tokens == "nvfp4" or expert_scales is not None:
            factors = call.array("expert_scales", expert_scales, F32, "(E,)", missing=ScaleError)
            call.shape("expert_scales", (experts,), f"(E,) = ({experts},)")
        return Down(array, scales, prepared, factors, take_bias(call, bias, experts, n), n)


def _take_prepared_down(
    call: Call, p: PreparedProduct, weight: Any, b_scales: Any
) -> tuple[PreparedWeights, Array]:
    if not isinstance(weight, PreparedWeights):
        rule = "PreparedWeights beside prepared operands of gate/up"
        hint = "nbmoe.ops.prepare_weights makes them"
        raise ArgTypeError(call.message("weight", rule, type(weight).__name__, hint))
    if b_scales is not None:
        rule = "None beside prepared operands, which hold their scales"
        raise ConfigError(call.message("b_scales", rule, type(b_scales).__name__))
    if weight.format != p.weights.format:
        rule = f"{p.weights.format}, the format of gate_up_weight"
        raise ConfigError(call.message("weight", rule, weight.format))
    if weight.k != p.n // 2:
        rule = f"K = {p.n // 2}, the D of gate_up_weight"
        raise ShapeError(call.message("weight", rule, f"K = {weight.k}"))
    call.multiple("weight", "N", weight.n, 8)
    array = call.array("weight", weight.data, PREPARED, FLAT)
    shape = (prepared_bytes(weight.format, weight.num_experts, weight.n, weight.k),)
    call.shape("weight", shape, f"data of shape {shape}, as E, N and K say")
    return weight, array


def _experts(p: Product | PreparedProduct) -> int:
    return p.num_experts if isinstance(p, Product) else p.weights.num_experts


def _active(p: Product | PreparedProduct, count: int) -> Product | PreparedProduct:
    """A product of the first slots alone."""
    if isinstance(p, PreparedProduct):
        g = p.groups
        starts, ids = g.starts.leading(count + 1), g.ids.leading(count)
        return replace(p, groups=replace(g, starts=starts, ids=ids))
    s = p.slots
    starts, ids = s.starts.leading(count + 1), s.ids.leading(count)
    slots = replace(s, starts=starts, ids=ids, offsets=s.offsets.leading(count))
    return replace(p, slots=slots)


def check_ffn(call: Call, ffn: FFN, chosen: Backend) -> None:
    """Checks what the operands' elements say ("metadata", "full"), and the GPU.

    Raises:
        DeviceError: the GPU's kernels cannot read prepared operands.
        RoutingError: routing metadata contradicts itself or the operands.
        ScaleError: a scale is NaN, negative or, as a factor, 0.
    """
    p, down = ffn.gate_up, ffn.down
    with call.naming(**GATE_UP):
        if isinstance(p, Product):
            check_product(call, p)
        else:
            check_prepared(call, p, chosen)
    if not call.checks("metadata"):
        return
    if ffn.factors is not None:
        active = call.data(ffn.factors)[: ffn.groups.count]
        check_factors(call, "c_input_scales", active, "slot")
    with call.naming(**DOWN):
        if down.expert_scales is not None:
            check_factors(call, "expert_scales", call.data(down.expert_scales), "expert")
        if down.scales is not None:
            tiles = call.data(down.scales)
            check_weight_scales(call, "b_scales", tiles, down.n, ffn.moe_dim, ffn.weight_fmt)
