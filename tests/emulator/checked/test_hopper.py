"""The warp-specialised Hopper GEMM: TMA, mbarriers and wgmma together, with no false alarm."""

import ast
import inspect
import textwrap

import pytest

import emulate
from emulate.bench.hopper_gemm import hopper_gemm, make_problem

SCHEDULES = ["fifo", "random:1", "pct:3:1", "adversarial:1"]


@pytest.mark.parametrize("strict", [False, True])
def test_no_finding_and_the_right_bits(strict):
    problem, kernel = make_problem(128, 256, 640), hopper_gemm("e4m3")
    args = problem.arguments()
    report = emulate.check(
        kernel,
        problem.tiles,
        kernel.threads,
        *args,
        shared_bytes=kernel.shared_bytes,
        schedules=SCHEDULES,
        strict_wgmma=strict,
    )
    assert not report.findings, str(report.findings[0])
    assert (args[2] == problem.expected()).all()


def without(kernel, call):
    """The kernel without the statements that are calls of a name."""
    function = kernel.py_func
    tree = ast.parse(textwrap.dedent(inspect.getsource(hopper_gemm)))
    body = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "gemm")
    body.decorator_list = []

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node):
            named = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == call
            return ast.Pass() if named else node

    module = ast.fix_missing_locations(ast.Module([Remove().visit(body)], []))
    names = function.__code__.co_freevars
    scope = dict(function.__globals__)
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    scope |= dict(zip(names, cells, strict=True))
    exec(compile(module, "<mutant>", "exec"), scope)
    return scope["gemm"]


@pytest.mark.parametrize(
    ("call", "id"),
    [
        ("wgmma_fence", "WGMMA_FENCE"),
        ("wait", "ASYNC_UNWAITED"),
        ("wgmma_commit", "ASYNC_UNWAITED"),
        ("fence_mbarrier_init", "MBAR_INIT_RACE"),
        ("mbarrier_arrive_expect", "DEADLOCK"),
        ("mbarrier_arrive", "DEADLOCK"),
        ("cuda.syncthreads", "MBAR_INIT_RACE"),
    ],
)
def test_nothing_that_orders_is_superfluous(call, id):
    problem, kernel = make_problem(128, 256, 640), hopper_gemm("e4m3")
    report = emulate.check(
        without(kernel, call),
        problem.tiles,
        kernel.threads,
        *problem.arguments(),
        shared_bytes=kernel.shared_bytes,
        schedules=["fifo"],
    )
    assert id in {finding.id for finding in report.findings}
