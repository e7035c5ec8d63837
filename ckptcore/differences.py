"""Differences between what a load asks for and what is stored, and the error that lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.errors import TreeMismatchError
from ckptcore.model.tree import Attribute, Key, Node, Skeleton, TreePath, format_path

__all__ = ["Difference", "mismatch", "sequence_differences"]

_SHOWN: Final = 30
"""How many differences an error's text lists; its attribute has all."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        sort: in a word: missing, unexpected, sequence, kind, shape, dtype, value.
        line: the path, what is asked for and what is stored, for a person.
        allowed_by: the option of `ckptcore.Matching`, with its value, that would allow it; None if none would.
    """

    sort: str
    line: str
    allowed_by: str | None = None


def mismatch(display: str, differences: Sequence[Difference]) -> TreeMismatchError:
    """The error of all differences: its text counts them by sort and shows some of each, its attribute lists every one.

    Args:
        display: the location.
        differences: at least one.
    """
    by_sort: dict[str, list[Difference]] = {}
    for difference in differences:
        by_sort.setdefault(difference.sort, []).append(difference)
    shown: list[str] = []
    for sort, count in _shares({sort: len(found) for sort, found in by_sort.items()}).items():
        found = by_sort[sort]
        shown.extend([f"\n  {difference.line}" for difference in found[:count]])
        if len(found) > count:
            shown.append(f"\n  and {len(found) - count} more: {sort}")
    counted = ""
    if len(differences) > _SHOWN:
        counts = ", ".join([f"{len(found)} {sort}" for sort, found in by_sort.items()])
        counted = f" ({len(differences)} differences: {counts})"
    options = dict.fromkeys([found.allowed_by for found in differences if found.allowed_by is not None])
    allowing = f"; what is meant to differ can be allowed by name: matching=Matching({', '.join(options)})"
    return TreeMismatchError(
        f"{display} does not hold what the abstract tree asks for{counted}:{''.join(shown)}\n"
        "Make the abstract tree like the stored one (metadata(location).abstract is it), or put PLACEHOLDER where a "
        f"part is not to be loaded{allowing if options else ''}",
        [difference.line for difference in differences],
    )


def _shares(counts: Mapping[str, int]) -> dict[str, int]:
    """How many of each sort are shown: as many of one as of the other, and of all what fits."""
    shares = dict.fromkeys(counts, 0)
    left = _SHOWN
    while left and (open_sorts := [sort for sort, count in counts.items() if shares[sort] < count]):
        for sort in open_sorts:
            added = min(counts[sort] - shares[sort], max(1, left // len(open_sorts)), left)
            shares[sort] += added
            left -= added
    return shares


def sequence_differences(asked: Skeleton, stored: Skeleton) -> list[Difference]:
    """Where a list is asked for and a tuple is stored, or the other way round. Keys match as leaves' do."""
    found: list[Difference] = []
    _compare(asked, stored, (), found)
    return found


def _compare(asked: Skeleton, stored: Skeleton, path: TreePath, found: list[Difference]) -> None:
    if not isinstance(asked, Node) or not isinstance(stored, Node):
        return
    if {asked.kind, stored.kind} == {"list", "tuple"}:
        line = f"{format_path(path)}: sequence: a {asked.kind} is asked for, a {stored.kind} is stored"
        found.append(Difference("sequence", line, 'sequences="either"'))
    if not any(isinstance(child, Node) for child in asked.children):
        return
    exact = dict(zip(stored.keys, stored.children, strict=True))
    loose = {_plain(key): child for key, child in exact.items()}
    for key, child in zip(asked.keys, asked.children, strict=True):
        other = exact.get(key, loose.get(_plain(key)))
        if other is not None:
            _compare(child, other, (*path, key), found)


def _plain(key: Key) -> Key:
    return key.name if isinstance(key, Attribute) else key
