"""Draws docs/pictures/mega_ffn_timeline.svg: python -m tests.pictures.mega_ffn_timeline.

Who copies, multiplies, finishes and waits in a small MegaFFN, over the events of the emulator.
"""

from collections.abc import Iterable
from pathlib import Path

from tests.pictures.mega_ffn_run import BLOCKS, DOWN_TILES, UP_TILES, WARPS, BlockRun, record
from tests.pictures.spans import Span
from tests.pictures.svg import INK, Picture

FILE = Path(__file__).parents[2] / "docs" / "pictures" / "mega_ffn_timeline.svg"
UP, DOWN = "#2166ac", "#d95f02"
UP_LIGHT, DOWN_LIGHT = "#b9d3ea", "#fbd0a4"
WAITS, COUNTER = "#e6e6e6", "#b2182b"
LEFT, RIGHT, WIDTH = 190, 888, 900
TOP, ROW, GAP, BETWEEN = 100, 15, 4, 20
TICK = 20_000
_AXIS = "events of the emulator, not time; copies land as late as they may"
_TITLE = f"A MegaFFN of {UP_TILES} gate/up tiles and {DOWN_TILES} down tiles on {BLOCKS} blocks"
NOTES = (
    "a down tile's weights are asked for, as many stages as the ring has, before its tokens exist",
    "its producer waits for the segment's counter: other blocks still have gate/up tiles",
    "the last gate/up tile has been counted",
    "the down tile's tokens are copied; its first weights are there",
)


class Chart:
    """The picture's rows, from top to bottom."""

    def __init__(self, runs: list[BlockRun]) -> None:
        self._runs = runs
        self._names = ["weights", "tokens", *WARPS]
        self._pitch = len(self._names) * (ROW + GAP) + BETWEEN
        bottom = TOP + len(runs) * self._pitch
        self._picture = Picture(WIDTH, bottom + 46 + 18 * len(NOTES), _TITLE)
        self._bottom = bottom
        copies = [span for run in runs for span, _ in _all(run.copies("weights"))]
        self._start = min(start for start, _ in copies) - 500
        self._end = max(run.end for run in runs)
        self._counter = self._picture.stripes("counter", COUNTER, "#f7d9dc")

    def draw(self) -> str:
        """The file's text."""
        self._legend()
        self._axis()
        for block, run in enumerate(self._runs):
            self._block(block, run)
        self._notes()
        return self._picture.as_text()

    def _x(self, moment: int) -> float:
        return LEFT + (RIGHT - LEFT) * (moment - self._start) / (self._end - self._start)

    def _y(self, block: int, name: str) -> float:
        return TOP + block * self._pitch + self._names.index(name) * (ROW + GAP)

    def _bar(self, span: Span, y: float, fill: str, height: float = ROW) -> None:
        start, end = max(span[0], self._start), span[1]
        if start < end:
            x = self._x(start)
            self._picture.rect(x, y, self._x(end) - x, height, fill)

    def _legend(self) -> None:
        at = self._picture
        at.text(12, 22, _TITLE, weight="bold")
        entries = (
            (UP, "gate/up: copies, products", 12, 36),
            (UP_LIGHT, "gate/up: decode, activate, store", 12, 56),
            (DOWN, "down: copies, products", 236, 36),
            (DOWN_LIGHT, "down: decode, store", 236, 56),
            (WAITS, "waits in an mbarrier", 446, 36),
            (self._counter, "waits for its segment's counter", 446, 56),
        )
        for fill, words, x, y in entries:
            at.rect(x, y, 22, 12, fill)
            at.text(x + 28, y + 10, words)

    def _axis(self) -> None:
        at, bottom = self._picture, self._bottom - BETWEEN + 4
        for moment in range(-(-self._start // TICK) * TICK, self._end + 1, TICK):
            x = self._x(moment)
            at.line(x, TOP - 4, x, bottom)
            at.text(x, bottom + 14, f"{moment:,}", "middle")
        at.text((LEFT + RIGHT) / 2, bottom + 32, _AXIS, "middle")

    def _block(self, block: int, run: BlockRun) -> None:
        for name in self._names:
            self._picture.text(LEFT - 8, self._y(block, name) + 11, _label(name), "end")
        self._picture.text(12, self._y(block, "weights") + 11, f"block {block}", weight="bold")
        for what in ("weights", "tokens"):
            stages = run.copies(what)
            height = ROW / len(stages)
            for number, bars in enumerate(stages.values()):
                y = self._y(block, what) + number * height
                for span, is_down in bars:
                    self._bar(span, y, DOWN if is_down else UP, height - 0.5)
        for name, warps in WARPS.items():
            y = self._y(block, name)
            for span in run.waits(warps):
                self._bar(span, y, WAITS)
            if name.startswith("consumers"):
                self._bars(run.consumes(warps), y, UP_LIGHT, DOWN_LIGHT)
                self._bars(run.products(warps), y, UP, DOWN)
            elif name == "finishing":
                for span in run.finishes():
                    self._bar(span, y, UP_LIGHT)
        for span in run.counter:
            self._bar(span, self._y(block, "producer"), self._counter)

    def _bars(self, bars: Iterable[tuple[Span, bool]], y: float, up: str, down: str) -> None:
        for span, is_down in bars:
            self._bar(span, y, down if is_down else up)

    def _notes(self) -> None:
        at = self._picture
        # The block that waits longest shows it best.
        waits = [(end - start, b) for b, run in enumerate(self._runs) for start, end in run.counter]
        block = max(waits)[1]
        run = self._runs[block]
        start, end = run.counter[0]
        asked = min(span[0] for span, is_down in _all(run.copies("weights")) if is_down)
        copied = max(span[1] for span, is_down in _all(run.copies("tokens")) if is_down)
        done = self._x(min(end for run in self._runs for _, end in run.counter))
        at.line(done, TOP - 10, done, self._bottom - BETWEEN + 4, INK, "3 3")
        at.mark(self._x(asked) - 11, self._y(block, "weights") + ROW / 2, 1)
        at.mark(self._x((start + end) // 2), self._y(block, "producer") + ROW / 2, 2)
        at.mark(done, TOP - 16, 3)
        at.mark(self._x(copied) + 11, self._y(block, "tokens") + ROW / 2, 4)
        for number, words in enumerate(NOTES, 1):
            y = self._bottom + 24 + 18 * number
            at.mark(20, y - 4, number)
            at.text(34, y, words)


def _all(stages: dict[str, list[tuple[Span, bool]]]) -> list[tuple[Span, bool]]:
    return [bar for bars in stages.values() for bar in bars]


def _label(name: str) -> str:
    warps = WARPS.get(name)
    if warps is None:
        return f"{name} in flight"
    role = name.split()[0]
    return f"{role}, " + (
        f"warps {warps[0]}\u2013{warps[-1]}" if len(warps) > 1 else f"warp {warps[0]}"
    )


def draw() -> str:
    """The picture of a run."""
    return Chart(record()).draw()


if __name__ == "__main__":
    FILE.write_bytes(draw().encode())
    print(FILE)
