"""Source lines in compiled kernels.

Numba raises an index error without saying where. This lowering notes the line of the statement
that is being compiled on its LLVM builder; exceptions and calls of ops read it from there.
"""

import copy
from typing import Any

from numba.core import callconv, cpu, lowering
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


def source_line(builder: Any) -> int:
    """The line of the statement that ``builder`` is in; 0 where unknown."""
    location = getattr(builder, "source_location", None)
    return location.line if location is not None else 0


class LocatedCallConv(callconv.CPUCallConv):  # type: ignore[misc]
    """The CPU's calling convention; an exception without a location gets the statement's."""

    def return_user_exc(
        self, builder: Any, exc: Any, exc_args: Any = None, loc: Any = None, func_name: Any = None
    ) -> None:
        if loc is None:
            loc = getattr(builder, "source_location", None)
        super().return_user_exc(builder, exc, exc_args, loc, func_name or "kernel")


VALUE_ATTRIBUTES: set[tuple[Any, str]] = set()
"""Attributes of modules that are no constants."""


class LocatedContext(cpu.CPUContext):  # type: ignore[misc]
    """The CPU target as one function's lowering sees it."""

    @property
    def nonconst_module_attrs(self) -> set[tuple[Any, str]]:
        return VALUE_ATTRIBUTES

    @property
    def call_conv(self) -> LocatedCallConv:
        return LocatedCallConv(self)


class LocatedLower(lowering.Lower):  # type: ignore[misc]
    """Numba's lowering; notes the line of each statement on the builder."""

    def init(self) -> None:
        super().init()
        context = copy.copy(self.context)  # type: ignore[has-type]
        context.__class__ = LocatedContext
        self.context = context

    def lower_inst(self, inst: Any) -> None:
        self.builder.source_location = self.loc
        super().lower_inst(inst)


@register_pass(mutates_CFG=True, analysis_only=False)
class LocatedLowering(NativeLowering):  # type: ignore[misc]
    """The pass that uses it."""

    _name = "emulate_native_lowering"

    @property
    def lowering_class(self) -> type[LocatedLower]:
        return LocatedLower


class KernelCompiler(CompilerBase):  # type: ignore[misc]
    """Numba's nopython pipeline with located lowering."""

    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [
            (LocatedLowering if one is NativeLowering else one, text)
            for one, text in manager.passes
        ]
        manager.finalize()
        return [manager]
