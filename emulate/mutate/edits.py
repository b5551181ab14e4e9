"""Which edits make mutants of a function.

delete    a synchronisation: block, warp and named barriers, commits, waits, fences, mbarrier
          ops, atomic arrivals
weaken    the order of an atomic (to relaxed), its scope (to the block)
count     a number of arrivals, bytes, threads of a barrier or open groups; the end of a loop;
          ``N - 1`` for a constant N of the configuration (the depth of a pipeline): one more
          or one less
parity    of an mbarrier wait
"""

import ast
import types as pytypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from emulate.mutate import ops
from emulate.mutate.functions import called_functions, compile_again, exchange, names_of, parse
from emulate.mutate.reach import left_out, reached_functions
from emulate.rebind import plain_function
from nbmoe_kernels.device.op import Op

NEW_OP = "mutant_op"
"""Name of the op that takes another's place."""
TURN = "mutant_turn"
"""Name of the function that counts the turns of an edited ``while`` loop."""
MAX_TURNS = 200_000
BLOCK_SYNCS = ("syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or")
STOCK_SYNCS = ("syncwarp", "threadfence", "threadfence_block", "threadfence_system")

Change = Callable[[], dict[str, Any]]
"""Edits the tree that it was made for; returns the names that it brought in."""


class Turns:
    """Counts the turns of all threads through a loop that an edit may have made endless."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        """One turn.

        Raises:
            RuntimeError: there have been too many.
        """
        self.count += 1
        if self.count > MAX_TURNS:
            raise RuntimeError("a loop does not end")


@dataclass(frozen=True)
class Mutant:
    """A kernel with one edit.

    Attributes:
        kind: ``delete``, ``weaken``, ``count`` or ``parity``.
        function: name of the edited function.
        file, line: where.
        what: the edit in words, without the line.
        is_left_out: the kernel's constants leave out the code that is edited.
        kernel: the kernel's function, edited.
    """

    kind: str
    function: str
    file: str
    line: int
    what: str
    is_left_out: bool
    kernel: pytypes.FunctionType

    @property
    def name(self) -> str:
        """What tells the edit apart from others of its function, whatever lines move."""
        return f"{self.function}: {self.what}"


@dataclass(frozen=True)
class _Edit:
    kind: str
    line: int
    what: str
    change: Change


def mutants(kernel: Any) -> list[Mutant]:
    """All mutants of a kernel and of the device functions that it calls."""
    whole = plain_function(kernel)
    reached = reached_functions(kernel)
    made = []
    for function in called_functions(kernel):
        seen: dict[str, int] = {}
        for position in range(len(list(_edits(parse(function), function)))):
            definition = parse(function)
            node, edit = list(_edits(definition, function))[position]
            is_left_out = function not in reached or node in left_out(definition, function)
            extra = edit.change()
            changed = compile_again(function, definition, extra)
            seen[edit.what] = seen.get(edit.what, 0) + 1
            again = f" (#{seen[edit.what]})" if seen[edit.what] > 1 else ""
            made.append(
                Mutant(
                    edit.kind,
                    function.__name__,
                    function.__code__.co_filename,
                    edit.line,
                    edit.what + again,
                    is_left_out,
                    exchange(whole, function, changed),
                )
            )
    return made


def _edits(
    definition: ast.FunctionDef, function: pytypes.FunctionType
) -> Iterator[tuple[ast.AST, _Edit]]:
    names = names_of(function)
    for node in ast.walk(definition):
        for edit in _edits_of(node, names):
            yield node, edit


def _edits_of(node: ast.AST, names: dict[str, Any]) -> Iterator[_Edit]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from _deletion(node, names)
    if isinstance(node, ast.Call):
        yield from _call_edits(node, names)
    if isinstance(node, ast.For):
        yield from _range_edits(node)
    if isinstance(node, ast.While):
        yield from _while_edits(node)
    if isinstance(node, ast.BinOp):
        yield from _depth_edits(node, names)


def _deletion(node: ast.Expr, names: dict[str, Any]) -> Iterator[_Edit]:
    assert isinstance(node.value, ast.Call)
    call = node.value
    op = _op_of(call, names)
    if ops.is_synchronisation(op) if op is not None else _is_stock_sync(call, names):

        def delete() -> dict[str, Any]:
            node.value = ast.copy_location(ast.Constant(None), call)
            return {}

        yield _Edit("delete", node.lineno, f"delete {ast.unparse(call)}", delete)


def _is_stock_sync(call: ast.Call, names: dict[str, Any]) -> bool:
    target = call.func
    if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
        return False
    module = getattr(names.get(target.value.id), "__name__", "")
    return module.startswith("numba.cuda") and target.attr in BLOCK_SYNCS + STOCK_SYNCS


def _op_of(call: ast.Call, names: dict[str, Any]) -> Op | None:
    if not isinstance(call.func, ast.Name):
        return None
    op = getattr(names.get(call.func.id), "op", None)
    return op if isinstance(op, Op) else None


def _call_edits(call: ast.Call, names: dict[str, Any]) -> Iterator[_Edit]:
    op = _op_of(call, names)
    if op is None:
        return
    for kind, what, other in ops.siblings(op):

        def replace(other: Any = other) -> dict[str, Any]:
            call.func = ast.copy_location(ast.Name(NEW_OP, ast.Load()), call.func)
            return {NEW_OP: other}

        yield _Edit(kind, call.lineno, f"{ast.unparse(call)}: {what}", replace)
    text = ast.unparse(call)
    for name in ops.counts(op):
        at = op.arguments.index(name)
        for change in (1, -1):
            what = f"{text}: {name} {change:+d}"
            yield _Edit("count", call.lineno, what, _add_to_list(call.args, at, change))
    for name in ops.parities(op):
        at = op.arguments.index(name)

        def swap(at: int = at) -> dict[str, Any]:
            old = call.args[at]
            flipped = ast.parse(f"int({ast.unparse(old)}) ^ 1", mode="eval").body
            call.args[at] = ast.copy_location(flipped, old)
            return {}

        yield _Edit("parity", call.lineno, f"{text}: {name} swapped", swap)


def _add_to_list(nodes: list[ast.expr], at: int, change: int) -> Change:
    def apply() -> dict[str, Any]:
        nodes[at] = _plus(nodes[at], change)
        return {}

    return apply


def _plus(node: ast.expr, change: int) -> ast.expr:
    """``node + change`` without the type's wrap."""
    text = f"int({ast.unparse(node)}) + {change}"
    changed = ast.parse(text, mode="eval").body
    return ast.copy_location(changed, node)


def _range_edits(loop: ast.For) -> Iterator[_Edit]:
    call = loop.iter
    if isinstance(call, ast.Call) and _is_named(call, "unroll") and call.args:
        inner = call.args[0]
        call = inner if isinstance(inner, ast.Call) else call
    if not (isinstance(call, ast.Call) and _is_named(call, "range")):
        return
    stop = 0 if len(call.args) == 1 else 1
    text = ast.unparse(call)
    for change in (1, -1):
        what = f"for {ast.unparse(loop.target)} in {text}: end {change:+d}"
        yield _Edit("count", loop.lineno, what, _add_to_list(call.args, stop, change))


def _is_named(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name


def _while_edits(loop: ast.While) -> Iterator[_Edit]:
    test = loop.test
    if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Lt | ast.LtE)):
        return
    text = ast.unparse(test)
    for change in (1, -1):

        def apply(change: int = change) -> dict[str, Any]:
            test.comparators[0] = _plus(test.comparators[0], change)
            turn = ast.parse(f"{TURN}()").body[0]
            loop.body.insert(0, ast.copy_location(turn, loop))
            return {TURN: Turns()}

        yield _Edit("count", loop.lineno, f"while {text}: end {change:+d}", apply)


def _depth_edits(node: ast.BinOp, names: dict[str, Any]) -> Iterator[_Edit]:
    """``stages - 1``: a number of the configuration, less one."""
    if not (isinstance(node.left, ast.Name) and isinstance(node.right, ast.Constant)):
        return
    if not isinstance(node.op, ast.Sub) or type(node.right.value) is not int:
        return
    if type(names.get(node.left.id)) is not int:
        return
    number, subtrahend = node.right, node.right.value
    for change in (1, -1):

        def apply(change: int = change) -> dict[str, Any]:
            number.value = subtrahend - change
            return {}

        yield _Edit("count", node.lineno, f"{ast.unparse(node)}: {change:+d}", apply)
