"""Patterns: select the leaves of a transform, and name its results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

from ckptcore.model.tree import Key, TreePath

Pattern: TypeAlias = str | re.Pattern[str]
"""Selects leaves: a template, or a regular expression for the whole text of a path, with named groups as fields.

The text of a path is its keys, joined by ``/``. In a template:

- ``{name}`` is a field for text of one key without dots; repeated fields must match the same text
- ``{name:d}`` matches digits; a key of a result that consists of only this field is an integer
- ``{name...}`` matches any text, of one or several keys
- ``*`` matches any text of one key, ``**`` any text
- other text matches itself; ``{{`` and ``}}`` match braces
"""

_TOKEN: Final = re.compile(r"(\{\{|\}\}|\*\*|\*|\{(?P<name>[A-Za-z_]\w*)(?P<kind>:d|\.\.\.)?\}|[{}])")

_EXPRESSIONS: Final[Mapping[str, str]] = {"": "[^/.]+", ":d": "[0-9]+", "...": ".+"}


@dataclass(frozen=True, slots=True)
class FieldMatch:
    """The match of a field in a path.

    Attributes:
        text: the matched text.
        keys: the matched keys, if the text consists of whole keys; else None.
    """

    text: str
    keys: TreePath | None = None

    def __eq__(self, other: object) -> bool:
        """Compare the text."""
        return isinstance(other, FieldMatch) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


Fields: TypeAlias = Mapping[str, FieldMatch]
"""Matches by field name."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    kind: str


@dataclass(frozen=True)
class Template:
    """A parsed pattern: a template, or a regular expression.

    Attributes:
        pattern: the pattern itself.
    """

    pattern: Pattern

    @cached_property
    def _parts(self) -> Sequence[str | _Field | None]:
        """The literal texts and fields of a template, and None for each wildcard."""
        assert isinstance(self.pattern, str)  # regular expressions have no parts
        parts: list[str | _Field | None] = []
        end = 0
        for token in _TOKEN.finditer(self.pattern):
            parts.append(self.pattern[end : token.start()])
            end = token.end()
            if token["name"]:
                parts.append(_Field(token["name"], token["kind"] or ""))
            elif token[0] in ("{{", "}}"):
                parts.append(token[0][0])
            elif token[0] in ("*", "**"):
                parts.append(None)
            else:
                raise ValueError(
                    f"{self.pattern!r} has an invalid field; use {{name}}, {{name:d}} or "
                    "{name...}, and write braces in text as {{ and }}"
                )
        parts.append(self.pattern[end:])
        return [part for part in parts if part != ""]

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        if not isinstance(self.pattern, str):
            return self.pattern
        parts, seen = [], set[str]()
        wild = iter(re.findall(r"\*\*|\*", self.pattern))
        for part in self._parts:
            if part is None:
                parts.append(".*" if next(wild) == "**" else "[^/]*")
            elif isinstance(part, str):
                parts.append(re.escape(part))
            elif part.name in seen:
                parts.append(f"(?P={part.name})")
            else:
                seen.add(part.name)
                parts.append(f"(?P<{part.name}>{_EXPRESSIONS[part.kind]})")
        return re.compile("".join(parts), re.DOTALL)

    @cached_property
    def fields(self) -> frozenset[str]:
        """Names of the fields, or of the named groups of a regular expression.

        Raises:
            ValueError: for an invalid field.
        """
        return frozenset(self._expression.groupindex)

    @property
    def is_exact(self) -> bool:
        """True if the fields determine the path: a template without wildcards."""
        return isinstance(self.pattern, str) and None not in self._parts

    def match(self, path: TreePath) -> Fields | None:
        """Return the fields of a path, or None if it does not match."""
        match = self._expression.fullmatch(path_text(path))
        if match is None:
            return None
        return {
            name: _field_match(path, *match.span(name))
            for name in self._expression.groupindex
            if match[name] is not None
        }

    def path(self, fields: Fields) -> TreePath:
        """Return the path for these fields.

        Raises:
            ValueError: for a regular expression or wildcards, or for an unknown field.
        """
        if not self.is_exact:
            raise ValueError(f"{self} does not determine a path; use a template without '*'")
        if not self.pattern:
            return ()
        keys: list[Key] = []
        segment: list[str | _Field] = []
        for part in [*self._parts, "/"]:
            if isinstance(part, _Field):
                segment.append(part)
            elif part is not None:
                first, *others = part.split("/")
                segment.append(first)
                for text in others:
                    keys.extend(self._keys([token for token in segment if token], fields))
                    segment = [text]
        return tuple(keys)

    def _keys(self, segment: Sequence[str | _Field], fields: Fields) -> Sequence[Key]:
        """Return the keys for the part of a template between two ``/``.

        A part without text and fields is an empty key. A part whose fields all match empty text has
        no key.
        """
        if not segment:
            return ("",)
        text = "".join([token if isinstance(token, str) else self._known(token, fields).text for token in segment])
        if len(segment) == 1 and isinstance(alone := segment[0], _Field):
            field = fields[alone.name]
            if alone.kind == ":d" and field.text.isdecimal():
                return (int(field.text),)
            if field.keys is not None:
                return field.keys
        return text.split("/") if text else ()

    def _known(self, field: _Field, fields: Fields) -> FieldMatch:
        if field.name not in fields:
            known = f"the fields are {', '.join(map(repr, fields))}" if fields else "there are no fields"
            raise ValueError(f"{self} has the unknown field {field.name!r}; {known}")
        return fields[field.name]

    def spanning_as(self, other: Template) -> str:
        """Return this template as text. Fields that can match several keys in `other` are marked ``...``."""
        assert isinstance(self.pattern, str)  # regular expressions do not determine paths
        spanning = {part.name for part in other._parts if isinstance(part, _Field) and part.kind == "..."}

        def spell(token: re.Match[str]) -> str:
            return f"{{{token['name']}...}}" if token["name"] in spanning else token[0]

        return _TOKEN.sub(spell, self.pattern)

    def __str__(self) -> str:
        return repr(self.pattern) if isinstance(self.pattern, str) else f"/{self.pattern.pattern}/"


def exactly(text: str) -> Template:
    """Return a pattern that matches only the path with this text."""
    return Template(re.compile(re.escape(text)))


def text_path(text: str) -> TreePath:
    """Parse a path. All keys are text."""
    return tuple(text.split("/")) if text else ()


def path_text(path: TreePath) -> str:
    """Return the keys of a path, joined by ``/``."""
    return "/".join(map(str, path))


def _field_match(path: TreePath, start: int, stop: int) -> FieldMatch:
    """Return the match for a range of a path's text."""
    text = path_text(path)[start:stop]
    position, first = 0, None
    for number, key in enumerate(path):
        if position == start:
            first = number
        position += len(str(key))
        if position == stop and first is not None:
            return FieldMatch(text, path[first : number + 1])
        position += 1
    return FieldMatch(text)
