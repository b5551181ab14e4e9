"""Runs the library's own kernels through `emulate.check`, at small shapes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import emulate
from nbmoe import backend, layouts, ops
from nbmoe.activation import GatedActivation
from nbmoe.formats import MXFP8, NVFP4, PAIRS
from nbmoe_kernels import heuristics, router_logits
from nbmoe_kernels.device.op import NUMPY_TYPES
from tests.fp8_operands import make_problem as make_fp8_problem
from tests.kernels.test_mega_ffn_sm90 import problem
from tests.ops.operands import make_product
from tests.ops.test_mega_ffn import arguments
from tests.strategies import Slots


class CheckingExecutor:
    """An executor that checks every launch.

    Attributes:
        reports: one a launch.
        multiprocessors: so few that persistent blocks take several tiles.
    """

    multiprocessors = 1

    def __init__(self, routed_before: bool = False, **options: Any) -> None:
        """``routed_before``: what kernels are told that may start while the previous one runs."""
        self.routed_before = routed_before
        self.options = options
        self.reports: list[emulate.Report] = []
        self.kernels: list[str] = []

    def __call__(self, kernel: Any, grid: Any, args: tuple[Any, ...], stream: Any) -> None:
        self.kernels.append(kernel.name)
        report = emulate.check(
            kernel.py_func,
            grid,
            kernel.threads,
            *_marked(kernel, args, self.routed_before),
            shared_bytes=kernel.shared_bytes,
            **self.options,
        )
        self.reports.append(report)

    @property
    def findings(self) -> list[emulate.Finding]:
        """Of all launches."""
        return [finding for report in self.reports for finding in report.findings]


READ_BEFORE_THE_WAIT = {"weights", "up_weights", "down_weights", "expert_start", "expert_ids"}
"""What a kernel may read while the previous one runs, if it is told that the routing is done."""


def _marked(kernel: Any, args: tuple[Any, ...], routed_before: bool) -> Iterator[Any]:
    """The arguments; of a kernel that starts early, as the previous one may still use them."""
    at_once = READ_BEFORE_THE_WAIT if routed_before else ()
    for param, value in zip(kernel.params, args, strict=True):
        typed = _typed(param, routed_before if param.name == "routed_before" else value)
        early = kernel.overlaps_previous and param.is_pointer and param.name not in at_once
        yield emulate.unfinished(typed) if early else typed


def _typed(param: Any, value: Any) -> Any:
    """An argument with the type that the kernel's parameter declares."""
    kind = np.dtype(NUMPY_TYPES[param.dtype])
    if param.kind == "scalar":
        return kind.type(value)
    return value.reshape(-1).view(kind) if value.size else np.zeros(1, kind)


@contextmanager
def checking(routed_before: bool = False, **options: Any) -> Any:
    """Within it, `nbmoe.ops` on the emulator are checked; gives the executor."""
    executor = CheckingExecutor(routed_before, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "executor", lambda name, device=None, **_: executor)
        yield executor


def _indices() -> Callable[[], Any]:
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation(6)[:3] for _ in range(17)]).astype(np.int32)
    ids[4] = -1
    return lambda: ops.moe_create_indices(ids, 6, backend="emulate")


def _quantize(width: int) -> Callable[[], Any]:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((20, width)).astype(np.float32)
    import ml_dtypes

    x = x.astype(ml_dtypes.bfloat16)
    starts = np.array([0, 9, 20], np.uint32)
    offsets = np.array([0, 1], np.uint32)
    ids = np.array([1, 0], np.int32)
    scales = np.array([0.5, 2.0], np.float32)
    quantize = ops.grouped_quantize_dynamic_block_scaled
    return lambda: quantize(x, starts, offsets, ids, scales, backend="emulate")


def _finalize() -> Callable[[], Any]:
    import ml_dtypes

    rng = np.random.default_rng(3)
    down = rng.standard_normal((6, 16)).astype(ml_dtypes.bfloat16)
    order = np.array([0, 5, 3, 0xFFFFFFFF, 1, 2], np.uint32)
    weights = rng.uniform(0, 1, (3, 2)).astype(np.float32)
    return lambda: ops.moe_finalize(down, order, weights, backend="emulate")


def _with_config(config: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heuristics, "grouped_matmul_config", lambda *args: config)
            return call()

    return run


def _slots(config: Any) -> Slots:
    # Interpreting a large tile takes seconds, however few of its rows are used.
    return Slots((3, 2), (1, 0), 2, 0) if config.block_m == 16 else Slots((3,), (0,), 1, 0)


def _matmul(config: Any, width: int, pair: Any = (NVFP4, NVFP4)) -> Callable[[], Any]:
    p = make_product(4, _slots(config), 16, width, row_scales=True, bias=True, pair=pair)
    matmul = ops.grouped_matmul_block_scaled
    factors = p.expert_scales if pair[0] is NVFP4 else None
    return _with_config(
        config, lambda: matmul(*p.operands, factors, **p.keywords, backend="emulate")
    )


def _swiglu(
    config: Any, width: int, match_bf16: bool = True, pair: Any = (NVFP4, NVFP4), **keywords: Any
) -> Callable[[], Any]:
    p = make_product(5, _slots(config), 64, width, bias=True, pair=pair)
    inverse = np.array([0.5, 2.0], np.float32)[: len(p.slots.counts)]
    swiglu = ops.grouped_matmul_blocked_swiglu
    factors = {"expert_scales": p.expert_scales, "c_input_scales": inverse}
    keywords |= p.keywords | (factors if pair[0] is NVFP4 else {})
    return _with_config(
        config, lambda: swiglu(*p.operands, match_bf16=match_bf16, **keywords, backend="emulate")
    )


def _mega_ffn(fmt: Any) -> Callable[[], Any]:
    """Of NVFP4 the smallest tile; of others the middle one, and all the options."""
    slots = Slots((3, 2), (1, 0), 2, 0)
    options: dict[str, Any] = {"estimated_total_m": 2}
    activation = GatedActivation()
    if fmt is not NVFP4:
        options = {"estimated_total_m": 80, "match_bf16": False}
        activation = GatedActivation("swigluoai", 1.702, 7.0)
    p = problem(6, fmt, 96, 64, 16, slots, bias=True, activation=activation)
    given = arguments(p, prepared=False, **options)
    return lambda: ops.mega_ffn_nvfp4(
        **given | {"output": given["output"].copy()}, backend="emulate"
    )


def _as_for_many_tokens(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(router_logits, "MAX_TOKENS", 0)
            return call()

    return run


def _ragged(width: int) -> dict[str, Callable[[], Any]]:
    """bf16 rows: with bf16 and MXFP4 weights, and dense."""
    import ml_dtypes

    rng = np.random.default_rng(6)
    bf16 = ml_dtypes.bfloat16
    x, w = (rng.standard_normal(s).astype(bf16) for s in ((5, width), (2, 24, width)))
    packed = rng.integers(0, 256, (2, 24, width // 2), np.uint8)
    scales = layouts.interleave_scales(rng.integers(120, 130, (2, 24, width // 32), np.uint8))
    slots = np.array([0, 3, 5], np.uint32), np.array([1, 0], np.int32)
    return {
        "ragged": lambda: ops.grouped_matmul_ragged(x, w, *slots, backend="emulate"),
        "w4a16": lambda: ops.grouped_matmul_w4a16(x, packed, scales, *slots, backend="emulate"),
        "dense": _as_for_many_tokens(lambda: ops.router_logits(x, w[0, :7], backend="emulate")),
    }


def _fp8(width: int) -> dict[str, Callable[[], Any]]:
    """Both scalings, grouped."""
    calls = {}
    for rowwise in (False, True):
        p = make_fp8_problem([3, 2], 24, width, rowwise=rowwise)
        name = "rowwise" if rowwise else "block128"
        op = (
            ops.grouped_rowwise_dynamic_scaled_fp8_matmul
            if rowwise
            else ops.grouped_dynamic_scaled_fp8_matmul
        )
        calls[f"fp8_{name}"] = lambda op=op, p=p: op(*p.arguments(), backend="emulate")
    return calls


LONG, WIDE, NARROW = 640, 32, 48
"""Values of K: stages are used again; one stage; rows that allow 8-byte copies only."""


def shipped() -> dict[str, Callable[[], Any]]:
    """One call for every kind of kernel of the catalog, by name."""
    wide = heuristics.grouped_matmul_configs("nvfp4", "nvfp4", WIDE)
    narrow = heuristics.grouped_matmul_configs("nvfp4", "nvfp4", NARROW)[-1]
    calls = {
        "create_indices": _indices(),
        "quantize_80": _quantize(80),
        "quantize_64": _quantize(64),
        "finalize": _finalize(),
        "matmul_narrow": _matmul(narrow, NARROW),
        "swiglu_narrow": _swiglu(narrow, NARROW, False),
        **_ragged(WIDE),
        **_fp8(WIDE),
    }
    for config in wide:
        width = LONG if config.block_m == 16 else WIDE
        calls[f"matmul_{config.name}"] = _matmul(config, width)
        calls[f"swiglu_{config.name}"] = _swiglu(config, width)
    calls |= {f"mega_ffn_{fmt.name}": _mega_ffn(fmt) for fmt in (NVFP4, MXFP8)}
    oai = GatedActivation("swigluoai", 1.702, 7.0)
    for pair in PAIRS[1:]:
        config = heuristics.grouped_matmul_configs(pair[0].name, pair[1].name, WIDE)[0]
        calls[f"matmul_{config.name}"] = _matmul(config, WIDE, pair)
        calls[f"swiglu_{config.name}"] = _swiglu(config, WIDE, pair=pair, activation=oai)
    return calls
