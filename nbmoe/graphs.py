"""CUDA graphs: work that is recorded once and launched again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Graph:
    """What a call enqueues on a stream, recorded; it does not run while it is."""

    def __init__(self, call: Callable[[], Any], stream: int) -> None:
        """Records ``call()``, which enqueues on ``stream`` alone and has run before.

        Args:
            call: Enqueues the work. What a capture cannot hold (an allocation, a first load of a
                kernel) must be over.
            stream: Handle of the stream, not the default one.

        Raises:
            RuntimeError: The driver refuses.
        """
        from cuda.bindings import driver

        self._driver = driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._ask(driver.cuStreamBeginCapture(stream, mode))
        try:
            call()
        finally:
            self._graph = self._ask(driver.cuStreamEndCapture(stream))
        self._executable = self._ask(driver.cuGraphInstantiate(self._graph, 0))

    def launch(self, stream: int) -> None:
        """Enqueues the work on a stream.

        Raises:
            RuntimeError: The driver refuses.
        """
        self._ask(self._driver.cuGraphLaunch(self._executable, stream))

    def destroy(self) -> None:
        """Gives up the graph, of which no launch may be under way."""
        self._driver.cuGraphExecDestroy(self._executable)
        self._driver.cuGraphDestroy(self._graph)

    def _ask(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if int(error):
            raise RuntimeError(f"the CUDA driver answers {error!r}")
        return values[0] if values else None
