"""Places in the source as small numbers.

A site is an instruction of a code object, which is cheap to name while the kernel runs; the line
is looked up when there is something to report.
"""

import functools
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

from emulate.checked.touch import SITE_SHIFT
from emulate.findings import Site

_PACKAGE = Path(__file__).parent.parent
_OURS = (
    *(f"{_PACKAGE / name}{os.sep}" for name in ("checked", "interpreted", "schedule")),
    str(_PACKAGE / "stock.py"),
    "<emulate",
)
_INSTRUCTION_SHIFT = 47

_shifted: dict[int, int] = {}
_places: list[tuple[CodeType, int]] = []
shifted_site = _shifted.get
"""From ``id(code) + (instruction << 47)`` to the site, shifted to its place in a log entry."""


def new_site(key: int, frame: FrameType) -> int:
    """Give a key that is not known yet its number, shifted."""
    _places.append((frame.f_code, frame.f_lasti))  # keeps the code object, whose id is in the key
    shifted = _shifted[key] = (len(_places) - 1) << SITE_SHIFT
    return shifted


def site_here() -> int:
    """The number of the innermost place outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    assert frame is not None
    return site_of(frame)


def site_of_function(code: CodeType) -> int:
    """The number of a function as a whole."""
    _places.append((code, -1))
    return len(_places) - 1


def is_ours(filename: str) -> bool:
    """Whether a file belongs to the engine."""
    return filename.startswith(_OURS)


def site_of(frame: FrameType) -> int:
    """The number of a frame's place."""
    key = id(frame.f_code) + (frame.f_lasti << _INSTRUCTION_SHIFT)
    known = shifted_site(key)
    return (new_site(key, frame) if known is None else known) >> SITE_SHIFT


@functools.cache
def find_site(number: int) -> Site:
    """The place of a number."""
    code, instruction = _places[number]
    line = code.co_firstlineno
    for start, end, at in code.co_lines():
        if start <= instruction < end and at is not None:
            line = at
    return Site(code.co_filename, line, code.co_name)
