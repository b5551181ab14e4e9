"""A run as the list of its picks: recorded, written as text, replayed.

A pick is the index among the choices; 0 is first in, first out. So a run is its list of deviations
from that order, zeros at the end can be left out, and a list that is too short is still a run.
"""

import base64
import binascii
import zlib
from collections.abc import Sequence

from emulate.schedule.choice import Choice, Scheduler

MAX_PICKS = 1 << 24
"""Picks of a run that is written as text; longer ones have a name that reproduces them."""


class Recorder:
    """A scheduler that notes the picks of another one.

    Attributes:
        picks: the picks so far.
        widths: how many choices there were at each.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.picks: list[int] = []
        self.widths: list[int] = []

    def pick(self, choices: Sequence[Choice]) -> int:
        """The pick of the recorded scheduler."""
        index = self._scheduler.pick(choices)
        self.picks.append(index)
        self.widths.append(len(choices))
        return index


class Picks:
    """Picks from a list, then first in, first out."""

    def __init__(self, picks: Sequence[int]) -> None:
        self._picks = picks
        self._next = 0

    def pick(self, choices: Sequence[Choice]) -> int:
        """The next one of the list; the last choice if there are fewer."""
        if self._next >= len(self._picks):
            return 0
        index = self._picks[self._next]
        self._next += 1
        return min(index, len(choices) - 1)


def encode(picks: Sequence[int]) -> str:
    """Picks as text without spaces or colons.

    Raises:
        ValueError: there are too many.
    """
    end = len(picks)
    while end and picks[end - 1] == 0:
        end -= 1
    if end > MAX_PICKS:
        raise ValueError(f"picks: expected at most {MAX_PICKS} picks, got {end}")
    octets = bytearray()
    for pick in picks[:end]:
        value = pick
        while value > 127:  # seven bits a byte, the lowest first
            octets.append(128 | (value & 127))
            value >>= 7
        octets.append(value)
    packed = zlib.compress(bytes(octets), 9)
    return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def decode(text: str) -> list[int]:
    """The picks that `encode` wrote.

    Raises:
        ValueError: the text is no list of picks.
    """
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        inflate = zlib.decompressobj()
        octets = inflate.decompress(packed, 4 * MAX_PICKS)
        if not inflate.eof:
            raise ValueError("truncated")
    except (ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"picks: {text[:40]!r} is damaged ({error})") from None
    picks = []
    value = shift = 0
    for octet in octets:
        value |= (octet & 127) << shift
        shift += 7
        if octet < 128:
            picks.append(value)
            value = shift = 0
    if shift:
        raise ValueError(f"picks: {text[:40]!r} is damaged (ends inside a number)")
    return picks
