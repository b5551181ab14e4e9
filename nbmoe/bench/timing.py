"""GPU time of a call and host time of a launch."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FLUSH_BYTES = 4 << 30
"""Written between runs: many times the L2 cache, and a millisecond for the host to run ahead."""


@dataclass(frozen=True)
class Spread:
    """Median and extremes of repeated measurements [us]."""

    median: float
    low: float
    high: float


class Timer:
    """Measures on one stream of the current device, with a cold L2 before every run."""

    def __init__(self) -> None:
        from cuda.core import Device, EventOptions

        self.device = Device()
        self.device.set_current()
        self.stream = self.device.create_stream()
        self._options = EventOptions(timing_enabled=True)
        self._flush = self.device.allocate(_FLUSH_BYTES, stream=self.stream)

    def gpu(self, call: Callable[[Any], Any], runs: int = 20) -> Spread:
        """Time between two events around ``call(stream)`` [us], 3 warm-up runs not counted."""
        pairs = []
        for run in range(runs + 3):
            self._flush.fill(run % 256, stream=self.stream)
            begin = self.stream.record(options=self._options)
            call(self.stream)
            end = self.stream.record(options=self._options)
            pairs.append((begin, end))
        self.stream.sync()
        return _spread([1e3 * (end - begin) for begin, end in pairs[3:]])

    def host(self, call: Callable[[Any], Any], launches: int = 200, runs: int = 9) -> Spread:
        """Host time of one ``call(stream)`` that only launches [us]."""
        times = []
        for _ in range(runs + 1):
            self.stream.sync()
            begin = time.perf_counter()
            for _ in range(launches):
                call(self.stream)
            times.append((time.perf_counter() - begin) / launches * 1e6)
        self.stream.sync()
        return _spread(times[1:])


def _spread(times: list[float]) -> Spread:
    return Spread(statistics.median(times), min(times), max(times))
