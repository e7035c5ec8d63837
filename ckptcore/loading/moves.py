"""Parts of a tree that are stored under another path, such as an optimizer that became a part of a chain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.model.tree import Attribute, TreePath

__all__ = ["Move", "find_moves", "whole_parts"]

_CANDIDATES: Final = 50
"""Most stored leaves with the same last keys that are compared with one requested leaf."""

_SPECIAL: Final = frozenset("{}*/")
"""Characters of keys that have a meaning in patterns of transforms."""


@dataclass(frozen=True, slots=True)
class Move:
    """Leaves that are requested and stored under the same names below different paths.

    Attributes:
        requested, stored: the path of the part in the requested tree, and in the stored one.
        pairs: of each leaf, its position in the requested tree and its number in the stored one.
    """

    requested: TreePath
    stored: TreePath
    pairs: Sequence[tuple[int, int]]

    @property
    def names(self) -> tuple[str, str]:
        """The arguments of ``Rename`` of `ckptcore_transforms`: a pattern, and the template of new paths."""
        return (
            "/".join([*map(str, self.stored), "{rest...}"]),
            "/".join([*map(str, self.requested), "{rest}"]),
        )

    @property
    def can_be_named(self) -> bool:
        """True if a transform can name both paths, and they are no two fields of one object."""
        paths = [tuple(map(str, path)) for path in (self.requested, self.stored)]
        if any(not key or not _SPECIAL.isdisjoint(key) for path in paths for key in path):
            return False
        # The momentum of an optimizer is not the mean of another one.
        is_field = bool(self.requested) and isinstance(self.requested[-1], Attribute)
        return not (is_field and paths[0] != paths[1] and paths[0][:-1] == paths[1][:-1])


def find_moves(
    requested: Mapping[int, TreePath],
    stored: Mapping[int, TreePath],
    others: Sequence[TreePath],
    fits: Callable[[int, int], bool],
) -> Sequence[Move]:
    """Find parts of at least two leaves that moved as a whole, in the order in which they can be renamed.

    Args:
        requested: the paths of requested leaves that are not stored.
        stored: the paths of stored leaves that are not requested.
        others: the paths of all other stored leaves. No part contains them.
        fits: returns True if a stored leaf can be loaded as the requested leaf at a position.
    """
    votes = _votes(requested, stored, fits)
    below = Counter([path[:length] for path in (*stored.values(), *others) for length in range(len(path) + 1)])
    ties = [Counter([(tops[side], len(pairs)) for tops, pairs in votes.items()]) for side in (0, 1)]
    moves: list[Move] = []
    taken: tuple[set[int], set[int]] = (set(), set())
    for tops, pairs in sorted(votes.items(), key=lambda vote: -len(vote[1])):
        if any(tie[top, len(pairs)] > 1 for tie, top in zip(ties, tops, strict=True)):
            continue  # several parts have these names
        free = [pair for pair in pairs if pair[0] not in taken[0] and pair[1] not in taken[1]]
        for move in _whole(Move(*tops, free), requested, stored, below):
            if move.can_be_named:
                moves.append(move)
                taken[0].update([position for position, _ in move.pairs])
                taken[1].update([number for _, number in move.pairs])
    return _in_order(moves)


def _votes(
    requested: Mapping[int, TreePath], stored: Mapping[int, TreePath], fits: Callable[[int, int], bool]
) -> Mapping[tuple[TreePath, TreePath], list[tuple[int, int]]]:
    """Return pairs of leaves with the most common last keys, by the paths above these keys."""
    by_suffix: dict[tuple[str, ...], list[int]] = {}
    for number, path in stored.items():
        text = tuple(map(str, path))
        for start in range(len(text)):
            by_suffix.setdefault(text[start:], []).append(number)
    votes: dict[tuple[TreePath, TreePath], list[tuple[int, int]]] = {}
    for position, path in requested.items():
        text = tuple(map(str, path))
        found = next((start for start in range(len(text)) if text[start:] in by_suffix), len(text))
        candidates = by_suffix.get(text[found:], ())
        if len(candidates) > _CANDIDATES:
            continue
        for number in candidates:
            if fits(position, number):
                top = stored[number][: len(stored[number]) - (len(text) - found)]
                votes.setdefault((path[:found], top), []).append((position, number))
    return votes


def _whole(
    move: Move, requested: Mapping[int, TreePath], stored: Mapping[int, TreePath], below: Counter[TreePath]
) -> Sequence[Move]:
    """Divide a part until each has all stored leaves below its path. Drops single leaves.

    Args:
        move: the part.
        requested, stored: see `find_moves`.
        below: the number of stored leaves below each path.
    """
    if len(move.pairs) < 2:
        return []
    if below[move.stored] == len(move.pairs):
        return [move]
    parts: dict[tuple[TreePath, TreePath], list[tuple[int, int]]] = {}
    for position, number in move.pairs:
        tops = requested[position][: len(move.requested) + 1], stored[number][: len(move.stored) + 1]
        if len(stored[number]) > len(tops[1]):
            parts.setdefault(tops, []).append((position, number))
    return [
        divided for tops, pairs in parts.items() for divided in _whole(Move(*tops, pairs), requested, stored, below)
    ]


def _in_order(moves: Sequence[Move]) -> Sequence[Move]:
    """Sort moves so that a part moves away before another one takes its place. Empty if that is impossible."""
    left, found = list(moves), list[Move]()
    while left:
        free = next((one for one in left if not any(other is not one and _blocks(other, one) for other in left)), None)
        if free is None:
            return []
        found.append(free)
        left.remove(free)
    return found


def _blocks(stays: Move, moves: Move) -> bool:
    """Return True if a part is stored where another one moves to."""
    paths = [tuple(map(str, path)) for path in (stays.stored, moves.requested)]
    length = min(map(len, paths))
    return paths[0][:length] == paths[1][:length]


def whole_parts(paths: Sequence[TreePath], chosen: Sequence[int]) -> Sequence[TreePath]:
    """Return the shortest paths below which all leaves are chosen, in the order of the leaves.

    Args:
        paths: the paths of all leaves.
        chosen: positions of leaves.
    """
    total = Counter([path[:length] for path in paths for length in range(len(path) + 1)])
    own = Counter([paths[position][:length] for position in chosen for length in range(len(paths[position]) + 1)])
    found: dict[TreePath, None] = {}
    for position in chosen:
        path = paths[position]
        length = next(length for length in range(len(path) + 1) if own[path[:length]] == total[path[:length]])
        found[path[:length]] = None
    return list(found)
