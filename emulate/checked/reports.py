"""Collects findings, and puts reports of shadow memory into words."""

from typing import Any

import numpy as np

from emulate.checked.clocks import Clocks
from emulate.checked.shadow import Region, Shadow
from emulate.checked.sites import find_site
from emulate.checked.touch import CONCURRENT, LOCAL_BITS, LOCAL_MASK, PROXY, RAW, UNINIT, WAR, WAW
from emulate.findings import Finding

_IDS = {
    RAW: "RACE_RAW",
    WAR: "RACE_WAR",
    WAW: "RACE_WAW",
    PROXY: "RACE_PROXY",
    UNINIT: "UNINIT_READ",
    CONCURRENT: "NONDETERMINISTIC_ATOMIC",
}
_DEEDS = {
    RAW: ("writes", "reads"),
    WAR: ("reads", "writes"),
    WAW: ("writes", "writes"),
    PROXY: ("writes", "uses"),
    UNINIT: ("", "reads"),
    CONCURRENT: ("adds", "adds"),
}
_WHY = {
    RAW: "nothing orders the read after the write",
    WAR: "nothing orders the write after the read",
    WAW: "nothing orders the two writes",
    PROXY: "no proxy fence makes the write visible to the async engine",
    UNINIT: "nobody has written it",
    CONCURRENT: "the sum's rounding depends on which of them comes first",
}


class Halt(Exception):
    """The run ends here, with a finding that was reported."""


class Reports:
    """The findings of one run.

    Args:
        shadow: shadow memory.
        ignore: ids that are not wanted.

    Attributes:
        clocks: of blocks.
        items: size of an element by array [bytes].
        previous: the number that stands for the previous kernel among those of blocks.
    """

    def __init__(self, shadow: Shadow, ignore: frozenset[str]) -> None:
        self.findings: dict[Any, Finding] = {}
        self.clocks: dict[int, Clocks] = {}
        self.items: dict[str, int] = {}
        self.previous = -1
        self._shadow = shadow
        self._ignore = ignore

    def add(
        self,
        id: str,
        message: str,
        *sides: tuple[int, int, str],
        variable: str | None = None,
        index: Any = None,
    ) -> None:
        """Keep a finding, unless it is known.

        Args:
            id: its id.
            message: what happened.
            *sides: of each side the site, the agent and what it did.
            variable, index: of what.
        """
        if id in self._ignore:
            return
        sites = tuple(find_site(site) for site, _, _ in sides)
        finding = Finding(
            id,
            message,
            sites,
            tuple(self.thread_of(agent) for _, agent, _ in sides),
            tuple(self.name_of(agent) for _, agent, _ in sides),
            tuple(deed for _, _, deed in sides),
            variable,
            index,
        )
        self.findings.setdefault(finding.key, finding)

    def halt(self, id: str, message: str, *sides: tuple[int, int, str], **what: Any) -> Halt:
        """Keep a finding after which the run makes no sense."""
        self.add(id, message, *sides, **what)
        return Halt()

    def thread_of(self, agent: int) -> tuple[int, int]:
        """Block and thread of an agent."""
        block, local = agent >> LOCAL_BITS, agent & LOCAL_MASK
        if block == self.previous:
            return -1, -1
        clocks = self.clocks.get(block)
        if clocks is not None and local in clocks.names:
            return block, clocks.names[local][1]
        return block, local

    def name_of(self, agent: int) -> str:
        """An agent in words."""
        block, thread = self.thread_of(agent)
        if block < 0:
            return "the previous kernel"
        clocks = self.clocks.get(block)
        known = clocks.names.get(agent & LOCAL_MASK) if clocks is not None else None
        who = f"block {block} thread {thread}"
        return who if known is None else f"{known[0]} of {who}"

    def races(self, out: np.ndarray, count: int, agents: Any, *, float_atomic: bool) -> None:
        """Report what a check of shadow memory has found.

        Args:
            out, count: reports of `emulate.checked.touch`.
            agents: from a row of ``out`` to the agent whose access was checked.
            float_atomic: whether it was a float sum.
        """
        for row in out[:count]:
            kind, address, other, other_site, site = (int(value) for value in row)
            if kind == CONCURRENT and not float_atomic:
                continue
            region = self._shadow.find(address)
            me = agents(row)
            first, second = _DEEDS[kind]
            element, index = self.element(region, address)
            sides = [(site, me, second)]
            if kind != UNINIT:
                sides.insert(0, (other_site, other, first))
            message = f"{element}: {_WHY[kind]}"
            self.add(_IDS[kind], message, *sides, variable=region.name, index=index)

    def element(self, region: Region, address: int) -> tuple[str, int]:
        """An address in words, and the index of the element or byte."""
        offset = address - region.base
        item = self.items.get(region.name)
        if item is None:
            return f"{region.name} + {offset} bytes", offset
        return f"{region.name}[{offset // item}]", offset // item
