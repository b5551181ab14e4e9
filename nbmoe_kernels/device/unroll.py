"""Full unrolling of marked loops on the GPU.

numba has no static unroll, and LLVM's own heuristic leaves larger or nested loops rolled; then
local arrays that they index go to local memory. `unroll(range(N))` marks the block that builds the
range; before the module is handed to NVVM the first loop reached from that block gets the metadata
`llvm.loop.unroll.full`.
"""

import re
from typing import Any

from llvmlite import ir
from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.typing.templates import infer, infer_global, make_intrinsic_template

from nbmoe_kernels.device import op as table

_MARK = "_nbmoe_unroll"
_LOOP_ID = 0x55000
"""llvmlite cannot write self-referencing metadata: a loop id is first written as a pair with this
number and rewritten as a distinct node in the module's text."""


def _successors(block: Any) -> list[Any]:
    terminator = block.terminator
    if terminator is None:
        return []
    found = [o for o in terminator.operands if isinstance(o, ir.Block)]
    return found + [case[1] for case in getattr(terminator, "cases", [])]


def _dominators(names: list[str], predecessors: dict[str, list[str]]) -> dict[str, set[str]]:
    dominators = {n: set(names) for n in names}
    dominators[names[0]] = {names[0]}
    changed = True
    while changed:
        changed = False
        for n in names[1:]:
            incoming = [dominators[p] for p in predecessors[n]]
            new = (set.intersection(*incoming) if incoming else set()) | {n}
            if new != dominators[n]:
                dominators[n], changed = new, True
    return dominators


def _loop_body(header: str, latches: list[str], predecessors: dict[str, list[str]]) -> set[str]:
    body, stack = {header}, list(latches)
    while stack:
        name = stack.pop()
        if name not in body:
            body.add(name)
            stack += predecessors[name]
    return body


def _first_loop(
    start: str,
    successors: dict[str, list[str]],
    predecessors: dict[str, list[str]],
    latches: dict[str, list[str]],
) -> list[str]:
    """Latches of the first loop that begins after ``start``."""
    seen: set[str] = set()
    queue = [start]
    while queue:
        name = queue.pop(0)
        if name in seen:
            continue
        seen.add(name)
        if name in latches and start not in _loop_body(name, latches[name], predecessors):
            return latches[name]
        queue += successors[name]
    return []


def _mark_loops(module: Any) -> None:
    count = 0
    for function in module.functions:
        marked = [b for b in function.blocks if getattr(b, _MARK, False)]
        if function.is_declaration or not marked:
            continue
        names = [b.name for b in function.blocks]
        blocks = {b.name: b for b in function.blocks}
        successors = {n: [s.name for s in _successors(blocks[n])] for n in names}
        predecessors: dict[str, list[str]] = {n: [] for n in names}
        for n in names:
            for s in successors[n]:
                predecessors[s].append(n)
        dominators = _dominators(names, predecessors)
        latches: dict[str, list[str]] = {}
        for n in names:
            for s in successors[n]:
                if s in dominators[n]:
                    latches.setdefault(s, []).append(n)
        for block in marked:
            for latch in _first_loop(block.name, successors, predecessors, latches):
                full = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.full")])
                loop_id = module.add_metadata([ir.Constant(ir.IntType(32), _LOOP_ID + count), full])
                blocks[latch].terminator.set_metadata("llvm.loop", loop_id)
                count += 1


def _distinct_loop_ids(text: str) -> str:
    def rewrite(match: re.Match[str]) -> str:
        if int(match[2]) < _LOOP_ID:
            return match[0]
        return f"{match[1]} = distinct !{{ {match[1]}, {match[3]} }}"

    return re.sub(r"^(!\d+) = !\{ ?i32 (\d+), (!\d+) ?\}$", rewrite, text, flags=re.M)


class _MarkedLibrary:
    """The two steps added to numba-cuda's code library."""

    finalize = CUDACodeLibrary.finalize

    @staticmethod
    def finalize_marked(library: Any) -> Any:
        if library._module is not None:
            _mark_loops(library._module)
        return _MarkedLibrary.finalize(library)

    @staticmethod
    def llvm_strs(library: Any) -> list[str]:
        if library._llvm_strs is None:
            library._llvm_strs = [_distinct_loop_ids(str(m)) for m in library.modules]
        return library._llvm_strs


def register_unroll() -> None:
    """Teach numba-cuda `unroll`."""

    def definition(context: Any, iterable: Any) -> Any:
        def codegen(ctx: Any, builder: Any, sig: Any, args: tuple[Any, ...]) -> Any:
            setattr(builder.block, _MARK, True)
            return args[0]

        return iterable(iterable), codegen

    template = make_intrinsic_template(table.unroll, definition, "unroll")
    infer(template)
    from numba.cuda import types

    infer_global(table.unroll, types.Function(template))
    CUDACodeLibrary.finalize = _MarkedLibrary.finalize_marked
    CUDACodeLibrary.llvm_strs = property(_MarkedLibrary.llvm_strs)
