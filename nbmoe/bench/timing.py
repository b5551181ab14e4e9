"""GPU time of a CUDA graph and host time of a launch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbmoe.graphs import Graph

Call = Callable[[Any], Any]
"""Enqueues work on a stream."""
Launch = Callable[[], Any]
"""Enqueues work on the timer's stream."""

FLUSH_BYTES = 256 << 20
"""Written, and for a clean cache then read, before each run: many times the L2 cache."""
_HEAD_START = 16
"""Flushes before the first run, about a millisecond in which the host gets ahead of the GPU."""
_FILLS = 2
"""Times that the memory is written, so that the GPU takes longer for it than the host."""
_WARM_UP = 3


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of repeated measurements [us]."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Times:
    """The same work behind a cache full of dirty lines, and behind one full of clean lines."""

    dirty: Spread
    clean: Spread


class Timer:
    """Measures on one stream of the current device, with a cold L2 before every run."""

    def __init__(self) -> None:
        from cuda.core import Device, EventOptions

        from nbmoe.backend import executor

        self.device = Device()
        self.device.set_current()
        self.stream = self.device.create_stream()
        self._options = EventOptions(timing_enabled=True)
        self._written = self.device.allocate(FLUSH_BYTES, stream=self.stream)
        self._read = self.device.allocate(FLUSH_BYTES, stream=self.stream)
        self._read.fill(0, stream=self.stream)
        self._executor = executor("gpu")
        self._graphs: list[Graph] = []
        self._flush(clean=True)
        self.stream.sync()

    def capture(self, call: Call) -> Launch:
        """Runs a call once, then captures it as a CUDA graph.

        Returns:
            What launches the graph. It lives until `forget`.
        """
        stream = int(self.stream.handle)
        self.device.sync()  # what the call reads may come from another stream
        call(self.stream)
        self.stream.sync()
        graph = Graph(lambda: call(self.stream), stream)
        self._graphs.append(graph)
        return lambda: graph.launch(stream)

    def forget(self) -> None:
        """Destroys all graphs."""
        self.stream.sync()
        for graph in self._graphs:
            graph.destroy()
        self._graphs.clear()

    def measure(self, launch: Launch, runs: int = 15) -> Times:
        """Times what `launch` enqueues, between two events, both ways."""
        return Times(self._measure(launch, runs, False), self._measure(launch, runs, True))

    def _measure(self, launch: Launch, runs: int, clean: bool) -> Spread:
        pairs = []
        for _ in range(_HEAD_START):
            self._flush(clean)
        for _ in range(runs + _WARM_UP):
            self._flush(clean)
            begin = self.stream.record(options=self._options)
            launch()
            end = self.stream.record(options=self._options)
            pairs.append((begin, end))
        self.stream.sync()
        return spread([1e3 * (end - begin) for begin, end in pairs[_WARM_UP:]])

    def sync(self) -> None:
        """Waits for the stream."""
        self.stream.sync()

    def empty(self) -> Launch:
        """A graph of one kernel that does nothing: what every time here includes."""
        return self.capture(lambda stream: self._read_bytes(0, stream))

    def _flush(self, clean: bool) -> None:
        for _ in range(_FILLS):
            self._written.fill(0, stream=self.stream)
        if clean:
            self._read_bytes(FLUSH_BYTES, self.stream)

    def _read_bytes(self, nbytes: int, stream: Any) -> None:
        from nbmoe.bench.flush import launch_read_memory

        launch_read_memory(self._executor, int(self._read.handle), nbytes, stream=stream)

    def host(self, call: Call, launches: int = 200, runs: int = 9) -> Spread:
        """Host time of one ``call(stream)`` that only launches [us]."""
        times = []
        for _ in range(runs + 1):
            self.stream.sync()
            begin = time.perf_counter()
            for _ in range(launches):
                call(self.stream)
            times.append((time.perf_counter() - begin) / launches * 1e6)
        self.stream.sync()
        return spread(times[1:])


def spread(times: list[float]) -> Spread:
    """Median and percentiles of at least one measurement."""
    times = sorted(times)
    last = len(times) - 1
    return Spread(statistics.median(times), times[round(last / 10)], times[round(last * 9 / 10)])
