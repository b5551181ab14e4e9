"""Grouped matmul with a gated activation and requantization: the first half of an expert."""

from __future__ import annotations

from typing import Any

from nbmoe import reference
from nbmoe.activation import GatedActivation, take_activation
from nbmoe.arrays import Array
from nbmoe.errors import ConfigError
from nbmoe.formats import FORMATS, BlockFormat
from nbmoe.layouts import TILE_SHAPE, ceil_div
from nbmoe.ops.launch import allocate, host_view, store
from nbmoe.ops.prepared_swiglu import multiply_swiglu
from nbmoe.ops.product import launch_product, optional_view, reference_arguments
from nbmoe.ops.quantized import take_layout
from nbmoe.reference.quantize import check_tensor_factor
from nbmoe.validate import F32, Call
from nbmoe.validate.elements import codes_of, scales_of
from nbmoe.validate.grouped import take_offsets
from nbmoe.validate.product import check_product, take_product
from nbmoe.validate.product_prepared import BLOCK_PAIRS, are_prepared, take_prepared
from nbmoe.validate.routing import used_tiles
from nbmoe.validate.scales import check_factors


def grouped_matmul_blocked_swiglu(
    hidden: Any,
    weight: Any,
    a_scales: Any,
    b_scales: Any,
    expert_start: Any,
    a_scale_offsets: Any,
    expert_ids: Any,
    *,
    expert_scales: Any = None,
    c_input_scales: Any = None,
    format: str | BlockFormat | None = None,
    weight_format: str | BlockFormat | None = None,
    bias: Any = None,
    activation: GatedActivation | None = None,
    estimated_total_m: int | None = None,
    a_row_scales: Any = None,
    match_bf16: bool = True,
    layout: str = "packed",
    routed_before: bool = False,
    out: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Multiplies by gate and up weights, applies a gated activation, and quantizes the result.

    Equals `grouped_matmul_block_scaled`, then `fused_silu_quantize` of its interleaved columns: the
    activation z is computed in float32 and quantized without another rounding, to the format of
    the activations, MX scales by the rule "rceil". Scale tiles are written and left alone as by
    `grouped_quantize_dynamic_block_scaled`.

    `hidden` and `weight` may both be prepared, see `grouped_matmul_block_scaled`; `a_scale_offsets`
    then says where the scales of the result go.

    No array says that its rows are interleaved, so nobody can notice weights, scales or a bias that
    are not, or not all.

    Args:
        hidden: (M, K) codes, packed (M, K/2) for FP4 formats, as for the plain matmul.
        weight: (E, 2D, K) or packed (E, 2D, K/2) codes, D a multiple of the block, rows in the
            order of `nbmoe.layouts.sigma_permute`: gate 0, up 0, gate 1, ...
        a_scales: (tiles, ceil(K/(4 * block)), 32, 4, 4) scale tiles of `hidden`.
        b_scales: (E, ceil(2D/128), ceil(K/(4 * block)), 32, 4, 4) scale tiles of `weight`, their
            rows permuted likewise.
        expert_start: (S + 1,) uint32 prefix sums: slot s owns rows expert_start[s] up to
            expert_start[s + 1] [rows].
        a_scale_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 get codes 0 and scales 0.
        expert_scales: (E,) float32 factors, by expert id. NVFP4 needs them; None means ones.
        c_input_scales: (S,) float32 inverse input scales of the down projection, by slot. NVFP4
            needs them; None for MX.
        format: Format of `hidden` and of the result; see `grouped_matmul_block_scaled`.
        weight_format: Format of `weight`; see there.
        bias: (E, 2D) bfloat16, by expert id, rows permuted like the weight's, added in float32
            after all factors.
        activation: What to apply, None for silu. It must be a named one.
        estimated_total_m: Expected rows, to choose tile sizes by; never changes a byte.
        a_row_scales: (M,) bfloat16 factors of rows, for NVFP4.
        match_bf16: Whether g and u are rounded to bfloat16 first, as separate kernels would.
        layout: "packed" for codes and scales; of prepared operands also "prepared", for what
            `prepare_tokens` makes of them, without `a_scale_offsets`.
        routed_before: See `grouped_matmul_block_scaled`.
        out: `(codes, scales)` to write, of prepared operands with any number of tiles that is large
            enough; or the array of prepared tokens.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`; levels as for `grouped_matmul_block_scaled`.

    Returns:
        Codes (M, D), or (M, D/2) packed low nibble first for FP4 formats, and scales
        (tiles, ceil(D/(4 * block)), 32, 4, 4) with the tiles of `a_scales`, or ceil(M/128) +
        min(S, M) of them, in the element types of the format (`nbmoe.formats`). Or PreparedTokens.

    Raises:
        ArgTypeError, RangeError: `estimated_total_m` is no int >= 0, `match_bf16` no bool,
            `activation` no GatedActivation.
            Only one of `hidden` and `weight` is prepared.
        ConfigError: formats contradict operands or each other, input or row scales came without
            NVFP4, scales beside prepared operands, the activation is a function, or the layout is
            unknown or "prepared" without prepared operands.
        UnsupportedError: too many slots for prepared operands.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other.
        ScaleError: a scale is missing, NaN, negative or, as a factor, 0.
    """
    call = Call("grouped_matmul_blocked_swiglu", validate)
    match_bf16 = call.boolean("match_bf16", match_bf16)
    routed_before = call.boolean("routed_before", routed_before)
    activation = take_activation(call.api, activation, fused=True)
    layout = take_layout(call, layout)
    if are_prepared(call, hidden, weight):
        unused = {"a_scales": a_scales, "b_scales": b_scales}
        if layout == "prepared":
            unused["a_scale_offsets"] = a_scale_offsets
        prepared = take_prepared(
            call,
            hidden,
            weight,
            expert_start,
            expert_ids,
            pairs=BLOCK_PAIRS,
            unused=unused,
            expert_scales=expert_scales,
            a_row_scales=a_row_scales,
            bias=bias,
            format=format,
            weight_format=weight_format,
            estimated_total_m=estimated_total_m,
        )
        fmt = FORMATS[hidden.format]
        _check_width(call, weight.n, fmt)
        scale_offsets = None
        if layout == "packed":
            scale_offsets = take_offsets(
                call, prepared.groups.count, "a_scale_offsets", a_scale_offsets
            )
        return multiply_swiglu(
            call,
            prepared,
            scale_offsets,
            _take_factors(call, fmt, prepared.groups.count, c_input_scales),
            out,
            backend,
            stream,
            activation=activation,
            match_bf16=match_bf16,
            layout=layout,
            routed_before=routed_before,
        )
    if layout == "prepared":
        hint = "prepare hidden and weight, or pass the result to nbmoe.ops.prepare_tokens"
        rule = "'packed' beside operands that are not prepared"
        raise ConfigError(call.message("layout", rule, "'prepared'", hint))
    p = take_product(
        call,
        hidden,
        weight,
        a_scales,
        b_scales,
        expert_start,
        a_scale_offsets,
        expert_ids,
        expert_scales=expert_scales,
        a_row_scales=a_row_scales,
        bias=bias,
        format=format,
        weight_format=weight_format,
        estimated_total_m=estimated_total_m,
    )
    _check_width(call, p.n, p.a_format)
    factors = _take_factors(call, p.a_format, p.slots.count, c_input_scales)
    moe_dim, starts, offsets = p.n // 2, p.slots.starts, p.slots.offsets
    codes_shape = (p.num_rows, p.a_format.packed_k(moe_dim))
    columns = p.a_format.tile_columns
    scales_shape = (p.a_scales.shape[0], ceil_div(moe_dim, columns), *TILE_SHAPE)
    code_type, scale_type = codes_of(p.a_format), scales_of(p.a_format)
    buffers = call.out_tuple(out, ("c_packed", "c_swiglu_scales"))
    if buffers is not None:
        symbols = "(M, D/2)" if p.a_format.per_byte == 2 else "(M, D)"
        call.output("out[0]", buffers[0], code_type, symbols, codes_shape)
        symbols = f"(tiles of a_scales, ceil(D/{columns}), 32, 4, 4)"
        call.output("out[1]", buffers[1], scale_type, symbols, scales_shape)
    chosen = call.place(backend, stream)
    check_product(call, p)
    if factors is not None and call.checks("metadata"):
        check_factors(call, "c_input_scales", call.data(factors), "slot")

    codes = call.outputs.get("out[0]") or allocate(call, "c_packed", codes_shape, code_type)
    scales = call.outputs.get("out[1]") or allocate(call, "scales", scales_shape, scale_type)
    if p.num_rows == 0:
        return codes.owner, scales.owner
    if chosen.name == "reference":
        operands, keywords = reference_arguments(p)
        result = reference.grouped_matmul_blocked_swiglu(
            *operands,
            **keywords,
            c_input_scales=optional_view(factors),
            activation=activation,
            match_bf16=match_bf16,
        )
        store(codes, result[0], [(0, int(host_view(starts)[-1]))])
        store(scales, result[1], used_tiles(host_view(starts), host_view(offsets)))
        return codes.owner, scales.owner

    from nbmoe_kernels.matmul_grouped_swiglu_sm80 import launch_matmul_grouped_swiglu

    launch_product(
        launch_matmul_grouped_swiglu,
        chosen,
        call,
        p,
        (codes, scales),
        (factors,),
        match_bf16=match_bf16,
        activation=activation.fused_activation,
        alpha=activation.alpha,
        limit=activation.limit,
    )
    return codes.owner, scales.owner


def _check_width(call: Call, n: int, fmt: BlockFormat) -> None:
    rule = f"gate and up rows, D % {fmt.block} == 0 each"
    call.multiple("weight", "N = 2D", n, 2 * fmt.block, rule)


def _take_factors(call: Call, fmt: BlockFormat, count: int, c_input_scales: Any) -> Array | None:
    check_tensor_factor(call.api, "c_input_scales", fmt, c_input_scales)
    factors = call.optional("c_input_scales", c_input_scales, F32, "(S,)")
    if factors is not None:
        call.shape("c_input_scales", (count,), f"(S,) = ({count},), one a slot")
    return factors
