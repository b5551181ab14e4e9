"""P8, P10: what looks odd but is legal is not refused, and the cheap level reads nothing."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import arrays, layouts, ops, reference
from tests.bad_inputs.case import Recorder, edit, put, remake
from tests.bad_inputs.test_bad_call import ON_GPU, on_gpu
from tests.bad_inputs.valid import EXPERTS, HIDDEN, ROWS, VALID, Arguments

QUANTIZE = "grouped_quantize_dynamic_block_scaled"
MATMUL = "grouped_matmul_block_scaled"
SWIGLU = "grouped_matmul_blocked_swiglu"
NO_ROW = 2**32 - 1


def both(*changes: Callable[[Arguments], Any]) -> Callable[[Arguments], None]:
    """Changes one after the other."""

    def change(arguments: Arguments) -> None:
        for one in changes:
            one(arguments)

    return change


def no_rows(arguments: Arguments) -> None:
    """No token at all."""
    empty = {
        "input": (0, HIDDEN),
        "indices": (0,),
        "a_row_scales": (0,),
        "down": (0, HIDDEN),
        "restore_token_order": (0,),
        "logits": (0, EXPERTS),
        "topk_ids": (0, 2),
        "weights": (0, 2),
    }
    del arguments["out"]
    if "hidden" in arguments:
        arguments["hidden"] = arguments["hidden"][:0].copy()
        arguments["a_scales"] = arguments["a_scales"][:0].copy()
    for name, shape in empty.items():
        if name in arguments:
            arguments[name] = np.zeros(shape, arguments[name].dtype)
    for name, value in arguments.items():
        if name in ("row_offsets", "scales_offsets", "expert_start", "a_scale_offsets"):
            arguments[name] = np.zeros_like(value)


def one_expert(arguments: Arguments) -> None:
    """E = S = 1; all rows are its."""
    for name in (
        "expert_ids",
        "sf_tensor",
        "weight",
        "b_scales",
        "expert_scales",
        "c_input_scales",
    ):
        if name in arguments:
            arguments[name] = arguments[name][:1].copy()
    for name in ("row_offsets", "expert_start"):
        if name in arguments:
            arguments[name] = np.array([0, ROWS], np.uint32)
    for name in ("scales_offsets", "a_scale_offsets"):
        if name in arguments:
            arguments[name] = np.zeros(1, np.uint32)
    if "indices" in arguments:
        del arguments["out"]


def one_group(arguments: Arguments) -> None:
    """K = 16, one block."""
    del arguments["out"]
    if "input" in arguments:
        arguments["input"] = arguments["input"][:, :16].copy()
    else:
        arguments["hidden"] = arguments["hidden"][:, :8].copy()
        arguments["weight"] = arguments["weight"][..., :8].copy()
        arguments["a_scales"] = arguments["a_scales"][:, :1].copy()
        arguments["b_scales"] = arguments["b_scales"][:, :, :1].copy()


def gap_in_tiles(name: str) -> Callable[[Arguments], None]:
    """Slots that leave a tile unused between them."""
    return lambda arguments: arguments[name].__setitem__(3, arguments[name][3] + 1)


def bits(name: str) -> Callable[[Arguments], None]:
    """bfloat16 as its bit patterns."""
    return remake(name, lambda x: x.view(np.uint16))


NAN_BITS = np.array(0x7FC0, np.uint16).view(ml_dtypes.bfloat16)
LEGAL = [
    *((api, "T0", no_rows) for api in VALID),
    *((api, "E1", one_expert) for api in (QUANTIZE, MATMUL, SWIGLU)),
    *((api, "K16", one_group) for api in (QUANTIZE, MATMUL, SWIGLU)),
    *((api, "masked", edit("expert_ids", 2, -1)) for api in (QUANTIZE, MATMUL, SWIGLU)),
    (QUANTIZE, "gap", gap_in_tiles("scales_offsets")),
    (MATMUL, "gap", gap_in_tiles("a_scale_offsets")),
    (MATMUL, "exact-tiles", remake("a_scales", lambda x: x[:3].copy())),
    (MATMUL, "M19", put(estimated_total_m=0)),
    (SWIGLU, "M19", put(estimated_total_m=10 * ROWS)),
    (MATMUL, "no-row-scales", put(a_row_scales=None)),
    (SWIGLU, "no-row-scales", put(a_row_scales=None)),
    (QUANTIZE, "nan", edit("input", 3, NAN_BITS)),
    (QUANTIZE, "bits", bits("input")),
    ("moe_finalize", "bits", bits("down")),
    ("moe_finalize", "nan", both(edit("down", 3, NAN_BITS), edit("weights", 3, np.nan))),
    ("moe_finalize", "dropped", edit("restore_token_order", slice(0, 7), NO_ROW)),
    ("moe_create_indices", "flat", remake("topk_ids", lambda x: x.reshape(-1))),
    ("moe_create_indices", "masked", edit("topk_ids", slice(0, 3), -1)),
    ("moe_create_indices", "none", edit("topk_ids", slice(None), -1)),
    ("route", "nan", edit("logits", 3, np.nan)),
    ("route", "all", put(top_k=EXPERTS, out=None)),
    ("route", "inf", edit("logits", (3, 0), -np.inf)),
]


@pytest.mark.parametrize(
    ("api", "change"), [pytest.param(a, c, id=f"{a}-{i}") for a, i, c in LEGAL]
)
def test_accepted(api: str, change: Callable[[Arguments], Any], recorder: Recorder) -> None:
    """The reference computes it; for kernels it is one launch, or none where nothing is to do."""
    arguments = VALID[api]()
    change(arguments)
    getattr(ops, api)(**arguments, backend="reference")
    assert not recorder.launches
    getattr(ops, api)(**arguments)
    empty = change is no_rows and api != "moe_create_indices"
    assert len(recorder.launches) == (0 if empty or api == "route" else 1)


@pytest.mark.parametrize("api", tuple(VALID))
def test_out_is_returned(api: str) -> None:
    arguments = VALID[api]()
    result = getattr(ops, api)(**arguments, backend="reference")
    out = arguments["out"]
    pairs = zip(result, out, strict=True) if isinstance(out, tuple) else ((result, out),)
    assert all(r is o for r, o in pairs)


@pytest.mark.parametrize("api", tuple(VALID))
def test_valid_call_equals_the_reference(api: str) -> None:
    """The op's reference backend is `nbmoe.reference`, with and without buffers."""
    arguments = VALID[api]()
    del arguments["out"]
    got = getattr(ops, api)(**arguments, backend="reference")
    expected = getattr(reference, api)(**arguments)
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else ((got, expected),)
    for g, e in pairs:
        assert g.dtype == e.dtype and g.shape == e.shape and g.tobytes() == e.tobytes()


@pytest.mark.parametrize("api", ON_GPU)
def test_gpu_call_reads_and_allocates_nothing(
    api: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: with buffers given, a call on a GPU is one launch on addresses."""
    monkeypatch.setattr("nbmoe.backend.problem", lambda name: None)
    monkeypatch.setattr(arrays, "read", lambda array: pytest.fail("an element was read"))
    monkeypatch.setattr(arrays, "empty", lambda *args: pytest.fail("memory was allocated"))
    arguments = on_gpu(api)
    getattr(ops, api)(**arguments, stream=77)
    ((_, grid, args, stream),) = recorder.launches
    assert stream == 77 and all(g > 0 for g in grid)
    pointers = [value.pointer for value in arguments.values() if hasattr(value, "pointer")]
    out = arguments["out"]
    pointers += [o.pointer for o in out] if isinstance(out, tuple) else []
    assert set(pointers) <= {a for a in args if isinstance(a, int)}


def test_shapes_level_reads_nothing_on_the_host(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "read", lambda array: pytest.fail("an element was read"))
    for api in VALID:
        getattr(ops, api)(**VALID[api](), validate="shapes")
    assert len(recorder.launches) == len(ON_GPU)


def test_levels_on_the_host(recorder: Recorder) -> None:
    """NaN weights are data of a token, refused only when asked; a bad order always is."""
    arguments = VALID["moe_finalize"]()
    arguments["weights"][0] = np.nan
    ops.moe_finalize(**arguments)
    ops.moe_finalize(**arguments, validate="metadata")
    with pytest.raises(ValueError, match="weights"):
        ops.moe_finalize(**arguments, validate="full")


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
