"""Near names: which of many names one that was not found may have meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

__all__ = ["NameSuggestions"]

_MOST_NAMES: Final = 20_000
_MOST_ASKED: Final = 1000
_LONGEST: Final = 300
"""In characters. What is longer than any name a person wrote is not compared."""

_COMMON: Final = 64
"""Groups of three letters that are in more names than this are ignored."""

_COMPARED: Final = 4
"""How many names that have the most in common are compared letter by letter, which takes longest."""

_FEW: Final = 16
"""So few names are all compared."""


class NameSuggestions:
    """Finds names that are nearly those that are asked for, in time that is bounded however many there are of either.

    What is compared letter by letter are only the few names that share the most runs of three letters with the one
    asked for. Beyond a number of names, or of questions, it finds nothing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Take the names there are."""
        self._names = names
        self._asked = 0
        self._having: dict[str, list[int]] | None = None

    def nearest(self, name: str) -> str | None:
        """The name that is most like this one; None if none is."""
        self._asked += 1
        if len(name) > _LONGEST or len(self._names) > _MOST_NAMES or self._asked > _MOST_ASKED:
            return None
        import difflib  # only where something is wrong

        found = difflib.get_close_matches(name, self._likely(name), 1)
        return found[0] if found else None

    def _likely(self, name: str) -> Sequence[str]:
        """The few names that may be near."""
        if len(self._names) <= _FEW:
            return [other for other in self._names if len(other) <= _LONGEST]
        having = self._index()
        lists = sorted([having[run] for run in _runs(name) if run in having], key=len)
        telling = [numbers for numbers in lists if len(numbers) <= _COMMON]
        shared = Counter([number for numbers in telling or lists[:_COMPARED] for number in numbers[:_COMMON]])
        return [self._names[number] for number, _ in shared.most_common(_COMPARED)]

    def _index(self) -> dict[str, list[int]]:
        """By run of three letters, the numbers of the names that have it."""
        if self._having is None:
            self._having = {}
            for number, name in enumerate(self._names):
                if len(name) <= _LONGEST:
                    for run in _runs(name):
                        self._having.setdefault(run, []).append(number)
        return self._having


def _runs(name: str) -> set[str]:
    """Return all groups of three adjacent letters, and those at both ends."""
    padded = f" {name} "
    return {padded[start : start + 3] for start in range(len(padded) - 2)}
