"""Selections: which leaves of a checkpoint a load reads; the others are left out before any array is.

A leaf has the path that its keys make, joined by ``/``: ``params/layers/0/kernel``. What selects by path selects what
is at a path that fits and everything below it. Selections combine: ``a | b`` is what either selects, ``a & b`` what
both do, ``~a`` everything else.
"""

from __future__ import annotations

import functools
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.errors import TreeMismatchError
from ckptcore.model.tree import Key, TreePath
from ckptcore.tree.suggestions import NearNames

__all__ = ["LeafTable", "Predicate", "Selection", "experts", "glob", "names", "regex", "where"]

Predicate: TypeAlias = Callable[[str, object], bool]
"""Takes the path of a leaf, and its leaf of ``metadata(location).abstract``: an `AbstractArray` or a small value."""

_EXPERT: Final = "{expert}"

_LONGEST: Final = 300
"""Of a path that an error tells, in characters: it may be hostile."""


@dataclass(frozen=True)
class LeafTable:
    """The leaves of a stored tree, as selections see them.

    Attributes:
        paths: of each leaf.
        describe: gives what ``metadata(location).abstract`` has in the place of each leaf; asked for only where it
            matters.
    """

    paths: Sequence[TreePath]
    describe: Callable[[], Sequence[object]]

    @functools.cached_property
    def texts(self) -> Sequence[str]:
        """The path of each leaf as text."""
        return [_text(path) for path in self.paths]


class Selection(ABC):
    """Some leaves of whatever tree it is asked about. Made by the functions of this module; immutable."""

    @abstractmethod
    def leaves(self, table: LeafTable) -> frozenset[int]:
        """The numbers of the leaves that it selects.

        Raises:
            TreeMismatchError: if it names what is not there.
        """

    def __or__(self, other: Selection) -> Selection:
        """What either selects."""
        return _Either(self, other) if isinstance(other, Selection) else NotImplemented

    def __and__(self, other: Selection) -> Selection:
        """What both select."""
        return _Both(self, other) if isinstance(other, Selection) else NotImplemented

    def __invert__(self) -> Selection:
        """What it does not select."""
        return _Others(self)

    def __bool__(self) -> bool:
        """Refused, so that ``and``, ``or`` and ``not`` do not quietly drop a part of what was asked for."""
        raise TypeError(
            "a selection is neither true nor false: combine selections with &, | and ~, not with and, or and not"
        )


def names(*paths: str | Sequence[Key]) -> Selection:
    """What is at these paths, and everything below them. Each must be there.

    Args:
        paths: as text, ``"params/dense"``, or as keys, ``("layers", 0)``. A key that has a ``/`` in it is part of the
            text, or a key.

    Raises:
        TypeError: for what is no path.
    """
    return _Names(tuple([path if isinstance(path, str) else _keys(path) for path in paths]))


def glob(*patterns: str) -> Selection:
    """What is at a path that fits one of the patterns, and everything below it.

    ``*`` stands for any text within one key, ``?`` for one character of it, ``[0-7]`` for one of several, and ``**``
    between two ``/`` for any number of keys. Letters are matched by case.

    Raises:
        ValueError: for a pattern that is none.
    """
    return _Patterns(tuple([_glob_pattern(pattern) for pattern in patterns]))


def regex(*patterns: str) -> Selection:
    """Select paths that one of the regular expressions matches from beginning to end, and everything below them.

    Raises:
        ValueError: for a pattern that is none.
    """
    return _Patterns(tuple([_compiled(_expect_text(pattern, r"params/.*/kernel"), pattern) for pattern in patterns]))


def where(predicate: Predicate) -> Selection:
    """The leaves for which a function says so.

    Args:
        predicate: called for each leaf of the tree, without its elements.

    Raises:
        TypeError: if it cannot be called.
    """
    if not callable(predicate):
        raise TypeError(f"where({predicate!r}): expected a function of a path and a leaf")
    return _Where(predicate)


def experts(pattern: str, own: Collection[int]) -> Selection:
    """Select all leaves but the experts of other processes, for a process with some experts of a mixture.

    Args:
        pattern: of the leaves of an expert, as for `glob`, with ``{expert}`` where its number is:
            ``"model.layers.*.mlp.experts.{expert}.*"``.
        own: the numbers of the experts to be loaded.

    Raises:
        ValueError: for a pattern that is none, or has not ``{expert}`` in one place.
        TypeError: if `own` are no numbers.
    """
    numbers = _numbers(own)
    before, found, after = _expect_text(pattern, "experts.{expert}.*").partition(_EXPERT)
    if not found or _EXPERT in after:
        raise ValueError(
            f"experts({pattern!r}): expected {_EXPERT} once, where the number of an expert stands in a path"
        )
    compiled = _compiled(_glob_text(before + "\0" + after, pattern).replace("\0", "([0-9]+)"), pattern)
    return _Experts(compiled, pattern, numbers)


@dataclass(frozen=True, slots=True)
class _Either(Selection):
    first: Selection
    second: Selection

    def leaves(self, table: LeafTable) -> frozenset[int]:
        return self.first.leaves(table) | self.second.leaves(table)


@dataclass(frozen=True, slots=True)
class _Both(Selection):
    first: Selection
    second: Selection

    def leaves(self, table: LeafTable) -> frozenset[int]:
        return self.first.leaves(table) & self.second.leaves(table)


@dataclass(frozen=True, slots=True)
class _Others(Selection):
    selection: Selection

    def leaves(self, table: LeafTable) -> frozenset[int]:
        return frozenset(range(len(table.paths))) - self.selection.leaves(table)


@dataclass(frozen=True, slots=True)
class _Names(Selection):
    paths: tuple[str | TreePath, ...]

    def leaves(self, table: LeafTable) -> frozenset[int]:
        below = _leaves_below(table)
        chosen: set[int] = set()
        absent: list[str] = []
        for path in self.paths:
            text = path if isinstance(path, str) else _text(path)
            found = below.get(text, ())
            if not isinstance(path, str):
                found = [number for number in found if _begins_with(table.paths[number], path)]
            if not found:
                absent.append(text)
            chosen.update(found)
        if absent:
            raise _not_there(absent, below)
        return frozenset(chosen)


@dataclass(frozen=True, slots=True)
class _Patterns(Selection):
    patterns: tuple[re.Pattern[str], ...]

    def leaves(self, table: LeafTable) -> frozenset[int]:
        fits: dict[str, bool] = {}
        chosen = []
        for number, path in enumerate(table.paths):
            for text in _forms_above(path):
                if (fit := fits.get(text)) is None:
                    fit = fits[text] = any(pattern.fullmatch(text) for pattern in self.patterns)
                if fit:
                    chosen.append(number)
                    break
        return frozenset(chosen)


@dataclass(frozen=True, slots=True)
class _Where(Selection):
    predicate: Predicate

    def leaves(self, table: LeafTable) -> frozenset[int]:
        told = zip(table.texts, table.describe(), strict=True)
        return frozenset([number for number, (text, leaf) in enumerate(told) if self.predicate(text, leaf)])


@dataclass(frozen=True, slots=True)
class _Experts(Selection):
    compiled: re.Pattern[str]
    pattern: str
    own: frozenset[int]

    def leaves(self, table: LeafTable) -> frozenset[int]:
        chosen: list[int] = []
        seen: set[int] = set()
        for number, path in enumerate(table.paths):
            expert = self._expert(path)
            if expert is None or expert in self.own:
                chosen.append(number)
            if expert is not None:
                seen.add(expert)
        absent = sorted(self.own - seen)
        if not seen or absent:
            there = f"experts {_ranges(sorted(seen))} are stored" if seen else "nothing that is stored has such a path"
            asked = f", and {_ranges(absent)} asked for" if seen else ""
            raise TreeMismatchError(
                f"experts({self.pattern!r}): {there}{asked}; nothing was read. Correct the pattern, or the numbers",
                [f"missing: expert {expert} of {self.pattern} is not stored" for expert in absent] or [there],
            )
        return frozenset(chosen)

    def _expert(self, path: TreePath) -> int | None:
        for text in _forms_above(path):
            if (match := self.compiled.fullmatch(text)) is not None:
                return int(match[1])
        return None


def _keys(path: Iterable[Key]) -> TreePath:
    if not isinstance(path, Sequence) or isinstance(path, bytes):
        raise TypeError(f"names({path!r}): expected a path, such as 'params/dense' or ('layers', 0)")
    return tuple(path)


def _text(path: TreePath) -> str:
    return "/".join(map(str, path))


def _texts_above(path: TreePath) -> Iterator[str]:
    """The paths of all that is above a leaf but the root, and its own; a ``/`` within a key is one of the text, too."""
    text = ""
    for depth, key in enumerate(path):
        text = f"{text}/{key}" if depth else str(key)
        yield text
    if not path:
        yield text


def _forms_above(path: TreePath) -> Iterator[str]:
    """Return the texts that patterns are compared with: with ``/`` inside keys as a separator, and as a character."""
    yield from _texts_above(path)
    if any("/" in str(key) for key in path):
        yield from _texts_above(tuple([str(key).replace("/", "\0") for key in path]))


def _leaves_below(table: LeafTable) -> Mapping[str, list[int]]:
    """By path, the leaves at it and below."""
    below: dict[str, list[int]] = {}
    for number, path in enumerate(table.paths):
        for text in _texts_above(path):
            below.setdefault(text, []).append(number)
    return below


def _begins_with(path: TreePath, keys: TreePath) -> bool:
    """Return True if a path begins with keys. A str matches the name of an attribute or the digits of an index."""
    return len(path) >= len(keys) and all(
        stored == wanted if type(stored) is type(wanted) else isinstance(wanted, str) and str(stored) == wanted
        for stored, wanted in zip(path, keys, strict=False)
    )


def _not_there(absent: Sequence[str], below: Mapping[str, object]) -> TreeMismatchError:
    names = NearNames(list(below))
    lines: list[str] = []
    for text in absent:
        near = names.nearest(text)
        lines.append(f"missing: {_shown(text)} is not stored" + (f"; did you mean {_shown(near)}?" if near else ""))
    shown = "".join(f"\n  {line}" for line in lines[:30])
    more = f"\n  and {len(lines) - 30} more" if len(lines) > 30 else ""
    return TreeMismatchError(
        f"names that are selected are not there, and nothing was read:{shown}{more}\n"
        "Correct them (metadata(location).abstract has what is stored), or use glob() for what may be missing",
        lines,
    )


def _shown(text: str) -> str:
    """A path for a person; in quotes where it has what a terminal would not print."""
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return shown if shown.isprintable() else repr(shown)


def _numbers(own: Collection[int]) -> frozenset[int]:
    """The numbers of experts.

    Raises:
        TypeError
    """
    try:
        return frozenset(map(operator.index, own))
    except TypeError as error:
        raise TypeError(f"experts(..., {own!r}): expected the numbers of experts, such as range(8)") from error


def _glob_pattern(pattern: str) -> re.Pattern[str]:
    return _compiled(_glob_text(pattern, pattern), pattern)


def _compiled(expression: str, told: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{told!r} is no pattern: {error}") from error


def _expect_text(pattern: str, example: str) -> str:
    """A pattern, if it is text.

    Raises:
        ValueError
    """
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{pattern!r} is no pattern; give text such as {example!r}")
    return pattern


def _glob_text(pattern: str, told: str) -> str:
    """The regular expression that a pattern of `glob` stands for; `told` is what errors call it."""
    parts = _expect_text(pattern, "params/*/kernel").split("/")
    expression = ""
    for number, part in enumerate(parts):
        last = number + 1 == len(parts)
        if part == "**":
            expression += ".*" if last else "(?:.*/)?"
        else:
            expression += _key_expression(part, told) + ("" if last else "/")
    return expression


def _key_expression(part: str, pattern: str) -> str:
    expression, position = "", 0
    while position < len(part):
        character = part[position]
        position += 1
        if character == "*":
            expression += "[^/]*"
        elif character == "?":
            expression += "[^/]"
        elif character == "[":
            end = part.find("]", position + 1 + (part[position : position + 1] == "!"))
            if end < 0:
                raise ValueError(f"{pattern!r} is no pattern: '[' is not closed; write '[[]' for the character itself")
            inner = part[position:end].replace("\\", "\\\\").replace("[", "\\[")
            negated = inner.startswith("!")
            inner = inner[1:] if negated else inner.replace("^", "\\^", 1) if inner.startswith("^") else inner
            expression += f"[^/{inner}]" if negated else f"[{inner}]"
            position = end + 1
        else:
            expression += re.escape(character) if character != "\0" else character
    return expression


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in order, for a person: ``0-7, 9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(told[:10]) + (", ..." if len(told) > 10 else "")
