"""Where the counters of a MegaFFN lie."""

NEXT_TILE = 1
"""Counters in front of those of segments: the next tile's number."""
