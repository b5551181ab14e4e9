"""C21, P9: sizes at the edge of 32-bit indices and 64-bit addresses."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from nbmoe import backend, layouts, ops
from nbmoe.errors import LayoutError, RangeError, ShapeError
from nbmoe.validate import F32, Call
from nbmoe.validate.call import FLAT
from nbmoe.validate.elements import FP8, PREPARED
from tests.bad_inputs.case import FakeDeviceArray, Recorder

LARGEST = 2**31 - 1


def test_largest_axis_is_legal() -> None:
    call = Call("api", None)
    assert call.array("x", FakeDeviceArray((LARGEST, 1), "|u1"), FP8, "(M, K)").size == LARGEST
    with pytest.raises(RangeError, match=r"api\(\): x: expected axes of at most 2147483647, got"):
        call.array("x", FakeDeviceArray((LARGEST + 1, 1), "|u1"), FP8, "(M, K)")


def test_an_axis_of_bytes_may_be_longer() -> None:
    """Prepared weights are one axis: of DeepSeek-V3's 256 experts 4.2 GB."""
    call = Call("api", None)
    size = 256 * 4096 * 7168 * 9 // 16
    assert call.array("x", FakeDeviceArray((size,), "|u1"), PREPARED, FLAT).size == size
    call.output("out", FakeDeviceArray((size,), "|u1"), PREPARED, FLAT, (size,))
    with pytest.raises(LayoutError, match="expected a C-contiguous array"):
        call.array("x", FakeDeviceArray((size,), "|u1", strides=(2,)), PREPARED, FLAT)


def test_largest_array_is_legal() -> None:
    factors = (454_279, 649_657, 31_252_369)
    assert factors[0] * factors[1] * factors[2] == 2**63 - 1
    call = Call("api", None)
    assert call.array("x", FakeDeviceArray(factors, "|u1"), FP8, "(E, N, K)").nbytes == 2**63 - 1
    with pytest.raises(RangeError, match=r"api\(\): x: expected at most 9223372036854775807 bytes"):
        call.array("x", FakeDeviceArray((2**30, 2**31 - 1, 2), "<f4"), F32, "(E, N, K)")


def test_byte_counts_do_not_wrap() -> None:
    call = Call("api", None)
    shape = (LARGEST, LARGEST, LARGEST)
    with pytest.raises(RangeError, match="bytes, got shape"):
        call.array("x", FakeDeviceArray(shape, "|u1"), FP8, "(E, N, K)")


def test_sizes_of_zero() -> None:
    """M5: sizes that need no multiple have no rule of one."""
    call = Call("api", None)
    call.positive("x", "K", 1)
    with pytest.raises(ShapeError, match=r"^api\(\): x: expected K > 0, got K = 0$"):
        call.positive("x", "K", 0)
    with pytest.raises(ShapeError, match=r"weights: expected k > 0, got k = 0$"):
        ops.moe_finalize(
            FakeDeviceArray((0, 8), "<u2"),
            FakeDeviceArray((0,), "<u4"),
            FakeDeviceArray((3, 0), "<f4"),
        )


def of(shape: tuple[int, ...], typestr: str, at: Iterator[int]) -> FakeDeviceArray:
    return FakeDeviceArray(shape, typestr, pointer=next(at) << 44)


@pytest.mark.parametrize("hint", [0, None])
def test_grids_of_large_problems_are_legal(
    hint: int | None, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: a million tokens to eight experts each; y and z of a grid end at 65,535."""
    monkeypatch.setattr(backend, "problem", lambda name: None)
    tokens, top_k, experts, hidden, moe_dim = 1_000_000, 8, 256, 7168, 2048
    rows, at = tokens * top_k, count(1)
    tiles = layouts.activation_tiles(rows, experts)
    starts, offsets = of((experts + 1,), "<u4", at), of((experts,), "<u4", at)
    ids, factors = of((experts,), "<i4", at), of((experts,), "<f4", at)
    slots = (starts, offsets, ids)
    x, order = of((tokens, hidden), "<u2", at), of((rows,), "<u4", at)
    codes, scales = (
        of((rows, hidden // 2), "|u1", at),
        of((tiles, hidden // 64, 32, 4, 4), "|u1", at),
    )
    ops.grouped_quantize_dynamic_block_scaled(
        x, *slots, factors, indices=order, indices_divisor=top_k, out=(codes, scales)
    )
    gate_up = of((experts, 2 * moe_dim, hidden // 2), "|u1", at)
    gate_up_scales = of((experts, 2 * moe_dim // 128, hidden // 64, 32, 4, 4), "|u1", at)
    inner = of((rows, moe_dim // 2), "|u1", at)
    inner_scales = of((tiles, moe_dim // 64, 32, 4, 4), "|u1", at)
    ops.grouped_matmul_blocked_swiglu(
        *(codes, gate_up, scales, gate_up_scales, *slots),
        expert_scales=factors,
        c_input_scales=factors,
        estimated_total_m=hint,
        out=(inner, inner_scales),
    )
    down = of((experts, hidden, moe_dim // 2), "|u1", at)
    down_scales = of((experts, hidden // 128, moe_dim // 64, 32, 4, 4), "|u1", at)
    y = of((rows, hidden), "<u2", at)
    ops.grouped_matmul_block_scaled(
        *(inner, down, inner_scales, down_scales, *slots, factors), estimated_total_m=hint, out=y
    )
    out = of((tokens, hidden), "<u2", at)
    ops.moe_finalize(y, order, of((tokens, top_k), "<f4", at), out=out)
    assert_launchable(recorder, 4)


def assert_launchable(recorder: Recorder, count: int) -> None:
    """A grid ends at 2**31 - 1 blocks along x and at 65,535 along y and z."""
    grids = [(name, grid) for name, grid, _, _ in recorder.launches]
    assert len(grids) == count
    beyond = [(n, g) for n, g in grids if g[0] > LARGEST or max(g[1:]) > 65_535]
    assert not beyond


TOKENS, TOP_K, EXPERTS, HIDDEN, MOE_DIM = 1_000_000, 8, 256, 7168, 2048
ROWS = TOKENS * TOP_K
TILES = layouts.activation_tiles(ROWS, EXPERTS)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes arrays of a GPU that are apart from each other."""
    monkeypatch.setattr(backend, "problem", lambda name: None)
    at = count(1)
    return lambda typestr, *shape: of(shape, typestr, at)


def test_large_activations_are_legal(fake: Any, recorder: Recorder) -> None:
    """P9: what is done to the rows of a million tokens, in and between the matmuls."""
    starts, offsets = fake("<u4", EXPERTS + 1), fake("<u4", EXPERTS)
    slots = (starts, offsets, fake("<i4", EXPERTS))
    x, order = fake("<u2", TOKENS, HIDDEN), fake("<u4", ROWS)
    mx = {"sf_vector_size": 32, "scales_type": "float8_e8m0fnu", "out_type": "float8_e4m3fn"}
    gather = {"indices": order, "indices_divisor": TOP_K}
    columns = HIDDEN // 128
    out = (fake("|u1", ROWS, HIDDEN), fake("|u1", TILES, columns, 32, 4, 4))
    ops.grouped_quantize_dynamic_block_scaled(x, *slots, **mx, **gather, out=out)
    tiles = fake("|u1", layouts.ceil_div(TOKENS, 128), columns, 32, 4, 4)
    ops.quantize_dynamic_block_scaled(x, **mx, out=(fake("|u1", TOKENS, HIDDEN), tiles))
    tiles = fake("|u1", TILES, HIDDEN // 64, 32, 4, 4)
    out = (fake("|u1", ROWS, HIDDEN // 2), tiles, fake("<u2", ROWS))
    ops.grouped_quantize_nvfp4_row_scaled(x, *slots, **gather, out=out)
    gate_up, inner = fake("<u2", ROWS, 2 * MOE_DIM), fake("|u1", ROWS, MOE_DIM)
    out = (inner, fake("|u1", TILES, MOE_DIM // 128, 32, 4, 4))
    ops.fused_silu_quantize(gate_up, *slots, format="mxfp8", out=out)
    ops.gated_activation(gate_up, out=fake("<u2", ROWS, MOE_DIM))
    ops.gather_rows(x, order, divisor=TOP_K, out=fake("<u2", ROWS, HIDDEN))
    logits = fake("<f4", TOKENS, EXPERTS)
    ops.router_logits(x, fake("<u2", EXPERTS, HIDDEN), out=logits)
    chosen = (fake("<i4", TOKENS, TOP_K), fake("<f4", TOKENS, TOP_K))
    ops.route(logits, TOP_K, out=chosen)
    groups = {"scoring": "sigmoid", "n_groups": 8, "topk_group": 4}
    ops.route(logits, TOP_K, **groups, out=chosen)
    rows = fake("<u2", ROWS, HIDDEN)
    scales = fake("<f4", HIDDEN // 128, ROWS)
    out = (fake("|u1", ROWS, HIDDEN), scales)
    ops.quantize_dynamic_scaled_float8(rows, group_size_or_per_token=128, out=out)
    out = (fake("|u1", ROWS, HIDDEN), fake("<f4", 1, ROWS))
    ops.quantize_dynamic_scaled_float8(rows, out=out)
    codes = fake("|u1", ROWS, HIDDEN)
    ops.quantize_static_scaled_float8(rows, 2.0, out=codes)
    scratch = {"workspace": fake("<f4", 1024)}
    ops.quantize_tensor_dynamic_scaled_float8(rows, **scratch, out=(codes, fake("<f4", 1)))
    assert_launchable(recorder, 15)


def test_large_weights_are_legal(fake: Any, recorder: Recorder) -> None:
    """P9: 256 experts of 7168 by 4096, and a million tokens' rows for them."""
    starts, ids = fake("<u4", EXPERTS + 1), fake("<i4", EXPERTS)
    n = 2 * MOE_DIM
    scales = fake("|u1", EXPERTS, n, HIDDEN // 32)
    tiles = fake("|u1", EXPERTS, n // 128, HIDDEN // 128, 32, 4, 4)
    ops.block_scales_interleave(scales, 32, out=tiles)
    packed, weight = fake("|u1", EXPERTS, n, HIDDEN // 2), fake("<u2", EXPERTS, n, HIDDEN)
    ops.mxfp4_dequant(packed, scales, out=weight)
    rows, y = fake("<u2", ROWS, HIDDEN), fake("<u2", ROWS, n)
    ops.grouped_matmul_ragged(rows, weight, starts, ids, out=y)
    ops.grouped_matmul_w4a16(rows, packed, tiles, starts, ids, out=y)
    codes, a_tiles = fake("|u1", ROWS, HIDDEN), fake("|u1", TILES, HIDDEN // 128, 32, 4, 4)
    operands = (codes, packed, a_tiles, tiles, starts, fake("<u4", EXPERTS), ids)
    formats = {"format": "mxfp8", "weight_format": "mxfp4"}
    ops.grouped_matmul_block_scaled(*operands, **formats, out=y)
    out = (fake("|u1", ROWS, MOE_DIM), fake("|u1", TILES, MOE_DIM // 128, 32, 4, 4))
    ops.grouped_matmul_blocked_swiglu(*operands, **formats, out=out)
    e4m3 = fake("|u1", EXPERTS, n, HIDDEN)
    blocks = (fake("<f4", HIDDEN // 128, ROWS), fake("<f4", EXPERTS, n // 128, HIDDEN // 128))
    ops.grouped_dynamic_scaled_fp8_matmul(codes, e4m3, *blocks, starts, ids, out=y)
    per_row = (fake("<f4", ROWS, 1), fake("<f4", EXPERTS, n, 1))
    matmul = ops.grouped_rowwise_dynamic_scaled_fp8_matmul
    matmul(codes, e4m3, *per_row, starts, ids, out=y)
    batch, m = 65_535, 1000
    a, b = fake("|u1", batch, m, 128), fake("|u1", batch, 64, 128)
    scales = (fake("<f4", batch, 1, m), fake("<f4", batch, 1, 1))
    ops.batched_dynamic_scaled_fp8_matmul(a, b, *scales, out=fake("<u2", batch, m, 64))
    assert_launchable(recorder, 9)
