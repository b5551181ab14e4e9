"""The whole FFN of all experts in one launch: gate/up, activation, requantization and down."""

from __future__ import annotations

from typing import Any

from nbmoe.activation import GatedActivation
from nbmoe.arrays import Array
from nbmoe.errors import ConfigError, WorkspaceError
from nbmoe.formats import BlockFormat
from nbmoe.ops.launch import allocate, host_view, store
from nbmoe.ops.mega_ffn_launch import launch_packed, launch_prepared
from nbmoe.ops.mega_ffn_reference import ffn_packed, ffn_prepared
from nbmoe.ops.mega_ffn_scratch import (
    LAUNCHES,
    check_counters,
    mega_ffn_arrival_count_size,
    scratch_bytes,
)
from nbmoe.validate import BF16, Call
from nbmoe.validate.call import FLAT
from nbmoe.validate.elements import PREPARED, U32
from nbmoe.validate.mega_ffn import FFN, check_ffn, take_clamped, take_ffn
from nbmoe.validate.product import Product


def mega_ffn_nvfp4(
    output: Any,
    hidden_states: Any,
    gate_up_weight: Any,
    gate_up_a_scales: Any,
    gate_up_b_scales: Any,
    down_weight: Any,
    down_b_scales: Any,
    expert_start_indices: Any,
    expert_ids: Any,
    a_scale_offsets: Any,
    gate_up_expert_scales: Any,
    down_expert_scales: Any,
    c_input_scales: Any,
    estimated_total_m: int | None,
    gate_up_num_active_experts: int,
    down_num_active_experts: int,
    arrival_count: Any,
    *,
    clamp_activation: bool = False,
    activation: GatedActivation | None = None,
    format: str | BlockFormat | None = None,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    gate_up_a_row_scales: Any = None,
    match_bf16: bool = True,
    routed_before: bool = False,
    workspace: Any = None,
    backend: str | None = None,
    stream: Any = None,
    validate: str | None = None,
) -> Any:
    """Applies the experts' FFN to the rows of all active slots, in one launch.

    The bytes are those of `grouped_matmul_blocked_swiglu` and then `grouped_matmul_block_scaled` of
    its result with the down weights. Packed operands of bytes are NVFP4, of e4m3 MXFP8; prepared
    operands (compute capability 9.0) are of any pair of formats that the matmuls multiply. Nothing
    is allocated, copied or waited for beside the launch if there is a `workspace`.

    `arrival_count` is a kernel's memory of which tile is next and which rows are ready for down:
    zero it once, and every call leaves it at 0, in CUDA graphs, too. Launches that may run at the
    same time, on two streams, need one each: a call refuses counters that another stream's launch
    still uses, but knows nothing of graphs.

    Args:
        output: (M, N) bfloat16 to write; rows from expert_start_indices[active] on are left alone.
        hidden_states: (M, K/2) uint8 packed e2m1 codes, or (M, K) e4m3 codes; or PreparedTokens.
        gate_up_weight: (E, 2D, K) or packed codes with rows in the order of
            `nbmoe.layouts.sigma_permute`; or PreparedWeights.
        gate_up_a_scales: (tiles, ceil(K/(4 * block)), 32, 4, 4) scale tiles of `hidden_states`.
            This and the other block scales are None beside prepared operands.
        gate_up_b_scales: (E, ceil(2D/128), ceil(K/(4 * block)), 32, 4, 4), rows permuted likewise.
        down_weight: (E, N, D) or packed codes, N % 8 == 0; or PreparedWeights.
        down_b_scales: (E, ceil(N/128), ceil(D/(4 * block)), 32, 4, 4).
        expert_start_indices: (S + 1,) uint32 prefix sums: slot s owns rows
            expert_start_indices[s] up to expert_start_indices[s + 1] [rows].
        expert_ids: (S,) int32 expert of each slot; the rows of -1 are 0.
        a_scale_offsets: (S,) uint32, see `nbmoe.layouts.scales_offset` [128-row tiles]. None beside
            prepared operands.
        gate_up_expert_scales: (E,) float32 factors of gate and up. NVFP4 needs them.
        down_expert_scales: (E,) float32 factors of the output. NVFP4 needs them.
        c_input_scales: (S,) float32 inverse input scales of down, by slot. NVFP4 needs them, None
            for MX.
        estimated_total_m: Expected rows, to choose tile sizes by, or None; never changes a byte.
        gate_up_num_active_experts: Slots that have a part, the first ones, at most S.
        down_num_active_experts: The same number.
        arrival_count: (n,) uint32 of at least `mega_ffn_arrival_count_size` zeros.
        clamp_activation: Whether gate and up are clamped; `activation` then says how.
        activation: A named activation, None for silu.
        format: Format of `hidden_states`, None to tell it by the element type. MXFP8 codes in
            uint8 need it.
        gate_up_bias: (E, 2D) bfloat16, by expert id, rows permuted like the weight's.
        down_bias: (E, N) bfloat16, by expert id.
        gate_up_a_row_scales: (M,) bfloat16 factors of rows, for NVFP4.
        match_bf16: Whether gate and up are rounded to bfloat16 first, as separate kernels would.
        routed_before: See `grouped_matmul_block_scaled`.
        workspace: (bytes,) uint8 of at least `mega_ffn_workspace_size`, or None to allocate it.
        backend: See `nbmoe.ops`.
        stream: See `nbmoe.ops`.
        validate: See `nbmoe.ops`. "metadata" checks offsets, ids, factors and weight scales; "full"
            also that `arrival_count` is 0.

    Returns:
        `output`.

    Raises:
        ArgTypeError, RangeError: a number is no int >= 0 or too large, a flag no bool.
        ConfigError: formats contradict operands or each other, the two numbers of active experts
            differ, clamping without a limit, the activation is a function.
        DTypeError, ShapeError, LayoutError, AliasError, DeviceError: an array cannot be used.
        RoutingError: offsets or ids contradict each other, or rows have no active expert.
        ScaleError: a scale is missing, NaN, negative or, as a factor, 0.
        UnsupportedError: too many slots for prepared operands.
        WorkspaceError: `arrival_count` or `workspace` is too small, counters are not 0, or a launch
            of another stream still uses them.
    """
    call = Call("mega_ffn_nvfp4", validate)
    flags = {
        "match_bf16": call.boolean("match_bf16", match_bf16),
        "routed_before": call.boolean("routed_before", routed_before),
    }
    ffn = take_ffn(
        call,
        hidden_states,
        (gate_up_weight, gate_up_a_scales, gate_up_b_scales, gate_up_expert_scales,
         gate_up_a_row_scales, gate_up_bias),
        (down_weight, down_b_scales, down_expert_scales, down_bias),
        (expert_start_indices, expert_ids, a_scale_offsets),
        c_input_scales,
        take_clamped(call, clamp_activation, activation),
        _take_active(call, gate_up_num_active_experts, down_num_active_experts),
        format,
        estimated_total_m,
    )  # fmt: skip
    rows, count = ffn.gate_up.num_rows, ffn.groups.count
    into = call.output("output", output, BF16, "(M, N)", (rows, ffn.down.n))
    counters = call.output("arrival_count", arrival_count, U32, "(n,)", (0,), longer=True)
    scratch = _take_workspace(call, ffn, workspace)
    chosen = call.place(backend, stream)
    check_ffn(call, ffn, chosen)
    check_counters(call, counters, mega_ffn_arrival_count_size(rows, count))
    if rows == 0:
        return into.owner
    if chosen.name == "reference":
        compute = ffn_packed if isinstance(ffn.gate_up, Product) else ffn_prepared
        result = compute(ffn, flags["match_bf16"])
        store(into, result, [(0, int(host_view(ffn.groups.starts)[-1]))])
        return into.owner
    if scratch is None:
        scratch = allocate(call, "workspace", (scratch_bytes(ffn),), PREPARED)
    if chosen.on_gpu:
        LAUNCHES.check(call, counters)
    launch = launch_packed if isinstance(ffn.gate_up, Product) else launch_prepared
    launch(chosen, call, ffn, into, scratch, counters, **flags)
    if chosen.on_gpu:
        LAUNCHES.note(call, counters)
    return into.owner


def _take_active(call: Call, gate_up: Any, down: Any) -> int:
    count = call.integer("gate_up_num_active_experts", gate_up, 0)
    other = call.integer("down_num_active_experts", down, 0)
    if other != count:
        rule = f"gate_up_num_active_experts = {count}: both matmuls have the same slots"
        raise ConfigError(call.message("down_num_active_experts", rule, other))
    return count


def _take_workspace(call: Call, ffn: FFN, workspace: Any) -> Array | None:
    if workspace is None:
        return None
    taken = call.output("workspace", workspace, PREPARED, FLAT, (0,), longer=True)
    needed = scratch_bytes(ffn)
    if taken.nbytes < needed:
        rows, slots, moe_dim = ffn.gate_up.num_rows, ffn.num_slots, ffn.moe_dim
        rule = f"at least {needed} bytes for {rows} rows, {slots} slots and D = {moe_dim}"
        hint = "nbmoe.ops.mega_ffn_workspace_size says how many"
        raise WorkspaceError(call.message("workspace", rule, taken.nbytes, hint))
    return taken
