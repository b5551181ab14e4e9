"""What a launch returns."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One finished launch.

    Attributes:
        engine: ``fast`` or ``interpreted``.
        seconds: time of the run itself [s].
        compile_seconds: time to compile the kernel or to load it from the cache [s]; 0 when this
            process had it already.
        cached: the kernel's machine code came from disk or from this process's memory.
        blocks: CTAs of the grid.
        resident: the most CTAs that were alive at one time.
    """

    engine: str
    seconds: float
    compile_seconds: float
    cached: bool
    blocks: int
    resident: int
