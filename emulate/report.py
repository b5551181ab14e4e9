"""What a launch returns."""

from dataclasses import dataclass

from emulate.findings import Finding


@dataclass(frozen=True)
class Report:
    """One finished launch.

    Attributes:
        engine: ``fast``, ``interpreted`` or ``checked``.
        seconds: time of the run itself [s].
        compile_seconds: time to compile the kernel or to load it from the cache [s]; 0 when this
            process had it already.
        cached: the kernel's machine code came from disk or from this process's memory.
        blocks: CTAs of the grid.
        resident: the most CTAs that were alive at one time.
        findings: what the checked engine has found, without duplicates.
        schedules: runs of the launch; `emulate.check` makes several.
        note: why another engine ran than the one that was asked for; else empty.
    """

    engine: str
    seconds: float
    compile_seconds: float
    cached: bool
    blocks: int
    resident: int
    note: str = ""
    findings: tuple[Finding, ...] = ()
    schedules: int = 1
