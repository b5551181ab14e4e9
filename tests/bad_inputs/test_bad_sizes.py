"""C21, P9: sizes at the edge of 32-bit indices and 64-bit addresses."""

from collections.abc import Iterator
from itertools import count

import pytest

from nbmoe import backend, layouts, ops
from nbmoe.errors import RangeError
from nbmoe.validate import CODES, F32, Call
from tests.bad_inputs.case import FakeDeviceArray, Recorder

LARGEST = 2**31 - 1


def test_largest_axis_is_legal() -> None:
    call = Call("api", None)
    assert call.array("x", FakeDeviceArray((LARGEST, 1), "|u1"), CODES, "(M, K)").size == LARGEST
    with pytest.raises(RangeError, match=r"api\(\): x: expected axes of at most 2147483647, got"):
        call.array("x", FakeDeviceArray((LARGEST + 1, 1), "|u1"), CODES, "(M, K)")


def test_largest_array_is_legal() -> None:
    factors = (454_279, 649_657, 31_252_369)
    assert factors[0] * factors[1] * factors[2] == 2**63 - 1
    call = Call("api", None)
    assert call.array("x", FakeDeviceArray(factors, "|u1"), CODES, "(E, N, K)").nbytes == 2**63 - 1
    with pytest.raises(RangeError, match=r"api\(\): x: expected at most 9223372036854775807 bytes"):
        call.array("x", FakeDeviceArray((2**30, 2**31 - 1, 2), "<f4"), F32, "(E, N, K)")


def test_byte_counts_do_not_wrap() -> None:
    call = Call("api", None)
    shape = (LARGEST, LARGEST, LARGEST)
    with pytest.raises(RangeError, match="bytes, got shape"):
        call.array("x", FakeDeviceArray(shape, "|u1"), CODES, "(E, N, K)")


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
    grids = {name: grid for name, grid, _, _ in recorder.launches}
    assert len(grids) == 4
    beyond = {n: g for n, g in grids.items() if g[0] > 2**31 - 1 or max(g[1:]) > 65_535}
    assert not beyond
