"""Pieces of messages."""


def ranges(ranks: list[int]) -> str:
    """Ascending thread numbers as text: ``threads 0..39, 50``."""
    parts = []
    first = last = ranks[0]
    for rank in [*ranks[1:], -2]:
        if rank != last + 1:
            parts.append(str(first) if first == last else f"{first}..{last}")
            first = rank
        last = rank
    return f"thread{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
