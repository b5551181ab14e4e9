"""What a planted case is.

A case is a factory: ``make(bug)`` returns a kernel, correct for ``bug=False``. Comments mark the
lines that the finding has to name: ``# BUG-A`` and ``# BUG-B``, or only the first where there is
one line. A helper's line says which cases it is a part of: ``# BUG-A of PATTERN``.
"""

import fnmatch
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from emulate.findings import Finding

BYTES = "BYTES"
"""Expected "finding" of a case that no detector can see: the output differs from what is right."""

_READ_WRITE = ("RACE_RAW", "RACE_WAR")

Extents = int | tuple[int, ...]
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One planted bug.

    Attributes:
        name: the factory's name.
        group: the module's name.
        make: from ``bug`` to the kernel.
        finds: id of the finding, or `BYTES`.
        also: ids of consequences, which may be reported as well.
        grid, block, shared_bytes: the launch.
        args: makes the arguments.
        want: from the arguments to the right output: argument number to array.
        options: further options of `emulate.check`.
    """

    name: str
    group: str
    make: Callable[[bool], Callable[..., None]]
    finds: str
    also: tuple[str, ...]
    grid: Extents
    block: Extents
    shared_bytes: int
    args: Callable[[], Arguments]
    want: Callable[..., dict[int, Any]]
    options: dict[str, Any]

    @property
    def lines(self) -> tuple[str, frozenset[int]]:
        """The file, and the marked lines in it: of the factory, and of helpers that name it."""
        file = inspect.getsourcefile(self.make) or ""
        source, first = inspect.getsourcelines(self.make)
        marked = {number for number, text in enumerate(source, first) if "# BUG-" in text}
        for number, text in enumerate(linecache.getlines(file), 1):
            pattern = text.partition("# BUG-A of ")[2].strip()
            if pattern and fnmatch.fnmatchcase(self.name, pattern):
                marked.add(number)
        return file, frozenset(marked)

    def is_right(self, args: Arguments) -> bool:
        """Whether arrays that a launch has changed hold the right bytes."""
        wanted = self.want(*self.args())
        return all(
            args[at].tobytes() == np.asarray(value, args[at].dtype).tobytes()
            for at, value in wanted.items()
        )

    def catches(self, finding: "Finding") -> bool:
        """Whether a finding has the expected id and names every marked line.

        Which access of a race comes first depends on the schedule, so that a race of a read and a
        write may be reported as either of two ids.
        """
        file, lines = self.lines
        named = {site.line for site in finding.sites if site.file == file}
        same = _READ_WRITE if self.finds in _READ_WRITE else (self.finds,)
        return finding.id in same and lines <= named

    def explains(self, finding: "Finding") -> bool:
        """Whether a finding is the bug itself or one of its consequences."""
        return finding.id in self.also or self.catches(finding)


CASES: list[Case] = []


def case(
    finds: str,
    *,
    args: Callable[[], Arguments],
    want: Callable[..., dict[int, Any]],
    grid: Extents = 1,
    block: Extents = 64,
    shared_bytes: int = 0,
    also: tuple[str, ...] = (),
    **options: Any,
) -> Callable[[Callable[[bool], Any]], Case]:
    """Declare a factory as a `Case`; see there for the arguments."""

    def declare(make: Callable[[bool], Any]) -> Case:
        group = make.__module__.rpartition(".")[2]
        made = Case(
            make.__name__, group, make, finds, also, grid, block, shared_bytes, args, want, options
        )
        CASES.append(made)
        return made

    return declare


def ramp(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    """1, 2, 3, … in a shape: no two elements are equal and none is 0."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=dtype).reshape(shape)


def zeros(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    """Zeros."""
    return np.zeros(shape, dtype)
