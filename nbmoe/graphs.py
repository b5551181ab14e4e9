"""CUDA graphs: work that is recorded once and launched again and again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Graph:
    """What a call enqueues on a stream, recorded; it does not run while it is.

    It is destroyed with the object. The driver lets a launch that is under way end first.
    """

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
            graph = self._ask(driver.cuStreamEndCapture(stream))
        self._executable = self._ask(driver.cuGraphInstantiate(graph, 0))
        self._destroy = weakref.finalize(self, _destroy, driver, graph, self._executable)
        # At the interpreter's end the driver frees everything itself.
        self._destroy.atexit = False

    def launch(self, stream: int) -> None:
        """Enqueues the work on a stream.

        Raises:
            RuntimeError: The driver refuses.
        """
        self._ask(self._driver.cuGraphLaunch(self._executable, stream))

    def destroy(self) -> None:
        """Gives up the graph now; it cannot be launched any more."""
        self._destroy()

    def _ask(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if int(error):
            raise RuntimeError(f"the CUDA driver answers {error!r}")
        return values[0] if values else None


def _destroy(driver: Any, graph: Any, executable: Any) -> None:
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)
