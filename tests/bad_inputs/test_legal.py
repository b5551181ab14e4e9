"""P8, P10: what looks odd but is legal is not refused."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import layouts, ops
from tests.bad_inputs import sizes
from tests.bad_inputs.case import Recorder, both, edit, put, remake, without
from tests.bad_inputs.common import input_names, is_optional
from tests.bad_inputs.sizes import EXPERTS, HIDDEN, ROWS, TOKENS, Sizes
from tests.bad_inputs.valid import LAUNCHES, VALID, Arguments, function, op_name, valid

QUANTIZE = "grouped_quantize_dynamic_block_scaled:nvfp4"
ROW_SCALED = "grouped_quantize_nvfp4_row_scaled"
MATMUL = "grouped_matmul_block_scaled:nvfp4"
SWIGLU = "grouped_matmul_blocked_swiglu:nvfp4"
W4A8 = "grouped_matmul_block_scaled:mxfp8xmxfp4"
FP8_MATMUL = "grouped_dynamic_scaled_fp8_matmul:float32"
ROWWISE = "grouped_rowwise_dynamic_scaled_fp8_matmul:row"
FP8_QUANTIZE = "quantize_dynamic_scaled_float8:float32"
E8M0_QUANTIZE = "quantize_dynamic_scaled_float8:float8_e8m0fnu"
STATIC = "quantize_static_scaled_float8:bfloat16"
NO_ROW = 2**32 - 1
NAN_BITS = np.array(0x7FC0, np.uint16).view(ml_dtypes.bfloat16)

WITHOUT_TOKENS = {"moe_create_indices", "quantize_tensor_dynamic_scaled_float8"} | {
    entry for entry in VALID if op_name(entry) in ("block_scales_interleave", "prepare_weights")
}
"""Entries with something to compute even where there is no token."""
SIZES = {
    "T0": sizes.NO_TOKENS,
    "T1": sizes.ONE_TOKEN,
    "E1": sizes.ONE_EXPERT,
    "K-one-block": sizes.ONE_BLOCK,
    "full-tile": sizes.FULL_TILE,
    "unowned-rows": sizes.UNOWNED_ROWS,
}


@pytest.mark.parametrize("entry", tuple(VALID))
@pytest.mark.parametrize("name", tuple(SIZES))
def test_sizes(entry: str, name: str, recorder: Recorder) -> None:
    """The reference computes it; for kernels it is its launches, or none where there is nothing."""
    accepted(entry, valid(entry, SIZES[name]), valid(entry, SIZES[name]), recorder, SIZES[name])


def accepted(
    entry: str, first: Arguments, second: Arguments, recorder: Recorder, used: Sizes = sizes.NORMAL
) -> None:
    """Makes a call by the reference and by kernels that are not run."""
    function(entry)(**first, backend="reference")
    assert not recorder.launches
    function(entry)(**second)
    is_empty = used.tokens == 0 and entry not in WITHOUT_TOKENS
    assert len(recorder.launches) == (0 if is_empty else LAUNCHES.get(op_name(entry), 1))


def gap_in_tiles(name: str) -> Callable[[Arguments], None]:
    """Slots that leave a tile unused between them."""
    return lambda arguments: arguments[name].__setitem__(3, arguments[name][3] + 1)


def bits(name: str) -> Callable[[Arguments], None]:
    """bfloat16 or float8 as its bit patterns."""
    return remake(name, lambda x: x.view(f"u{x.dtype.itemsize}"))


def many_experts(arguments: Arguments) -> None:
    """As many as the kernels have room for."""
    arguments["logits"] = np.zeros((TOKENS, 1024), np.float32)
    arguments["bias"] = np.zeros(1024, np.float32)


def entries_with(*names: str) -> list[str]:
    """Entries that have all of these arguments."""
    return [entry for entry in VALID if set(names) <= set(VALID[entry]())]


GENERATED = [
    *((e, "masked", edit("expert_ids", 2, -1)) for e in entries_with("expert_ids")),
    *((e, "all-masked", edit("expert_ids", slice(None), -1)) for e in entries_with("expert_ids")),
    *((e, "M19-0", put(estimated_total_m=0)) for e in entries_with("estimated_total_m")),
    *((e, "M19-x10", put(estimated_total_m=10 * ROWS)) for e in entries_with("estimated_total_m")),
    *((e, "M19-none", put(estimated_total_m=None)) for e in entries_with("estimated_total_m")),
    *((e, "gap", gap_in_tiles("scales_offsets")) for e in entries_with("scales_offsets")),
    *((e, "no-out", without("out")) for e in VALID),
    *(
        (e, f"no-{arg}", put(**{arg: None}))
        for e in VALID
        for arg in input_names(e)
        if is_optional(e, arg)
        # Without a gather, the input would need a row for each that is routed.
        and arg != "indices"
    ),
    *(
        (e, f"bits-{arg}", bits(arg))
        for e in VALID
        for arg in input_names(e)
        if VALID[e]()[arg].dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu")
        # The type of a tile's bytes is that of the result's.
        and not e.startswith("block_scales_interleave")
    ),
]
CHOSEN = [
    (MATMUL, "gap", gap_in_tiles("a_scale_offsets")),
    (MATMUL, "exact-tiles", remake("a_scales", lambda x: x[:3].copy())),
    (QUANTIZE, "nan", edit("input", 3, NAN_BITS)),
    (QUANTIZE, "more-tiles", remake("out", lambda o: (o[0], np.concatenate([o[1], o[1]])))),
    ("fused_silu_quantize:nvfp4", "nan", edit("gate_up", 3, NAN_BITS)),
    ("mxfp4_dequant:bfloat16", "nan", edit("scales", 2, np.float32("nan"))),
    ("moe_finalize", "nan", both(edit("down", 3, NAN_BITS), edit("weights", 3, np.nan))),
    ("moe_finalize", "dropped", edit("restore_token_order", slice(0, 7), NO_ROW)),
    ("gather_rows", "no-source", edit("order", slice(0, 7), NO_ROW)),
    ("moe_create_indices", "flat", remake("topk_ids", lambda x: x.reshape(-1))),
    ("moe_create_indices", "masked", edit("topk_ids", slice(0, 3), -1)),
    ("moe_create_indices", "none", edit("topk_ids", slice(None), -1)),
    ("route:softmax", "nan", edit("logits", 3, np.nan)),
    ("route:softmax", "all", put(top_k=EXPERTS, out=None)),
    ("route:softmax", "inf", edit("logits", (3, 0), -np.inf)),
    ("route:softmax", "parts", put(num_parts=2, bias=np.ones(2, np.float32))),
    (FP8_MATMUL, "zero-scale", edit("b_scales", 1, 0)),
    (FP8_MATMUL, "nan-padding", edit("a_scales", (slice(None), slice(ROWS, None)), np.nan)),
    (ROWWISE, "row-of-scales", remake("a_scales", lambda x: x.reshape(1, -1).copy())),
    (ROWWISE, "one-scale", remake("a_scales", lambda x: x[0].copy())),
    (ROWWISE, "scale-an-expert", remake("b_scales", lambda x: x[:, :1].copy())),
    (FP8_QUANTIZE, "rows", both(put(group_size_or_per_token=-1), without("out"))),
    (FP8_QUANTIZE, "short-group", both(put(group_size_or_per_token=50), without("out"))),
    (FP8_QUANTIZE, "wide-group", both(put(group_size_or_per_token=10**6), without("out"))),
    (FP8_QUANTIZE, "largest-bound", put(scale_ub=float(np.finfo(np.float32).max))),
    (FP8_QUANTIZE, "smallest-bound", put(scale_ub=2.0**-100)),
    (E8M0_QUANTIZE, "floor", put(amax_floor=1e-4, row_offsets=None)),
    ("route:softmax", "E1024", many_experts),
    ("moe_create_indices", "E1024", put(num_experts=1024, out=None)),
    (STATIC, "number", put(scale=np.float32(3))),
    (STATIC, "int", put(scale=2, scale_is_inverted=False)),
    (STATIC, "half", remake("x", lambda x: x.astype(np.float16))),
    ("quantize_dynamic_block_scaled:mxfp4", "factor-1", put(tensor_sf=1.0)),
    ("quantize_dynamic_block_scaled:nvfp4", "no-factor", put(tensor_sf=None)),
    ("block_scales_interleave:nvfp4", "matrix", both(edit("scales", 0, 1), without("out"))),
    *((MATMUL, f"{name}-by-dtype", put(**{name: None})) for name in ("format", "weight_format")),
    *((W4A8, f"{name}-by-dtype", put(**{name: None})) for name in ("format", "weight_format")),
]


@pytest.mark.parametrize(
    ("entry", "change"), [pytest.param(e, c, id=f"{e}-{i}") for e, i, c in GENERATED + CHOSEN]
)
def test_accepted(entry: str, change: Callable[[Arguments], Any], recorder: Recorder) -> None:
    first, second = VALID[entry](), VALID[entry]()
    change(first)
    change(second)
    accepted(entry, first, second, recorder)


def test_padding_scales_are_not_judged() -> None:
    """Bytes that belong to no weight row or block may be anything."""
    arguments = VALID[MATMUL]()
    n, blocks = HIDDEN, arguments["hidden"].shape[1] // 8
    used = layouts.interleave_scales(np.ones((EXPERTS, n, blocks), np.uint8)) == 1
    arguments["b_scales"][~used] = 0x7F
    assert not used.all()
    clean = ops.grouped_matmul_block_scaled(**VALID[MATMUL](), backend="reference")
    spoilt = ops.grouped_matmul_block_scaled(**arguments, backend="reference")
    assert clean.tobytes() == spoilt.tobytes()


def test_indices_may_be_left_away() -> None:
    for entry in entries_with("indices"):
        arguments = VALID[entry]()
        del arguments["indices"], arguments["indices_divisor"], arguments["out"]
        starts = arguments["row_offsets"]
        starts[:] = np.minimum(starts, TOKENS)
        arguments["scales_offsets"] = layouts.scales_offset(starts)
        function(entry)(**arguments, backend="reference")
