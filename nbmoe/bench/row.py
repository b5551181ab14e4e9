"""A measured row: what was run, its times, and how it compares with its floor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from nbmoe.bench.floors import Work
from nbmoe.bench.timing import Times

OURS = "nbmoe"


@dataclass
class Row:
    """One thing that was run, or that could not be.

    Attributes:
        model: Name of the model.
        tokens: T.
        library: "nbmoe" or the name of a peer.
        format: Ours by its name; a peer's as "weights x activations".
        variant: Kind of operands, or which of a peer's ways was the fastest.
        leg: One of `nbmoe.bench.entry.LEGS`.
        times: Behind a dirty and a clean cache; None if it did not run.
        work: What it has to do at least.
        error: Relative error against float64, None if there is none to give.
        digest: Of the output's bytes.
        note: Why it did not run, or a remark.
        others: Times of a peer's other ways [us], or of the kernels of a layer.
    """

    model: str
    tokens: int
    library: str
    format: str
    variant: str
    leg: str
    times: Times | None = None
    work: Work = field(default_factory=Work)
    error: float | None = None
    digest: str = ""
    note: str = ""
    others: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Library, format and variant in a few words."""
        words = [self.library if self.library != OURS else f"{OURS} {self.format}", self.variant]
        return ", ".join(word for word in words if word)

    @property
    def floor_share(self) -> float | None:
        """Floor over time behind a dirty cache, None without either."""
        if self.times is None or not self.work.floor_us:
            return None
        return self.work.floor_us / self.times.dirty.median

    @property
    def tflops(self) -> float | None:
        """Rate behind a dirty cache, None without time or products."""
        if self.times is None or not self.work.flops:
            return None
        return self.work.flops / self.times.dirty.median / 1e6

    def as_dictionary(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "tokens": self.tokens,
            "library": self.library,
            "format": self.format,
            "variant": self.variant,
            "leg": self.leg,
            "us": None if self.times is None else asdict(self.times),
            "bytes": round(self.work.bytes),
            "flops": round(self.work.flops),
            "floor_us": round(self.work.floor_us, 3),
            "floor_share": _rounded(self.floor_share),
            "tflops": _rounded(self.tflops),
            "error": self.error,
            "hash": self.digest,
            "note": self.note,
            "others": self.others,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
