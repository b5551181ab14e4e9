"""What can happen next: threads that can run and async copies in flight."""

from collections import deque
from collections.abc import Callable, Iterable

from emulate.interpreted.block import Thread
from emulate.schedule.choice import Choice, Scheduler


class Flight:
    """An async copy between issue and landing."""

    __slots__ = ("block", "land", "number", "rank", "thread")

    def __init__(
        self, thread: Thread, land: Callable[[], None], block: int, rank: int, number: int
    ) -> None:
        self.thread = thread
        self.land = land
        self.block = block
        self.rank = rank
        self.number = number


class ReadyList:
    """Threads and copies in the order in which they became ready."""

    def __init__(self, scheduler: Scheduler | None) -> None:
        self._scheduler = scheduler
        self._fifo: deque[Thread] = deque()
        self._items: list[Thread | Flight] = []
        self._choices: list[Choice] = []
        self._flights = 0

    def __bool__(self) -> bool:
        return bool(self._fifo or self._items)

    @property
    def has_threads(self) -> bool:
        """Whether a thread can run."""
        return bool(self._fifo) or len(self._items) > self._flights

    @property
    def has_flights(self) -> bool:
        """Whether a copy is in flight."""
        return self._flights > 0

    def append(self, thread: Thread) -> None:
        """A thread can run."""
        if self._scheduler is None:
            self._fifo.append(thread)
        else:
            self._items.append(thread)
            self._choices.append(thread.choice)

    def extend(self, threads: Iterable[Thread]) -> None:
        """Threads can run."""
        for thread in threads:
            self.append(thread)

    def launch(self, flight: Flight) -> None:
        """A copy can land."""
        self._flights += 1
        self._items.append(flight)
        self._choices.append(Choice("copy", flight.block, flight.rank, flight.number))

    def withdraw(self, flight: Flight) -> bool:
        """Take a copy out; False if it has landed."""
        for at, item in enumerate(self._items):
            if item is flight:
                self._pop(at)
                return True
        return False

    def take(self) -> Thread | Flight | None:
        """What happens next; None when no thread can run."""
        if self._scheduler is None:
            return self._fifo.popleft() if self._fifo else None
        if not self.has_threads:
            return None
        return self._pop(self._pick())

    def take_flight(self) -> Flight | None:
        """A copy that lands because no thread can run."""
        if not self._flights:
            return None
        flight = self._pop(self._pick())
        assert isinstance(flight, Flight)
        return flight

    def _pick(self) -> int:
        if self._scheduler is None or len(self._choices) == 1:
            return 0
        return self._scheduler.pick(self._choices)

    def _pop(self, at: int) -> Thread | Flight:
        item = self._items.pop(at)
        del self._choices[at]
        if isinstance(item, Flight):
            self._flights -= 1
        return item
