"""P10: bad input of prepared weights, and of matmuls with prepared operands (tables L and M)."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nbmoe import backend, gpus, ops
from nbmoe.errors import (
    ArgTypeError,
    ConfigError,
    DeviceError,
    DTypeError,
    LayoutError,
    RoutingError,
    ScaleError,
    ShapeError,
    UnsupportedError,
)
from nbmoe.formats import FORMATS
from nbmoe.gpus import Gpu
from nbmoe.layouts import deinterleave_scales
from nbmoe.operand import named_dtype
from nbmoe.prepared import PreparedTokens, PreparedWeights, pack_tokens, pack_weights
from nbmoe.prepared.tokens import token_shape
from tests.bad_inputs.case import (
    Case,
    FakeDeviceArray,
    Recorder,
    both,
    check,
    edit,
    narrow,
    params,
    put,
    refused,
    remake,
    shorter,
    table,
    without,
)
from tests.bad_inputs.common import unaligned
from tests.bad_inputs.sizes import EXPERTS, MOE_DIM, ROWS, Arguments
from tests.bad_inputs.test_bad_matmul import scale_byte
from tests.bad_inputs.valid import VALID

PREPARE, MATMUL = "prepare_weights", "grouped_matmul_block_scaled"
E4M3 = named_dtype("float8_e4m3fn")


def common_cases(entry: str) -> Iterator[Case]:
    """Sizes and formats of any kind of weights."""
    kind = entry.partition(":")[2]
    block = FORMATS[kind].block if kind in FORMATS else 8
    n = VALID[entry]()["weight"].shape[1]
    half = narrow("weight", block // 4)
    yield Case("Q8", half, ShapeError, "weight", "K = ", f"K > 0 and K % {block} == 0.*pad K")
    yield Case("Q9", narrow("weight", 0), ShapeError, "weight", "K = 0", "K > 0")
    for row, rows in (("M5", 0), ("M6", 12)):
        change = remake("weight", lambda x, rows=rows: x[:, :rows].copy())
        yield Case(row, change, ShapeError, "weight", f"N = {rows}", "N > 0 and N % 8 == 0")
    change = remake("weight", lambda x: x[:0].copy())
    yield Case("E0", change, ShapeError, "weight", r"\(0,", "E >= 1")
    yield Case("M21", shorter("out"), ShapeError, "out", r"\(\d+,\)", r"\(bytes,\)")
    names = r"\('nvfp4', 'mxfp4', 'mxfp8', 'bf16'\)"
    yield Case("L16", put(format="fp4"), ConfigError, "format", "'fp4'", names)
    yield Case("L16-type", put(format=4), ArgTypeError, "format", "int 4")
    assert n % 8 == 0


def nvfp4_cases() -> Iterator[Case]:
    """Scales that are missing, of another layout, format or weight, or unusable."""
    arg = "b_scales"
    untyped = both(without("format"), put(b_scales=None))
    yield Case("C1-untyped", untyped, ScaleError, arg, "None", "b_scales is required")
    plain = remake(arg, lambda x: deinterleave_scales(x, 40, 3))
    yield Case("M8", plain, LayoutError, arg, "row-major scales", "interleave_scales")
    for name, axis in (("down", 1), ("across", 2)):
        change = remake(arg, lambda x, axis=axis: np.concatenate([x, x], axis=axis))
        yield Case(f"M9-{name}", change, ShapeError, arg, r"shape \(4, ", "blocks of 16")
    e8m0 = remake(arg, lambda x: x.view(named_dtype("float8_e8m0fnu")))
    yield Case("K2", e8m0, ConfigError, "format", "float8_e8m0fnu", "nvfp4 with b_scales")
    got = "NaN byte 0x7f for expert 2, row 33, block 1"
    yield Case("M12", scale_byte(2, 33, 1, 0x7F), ScaleError, arg, got, "finite e4m3")
    got = "negative byte 0x81"
    yield Case("M13", scale_byte(2, 33, 1, 0x81), ScaleError, arg, got, "finite e4m3")
    typed = remake("weight", lambda x: x.view(E4M3))
    yield Case("K1", typed, ConfigError, "format", "float8_e4m3fn", "packed e2m1")
    as_bf16 = both(put(format="bf16"), without("out"))
    yield Case("K2-bf16", as_bf16, DTypeError, "weight", "uint8", "bfloat16")


def bf16_cases() -> Iterator[Case]:
    """Scales beside weights that have none."""
    tiles = VALID[f"{PREPARE}:nvfp4"]()["b_scales"]
    both_given = put(b_scales=tiles, format="bf16")
    yield Case("M10", both_given, ConfigError, "b_scales", "some", "None.*format=")
    half = remake("weight", lambda x: x.astype(np.float16))
    yield Case("Q12", half, UnsupportedError, "weight", "float16", "convert to bfloat16")


TABLE = {
    f"{PREPARE}:{kind}": (*common_cases(f"{PREPARE}:{kind}"), *more)
    for kind, more in (("nvfp4", nvfp4_cases()), ("mxfp8", ()), ("bf16", bf16_cases()))
}


@pytest.mark.parametrize(("entry", "case"), table(TABLE))
def test_preparation_refused(entry: str, case: Case, recorder: Recorder) -> None:
    check(entry, case, recorder)


def matmul() -> Arguments:
    """A valid call with prepared operands, in NVFP4."""
    given = VALID[f"{MATMUL}:nvfp4"]()
    tokens = pack_tokens(
        given.pop("hidden"),
        given["a_scales"],
        given["expert_start"],
        given["a_scale_offsets"],
        format="nvfp4",
    )
    weights = pack_weights(given.pop("weight"), given["b_scales"], format="nvfp4")
    unused = dict.fromkeys(("a_scales", "b_scales", "a_scale_offsets"))
    return {"hidden": tokens, "weight": weights, **given, **unused}


def field(arg: str, **values: Any) -> Callable[[Arguments], None]:
    """A change of what a prepared operand says of itself."""
    return remake(arg, lambda x: dataclasses.replace(x, **values))


def data(arg: str, make: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    """A change of a prepared operand's array."""
    return remake(arg, lambda x: dataclasses.replace(x, data=make(x.data)))


def documented(name: str) -> Any:
    """An operand in the documented layout."""
    return VALID[f"{MATMUL}:nvfp4"]()[name]


def many_slots(arguments: Arguments) -> None:
    """More slots than a kernel has room for, and as many experts."""
    arguments["expert_start"] = np.zeros(1026, np.uint32)
    arguments["expert_ids"] = np.full(1025, -1, np.int32)
    arguments["hidden"] = dataclasses.replace(arguments["hidden"], num_slots=1025)


def fewer_experts(arguments: Arguments) -> None:
    """Fewer experts than slots."""
    weights = arguments["weight"]
    size = weights.data.size * 3 // 4
    arguments["weight"] = dataclasses.replace(
        weights, num_experts=3, data=weights.data[:size].copy()
    )
    for name in ("expert_scales", "bias"):
        arguments[name] = arguments[name][:3].copy()


MATMUL_CASES = [
    Case(
        "one-weight",
        put(weight=documented("weight")),
        ArgTypeError,
        "weight",
        "ndarray",
        r"PreparedWeights beside PreparedTokens.*nbmoe\.ops\.prepare_weights",
    ),
    Case(
        "one-hidden",
        put(hidden=documented("hidden")),
        ArgTypeError,
        "hidden",
        "ndarray",
        r"PreparedTokens beside PreparedWeights.*nbmoe\.ops\.prepare_tokens",
    ),
    *(
        Case(
            f"both-{arg}", put(**{arg: documented(arg)}), ConfigError, arg, "ndarray", "None beside"
        )
        for arg in ("a_scales", "b_scales", "a_scale_offsets")
    ),
    Case("K1", put(format="mxfp4"), ConfigError, "format", "mxfp4", "nvfp4 or None"),
    Case("K1-b", put(weight_format="mxfp4"), ConfigError, "weight_format", "mxfp4", "nvfp4"),
    Case("K1-name", put(format="fp4"), ConfigError, "format", "'fp4'"),
    Case(
        "K2",
        both(field("weight", format="mxfp4"), put(weight_format=None)),
        ConfigError,
        "weight",
        "nvfp4 x mxfp4",
        "mxfp8 x mxfp4",
    ),
    Case("M1", field("weight", k=64), ShapeError, "weight", "K = 64", "K = 48, that of hidden"),
    Case("M6", field("weight", n=77), ShapeError, "weight", "N = 77", "N % 8 == 0"),
    Case("slots", field("hidden", num_slots=3), ShapeError, "hidden", "for 3", "for 4 slots"),
    Case("slots-many", many_slots, UnsupportedError, "expert_ids", "1025 slots", "at most 1024"),
    Case("M4-slots", fewer_experts, ShapeError, "weight", "3 entries", "4 slots"),
    Case("rows", field("hidden", num_rows=300), ShapeError, "hidden", r"\(1, 168, 128\)"),
    Case("size", field("weight", n=400), ShapeError, "weight", r"\(\d+,\)", "E, N and K"),
    Case("C3", data("hidden", lambda x: x.view(np.int8)), DTypeError, "hidden", "int8", "view"),
    Case("C8", data("weight", lambda x: x[None]), ShapeError, "weight", r"shape \(1,", "squeeze"),
    Case("C14", data("weight", lambda x: unaligned(x, 8)), LayoutError, "weight", "address 0x"),
    Case("C2", data("hidden", lambda x: x.tolist()), ArgTypeError, "hidden", "list"),
    Case("C1", put(expert_scales=None), ScaleError, "expert_scales", "None", "required"),
    Case("M14", edit("expert_scales", 1, 0), ScaleError, "expert_scales", r"\[1\] = 0"),
    Case("M15", shorter("expert_scales"), ShapeError, "expert_scales", r"\(3,\)"),
    Case("M16", shorter("a_row_scales"), ShapeError, "a_row_scales", r"\(129,\)", r"\(130,\)"),
    Case("bias", narrow("bias", 8), ShapeError, "bias", r"\(4, 8\)", r"\(E, N\) ="),
    Case("G1", edit("expert_start", 4, 200), RoutingError, "expert_start", "200"),
    Case("G8", edit("expert_ids", 2, 4), RoutingError, "expert_ids", r"\[2\] = 4", "weight"),
    Case("M21", shorter("out"), ShapeError, "out", r"\(129, ", r"\(M, N\)"),
    Case("early", put(routed_before=1), ArgTypeError, "routed_before", "int 1", "a bool"),
]


@pytest.mark.parametrize("case", params(MATMUL_CASES))
def test_matmul_refused(case: Case, recorder: Recorder) -> None:
    arguments = matmul()
    case.change(arguments)
    refused(ops.grouped_matmul_block_scaled, arguments, case, MATMUL, recorder)


def test_row_scales_are_of_nvfp4(recorder: Recorder) -> None:
    change = both(
        field("hidden", format="mxfp4"),
        field("weight", format="mxfp4"),
        put(format="mxfp4", weight_format=None),
    )
    case = Case("M17", change, ConfigError, "a_row_scales", "some beside mxfp4", "only NVFP4")
    arguments = matmul()
    change(arguments)
    refused(ops.grouped_matmul_block_scaled, arguments, case, MATMUL, recorder)


SWIGLU = "grouped_matmul_blocked_swiglu"


def swiglu() -> Arguments:
    """A valid fused call with prepared operands and scale tiles in the result."""
    given = VALID[f"{SWIGLU}:nvfp4"]()
    tokens = pack_tokens(
        given.pop("hidden"),
        given["a_scales"],
        given["expert_start"],
        given["a_scale_offsets"],
        format="nvfp4",
    )
    weights = pack_weights(given.pop("weight"), given["b_scales"], format="nvfp4")
    unused = dict.fromkeys(("a_scales", "b_scales"))
    return {"hidden": tokens, "weight": weights, **given, **unused}


def prepared_result(arguments: Arguments) -> None:
    """Asks for prepared tokens."""
    shape = token_shape(ROWS, EXPERTS, MOE_DIM)
    arguments |= {"layout": "prepared", "a_scale_offsets": None, "out": np.zeros(shape, np.uint8)}


SWIGLU_CASES = [
    Case("G17", put(a_scale_offsets=None), ScaleError, "a_scale_offsets", "None", "required"),
    Case("S1", put(c_input_scales=None), ScaleError, "c_input_scales", "None", "required"),
    Case("S2", shorter("c_input_scales"), ShapeError, "c_input_scales", r"\(3,\)", "one a slot"),
    Case("S3", edit("c_input_scales", 2, 0), ScaleError, "c_input_scales", r"\[2\] = 0"),
    Case("G5", edit("a_scale_offsets", 3, 9), RoutingError, "a_scale_offsets", ""),
    Case("slots", shorter("a_scale_offsets"), ShapeError, "a_scale_offsets", r"\(3,\)"),
    Case("layout", put(layout="tiled"), ConfigError, "layout", "'tiled'", "'prepared'"),
    Case("layout-type", put(layout=3), ArgTypeError, "layout", "int 3", "a name"),
    Case(
        "layout-offsets",
        both(prepared_result, put(a_scale_offsets=np.zeros(4, np.uint32))),
        ConfigError,
        "a_scale_offsets",
        "ndarray",
        "None beside prepared",
    ),
    Case("early", put(routed_before=0), ArgTypeError, "routed_before", "int 0", "a bool"),
    Case(
        "out",
        both(prepared_result, shorter("out")),
        ShapeError,
        "out",
        r"\(0, 168, 128\)",
        r"\(ceil\(D/64\), R, 128\)",
    ),
    Case(
        "one-weight", put(weight=documented("weight")), ArgTypeError, "weight", "ndarray", "beside"
    ),
]


@pytest.mark.parametrize("case", params(SWIGLU_CASES))
def test_fused_matmul_refused(case: Case, recorder: Recorder) -> None:
    arguments = swiglu()
    case.change(arguments)
    refused(ops.grouped_matmul_blocked_swiglu, arguments, case, SWIGLU, recorder)


def test_fused_matmul_of_packed_operands_gives_no_prepared_tokens(recorder: Recorder) -> None:
    arguments = VALID[f"{SWIGLU}:nvfp4"]() | {"layout": "prepared"}
    says = "prepare_tokens"
    case = Case("layout", without(), ConfigError, "layout", "'prepared'", says)
    refused(ops.grouped_matmul_blocked_swiglu, arguments, case, SWIGLU, recorder)


@pytest.mark.parametrize("api", ["grouped_matmul_ragged", "grouped_matmul_w4a16"])
def test_matmuls_of_bf16_rows_want_bf16_tokens(api: str, recorder: Recorder) -> None:
    names = ("hidden", "weight", "expert_start", "expert_ids", "bias")
    arguments = {name: matmul()[name] for name in names}
    if api == "grouped_matmul_w4a16":
        arguments["b_scales"] = None
    case = Case("K2", without(), ConfigError, "weight", "nvfp4 x nvfp4", "bf16 x ")
    refused(getattr(ops, api), arguments, case, api, recorder)


def fake_call() -> Arguments:
    """Operands of a GPU as far as the host can tell."""
    arguments = matmul()
    at = 1 << 40
    for name, value in arguments.items():
        at += 1 << 30
        if isinstance(value, np.ndarray):
            arguments[name] = FakeDeviceArray.of(value, pointer=at)
        elif isinstance(value, PreparedTokens | PreparedWeights):
            fake = FakeDeviceArray.of(value.data, pointer=at)
            arguments[name] = dataclasses.replace(value, data=fake)
    return arguments


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_gpus_without_the_kernels(
    capability: tuple[int, int], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "problem", lambda name: None)
    found = (Gpu(0, "A GPU", capability),), ""
    monkeypatch.setattr("nbmoe.validate.product_prepared.find_gpus", lambda: found)
    have = "{}.{}".format(*capability)
    says = r"compute capability 9\.0.*documented layouts"
    case = Case("CC", without(), DeviceError, "hidden", f"A GPU with {have}", says)
    refused(ops.grouped_matmul_block_scaled, fake_call(), case, MATMUL, recorder)


def test_a_gpu_with_the_kernels_reads_nothing(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: a call is one launch on addresses."""
    monkeypatch.setattr(backend, "problem", lambda name: None)
    found = (gpus.Gpu(0, "A GPU", (9, 0)),), ""
    monkeypatch.setattr("nbmoe.validate.product_prepared.find_gpus", lambda: found)
    monkeypatch.setattr("nbmoe.arrays.read", lambda array: pytest.fail("an element was read"))
    monkeypatch.setattr("nbmoe.arrays.empty", lambda *args: pytest.fail("memory was allocated"))
    arguments = fake_call()
    ops.grouped_matmul_block_scaled(**arguments, stream=77)
    ((_, _, args, stream),) = recorder.launches
    assert stream == 77
    wanted = {arguments[name].data.pointer for name in ("hidden", "weight")}
    wanted |= {v.pointer for v in arguments.values() if isinstance(v, FakeDeviceArray)}
    assert wanted <= {a for a in args if isinstance(a, int)}
