"""A small MegaFFN on the emulator, and what its timeline says of each block.

One segment of 9 rows. Blocks draw tiles ahead, so that a block is at its down tile while others
still have gate/up tiles.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import emulate
from emulate.trace import recording
from nbmoe.formats import NVFP4
from tests.kernels.test_mega_ffn_sm90 import config_of, problem, run
from tests.pictures.spans import Span, common, outside, union
from tests.strategies import Slots

BLOCKS = 3
K, MOE_DIM, N = 384, 320, 384
CONFIG = config_of(NVFP4, "finish", (16,))
UP_TILES, DOWN_TILES = (-(-rows // CONFIG.block_rows) for rows in (2 * MOE_DIM, N))
_PRODUCER = CONFIG.consumers // 32
WARPS = {
    "producer": range(_PRODUCER, _PRODUCER + 1),
    **{f"consumers {g}": range(4 * g, 4 * g + 4) for g in range(CONFIG.warpgroups)},
    "finishing": range(_PRODUCER + 1, CONFIG.threads // 32),
}
_ROWS_PER_WARP = 16


def record() -> list["BlockRun"]:
    """Run it once, threads first in, first out; copies land as late as they may."""

    def execute(kernel: Any, grid: Any, args: Any, stream: Any) -> None:
        assert grid[0] == BLOCKS, "there are fewer tiles than blocks"
        emulate.launch(
            kernel,
            grid,
            kernel.threads,
            *args,
            shared_bytes=kernel.shared_bytes,
            engine="interpreted",
            copies="lazy",
        )

    execute.multiprocessors = BLOCKS  # type: ignore[attr-defined]
    with recording() as timeline:
        run(CONFIG, problem(7, NVFP4, K, MOE_DIM, N, Slots((9,), (0,), 1, 0)), executor=execute)
    events = [e for e in timeline.as_dict()["traceEvents"] if e["ph"] == "X"]
    return [BlockRun([e for e in events if e["pid"] == block]) for block in range(BLOCKS)]


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


class BlockRun:
    """What a block's warps did; ``is_down`` is True for a tile of the down matmul.

    Attributes:
        end: the block's last event.
        counter: when the producer waited for the segment's counter.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self._events = sorted(events, key=lambda event: event["ts"])
        self.end = max(_span(event)[1] for event in events)
        waits = self._of(WARPS["producer"], "wait")
        self.counter = union(_span(e) for e in waits if e["args"]["on"].startswith("counters"))

    def _of(self, warps: Iterable[int], kind: str) -> list[dict[str, Any]]:
        return [e for e in self._events if e["tid"] // _ROWS_PER_WARP in warps and e["cat"] == kind]

    def copies(self, what: str) -> dict[str, list[tuple[Span, bool]]]:
        """Copies in flight of "weights" or "tokens", by the mbarrier of their stage."""
        arrays = {
            "weights": {"up_weights": False, "down_weights": True},
            "tokens": {"tokens": False, "middle_bytes": True},
        }[what]
        found: dict[str, list[tuple[Span, bool]]] = defaultdict(list)
        for event in self._of(WARPS["producer"], "copy"):
            is_down = arrays.get(event["args"]["of"])
            if is_down is not None:
                found[event["args"]["to"]].append((_span(event), is_down))
        return {
            bar: [
                (span, is_down)
                for is_down in (False, True)
                for span in union(s for s, down in found[bar] if down == is_down)
            ]
            for bar in sorted(found)
        }

    def waits(self, warps: Iterable[int]) -> list[Span]:
        """When all these warps wait in mbarriers."""
        each = [[_span(e) for e in self._of([warp], "wait")] for warp in warps]
        return [span for span in common(each, 0, self.end) if span not in self.counter]

    def products(self, warps: Iterable[int]) -> list[tuple[Span, bool]]:
        """When these consumers multiply, a product being one 64-block of K of a tile."""
        # Blocks of K are multiplied in the order in which their tokens are asked for.
        tokens = [e for e in self._events if e["args"].get("of") in ("tokens", "middle_bytes")]
        kinds = [e["args"]["of"] == "middle_bytes" for e in tokens]
        found = []
        for warp in warps:
            mine = [e for e in self._of([warp], "mma") if e["name"] != "wgmma_fence"]
            assert len(mine) == len(kinds), "a product does not belong to one copy of tokens"
            found += [(_span(e), is_down) for e, is_down in zip(mine, kinds)]
        return sorted(found)

    def consumes(self, warps: Iterable[int]) -> list[tuple[Span, bool]]:
        """When not all of these consumers wait, from what they do for their first product on."""
        starts = [(span[0], is_down) for span, is_down in self.products(warps)]
        found: list[tuple[Span, bool]] = []
        for start, end in self._busy(warps, self._last(warps)):
            cuts = [cut for cut in starts if start <= cut[0] < end]
            if cuts:  # what comes before a product is done for it
                cuts[0] = start, cuts[0][1]
            elif found:
                cuts = [(start, found[-1][1])]
            ends = [*(cut for cut, _ in cuts[1:]), end]
            found += [((cut, after), is_down) for (cut, is_down), after in zip(cuts, ends)]
        return found

    def finishes(self) -> list[Span]:
        """When the finishing warps have results of a gate/up tile."""
        warps = WARPS["finishing"]
        first = self.products(WARPS["consumers 0"])[0][0][0]
        busy = self._busy(warps, self._last(warps, "named_barrier"))
        return [span for span in busy if span[0] > first]

    def _busy(self, warps: Iterable[int], end: int) -> list[Span]:
        return outside(self.waits(warps), 0, end)

    def _last(self, warps: Iterable[int], name: str = "") -> int:
        """The end of the last event whose name begins like this."""
        mine = (e for e in self._events if e["tid"] // _ROWS_PER_WARP in warps)
        return max((_span(e)[1] for e in mine if e["name"].startswith(name)), default=0)
