"""Suggestions of similar names for a name that was not found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

_MAX_NAMES: Final = 20_000
_MAX_REQUESTS: Final = 1000
_MAX_LENGTH: Final = 300
"""Maximum length of the names to compare, in characters."""

_COMMON: Final = 64
"""A group of three letters is ignored if more names than this contain it, unless the requested name has no rarer group.
"""

_COMPARED: Final = 4
"""Number of names to compare letter by letter: the names with the most groups in common. This is the slowest step."""

_FEW: Final = 16
"""If there are at most this number of names, all of them are compared."""


class NameSuggestions:
    """A search for similar names in bounded time.

    It compares only a few names letter by letter: the names that share the most groups of three letters with the
    requested name. Beyond a limit of names or requests it finds nothing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Create a search in the given names."""
        self._names = names
        self._requests = 0
        self._names_by_group: dict[str, list[int]] | None = None

    def nearest(self, name: str) -> str | None:
        """Return the most similar name, or None if none is similar."""
        self._requests += 1
        if len(name) > _MAX_LENGTH or len(self._names) > _MAX_NAMES or self._requests > _MAX_REQUESTS:
            return None
        import difflib  # needed only for errors

        similar = difflib.get_close_matches(name, self._likely(name), 1)
        return similar[0] if similar else None

    def _likely(self, name: str) -> Sequence[str]:
        """Return the few names that may be similar."""
        if len(self._names) <= _FEW:
            return [other for other in self._names if len(other) <= _MAX_LENGTH]
        names_by_group = self._index()
        lists = sorted([names_by_group[run] for run in _runs(name) if run in names_by_group], key=len)
        rare = [numbers for numbers in lists if len(numbers) <= _COMMON]
        shared = Counter([number for numbers in rare or lists[:_COMPARED] for number in numbers[:_COMMON]])
        return [self._names[number] for number, _ in shared.most_common(_COMPARED)]

    def _index(self) -> dict[str, list[int]]:
        """Return, by group of three letters, the numbers of the names that contain it."""
        if self._names_by_group is None:
            self._names_by_group = {}
            for number, name in enumerate(self._names):
                if len(name) <= _MAX_LENGTH:
                    for run in _runs(name):
                        self._names_by_group.setdefault(run, []).append(number)
        return self._names_by_group


def _runs(name: str) -> set[str]:
    """Return all groups of three adjacent letters, including both ends."""
    padded = f" {name} "
    return {padded[start : start + 3] for start in range(len(padded) - 2)}
