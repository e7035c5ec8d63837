"""What a pickle can hold: plain values, and inert records of what it would have imported and called.

A pickle says with a few bytes that one object stands in many places, or inside itself. So a small file can hold a value
that a walk never gets to the end of, and one nested deeper than any stack. Reading makes such values in bounded memory;
whoever walks them calls `check_walk` first, or goes no further than the places that it knows.
``repr`` of a list or tuple walks too: messages show a value with `brief`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ckptcore.errors import CorruptCheckpointError

__all__ = ["Call", "Compact", "Global", "Persistent", "Value", "brief", "check_walk"]

Value: TypeAlias = (
    "None | bool | int | float | complex | str | bytes | list[Value] | tuple[Value, ...] | dict[Value, Value] | "
    "set[Value] | frozenset[Value] | Global | Call | Compact | Persistent"
)

_NO_KEYWORDS: Final[Mapping[str, Value]] = MappingProxyType({})
_SHOWN: Final = 80
"""How much of a text `brief` shows, in characters."""


@dataclass(frozen=True, slots=True, repr=False)
class Global:
    """The name of a class or function. It is never imported; names may have dots in them, or be of nothing at all."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"<{brief(self)}>"


@dataclass(slots=True, eq=False, repr=False, init=False)
class Call:
    """What a pickle would have called, and what it would have done to the result. Nothing is called.

    Two are equal only where they are one object, as keys of a dict too: what the object would have said is not known.

    Attributes:
        function: a `Global`, or the `Call` whose result would have been called.
        arguments: of the call.
        state: what BUILD would have given to ``__setstate__`` or ``__dict__``, or None.
        appended: what would have been appended to it, in order.
        pairs: keys and values that would have been set in it, in order; the keys need not be hashable.
        keywords: of the call; NEWOBJ_EX alone has some.
        new: whether ``function.__new__`` would have been called (NEWOBJ, NEWOBJ_EX) instead of ``function`` (REDUCE).
    """

    function: Value
    arguments: tuple[Value, ...]
    state: Value
    appended: Sequence[Value]
    pairs: Sequence[tuple[Value, Value]]
    keywords: Mapping[str, Value]
    new: bool

    def __init__(
        self,
        function: Value,
        arguments: tuple[Value, ...] = (),
        state: Value = None,
        appended: Sequence[Value] = (),
        pairs: Sequence[tuple[Value, Value]] = (),
        keywords: Mapping[str, Value] = _NO_KEYWORDS,
        new: bool = False,
    ) -> None:
        # Written out, because a `.metadata` makes millions of these: most have neither items nor keywords, and share
        # the empty ones.
        self.function = function
        self.arguments = arguments
        self.state = state
        self.appended = appended
        self.pairs = pairs
        self.keywords = keywords
        self.new = new

    def __repr__(self) -> str:
        return f"<{brief(self)}>"


@dataclass(frozen=True, slots=True, repr=False)
class Persistent:
    """A reference to what lies outside the pickle: torch's are ``("storage", type, key, device, elements)``."""

    id: Value

    def __repr__(self) -> str:
        return f"<{brief(self)}>"


class Compact(tuple[Any, ...]):
    """An object that an `ObjectReader` read in one step: the name of its class, then what it is made of.

    Like an object, it is equal only to itself: a file cannot choose its hash.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


def brief(value: Value) -> str:
    """A text of at most some 200 characters that says what a value is, for messages.

    It does not go into what the value contains.
    """
    if isinstance(value, Global):
        return f"{_cut(value.module)}.{_cut(value.name)}"
    if isinstance(value, Call):
        called = (
            brief(value.function) if isinstance(value.function, Global) else f"the result of a {_kind(value.function)}"
        )
        return f"call of {called} with {len(value.arguments)} arguments"
    if isinstance(value, Persistent):
        inner = value.id
        return f"reference {_shown(inner)}" if isinstance(inner, str | int) else f"reference by a {_kind(inner)}"
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"{_kind(value)} of {len(value)}"
    return _shown(value)


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return repr(_cut(value))
    if isinstance(value, bytes):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN:
        return f"an integer of {value.bit_length()} bits"  # str() of a long one is quadratic, and refused by Python
    return repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _kind(value: Value) -> str:
    return type(value).__name__


def check_walk(value: Value, *, key: str, visits: int, depth: int) -> None:
    """Refuse a value that a recursive walk could not get to the end of.

    A value that stands in several places counts at each of them, as a walk would meet it.

    Args:
        key: the object it was read from, for the error.
        visits: the most values a walk may meet.
        depth: the most values that may stand one inside the other.

    Raises:
        CorruptCheckpointError: if there are more; in at most about ``visits`` steps.
    """
    level: list[Value] = [value]
    met = 0
    for _ in range(depth):
        inner: list[Value] = []
        for each in level:
            met += 1
            if met + len(inner) > visits:
                break
            _add_parts(inner, each)
        if met + len(inner) > visits:
            raise CorruptCheckpointError(
                f"{key} holds a pickle whose value unfolds to more than {visits} values; one that was saved from "
                "memory shares less; save the checkpoint again",
                key=key,
            )
        if not inner:
            return
        level = inner
    raise CorruptCheckpointError(
        f"{key} holds a pickle whose values stand more than {depth} deep inside each other; expected a state that "
        "can be walked; save the checkpoint again",
        key=key,
    )


def _add_parts(parts: list[Value], value: Value) -> None:
    """Add what stands directly in a value."""
    match value:
        case list() | tuple() | set() | frozenset():
            parts.extend(value)
        case dict():
            parts.extend(value.keys())
            parts.extend(value.values())
        case Persistent():
            parts.append(value.id)
        case Call():
            parts.append(value.function)
            parts.extend(value.arguments)
            parts.append(value.state)
            parts.extend(value.appended)
            for pair in value.pairs:
                parts.extend(pair)
            parts.extend(value.keywords.values())
