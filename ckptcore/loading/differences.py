"""Differences between an abstract tree and the stored one, and the error that lists them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.errors import TreeMismatchError
from ckptcore.loading.load_requests import LeafChange
from ckptcore.loading.quantized_names import find_quantized, scales_beside
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import Attribute, Key, Node, Skeleton, TreePath, format_path
from ckptcore.tree.suggestions import NearNames

__all__ = [
    "Difference",
    "Remedy",
    "container_differences",
    "lost_scales",
    "mismatch",
    "missing_leaves",
    "unexpected_leaves",
]

_SHOWN: Final = 30
"""Differences in the text of an error; its attribute has all."""

_LONGEST: Final = 600
"""Characters of a line."""

_SEQUENCES: Final = ("list", "tuple")

_ALLOW_MORE: Final = ("narrowing", "placeholder")
"""Choices that also allow what the other choices of the same option do."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """An option of `ckptcore.Matching` that allows a difference.

    Attributes:
        option: its name.
        choice: its value; several for `shapes`.
    """

    option: str
    choice: str | frozenset[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        sort: in one word: missing, unexpected, sequence, kind, shape, dtype, value.
        line: the path, what is asked for and what is stored, for a person.
        allowed_by: what would allow it; None if nothing would.
    """

    sort: str
    line: str
    allowed_by: Remedy | None = None


def mismatch(display: str, differences: Sequence[Difference], tree: TreeMetadata) -> TreeMismatchError:
    """Return the error for differences. Its text counts them by sort and shows some of each; its attribute lists all.

    Args:
        display: the location.
        differences: at least one.
        tree: the stored tree.
    """
    by_sort: dict[str, list[Difference]] = {}
    for difference in differences:
        by_sort.setdefault(difference.sort, []).append(difference)
    shown: list[str] = []
    for sort, count in _shares({sort: len(found) for sort, found in by_sort.items()}).items():
        found = by_sort[sort]
        shown.extend([f"\n  {_cut(difference.line)}" for difference in found[:count]])
        if len(found) > count:
            shown.append(f"\n  and {len(found) - count} more: {sort}")
    counted = allowing = dequantizing = ""
    if len(differences) > _SHOWN:
        counts = ", ".join([f"{len(found)} {sort}" for sort, found in by_sort.items()])
        counted = f" ({len(differences)} differences: {counts})"
    if remedies := [found.allowed_by for found in differences if found.allowed_by is not None]:
        allowing = f"; what is meant to differ can be allowed by name: matching=Matching({_options(remedies)})"
    if (quantized := find_quantized(tree)) is not None:
        dequantizing = (
            f"; weights are quantised ({quantized}): load them as numbers with transforms=[DequantizeAsConfigured()] or "
            "[Dequantize(...)] of ckptcore.transforms"
        )
    return TreeMismatchError(
        f"{display} does not hold what the abstract tree asks for{counted}:{''.join(shown)}\n"
        "Make the abstract tree like the stored one (metadata(location).abstract is it), or put PLACEHOLDER where a "
        f"part is not to be loaded{allowing}{dequantizing}",
        [difference.line for difference in differences],
    )


def _options(remedies: Sequence[Remedy]) -> str:
    """Return the options that allow all differences, as Python code."""
    by_option: dict[str, list[str | frozenset[str]]] = {}
    for remedy in remedies:
        by_option.setdefault(remedy.option, []).append(remedy.choice)
    return ", ".join([f"{option}={_choice(choices)}" for option, choices in by_option.items()])


def _choice(choices: Sequence[str | frozenset[str]]) -> str:
    """Return the value that allows all that several choices do, as Python code."""
    words = {word for choice in choices for word in ([choice] if isinstance(choice, str) else choice)}
    if not isinstance(choices[0], str):
        return "{" + ", ".join([f'"{word}"' for word in sorted(words)]) + "}"
    return f'"{next((word for word in _ALLOW_MORE if word in words), choices[0])}"'


def _cut(line: str) -> str:
    """Return a line of limited length: names may be hostile, and of any length."""
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def _shares(counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many differences of each sort to show: about the same number of each."""
    shares = dict.fromkeys(counts, 0)
    left = _SHOWN
    while left and (open_sorts := [sort for sort, count in counts.items() if shares[sort] < count]):
        for sort in open_sorts:
            added = min(counts[sort] - shares[sort], max(1, left // len(open_sorts)), left)
            shares[sort] += added
            left -= added
    return shares


def missing_leaves(names: Sequence[str], unexpected: Sequence[str]) -> Iterator[Difference]:
    """Return the differences for leaves that are not stored, each with the unexpected leaf that may have been meant."""
    there = NearNames(unexpected)
    for name in names:
        near = there.nearest(name)
        hint = "" if near is None else f"; did you mean {near}?"
        yield Difference("missing", f"missing: {name} is not stored{hint}", Remedy("missing", "keep"))


def unexpected_leaves(names: Sequence[str]) -> Iterator[Difference]:
    """Return the differences for stored leaves that are not asked for."""
    for name in names:
        line = f"unexpected: {name} is stored and not asked for"
        yield Difference("unexpected", line, Remedy("unexpected", "ignore"))


def lost_scales(
    tree: TreeMetadata, changes: Mapping[int, LeafChange], loaded: Collection[int | None]
) -> Iterator[Difference]:
    """Return the differences for quantised arrays that would be cast without their scales, which gives wrong numbers.

    Args:
        tree: the stored tree.
        changes: by leaf, the changes of arrays.
        loaded: the leaves that are asked for.
    """
    for number, scales in scales_beside(tree):
        change = changes.get(number)
        if change is not None and change.cast != "error" and scales not in loaded:
            path, beside = (format_path(tree.paths[one]) for one in (number, scales))
            reason = f"{change.stored} is quantised: a cast would leave out its scales, {beside}"
            yield Difference("dtype", f"{path}: dtype: {reason}")


def container_differences(asked: Skeleton, stored: Skeleton) -> list[Difference]:
    """Find differences between lists and tuples, and between empty dicts and empty sequences, in either direction.

    Keys match like those of leaves. Containers with children are compared by their leaves.
    """
    found: list[Difference] = []
    _compare(asked, stored, (), found)
    return found


def _compare(asked: Skeleton, stored: Skeleton, path: TreePath, found: list[Difference]) -> None:
    if not isinstance(asked, Node) or not isinstance(stored, Node):
        return
    # Without its class, an object loads as a dict or a list.
    empty = not asked.keys and not stored.keys and "object" not in (asked.kind, stored.kind)
    if {asked.kind, stored.kind} == {"list", "tuple"}:
        line = f"{format_path(path)}: sequence: a {asked.kind} is asked for, a {stored.kind} is stored"
        found.append(Difference("sequence", line, Remedy("sequences", "either")))
    elif empty and (asked.kind in _SEQUENCES) != (stored.kind in _SEQUENCES):
        line = f"{format_path(path)}: kind: an empty {asked.kind} is asked for, an empty {stored.kind} is stored"
        found.append(Difference("kind", line))
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
