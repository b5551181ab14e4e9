"""The whole FFN as an operation: its bytes are those of the chain and the reference."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nbmoe import ops
from nbmoe.activation import GatedActivation
from nbmoe.backend import problem as backend_problem
from nbmoe.formats import FORMATS, MXFP8, NVFP4
from nbmoe.prepared import PreparedTokens, PreparedWeights, pack_tokens, pack_weights
from nbmoe.prepared.tokens import token_shape
from nbmoe.validate.product_prepared import reads_prepared
from nbmoe_kernels import mega_ffn_sm80
from nbmoe_kernels.mega_ffn_sm80 import make_mega_ffn_sm80
from nbmoe_kernels.mega_ffn_sm90_config import mega_ffn_config
from nbmoe_kernels.prepared_weights import prepared_bytes
from tests.kernels.test_mega_ffn_sm90 import Problem, problem
from tests.ops.compare import assert_same
from tests.strategies import Slots

BF16 = ml_dtypes.bfloat16
OAI = GatedActivation("swigluoai", alpha=1.702, limit=7.0)
FEW = 2
"""Rows to expect, so that all cases run the same kernel: compiling takes longer than running."""
CASES = {
    "tile boundaries": Slots((8, 16, 7, 9, 15, 17), (0, 1, 2, 3, 4, 5), 6, 2),
    "primes": Slots((31, 2, 13, 5), (3, 0, 2, 1), 4, 1),
    "skew": Slots((53, 0, 1, 0), (1, 0, 3, 2), 4, 3),
    "one row": Slots((0, 1, 0), (0, 2, 1), 3, 0),
    "masked": Slots((4, 9, 3), (-1, 1, -1), 3, 1),
    "all masked": Slots((4, 2), (-1, -1), 2, 1),
}


def arguments(p: Problem, *, prepared: bool, **changes: Any) -> dict[str, Any]:
    """Those of the operation, with a poisoned output and poisoned scratch."""
    up, down, s = p.up, p.down, p.up.slots
    slots, fmt = len(s.counts), up.a_format
    given: dict[str, Any] = {
        "output": np.full((s.rows, down.n), 0xAAAA, np.uint16).view(BF16),
        "hidden_states": up.hidden,
        "gate_up_weight": up.weight,
        "gate_up_a_scales": up.a_scales,
        "gate_up_b_scales": up.b_scales,
        "down_weight": down.weight,
        "down_b_scales": down.b_scales,
        "expert_start_indices": s.starts,
        "expert_ids": s.ids,
        "a_scale_offsets": s.offsets,
        "gate_up_expert_scales": up.expert_scales,
        "down_expert_scales": down.expert_scales,
        "c_input_scales": p.factors,
        "estimated_total_m": FEW,
        "gate_up_num_active_experts": slots,
        "down_num_active_experts": slots,
        "arrival_count": np.zeros(ops.mega_ffn_arrival_count_size(s.rows, slots), np.uint32),
        "activation": p.activation,
        "format": fmt.name,
        "gate_up_bias": up.bias,
        "down_bias": down.bias,
        "gate_up_a_row_scales": up.row_scales,
        "workspace": np.full(ops.mega_ffn_workspace_size(s.rows, slots, down.k), 0xAA, np.uint8),
    }
    if prepared:
        given["hidden_states"] = pack_tokens(
            up.hidden, up.a_scales, s.starts, s.offsets, format=fmt.name
        )
        for name, product in (("gate_up_weight", up), ("down_weight", down)):
            given[name] = pack_weights(product.weight, product.b_scales, format=fmt.name)
        unused = ("gate_up_a_scales", "gate_up_b_scales", "down_b_scales", "a_scale_offsets")
        given |= dict.fromkeys(unused)
    return given | changes


def check(
    kernels: Any, p: Problem, used: int | None = None, *, prepared: bool = True, **changes: Any
) -> None:
    """Rows of active slots have the reference's bytes, others are not written."""
    got = kernels(ops.mega_ffn_nvfp4, **arguments(p, prepared=prepared, **changes))
    used = int(p.up.slots.starts[-1]) if used is None else used
    assert_same(got[:used].view(BF16), np.asarray(p.expected())[:used], "output")
    assert (got[used:].view(np.uint16) == 0xAAAA).all()


@pytest.mark.parametrize("fmt", [NVFP4, MXFP8], ids=lambda f: f.name)
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_chain(hopper_kernels: Any, case: str, fmt: Any) -> None:
    p = problem(len(case), fmt, 96, 64, 72, CASES[case], bias=True, row_scales=fmt is NVFP4)
    check(hopper_kernels, p)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
@pytest.mark.parametrize("case", CASES)
def test_packed_operands(kernels: Any, case: str, fmt: Any) -> None:
    """On the portable kernel, of every format."""
    p = problem(len(case), fmt, 96, 64, 72, CASES[case], bias=True, row_scales=fmt is NVFP4)
    check(kernels, p, prepared=False)


@pytest.mark.parametrize(
    ("fmt", "hint", "rows"), [(NVFP4, 200, 64), (MXFP8, 1000, 128)], ids=["nvfp4", "mxfp8"]
)
def test_packed_operands_in_larger_tiles(
    kernels: Any, fmt: Any, hint: int, rows: int, monkeypatch: Any
) -> None:
    """Slots of several row blocks and scale tiles, and of less than one."""
    ran = []

    def make(config: Any, *options: Any) -> Any:
        ran.append(config.block_m)
        return make_mega_ffn_sm80(config, *options)

    monkeypatch.setattr(mega_ffn_sm80, "make_mega_ffn_sm80", make)
    p = problem(11, fmt, 96, 96, 72, Slots((rows + 3, 0, 1, 131, 2), (2, 0, 1, 3, -1), 5, 3))
    check(kernels, p, prepared=False, estimated_total_m=hint)
    assert ran == [rows]


def test_packed_slots_past_the_active_ones_have_no_part(kernels: Any) -> None:
    p = problem(8, NVFP4, 96, 64, 72, CASES["primes"])
    active = {"gate_up_num_active_experts": 2, "down_num_active_experts": 2}
    check(kernels, p, used=int(p.up.slots.starts[2]), prepared=False, **active)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_has_the_chain_s_bytes_in_both_layouts(case: str) -> None:
    for fmt, activation in ((NVFP4, GatedActivation(limit=2.5)), (MXFP8, OAI)):
        p = problem(5, fmt, 96, 64, 72, CASES[case], bias=True, activation=activation)
        for prepared in (False, True):
            given = arguments(p, prepared=prepared, clamp_activation=True)
            got = ops.mega_ffn_nvfp4(**given, backend="reference")
            assert got is given["output"]
            used = int(p.up.slots.starts[-1])
            assert_same(got[:used], np.asarray(p.expected())[:used], "output")
            assert (got[used:].view(np.uint16) == 0xAAAA).all()


@pytest.mark.parametrize("hint", [0, 10])
def test_the_hint_changes_no_byte(hopper_kernels: Any, hint: int) -> None:
    """So few rows that both hints choose narrow tiles, of other widths: wide ones take long."""
    p = problem(7, NVFP4, 96, 64, 72, Slots((2, 0, 1), (0, 2, 1), 3, 0))
    widths = [mega_ffn_config("nvfp4", "nvfp4", 64, 96, 3, n).widths for n in (0, 10 * 3)]
    assert widths == [(8,), (8, 16)]
    check(hopper_kernels, p, estimated_total_m=hint * p.up.slots.rows)


def test_slots_past_the_active_ones_have_no_part(hopper_kernels: Any) -> None:
    p = problem(8, NVFP4, 96, 64, 72, CASES["primes"])
    active = {"gate_up_num_active_experts": 2, "down_num_active_experts": 2}
    check(hopper_kernels, p, used=int(p.up.slots.starts[2]), **active)
    for prepared in (False, True):
        given = arguments(p, prepared=prepared, **active)
        ops.mega_ffn_nvfp4(**given, backend="reference")
        used = int(p.up.slots.starts[2])
        assert_same(given["output"][:used], np.asarray(p.expected())[:used], "output")
        assert (given["output"][used:].view(np.uint16) == 0xAAAA).all()


def test_no_rows_and_no_slots_launch_nothing(monkeypatch: Any) -> None:
    p = problem(9, NVFP4, 96, 64, 72, Slots((0, 0), (0, 1), 2, 0))
    monkeypatch.setattr("nbmoe.ops.mega_ffn.launch_prepared", None)
    monkeypatch.setattr("nbmoe.ops.mega_ffn.launch_packed", None)
    for count, prepared in itertools.product((0, 2), (False, True)):
        active = {"gate_up_num_active_experts": count, "down_num_active_experts": count}
        given = arguments(p, prepared=prepared, **active)
        assert ops.mega_ffn_nvfp4(**given) is given["output"]


def test_without_a_workspace_it_allocates_one(hopper_kernels: Any) -> None:
    check(hopper_kernels, problem(10, NVFP4, 96, 64, 72, CASES["skew"]), workspace=None)


EXPERTS, K, DIM, N, ROWS = 6, 512, 256, 384, 320


def on_hopper(test: Any) -> Any:
    """Marks a test of the GPU's own kernels."""
    why = "no GPU of compute capability 9.0"
    has_gpu = backend_problem("gpu") is None and reads_prepared()
    return pytest.mark.gpu(pytest.mark.skipif(not has_gpu, reason=why)(test))


class OnGpu:
    """Operands as torch tensors whose routing can change: any place of a panel may be a row's."""

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        g = torch.Generator(device="cuda").manual_seed(1)
        here: Any = {"device": "cuda", "generator": g}
        self.torch = torch
        values = torch.randn((*token_shape(ROWS, EXPERTS, K)[:2], 64), **here)
        data = values.to(torch.float16).view(torch.uint8)
        self.tokens = PreparedTokens(data, "nvfp4", ROWS, EXPERTS, K)
        self.weights = []
        for n, k in ((2 * DIM, K), (N, DIM)):
            size = prepared_bytes("nvfp4", EXPERTS, n, k)
            # Codes of all kinds, and scales below NaN's.
            raw = torch.randint(0, 256, (size // 2304, 2304), dtype=torch.uint8, **here)
            raw[:, 2048:] %= 96
            self.weights.append(PreparedWeights(raw.reshape(-1), "nvfp4", EXPERTS, n, k))
        ones = torch.ones(EXPERTS, device="cuda")
        self.factors, self.inverse = ones * 2.0**-6, ones * 0.5
        self.starts = torch.zeros(EXPERTS + 1, dtype=torch.int32, device="cuda")
        self.ids = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
        self.output = torch.zeros(ROWS, N, dtype=torch.bfloat16, device="cuda")
        size = ops.mega_ffn_arrival_count_size(ROWS, EXPERTS)
        self.counters = torch.zeros(size + 1, dtype=torch.int32, device="cuda")
        self.counters[-1] = 0x5EED
        size = ops.mega_ffn_workspace_size(ROWS, EXPERTS, DIM)
        self.workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def route(self, rng: Any) -> int:
        """New routing; the number of rows that slots own."""
        cuts = np.sort(rng.integers(0, ROWS + 1, EXPERTS)).astype(np.int32)
        starts = np.concatenate([[0], cuts]).astype(np.int32)
        ids = rng.permutation(EXPERTS).astype(np.int32)
        ids[rng.random(EXPERTS) < 0.2] = -1
        self.starts.copy_(self.torch.from_numpy(starts))
        self.ids.copy_(self.torch.from_numpy(ids))
        return int(starts[-1])

    def mega(self) -> Any:
        u32 = self.torch.uint32
        return ops.mega_ffn_nvfp4(
            self.output, self.tokens, self.weights[0], None, None, self.weights[1], None,
            self.starts.view(u32), self.ids, None, self.factors, self.factors, self.inverse, None,
            EXPERTS, EXPERTS, self.counters[:-1].view(u32), workspace=self.workspace,
        )  # fmt: skip

    def chain(self) -> Any:
        starts = self.starts.view(self.torch.uint32)
        middle = ops.grouped_matmul_blocked_swiglu(
            self.tokens, self.weights[0], None, None, starts, None, self.ids,
            expert_scales=self.factors, c_input_scales=self.inverse, layout="prepared",
        )  # fmt: skip
        return ops.grouped_matmul_block_scaled(
            middle, self.weights[1], None, None, starts, None, self.ids, self.factors
        )


@on_hopper
def test_gpu_graph_replays_with_other_routing() -> None:
    """1000 replays: the chain's bytes, nothing else written, counters 0 after each."""
    gpu = OnGpu()
    torch, rng = gpu.torch, np.random.default_rng(2)
    gpu.route(rng)
    gpu.mega()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.mega()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for replay in range(1000):
        used = gpu.route(rng)
        gpu.output.view(torch.int16).fill_(0x5A5A)
        gpu.workspace.fill_(0xFF if replay % 2 else 0x7F)
        graph.replay()
        bits = gpu.output.view(torch.int16)
        wrong += (bits[:used] != gpu.chain().view(torch.int16)[:used]).sum()
        wrong += (bits[used:] != 0x5A5A).sum() + gpu.counters[:-1].count_nonzero()
    assert int(wrong) == 0
    assert int(gpu.counters[-1]) == 0x5EED


@on_hopper
def test_gpu_launches_back_to_back() -> None:
    """10,000 on one stream without a pause: none hangs, the last is right."""
    gpu = OnGpu()
    torch = gpu.torch
    used = gpu.route(np.random.default_rng(3))
    wanted = gpu.chain().view(torch.int16)[:used].clone()
    for _ in range(10_000):
        gpu.mega()
    torch.cuda.synchronize()
    assert torch.equal(gpu.output.view(torch.int16)[:used], wanted)
    assert int(gpu.counters[:-1].count_nonzero()) == 0


@on_hopper
def test_gpu_launches_on_two_streams() -> None:
    """Blocks of both share the GPU: whichever blocks run, what they wait for is at work."""
    first, second = OnGpu(), OnGpu()
    torch = first.torch
    rng = np.random.default_rng(4)
    used = [gpu.route(rng) for gpu in (first, second)]
    wanted = [gpu.chain().view(torch.int16)[:n].clone() for gpu, n in zip((first, second), used)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(2_000):
        for gpu, stream in zip((first, second), streams):
            with torch.cuda.stream(stream):
                gpu.mega()
    torch.cuda.synchronize()
    for gpu, n, rows in zip((first, second), used, wanted):
        assert torch.equal(gpu.output.view(torch.int16)[:n], rows)
        assert int(gpu.counters[:-1].count_nonzero()) == 0
