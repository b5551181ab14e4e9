"""Bad input of the whole FFN in one launch (table F), with packed and with prepared operands."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.errors import (
    AliasError,
    ArgTypeError,
    ConfigError,
    DTypeError,
    LayoutError,
    RangeError,
    RoutingError,
    ScaleError,
    ShapeError,
    WorkspaceError,
    message,
)
from nbmoe.formats import MXFP8, NVFP4, BlockFormat
from nbmoe.layouts import ceil_div
from nbmoe.operand import named_dtype
from nbmoe.ops import mega_ffn_scratch
from nbmoe.ops.mega_ffn_scratch import Launches
from nbmoe.prepared import pack_tokens, pack_weights
from tests.bad_inputs.case import (
    Case,
    Recorder,
    both,
    cast,
    edit,
    params,
    put,
    refused,
    remake,
    shorter,
)
from tests.bad_inputs.sizes import NORMAL, Arguments, bf16, codes, factors, poisoned, scale_tiles

OP = "mega_ffn_nvfp4"
BF16, E8M0 = named_dtype("bfloat16"), named_dtype("float8_e8m0fnu")
OAI = GatedActivation("swigluoai", alpha=1.702, limit=7.0)
ROWS, SLOTS = NORMAL.rows, NORMAL.experts
HIDDEN, DIM = 5 * 32, 3 * 32
COUNTERS = ops.mega_ffn_arrival_count_size(ROWS, SLOTS)
BYTES = ops.mega_ffn_workspace_size(ROWS, SLOTS, DIM)
# Codes of a row in DIM / 2 bytes, the scale tiles of 64 columns behind them at a multiple of 128.
PACKED_BYTES = ceil_div(ROWS * DIM // 2, 128) * 128 + NORMAL.tiles * ceil_div(DIM, 64) * 512


def packed(fmt: BlockFormat = NVFP4) -> Arguments:
    """A valid call with packed operands."""
    is_nvfp4 = fmt is NVFP4
    slots = NORMAL.slots("expert_start_indices", "a_scale_offsets")
    return {
        "output": poisoned((ROWS, HIDDEN), BF16),
        "hidden_states": codes(1, fmt.codes_dtype, ROWS, fmt.packed_k(HIDDEN)),
        "gate_up_weight": codes(2, fmt.codes_dtype, SLOTS, 2 * DIM, fmt.packed_k(HIDDEN)),
        "gate_up_a_scales": scale_tiles(3, fmt, 128 * NORMAL.tiles, HIDDEN),
        "gate_up_b_scales": scale_tiles(4, fmt, 2 * DIM, HIDDEN, SLOTS),
        "down_weight": codes(5, fmt.codes_dtype, SLOTS, HIDDEN, fmt.packed_k(DIM)),
        "down_b_scales": scale_tiles(6, fmt, HIDDEN, DIM, SLOTS),
        **slots,
        "gate_up_expert_scales": factors(7, SLOTS),
        "down_expert_scales": factors(8, SLOTS),
        "c_input_scales": factors(9, SLOTS) if is_nvfp4 else None,
        "estimated_total_m": ROWS,
        "gate_up_num_active_experts": SLOTS,
        "down_num_active_experts": SLOTS,
        "arrival_count": np.zeros(COUNTERS, np.uint32),
        "gate_up_bias": bf16(10, SLOTS, 2 * DIM),
        "down_bias": bf16(11, SLOTS, HIDDEN),
        "workspace": np.full(BYTES, 0xAA, np.uint8),
    }


def prepared() -> Arguments:
    """The same with prepared operands."""
    given = packed()
    routing = given["expert_start_indices"], given["a_scale_offsets"]
    tokens = pack_tokens(
        given["hidden_states"], given["gate_up_a_scales"], *routing, format="nvfp4"
    )
    weights = {
        name: pack_weights(given[name], given[scales], format="nvfp4")
        for name, scales in (
            ("gate_up_weight", "gate_up_b_scales"),
            ("down_weight", "down_b_scales"),
        )
    }
    unused = ("gate_up_a_scales", "gate_up_b_scales", "down_b_scales", "a_scale_offsets")
    given |= {"hidden_states": tokens, **weights, **dict.fromkeys(unused)}
    return given


def test_the_calls_are_legal(recorder: Recorder) -> None:
    for fmt in (NVFP4, MXFP8):
        ops.mega_ffn_nvfp4(**packed(fmt), validate="full")
    ops.mega_ffn_nvfp4(**prepared(), validate="full")
    assert len(recorder.launches) == 3


def same_memory(arguments: Arguments) -> None:
    output = arguments["output"]
    memory = np.full(max(BYTES, output.nbytes), 0xAA, np.uint8)
    arguments["output"] = memory[: output.nbytes].view(BF16).reshape(output.shape)
    arguments["workspace"] = memory


def counts(count: int) -> Callable[[Arguments], None]:
    return put(gate_up_num_active_experts=count, down_num_active_experts=count)


def too_small(needed: int) -> Case:
    """A byte less than what the operands need."""
    change = remake("workspace", lambda x: x[: needed - 1].copy())
    says = f"at least {needed} bytes for {ROWS} rows.*mega_ffn_workspace_size"
    return Case("F18", change, WorkspaceError, "workspace", f"{needed - 1}", says)


ACTIVE = "gate_up_num_active_experts"
FULL: dict[str, Any] = {"validate": "full"}
COMMON = [
    Case("F1", cast("arrival_count", np.int32), DTypeError, "arrival_count", "int32", "uint32"),
    Case("F2", remake("arrival_count", lambda x: x[None]), ShapeError, "arrival_count", r"\(1,"),
    Case("F3", shorter("arrival_count"), WorkspaceError, "arrival_count", f"{COUNTERS - 1}",
         f"at least {COUNTERS} counters.*mega_ffn_arrival_count_size"),
    Case("F4", edit("arrival_count", 2, 7), WorkspaceError, "arrival_count",
         r"arrival_count\[2\] = 7", "zero them once", FULL),
    Case("F6", put(down_num_active_experts=3), ConfigError, "down_num_active_experts", "3", "= 4"),
    Case("F7", counts(0), RoutingError, ACTIVE, "0", f"the {ROWS} rows of hidden_states"),
    Case("F8", counts(5), RangeError, ACTIVE, "5", "at most 4"),
    Case("F8-bool", put(gate_up_num_active_experts=True), ArgTypeError, ACTIVE, "bool True"),
    Case("F8-low", counts(-1), RangeError, ACTIVE, "-1"),
    Case("F16", put(clamp_activation=True), ConfigError, "activation", "None", "swigluoai.*limit"),
    Case("F16-silu", put(clamp_activation=True, activation=GatedActivation()), ConfigError,
         "activation", "silu", "a limit"),
    Case("F16-flag", put(clamp_activation=1), ArgTypeError, "clamp_activation", "int 1"),
    Case("F18-type", cast("workspace", np.int8), DTypeError, "workspace", "int8", "uint8"),
    Case("F18-alias", same_memory, AliasError, "workspace", "overlap", "apart from output"),
    Case("F19", cast("output", np.float32), DTypeError, "output", "float32", "bfloat16"),
    Case("F11", remake("output", lambda x: x[:, :-8].copy()), ShapeError, "output",
         rf"\({ROWS}, {HIDDEN - 8}\)", rf"\(M, N\) = \({ROWS}, {HIDDEN}\)"),
    Case("M21", shorter("output"), ShapeError, "output", rf"\({ROWS - 1}, {HIDDEN}\)"),
    Case("S1", put(c_input_scales=None), ScaleError, "c_input_scales", "None", "required"),
    Case("S2", shorter("c_input_scales"), ShapeError, "c_input_scales", r"\(3,\)", "one a slot"),
    Case("S3", edit("c_input_scales", 1, np.nan), ScaleError, "c_input_scales", r"\[1\] = nan"),
    Case("C1", put(gate_up_expert_scales=None), ScaleError, "gate_up_expert_scales", "None"),
    Case("C1-down", put(down_expert_scales=None), ScaleError, "down_expert_scales", "None"),
    Case("M14", edit("down_expert_scales", 1, 0), ScaleError, "down_expert_scales", r"\[1\] = 0"),
    Case("M15", shorter("gate_up_expert_scales"), ShapeError, "gate_up_expert_scales", r"\(3,\)",
         "E from gate_up_weight"),
    Case("G1", edit("expert_start_indices", 4, ROWS + 9), RoutingError, "expert_start_indices",
         f"{ROWS + 9}", "the rows of hidden_states"),
    Case("G2", edit("expert_start_indices", 2, 999), RoutingError, "expert_start_indices", "999"),
    Case("G8", edit("expert_ids", 2, 4), RoutingError, "expert_ids", r"\[2\] = 4",
         "gate_up_weight"),
    Case("bias", remake("down_bias", lambda x: x[:, 8:].copy()), ShapeError, "down_bias",
         rf"\(4, {HIDDEN - 8}\)", r"\(E, N\) ="),
    Case("bias-up", cast("gate_up_bias", np.float32), DTypeError, "gate_up_bias", "float32"),
    Case("C14", remake("output", lambda x: np.zeros(x.size + 1, BF16)[1:].reshape(x.shape)),
         LayoutError, "output", "address 0x"),
    Case("rows", put(gate_up_a_row_scales=factors(1, ROWS)), DTypeError, "gate_up_a_row_scales",
         "float32", "bfloat16"),
    Case("early", put(routed_before=0), ArgTypeError, "routed_before", "int 0", "a bool"),
    Case("hint", put(estimated_total_m=-1), RangeError, "estimated_total_m", "-1"),
    Case("fn", put(activation=GatedActivation(gated_activation_fn=lambda g, u: g * u)), ConfigError,
         "activation", "gated_activation_fn", "a named activation"),
]  # fmt: skip
PACKED = [
    too_small(PACKED_BYTES),
    Case("F9", remake("gate_up_weight", lambda x: x[..., :-8].copy()), ShapeError,
         "gate_up_weight", rf"\(4, {2 * DIM}, {HIDDEN // 2 - 8}\)", f"K/2 = {HIDDEN // 2}"),
    Case("F10", remake("down_weight", lambda x: x[..., :-8].copy()), ShapeError, "down_weight",
         rf"\(4, {HIDDEN}, {DIM // 2 - 8}\)", f"K/2 = {DIM // 2}"),
    Case("F12", shorter("a_scale_offsets"), ShapeError, "a_scale_offsets", r"\(3,\)"),
    Case("F13", edit("a_scale_offsets", 3, 9), RoutingError, "a_scale_offsets", "slot 3"),
    Case("F14", cast("gate_up_a_scales", E8M0), ConfigError, "format", "float8_e8m0fnu", "nvfp4"),
    Case("F14-down", cast("down_b_scales", E8M0), ConfigError, "down_weight", "float8_e8m0fnu"),
    Case("F15", put(gate_up_weight=packed(MXFP8)["gate_up_weight"]), ConfigError,
         "gate_up_weight", "gate_up_weight of float8_e4m3fn", "nvfp4"),
    Case("F15-down", put(down_weight=packed(MXFP8)["down_weight"]), ShapeError, "down_weight", ""),
    Case("F15-fmt", put(format="fp4"), ConfigError, "format", "'fp4'"),
    Case("C1-a", put(gate_up_a_scales=None), ScaleError, "gate_up_a_scales", "None", "required"),
    Case("C1-b", put(down_b_scales=None), ScaleError, "down_b_scales", "None", "required"),
    Case("experts", both(shorter("down_weight"), shorter("down_b_scales")), ShapeError,
         "down_weight", "3", "4 experts, as gate_up_weight"),
    Case("M10", remake("down_b_scales", lambda x: np.full_like(x, 0x7F)), ScaleError,
         "down_b_scales", "NaN byte 0x7f"),
    Case("C2", remake("down_weight", lambda x: x.tolist()), ArgTypeError, "down_weight", "list"),
]  # fmt: skip


def other_format(name: str) -> Callable[[Arguments], None]:
    return remake(name, lambda w: replace(w, format="mxfp4"))


PREPARED = [
    too_small(BYTES),
    Case("F9", remake("gate_up_weight", lambda w: replace(w, k=w.k - 16)), ShapeError,
         "gate_up_weight", f"K = {HIDDEN - 16}", f"K = {HIDDEN}, that of hidden_states"),
    Case("F10", remake("down_weight", lambda w: replace(w, k=w.k - 16)), ShapeError, "down_weight",
         f"K = {DIM - 16}", f"K = {DIM}, the D of gate_up_weight"),
    Case("F15", other_format("gate_up_weight"), ConfigError, "gate_up_weight", "nvfp4 x mxfp4"),
    Case("F15-down", other_format("down_weight"), ConfigError, "down_weight", "mxfp4", "nvfp4"),
    Case("one", put(down_weight=packed()["down_weight"]), ArgTypeError, "down_weight", "ndarray",
         "prepare_weights"),
    Case("one-up", put(gate_up_weight=packed()["gate_up_weight"]), ArgTypeError, "gate_up_weight",
         "ndarray", "PreparedTokens"),
    Case("scales", put(down_b_scales=packed()["down_b_scales"]), ConfigError, "down_b_scales",
         "ndarray", "None beside prepared"),
    Case("offsets", put(a_scale_offsets=packed()["a_scale_offsets"]), ConfigError,
         "a_scale_offsets", "ndarray", "None beside prepared"),
    Case("bytes", remake("down_weight", lambda w: replace(w, data=w.data[:-128].copy())),
         ShapeError, "down_weight", r"shape \(", "as E, N and K say"),
]  # fmt: skip


@pytest.mark.parametrize("make", [packed, prepared], ids=["packed", "prepared"])
@pytest.mark.parametrize("case", params(COMMON))
def test_common_refused(make: Any, case: Case, recorder: Recorder) -> None:
    _check(make, case, recorder)


@pytest.mark.parametrize("case", params(PACKED))
def test_packed_refused(case: Case, recorder: Recorder) -> None:
    _check(packed, case, recorder)


@pytest.mark.parametrize("case", params(PREPARED))
def test_prepared_refused(case: Case, recorder: Recorder) -> None:
    _check(prepared, case, recorder)


def _check(make: Any, case: Case, recorder: Recorder) -> None:
    arguments = make()
    written = ("output", "workspace", "arrival_count")
    case.change(arguments)
    before = {name: arguments[name].tobytes() for name in written}
    refused(ops.mega_ffn_nvfp4, arguments, case, OP, recorder)
    assert {name: arguments[name].tobytes() for name in written} == before


def test_counters_that_another_stream_still_uses(monkeypatch: Any) -> None:
    """F5: another stream waits for the end; the same one, and other counters, need not."""
    driver = pytest.importorskip("cuda.bindings.driver")
    ready, busy = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY
    state, destroyed = {"status": busy}, []
    monkeypatch.setattr(driver, "cuEventQuery", lambda event: (state["status"],))
    monkeypatch.setattr(driver, "cuEventCreate", lambda flags: (ready, "event"))
    monkeypatch.setattr(driver, "cuEventRecord", lambda event, stream: (ready,))
    monkeypatch.setattr(driver, "cuEventDestroy", destroyed.append)
    monkeypatch.setattr(mega_ffn_scratch, "is_capturing", lambda stream: stream == 9)
    launches: Any = Launches()

    def call(stream: int) -> Any:
        return SimpleNamespace(stream=stream, message=partial(message, OP))

    def counters(pointer: int) -> Any:
        return SimpleNamespace(pointer=pointer)

    launches.note(call(1), counters(64))
    launches.note(call(3), counters(128))
    launches.check(call(1), counters(64))
    launches.check(call(2), counters(256))
    launches.check(call(9), counters(64))
    rule = r"arrival_count: .* got those of stream 0x1, which runs, on stream 0x2.*of its own"
    with pytest.raises(WorkspaceError, match=rule):
        launches.check(call(2), counters(64))
    state["status"] = ready
    launches.check(call(2), counters(64))
    assert not destroyed
    for pointer in range(1000, 1256):
        launches.note(call(1), counters(pointer))
    assert destroyed == ["event", "event"]
