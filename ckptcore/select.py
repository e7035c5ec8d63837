"""Selections: the leaves of a checkpoint that a load reads. Other leaves are dropped before any array is read.

The path of a leaf is its keys joined by ``/``: ``params/layers/0/kernel``. A selection by path includes the matching
path and all leaves below it. Containers without children, ``{}``, ``[]`` and ``()``, are selected by their paths like
leaves. Selections combine: ``a | b`` is the union, ``a & b`` the intersection, and ``~a`` the complement.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Final, TypeAlias

from ckptcore.errors import TreeMismatchError
from ckptcore.model.tree import Key, TreePath
from ckptcore.records import dataclass
from ckptcore.tree.suggestions import NameSuggestions

__all__ = ["LeafTable", "Predicate", "Selection", "experts", "glob", "names", "regex", "where"]

Predicate: TypeAlias = Callable[[str, object], bool]
"""A function of the path of a leaf and its abstract leaf. It returns True to select the leaf."""

_EXPERT: Final = "{expert}"

_MAX_CHARACTERS: Final = 300
"""Maximum length of a path in an error message, in characters. Paths of untrusted checkpoints can be long."""


@dataclass(frozen=True)
class LeafTable:
    """Rows for selections: the leaves of a stored tree, followed by its containers without children.

    Attributes:
        paths: the path of each row.
        describe: returns the abstract leaf of each leaf, as in ``metadata(location).abstract``, followed by the
            containers. Called only if needed.
    """

    paths: Sequence[TreePath]
    describe: Callable[[], Sequence[object]]

    @functools.cached_property
    def texts(self) -> Sequence[str]:
        """The path of each row as text."""
        return [_text(path) for path in self.paths]


class Selection(ABC):
    """A selection of leaves of any tree, created by the functions of this module. Immutable."""

    @abstractmethod
    def leaves(self, table: LeafTable) -> frozenset[int]:
        """Return the indices of the selected rows of the table.

        Raises:
            TreeMismatchError: a selected name or expert is not stored.
        """

    def __or__(self, other: Selection) -> Selection:
        """Return the union of two selections."""
        return _Combination(operator.or_, self, other) if isinstance(other, Selection) else NotImplemented

    def __and__(self, other: Selection) -> Selection:
        """Return the intersection of two selections."""
        return _Combination(operator.and_, self, other) if isinstance(other, Selection) else NotImplemented

    def __invert__(self) -> Selection:
        """Return the complement of the selection."""
        return _Complement(self)

    def __bool__(self) -> bool:
        """Raise TypeError: ``and``, ``or`` and ``not`` would silently ignore an operand."""
        raise TypeError(
            "a selection is neither true nor false: combine selections with &, | and ~, not with and, or and not"
        )


def names(*paths: str | Sequence[Key]) -> Selection:
    """Select the leaves at the given paths and below them. Each path must exist.

    Args:
        paths: text, ``"params/dense"``, or keys, ``("layers", 0)``. A key may contain ``/`` in both forms.

    Raises:
        TypeError: an argument is not a path.
    """
    return _Names(tuple([path if isinstance(path, str) else _keys(path) for path in paths]))


def glob(*patterns: str) -> Selection:
    """Select paths that match one of the patterns, and all leaves below them.

    ``*`` matches any text within a key, ``?`` one character, ``[0-7]`` one of several characters, and ``**`` in place
    of a key any number of keys, or at least one after the last ``/``. Matching is case-sensitive.

    Raises:
        ValueError: a pattern is invalid.
    """
    return _Patterns(tuple([_compiled(_glob_text(pattern, pattern), pattern) for pattern in patterns]))


def regex(*patterns: str) -> Selection:
    """Select paths that one of the regular expressions matches as a whole, and all leaves below them.

    Raises:
        ValueError: a regular expression is invalid.
    """
    return _Patterns(tuple([_compiled(_expect_text(pattern, r"params/.*/kernel"), pattern) for pattern in patterns]))


def where(predicate: Predicate) -> Selection:
    """Select the leaves for which a function returns True.

    Args:
        predicate: called with the path and the abstract leaf of each leaf of the tree, and with each container
            without children (``{}``, ``[]`` or ``()``) and its path. If it raises AttributeError for such a container,
            the container is selected.

    Raises:
        TypeError: the argument is not callable.
    """
    if not callable(predicate):
        raise TypeError(f"where({predicate!r}): expected a function of a path and a leaf")
    return _Where(predicate)


def experts(pattern: str, own: Collection[int]) -> Selection:
    """Select all leaves except the experts of other processes, for expert parallelism in a mixture of experts.

    Args:
        pattern: matches the leaves of an expert, as for `glob`, with ``{expert}`` for its number:
            ``"model.layers.*.mlp.experts.{expert}.*"``.
        own: the numbers of the experts to load.

    Raises:
        ValueError: the pattern is invalid, or does not have ``{expert}`` exactly once.
        TypeError: `own` has other values than integers.
    """
    numbers = _numbers(own)
    before, has_number, after = _expect_text(pattern, "experts.{expert}.*").partition(_EXPERT)
    if not has_number or _EXPERT in after:
        raise ValueError(f"experts({pattern!r}): expected {_EXPERT} once, in place of the number of an expert")
    # The NUL character marks the place of the number: `_key_expression` does not escape it.
    compiled = _compiled(_glob_text(before + "\0" + after, pattern).replace("\0", "([0-9]+)"), pattern)
    return _Experts(compiled, pattern, numbers)


@dataclass(frozen=True, slots=True)
class _Combination(Selection):
    combine: Callable[[frozenset[int], frozenset[int]], frozenset[int]]
    first: Selection
    second: Selection

    def leaves(self, table: LeafTable) -> frozenset[int]:
        return self.combine(self.first.leaves(table), self.second.leaves(table))


@dataclass(frozen=True, slots=True)
class _Complement(Selection):
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
            numbers = below.get(text, ())
            if not isinstance(path, str):
                numbers = [number for number in numbers if _begins_with(table.paths[number], path)]
            if not numbers:
                absent.append(text)
            chosen.update(numbers)
        if absent:
            raise _missing_names(absent, below)
        return frozenset(chosen)


@dataclass(frozen=True, slots=True)
class _Patterns(Selection):
    patterns: tuple[re.Pattern[str], ...]

    def leaves(self, table: LeafTable) -> frozenset[int]:
        @functools.cache
        def fits(text: str) -> bool:
            return any(pattern.fullmatch(text) for pattern in self.patterns)

        paths = enumerate(table.paths)
        return frozenset([number for number, path in paths if any(map(fits, _pattern_texts(path)))])


@dataclass(frozen=True, slots=True)
class _Where(Selection):
    predicate: Predicate

    def leaves(self, table: LeafTable) -> frozenset[int]:
        leaves = zip(table.texts, table.describe(), strict=True)
        return frozenset([number for number, (text, leaf) in enumerate(leaves) if self._selects(text, leaf)])

    def _selects(self, text: str, leaf: object) -> bool:
        try:
            return bool(self.predicate(text, leaf))
        except AttributeError:
            if isinstance(leaf, Sized) and not leaf:
                return True  # an empty container: a predicate about arrays does not exclude it
            raise


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
            stored = f"experts {_ranges(sorted(seen))} are stored" if seen else "no stored path matches the pattern"
            requested = f", {_ranges(absent)} were requested" if seen else ""
            raise TreeMismatchError(
                f"experts({self.pattern!r}): {stored}{requested}; nothing was read. Correct the pattern or the numbers",
                [f"missing: expert {expert} of {self.pattern} is not stored" for expert in absent] or [stored],
            )
        return frozenset(chosen)

    def _expert(self, path: TreePath) -> int | None:
        matches = map(self.compiled.fullmatch, _pattern_texts(path))
        return next((int(match[1]) for match in matches if match is not None), None)


def _keys(path: Iterable[Key]) -> TreePath:
    if not isinstance(path, Sequence) or isinstance(path, bytes):
        raise TypeError(f"names({path!r}): expected a path, such as 'params/dense' or ('layers', 0)")
    return tuple(path)


def _text(path: TreePath) -> str:
    return "/".join(map(str, path))


def _texts_above(path: TreePath) -> Iterator[str]:
    """Yield the paths of the containers above a leaf, without the root, and the path of the leaf."""
    text = ""
    for depth, key in enumerate(path):
        text = f"{text}/{key}" if depth else str(key)
        yield text
    if not path:
        yield text


def _pattern_texts(path: TreePath) -> Iterator[str]:
    """Yield the texts of a path to match with patterns.

    If a key contains ``/``, also yields texts with a NUL character in its place, so that ``*`` matches the whole key.
    """
    yield from _texts_above(path)
    if any("/" in str(key) for key in path):
        yield from _texts_above(tuple([str(key).replace("/", "\0") for key in path]))


def _leaves_below(table: LeafTable) -> Mapping[str, list[int]]:
    """Return the indices of the leaves at each path and below it."""
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


def _missing_names(absent: Sequence[str], below: Mapping[str, object]) -> TreeMismatchError:
    names = NameSuggestions(list(below))
    lines: list[str] = []
    for text in absent:
        near = names.nearest(text)
        lines.append(f"missing: {_shown(text)} is not stored" + (f"; did you mean {_shown(near)}?" if near else ""))
    shown = "".join(f"\n  {line}" for line in lines[:30])
    more = f"\n  and {len(lines) - 30} more" if len(lines) > 30 else ""
    return TreeMismatchError(
        f"selected names are not stored; nothing was read:{shown}{more}\n"
        "Correct them (metadata(location).abstract has the stored names), or use glob() for names that may be missing",
        lines,
    )


def _shown(text: str) -> str:
    """Return a path for an error message, in quotes if it has characters that a terminal cannot print."""
    shown = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
    return shown if shown.isprintable() else repr(shown)


def _numbers(own: Collection[int]) -> frozenset[int]:
    """Return the numbers of experts.

    Raises:
        TypeError: a value is not an integer.
    """
    try:
        return frozenset(map(operator.index, own))
    except TypeError as error:
        raise TypeError(f"experts(..., {own!r}): expected the numbers of experts, such as range(8)") from error


def _compiled(expression: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid pattern: {error}") from error


def _expect_text(pattern: str, example: str) -> str:
    """Return the pattern if it is text and not empty.

    Raises:
        ValueError: it is not text, or empty.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"{pattern!r} is not a pattern; pass text such as {example!r}")
    return pattern


def _glob_text(pattern: str, shown: str) -> str:
    """Return a pattern of `glob` as a regular expression. Errors show the pattern as `shown`."""
    parts = _expect_text(pattern, "params/*/kernel").split("/")
    expression = ""
    for number, part in enumerate(parts):
        last = number + 1 == len(parts)
        if part == "**":
            expression += ".*" if last else "(?:.*/)?"
        else:
            expression += _key_expression(part, shown) + ("" if last else "/")
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
                raise ValueError(f"{pattern!r} is not a valid pattern: '[' is not closed; write '[[]' for '['")
            inner = part[position:end].replace("\\", "\\\\").replace("[", "\\[")
            negated = inner.startswith("!")
            inner = inner[1:] if negated else inner.replace("^", "\\^", 1) if inner.startswith("^") else inner
            expression += f"[^/{inner}]" if negated else f"[{inner}]"
            position = end + 1
        else:
            expression += re.escape(character) if character != "\0" else character
    return expression


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text: ``0-7, 9``."""
    numbered = enumerate(numbers)
    # In a run of consecutive numbers, the number minus its position is constant.
    runs = [[number for _, number in run] for _, run in itertools.groupby(numbered, lambda pair: pair[1] - pair[0])]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown[:10]) + (", ..." if len(shown) > 10 else "")
