"""Writes the table of the suite into docs/emulate/planted.md.

python -m emulate.planted.document
"""

import json
from collections.abc import Iterator
from typing import Any

from emulate.planted.suite import load_suite, stock_file, stock_results, suite_root

BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def table() -> str:
    """Every case with what is wrong, what is found, and what Numba's simulator makes of it."""
    return "".join(f"{line}\n" for line in _lines(load_suite(), stock_results()))


def _lines(cases: list[Any], stock: dict[str, str]) -> Iterator[str]:
    recorded = json.loads(stock_file().read_text())
    verdicts = [stock[case.name] for case in cases]
    counts = {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}
    yield (
        f"Of {len(cases)} cases, Numba's simulator (numba-cuda {recorded['numba-cuda']}, recorded "
        f"{recorded['date']}):"
    )
    yield ""
    for verdict, count in counts.items():
        yield f"* {verdict}: {count}"
    group = ""
    for case in cases:
        if case.group != group:
            group = case.group
            yield ""
            yield f"### {group}"
            yield ""
            yield "| case | what is wrong | found as | Numba's simulator |"
            yield "|---|---|---|---|"
        summary = " ".join((case.make.__doc__ or "").split())
        found = "other bytes" if case.finds == "BYTES" else f"`{case.finds}`"
        yield f"| {case.name} | {summary} | {found} | {stock[case.name]} |"


def main() -> int:
    """Rewrite the part between the marks."""
    file = suite_root() / "docs" / "emulate" / "planted.md"
    head, _, rest = file.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    file.write_text(f"{head}{BEGIN}{table()}{END}{tail}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
