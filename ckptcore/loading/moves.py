"""Parts of a tree that are stored under another path, such as an optimizer that became a part of a chain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ckptcore.model.tree import Attribute, TreePath

__all__ = ["Move", "find_moves", "whole_parts"]

_CANDIDATES: Final = 50
"""Most stored leaves with the same last keys that are compared with one requested leaf."""


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


def find_moves(
    requested: Mapping[int, TreePath], stored: Mapping[int, TreePath], others: Sequence[TreePath]
) -> Sequence[Move]:
    """Find parts of at least two leaves that moved as a whole, the largest first.

    Args:
        requested: the paths of requested leaves that are not stored.
        stored: the paths of stored leaves that are not requested.
        others: the paths of all other stored leaves. No part contains them.
    """
    by_suffix: dict[tuple[str, ...], list[int]] = {}
    for number, path in stored.items():
        text = tuple(map(str, path))
        for start in range(len(text)):
            by_suffix.setdefault(text[start:], []).append(number)
    votes: dict[tuple[TreePath, TreePath], list[tuple[int, int]]] = {}
    for position, path in requested.items():
        text = tuple(map(str, path))
        found = next((start for start in range(len(text)) if text[start:] in by_suffix), len(text))
        for number in by_suffix.get(text[found:], ())[:_CANDIDATES]:
            top = stored[number][: len(stored[number]) - (len(text) - found)]
            votes.setdefault((path[:found], top), []).append((position, number))
    moves: list[Move] = []
    taken: tuple[set[int], set[int]] = (set(), set())
    for (top, of_stored), pairs in sorted(votes.items(), key=lambda vote: -len(vote[1])):
        free = [pair for pair in pairs if pair[0] not in taken[0] and pair[1] not in taken[1]]
        for move in _without_others(Move(top, of_stored, free), requested, stored, others):
            if len(move.pairs) > 1 and not _are_fields(move):
                moves.append(move)
                taken[0].update([position for position, _ in move.pairs])
                taken[1].update([number for _, number in move.pairs])
    return moves


def _without_others(
    move: Move, requested: Mapping[int, TreePath], stored: Mapping[int, TreePath], others: Sequence[TreePath]
) -> Sequence[Move]:
    """Divide a part until each has all stored leaves below its path."""
    own = {number for _, number in move.pairs}
    length = len(move.stored)
    below = [path for path in others if path[:length] == move.stored]
    if not below and all(number in own for number, path in stored.items() if path[:length] == move.stored):
        return [move]
    parts: dict[tuple[TreePath, TreePath], list[tuple[int, int]]] = {}
    for position, number in move.pairs:
        path, of_stored = requested[position], stored[number]
        if len(of_stored) > length + 1:
            top = path[: len(move.requested) + 1], of_stored[: length + 1]
            parts.setdefault(top, []).append((position, number))
    return [
        divided
        for (top, of_stored), pairs in parts.items()
        for divided in _without_others(Move(top, of_stored, pairs), requested, stored, below)
    ]


def _are_fields(move: Move) -> bool:
    """Return True for two fields of one object: the momentum of an optimizer is not the mean of another one."""
    paths = [tuple(map(str, path)) for path in (move.requested, move.stored)]
    is_field = bool(move.requested) and isinstance(move.requested[-1], Attribute)
    return is_field and paths[0] != paths[1] and paths[0][:-1] == paths[1][:-1]


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
