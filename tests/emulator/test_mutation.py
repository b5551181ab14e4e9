"""Mutation: what is edited, and that a small kernel's mutants are killed for the right reason."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numba import cuda, int32

import emulate
from emulate.mutate import (
    KernelScore,
    Subject,
    Verdict,
    mutants,
    mutate_kernel,
    mutate_kernels,
    subjects,
)
from emulate.mutate import run as mutate_run
from emulate.mutate import workers as mutate_workers
from emulate.mutate.equivalent import LEFT_OUT, REASONS
from nbmoe_kernels.catalog import catalog
from nbmoe_kernels.device.atomics import reduction, wait_ge
from nbmoe_kernels.device.mbarrier import mbarrier_arrive, mbarrier_init, mbarrier_wait
from nbmoe_kernels.device.memory import cp_async, cp_async_commit, cp_async_wait
from nbmoe_kernels.device.op import device_function, unroll
from nbmoe_kernels.device.sync import named_barrier_sync
from nbmoe_kernels.device.warp import shuffle_xor, sync_warp

STAGES = 3
copy, wait = cp_async(4), cp_async_wait(1)
arrive, wait_count = reduction("add", order="release"), wait_ge()


@device_function
def exchange(part, t):
    """The left neighbour's element."""
    cuda.syncthreads()
    return part[max(t - 1, 0)]


def shifted(x, out):
    part = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    part[t] = x[t]
    left = exchange(part, t)
    total = int32(0)
    for _ in unroll(range(2)):
        total += left
    out[t] = total


def rich(x, out, count):
    part = cuda.shared.array(64, np.uint32)
    bar = cuda.shared.array(1, np.uint64)
    mbarrier_init(bar, 0, np.uint32(64))
    mbarrier_arrive(bar, 0)
    mbarrier_wait(bar, 0, np.uint32(1))
    named_barrier_sync(np.uint32(1), np.uint32(64))
    copy(part, np.uint32(0), x, np.uint64(0), np.uint32(4))
    cp_async_commit()
    wait()
    sync_warp()
    arrive(count, 0, np.uint32(1))
    wait_count(count, 0, np.uint32(2))
    out[0] = shuffle_xor(part[0], np.uint32(1)) + np.uint32(STAGES - 1)


def subject(kernel, want=None):
    x = np.arange(1, 65, dtype=np.int32)
    return Subject("small", kernel, 1, 64, 0, lambda: (x, np.zeros(64, np.int32)))


def test_edits_of_a_kernel_and_its_device_functions():
    assert [mutant.name for mutant in mutants(shifted)] == [
        "shifted: for _ in range(2): end +1",
        "shifted: for _ in range(2): end -1",
        "exchange: delete cuda.syncthreads()",
    ]


def test_edits_follow_from_the_effects_of_ops():
    found = [mutant.what for mutant in mutants(rich)]
    for op in (
        "mbarrier_init(bar, 0, np.uint32(64))",
        "mbarrier_arrive(bar, 0)",
        "mbarrier_wait(bar, 0, np.uint32(1))",
        "named_barrier_sync(np.uint32(1), np.uint32(64))",
        "cp_async_commit()",
        "wait()",
        "sync_warp()",
        "arrive(count, 0, np.uint32(1))",
        "wait_count(count, 0, np.uint32(2))",
    ):
        assert f"delete {op}" in found
    assert not any("shuffle_xor" in what or "delete copy" in what for what in found)
    assert "wait(): 2 open groups instead of 1" in found
    assert "wait(): 0 open groups instead of 1" in found
    assert "mbarrier_init(bar, 0, np.uint32(64)): count +1" in found
    assert "named_barrier_sync(np.uint32(1), np.uint32(64)): count -1" in found
    assert "mbarrier_wait(bar, 0, np.uint32(1)): parity swapped" in found
    for change in ("relaxed instead of release", "cta instead of gpu"):
        assert f"arrive(count, 0, np.uint32(1)): {change}" in found
    assert "wait_count(count, 0, np.uint32(2)): relaxed instead of acquire" in found
    assert "STAGES - 1: +1" in found
    assert len(found) == len(set(found))


def test_mutants_have_lines_and_leave_the_kernel_alone():
    made = mutants(shifted)
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert source[made[-1].line - 1].strip() == "cuda.syncthreads()"
    assert made[-1].file == __file__
    x, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    emulate.launch(made[0].kernel, 1, 64, x, out, engine="interpreted")
    assert out[2] == 3, "three turns instead of two"
    emulate.launch(shifted, 1, 64, x, out, engine="interpreted")
    assert out[2] == 2
    assert not emulate.check(shifted, 1, 64, x, out, schedules="fifo").findings
    (finding,) = emulate.check(made[-1].kernel, 1, 64, x, out, schedules="fifo").findings[:1]
    assert finding.sites[-1].file == __file__


def test_a_small_kernel_is_killed_completely():
    score = mutate_kernel(subject(shifted))
    assert [bool(verdict.killed_by) for verdict in score.verdicts] == [True] * 3
    assert score.verdicts[0].killed_by == "bytes"
    assert score.rate == 1.0 and score.killed == 3


def test_a_race_that_does_not_show_in_the_bytes_is_killed_by_a_finding():
    def same(x, out):
        flag = cuda.shared.array(1, int32)
        flag_at = cuda.threadIdx.x * 0
        if cuda.threadIdx.x == 0:
            flag[flag_at] = 5
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            out[0] = flag[0]
        cuda.syncthreads()
        flag[0] = int32(out[1])  # BUG: all threads write one value

    with pytest.raises(RuntimeError, match="RACE_WAW"):
        mutate_kernel(subject(same))


def test_survivors_count_and_equivalents_do_not(monkeypatch):
    def idle(x, out):
        out[cuda.threadIdx.x] = x[cuda.threadIdx.x]
        cuda.syncthreads()

    score = mutate_kernel(subject(idle))
    assert score.rate == 0.0
    assert [v.mutant for v in score.survivors] == ["idle: delete cuda.syncthreads()"]
    monkeypatch.setitem(REASONS, "idle: delete cuda.syncthreads()", "nothing comes after it")
    score = mutate_kernel(subject(idle))
    assert score.rate == 1.0 and score.counted == 0 and not score.survivors
    score = mutate_kernel(subject(shifted), everything=True)
    assert score.killed == 3


def make_optional(has_turns, kind, depth):
    """A kernel whose barriers no byte depends on, most of them in branches."""

    @device_function
    def take_turn():
        sync_warp()

    @device_function
    def early():
        if kind == "plain":
            return
        cuda.threadfence()

    def optional(x, out):
        t = cuda.threadIdx.x
        if has_turns:
            take_turn()
        else:
            cuda.threadfence_block()
        if not has_turns and x[0] > 0:
            cuda.syncthreads()
        if depth - 1 > 2 or kind == "deep":
            cuda.threadfence_system()
        early()
        if x[0] > 100:
            cuda.syncwarp()
        out[t] = x[t]

    return optional


TURN, SHORT, BLOCK, DEEP, EARLY, RARE = (
    "take_turn: delete sync_warp()",
    "optional: delete cuda.threadfence_block()",
    "optional: delete cuda.syncthreads()",
    "optional: delete cuda.threadfence_system()",
    "early: delete cuda.threadfence()",
    "optional: delete cuda.syncwarp()",
)


@pytest.mark.parametrize(
    "constants, left_out",
    [
        ((False, "plain", 3), {TURN, DEEP, EARLY}),
        ((True, "deep", 3), {SHORT, BLOCK}),
        ((True, "plain", 4), {SHORT, BLOCK, EARLY}),
        ((np.bool_(False), "fancy", np.int32(4)), {TURN}),
    ],
)
def test_code_that_constants_leave_out_does_not_count(constants, left_out):
    kernel = make_optional(*constants)
    counted = {TURN, SHORT, BLOCK, DEEP, EARLY, RARE} - left_out
    made = {mutant.name: mutant for mutant in mutants(kernel) if mutant.kind == "delete"}
    assert {name for name, mutant in made.items() if mutant.is_left_out} == left_out
    assert made.keys() == counted | left_out
    score = mutate_kernel(subject(kernel), everything=True)
    survivors = {verdict.mutant for verdict in score.survivors}
    assert survivors >= counted, "also those that the arguments never reach"
    reasons = {verdict.mutant for verdict in score.verdicts if verdict.reason == LEFT_OUT}
    assert reasons == left_out
    assert score.killed == 0 and score.counted == len(score.verdicts) - len(left_out)


def test_only_constants_leave_code_out():
    depth = STAGES

    def shadowed(x, out, kind):
        depth = x[0]
        if depth > 100:
            cuda.syncwarp()
        if kind:
            cuda.threadfence()
        if min(STAGES, 0):
            cuda.syncthreads()
        out[0] = depth

    def named(x, out):
        if depth > 100:
            cuda.syncwarp()
        if STAGES == 3:
            out[0] = x[0]
        else:
            cuda.syncthreads()

    assert [mutant.is_left_out for mutant in mutants(shadowed)] == [False] * 3
    assert [mutant.is_left_out for mutant in mutants(named)] == [True] * 2


def deadly(x, out):
    part = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    for i in range(2):
        if i == 2:
            os.kill(os.getpid(), signal.SIGSEGV)  # as a store through a wild address does
        part[t] = x[t]
    cuda.syncthreads()
    out[t] = part[63 - t]
    cuda.syncthreads()


def stillborn(x, out):
    os._exit(3)
    cuda.syncthreads()


def endless(x, out):
    t = cuda.threadIdx.x
    for i in range(1):
        while i == 1:
            out[t] = x[t]
        out[t] = x[63 - t]


def planted(name):
    return replace(subject(globals()[name]), name=name)


def test_a_mutant_that_ends_its_process_is_killed_and_the_others_are_run():
    (score,) = mutate_kernels([planted("deadly")], 1, planted)
    assert [(v.mutant, v.killed_by) for v in score.verdicts] == [
        ("deadly: for i in range(2): end +1", "crash SIGSEGV"),
        ("deadly: for i in range(2): end -1", ""),
        ("deadly: delete cuda.syncthreads()", "bytes"),
        ("deadly: delete cuda.syncthreads() (#2)", ""),
    ]


def test_a_mutant_that_does_not_end_is_killed_and_the_others_are_run(monkeypatch):
    monkeypatch.setattr(mutate_workers, "TIMES", 0)
    monkeypatch.setattr(mutate_workers, "LEAST_SECONDS", 5)
    (score,) = mutate_kernels([planted("endless")], 1, planted)
    assert [(v.mutant, v.killed_by) for v in score.verdicts] == [
        ("endless: for i in range(1): end +1", "timeout"),
        ("endless: for i in range(1): end -1", "bytes"),
    ]


def test_a_kernel_that_ends_its_process_is_an_error():
    with pytest.raises(RuntimeError, match="stillborn itself ends its process"):
        mutate_kernels([planted("deadly"), planted("stillborn")], 1, planted)


def test_every_shipped_kernel_has_a_launch():
    assert [s.name for s in subjects()] == [kernel.name for kernel in catalog()]


def test_every_reason_is_about_a_mutant_that_exists():
    # One kernel of each source, and one for each depth of the pipeline.
    chosen = (
        "moe_create_indices_64",
        "moe_create_indices_many_128",
        "moe_finalize",
        "router_logits",
        "matmul_grouped_nvfp4_sm80_m16",
        "swiglu_nvfp4_sm80_m64",
        "mxfp8_sm90_n8",
        "fp8_sm90_n120",
        "fp8_sm90_n8",
        "bf16_sm90_n8",
    )
    kernels = [s.kernel for s in subjects() if any(part in s.name for part in chosen)]
    assert len(kernels) == len(chosen)
    known = {mutant.name for kernel in kernels for mutant in mutants(kernel)}
    assert set(REASONS) <= known
    assert all(REASONS.values())


def test_the_page_lists_the_equivalent_mutants():
    page = Path(__file__).parents[2] / "docs" / "emulate" / "mutation.md"
    rows = re.findall(r"^\| `(.*?)` \| (.*) \|$", page.read_text(encoding="utf-8"), re.M)
    assert dict(rows) == REASONS


def test_finalize_is_killed_completely():
    (finalize,) = (s for s in subjects() if s.name.startswith("moe_finalize"))
    score = mutate_kernel(finalize)
    assert score.rate == 1.0 and score.killed == 9 and score.counted == 9


def test_main_reports_and_fails(capsys, monkeypatch):
    killed = Verdict("f: a", "delete", "f.py", 3, "RACE_RAW", "", "fifo", 0.1)
    alive = Verdict("f: b", "count", "f.py", 4, "", "", "", 0.1)
    for verdicts, status in (((killed,), 0), ((killed, alive), 1)):
        score = KernelScore("kernel", verdicts)
        monkeypatch.setattr(mutate_run, "run", lambda *_, kept=score: [kept])
        assert mutate_run.main(json=True) == status
        document = json.loads(capsys.readouterr().out)
        assert document["kernels"][0]["killed"] == 1
        assert document["kernels"][0]["mutants"] == len(verdicts)
        assert mutate_run.main() == status
        assert ("survives: line 4" in capsys.readouterr().out) == bool(status)


def test_an_unknown_kernel_is_an_error(capsys):
    assert mutate_run.main("no such kernel") == 2
    assert "moe_finalize" in capsys.readouterr().out
