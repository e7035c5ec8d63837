"""Parts of a tree that are stored under another path, such as an optimizer that became a part of a chain.

Names with dots are divided like paths, so that the prefix of a wrapper is found, such as ``model.`` or ``module.``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ckptcore.model.tree import Attribute, Key, TreePath, format_path
from ckptcore.records import dataclass

_CANDIDATES: Final = 50
"""Maximum number of stored leaves with the same last keys that are compared with one requested leaf."""

_MOST: Final = 20
"""Maximum number of moved parts. If more parts moved, all keys differ, or one transform can describe all moves."""

_OPTIMIZERS: Final = "optimizer_variables"
"""In Keras models, the key above the class of the optimizer. Different classes have variables with the same names."""

_SPECIAL: Final = frozenset("{}*/")
"""Characters of keys that have a meaning in patterns of transforms."""


class _NamePart(str):
    """A part of a name with dots, including the dot after it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Move:
    """Leaves that are requested and stored under the same names below different paths.

    Attributes:
        requested, stored: the path of the part in the requested tree, and in the stored tree. Names with dots are
            divided into `_NamePart`.
        pairs: for each leaf, its position in the requested tree and its number in the stored tree.
        is_leaf: True if the paths are those of a single leaf.
    """

    requested: TreePath
    stored: TreePath
    pairs: Sequence[tuple[int, int]]
    is_leaf: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The arguments of ``Rename`` of `ckptcore_transforms`: a pattern, and the template of new paths."""
        if self.is_leaf:
            return _joined(self.stored), _joined(self.requested)
        return _joined((*self.stored, "{rest...}")), _joined((*self.requested, "{rest}"))

    @property
    def shown(self) -> tuple[str, str]:
        """The requested and the stored path for messages. A name that continues below the path ends with ``*``."""
        requested, stored = (format_path(_undivided(path)) for path in (self.requested, self.stored))
        return requested, stored

    @property
    def has_index(self) -> bool:
        """True if the requested path has a key that is not text. The template of a ``Rename`` converts it to text."""
        return any(not isinstance(key, str | Attribute) for key in self.requested)

    @property
    def is_prefix(self) -> bool:
        """True if one path begins with the other: keys were added or removed below it, such as those of a wrapper."""
        requested, stored = (tuple(map(str, path)) for path in (self.requested, self.stored))
        length = min(len(requested), len(stored))
        return requested[:length] == stored[:length]

    @property
    def can_be_named(self) -> bool:
        """True if a transform can express the move.

        False for moves between two fields of one object, and between optimizers of two classes.
        """
        paths = [tuple(map(str, path)) for path in (self.requested, self.stored)]
        if any(not key or not _SPECIAL.isdisjoint(key) for path in paths for key in path):
            return False
        # Fields have different meanings: the momentum of one optimizer is not the mean of another optimizer.
        is_field = bool(self.requested) and isinstance(self.requested[-1], Attribute)
        if is_field and paths[0] != paths[1] and paths[0][:-1] == paths[1][:-1]:
            return False
        requested, stored = map(_optimizer, paths)
        return requested is None or stored is None or requested == stored


def find_moves(
    requested: Mapping[int, TreePath],
    stored: Mapping[int, TreePath],
    others: Sequence[TreePath],
    fits: Callable[[int, int], bool],
    *,
    any_number: bool = False,
) -> Sequence[Move]:
    """Find parts that moved as a whole, in the order in which they can be renamed.

    A part has at least two leaves, unless only a prefix was added or removed. Returns nothing if more than `_MOST`
    parts moved, or if no order is possible.

    Args:
        requested: the paths of requested leaves that are not stored.
        stored: the paths of stored leaves that are not requested.
        others: the paths of all other stored leaves. No part contains them.
        fits: returns True if a stored leaf can be loaded as the requested leaf at a position.
        any_number: True to return any number of parts, in any order.
    """
    requested, stored = ({number: _divided(path) for number, path in paths.items()} for paths in (requested, stored))
    votes = _votes(requested, stored, fits)
    if not votes:
        return []
    parts = _Parts(requested, stored, list(map(_divided, others)))
    # It is ambiguous which part moved if two parts with one path have equally many leaves.
    ties = [Counter([(tops[side], len(pairs)) for tops, pairs in votes.items()]) for side in (0, 1)]
    ordered = [
        Move(*tops, pairs)
        for tops, pairs in sorted(votes.items(), key=lambda vote: -len(vote[1]))
        if not any(tie[top, len(pairs)] > 1 for tie, top in zip(ties, tops, strict=True))  # equal parts
        and all(len(set(side)) == len(pairs) for side in zip(*pairs, strict=True))  # keys with the same text
    ]
    # Other leaves that are not requested may move together with a part, unless another part needs them.
    if any_number:
        return parts.chosen(ordered, with_others=True)
    return in_order(parts.chosen(ordered, with_others=True)) or in_order(parts.chosen(ordered, with_others=False))


def _optimizer(path: Sequence[str]) -> str | None:
    """Return the name of the Keras optimizer class in a path, without its number; None if the path has none."""
    if _OPTIMIZERS not in path[:-1]:
        return None
    return re.sub(r"_\d+$", "", path[path.index(_OPTIMIZERS) + 1])


def _divided(path: TreePath) -> TreePath:
    """Split names with dots into their parts."""
    if not any(type(key) is str and "." in key for key in path):
        return path
    keys: list[Key] = []
    for key in path:
        if type(key) is str:
            *above, last = key.split(".")
            keys.extend([_NamePart(f"{part}.") for part in above])
            keys.append(last)
        else:
            keys.append(key)
    return tuple(keys)


def _joined(path: TreePath) -> str:
    """Return the text of a divided path in patterns."""
    text = "".join([str(key) if isinstance(key, _NamePart) else f"{key}/" for key in path])
    return text.removesuffix("/")


def _undivided(path: TreePath) -> TreePath:
    """Join the parts of names with dots. A name that continues below the path ends with ``*``."""
    keys: list[Key] = []
    begun = ""
    for key in path:
        if isinstance(key, _NamePart):
            begun += key
        else:
            keys.append(begun + key if isinstance(key, str) and begun else key)
            begun = ""
    return (*keys, f"{begun}*") if begun else tuple(keys)


def _votes(
    requested: Mapping[int, TreePath], stored: Mapping[int, TreePath], fits: Callable[[int, int], bool]
) -> Mapping[tuple[TreePath, TreePath], list[tuple[int, int]]]:
    """Pair each requested leaf with the stored leaves that share the longest sequence of last keys with it.

    Returns the pairs by the requested and the stored path above these keys.
    """
    by_suffix: dict[tuple[str, ...], list[int]] = {}
    for number, path in stored.items():
        text = tuple(map(str, path))
        for begin in range(len(text)):
            by_suffix.setdefault(text[begin:], []).append(number)
    votes: dict[tuple[TreePath, TreePath], list[tuple[int, int]]] = {}
    for position, path in requested.items():
        text = tuple(map(str, path))
        # The longest ending that a stored path shares identifies the leaf best.
        start = next((begin for begin in range(len(text)) if text[begin:] in by_suffix), len(text))
        candidates = by_suffix.get(text[start:], ())
        if len(candidates) > _CANDIDATES:
            continue
        for number in candidates:
            if fits(position, number):
                top = stored[number][: len(stored[number]) - (len(text) - start)]
                votes.setdefault((path[:start], top), []).append((position, number))
    return votes


class _Parts:
    """Divides parts until no leaf that must stay is below their paths."""

    def __init__(
        self, requested: Mapping[int, TreePath], stored: Mapping[int, TreePath], others: Sequence[TreePath]
    ) -> None:
        """Take divided paths. See `find_moves`."""
        self._requested = requested
        self._stored = stored
        self._others = {path[:length] for path in others for length in range(len(path) + 1)}
        self._below: dict[TreePath, list[int]] = {}
        for number, path in stored.items():
            for length in range(len(path) + 1):
                self._below.setdefault(path[:length], []).append(number)

    def chosen(self, moves: Sequence[Move], *, with_others: bool) -> Sequence[Move]:
        """Return parts that share no leaf, the largest first.

        Args:
            moves: parts, the largest first.
            with_others: True if leaves that are not requested may move together with a part.
        """
        parts: list[Move] = []
        taken: tuple[set[int], set[int]] = (set(), set())
        for move in moves:
            free = [pair for pair in move.pairs if pair[0] not in taken[0] and pair[1] not in taken[1]]
            for part in self._whole(replace(move, pairs=free), with_others):
                if part.can_be_named:
                    parts.append(part)
                    taken[0].update([position for position, _ in part.pairs])
                    taken[1].update([number for _, number in part.pairs])
        return parts

    def _whole(self, move: Move, with_others: bool) -> Sequence[Move]:
        """Divide a part until it can move as a whole. Drops single leaves, unless only a prefix changed."""
        if not move.pairs or (len(move.pairs) < 2 and not move.is_prefix):
            return []
        is_alone = len(self._below[move.stored]) == len(move.pairs)
        if move.stored not in self._others and (is_alone or (with_others and not self._keeps_others(move))):
            return [move]
        parts: dict[tuple[TreePath, TreePath], list[tuple[int, int]]] = {}
        leaves: list[Move] = []
        for pair in move.pairs:
            paths = self._requested[pair[0]], self._stored[pair[1]]
            tops = paths[0][: len(move.requested) + 1], paths[1][: len(move.stored) + 1]
            if tops != paths:
                parts.setdefault(tops, []).append(pair)
            elif move.is_prefix:
                leaves.append(Move(*paths, [pair], is_leaf=True))
        is_prefix = move.is_prefix
        for tops, pairs in parts.items():
            part = Move(*tops, pairs)
            if len(pairs) > 1 or not is_prefix:
                leaves.extend(self._whole(part, with_others))
            else:
                (pair,) = pairs
                leaves.append(Move(self._requested[pair[0]], self._stored[pair[1]], pairs, is_leaf=True))
        return leaves

    def _keeps_others(self, move: Move) -> bool:
        """Return True if other leaves below the path must stay.

        They must stay if one of them would get the path of another stored leaf. They must also stay if the part gets
        another last key and many leaves directly below it are not requested: it may be an optimizer of another class.
        """
        moved = {number for _, number in move.pairs}
        length = len(move.stored)
        left = [self._stored[number] for number in self._below[move.stored] if number not in moved]
        direct = [path for path in left if len(path) == length + 1]
        is_renamed = not move.is_prefix and move.requested[-1:] != move.stored[-1:]
        if is_renamed and 2 * len(direct) > len(move.pairs):
            return True
        return any((*move.requested, *path[length:]) in self._others for path in left)


def in_order(moves: Sequence[Move]) -> Sequence[Move]:
    """Sort moves so that a part moves away before another part takes its place.

    Returns nothing if no such order exists, or if there are more than `_MOST` moves.
    """
    if len(moves) > _MOST:
        return []
    left, ordered = list(moves), list[Move]()
    while left:
        free = next((move for move in left if not any(_blocks(other, move) for other in left)), None)
        if free is None:
            return []
        ordered.append(free)
        left.remove(free)
    return ordered


def _blocks(stays: Move, moves: Move) -> bool:
    """Return True if one part is stored at, above or below the path to which the other part moves."""
    if stays is moves:
        return False
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
    tops: dict[TreePath, None] = {}
    for position in chosen:
        path = paths[position]
        length = next(length for length in range(len(path) + 1) if own[path[:length]] == total[path[:length]])
        tops[path[:length]] = None
    return list(tops)
