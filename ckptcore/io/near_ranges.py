"""Ranges of bytes that are near each other, and asked for together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["NearRanges", "near_ranges"]


@dataclass(frozen=True, slots=True)
class NearRanges:
    """Ranges of one object that are asked for together.

    Attributes:
        key: the object.
        start, stop: what holds all of them; None: up to the end of the object.
        numbers: which of the ranges that were given.
    """

    key: str
    start: int
    stop: int | None
    numbers: tuple[int, ...]


def near_ranges(ranges: Sequence[tuple[str, int, int | None]], gap_bytes: int, most_bytes: int) -> Iterator[NearRanges]:
    """Ranges (key, start, stop) in groups, by object and ascending.

    Args:
        ranges: in any order; they may overlap.
        gap_bytes: bytes between two that are cheaper read in vain than asked for apart.
        most_bytes: the most that a group of several has; one whose end is not known joins no other.
    """
    order = sorted(range(len(ranges)), key=lambda number: ranges[number][:2])
    numbers: list[int] = []
    key, first, last = "", 0, 0
    for number in order:
        of_key, start, stop = ranges[number]
        if stop is None:
            yield NearRanges(of_key, start, None, (number,))
            continue
        together = numbers and of_key == key and start <= last + gap_bytes and max(last, stop) - first <= most_bytes
        if not together:
            if numbers:
                yield NearRanges(key, first, last, tuple(numbers))
            numbers, key, first, last = [], of_key, start, stop
        numbers.append(number)
        last = max(last, stop)
    if numbers:
        yield NearRanges(key, first, last, tuple(numbers))
