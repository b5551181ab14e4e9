"""Code that a kernel's constants leave out: branches that they decide, which compilers drop.

Constants are numbers, texts and None of a function's closure and module. Code that no run happens
to reach is not left out: whether it runs depends on an argument.
"""

import ast
import types as pytypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from emulate.mutate.functions import helper_of, names_of, parse
from emulate.rebind import plain_function

_SCALARS = (bool, int, float, str, np.generic, type(None))
_PLAIN = (
    ast.Name,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.expr_context,
)
"""Of these a test is evaluated; a call is not one of them."""


def reached_functions(kernel: Any) -> list[pytypes.FunctionType]:
    """The kernel's function and all device functions that it calls in code not left out."""
    found = [plain_function(kernel)]
    for function in found:
        definition = parse(function)
        dropped = left_out(definition, function)
        names = names_of(function)
        for node in ast.walk(definition):
            if isinstance(node, ast.Name) and node not in dropped:
                helper = helper_of(names.get(node.id))
                if helper is not None and helper not in found:
                    found.append(helper)
    return found


def left_out(definition: ast.FunctionDef, function: pytypes.FunctionType) -> set[ast.AST]:
    """The nodes of the function's tree that its constants leave out."""
    own = {*function.__code__.co_varnames, *function.__code__.co_cellvars}
    constants = {
        name: value
        for name, value in names_of(function).items()
        if name not in own and isinstance(value, _SCALARS)
    }
    return {
        inner
        for node in ast.walk(definition)
        for part in _dropped_parts(node, constants)
        for inner in ast.walk(part)
    }


def _dropped_parts(node: ast.AST, constants: Mapping[str, Any]) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        taken = _decided(node.test, constants)
        if taken is False:
            yield from _parts(node.body)
        elif taken is True:
            yield from _parts(node.orelse)
    for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
        if isinstance(block, list):
            ends = [at for at, part in enumerate(block) if _leaves(part, constants)]
            yield from block[ends[0] + 1 :] if ends else ()


def _parts(branch: ast.expr | Sequence[ast.stmt]) -> Sequence[ast.AST]:
    return [branch] if isinstance(branch, ast.expr) else branch


def _leaves(statement: ast.stmt, constants: Mapping[str, Any]) -> bool:
    """Whether nothing after the statement in its block is executed."""
    if isinstance(statement, ast.If):
        taken = _decided(statement.test, constants)
        branches = [statement.body] * (taken is not False) + [statement.orelse] * (
            taken is not True
        )
        return all(any(_leaves(part, constants) for part in branch) for branch in branches)
    return isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue)


def _decided(test: ast.expr, constants: Mapping[str, Any]) -> bool | None:
    """What the constants make of a test; None if it also depends on something else."""
    if isinstance(test, ast.BoolOp):
        parts = [_decided(part, constants) for part in test.values]
        enough = isinstance(test.op, ast.Or)
        if enough in parts:
            return enough
        return None if None in parts else not enough
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _decided(test.operand, constants)
        return None if inner is None else not inner
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if not (all(isinstance(node, _PLAIN) for node in nodes) and names <= constants.keys()):
        return None
    return bool(eval(compile(ast.Expression(test), "<test>", "eval"), {}, dict(constants)))
