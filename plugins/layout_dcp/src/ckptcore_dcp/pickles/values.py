"""Values of a pickle: plain values, and inert records of the imports and calls that it requests.

With a few bytes a pickle can make one object occur in many places, or inside itself. So a small
file can describe a value on which a naive recursion never ends or overflows the stack. Reading such
values takes limited memory; code that walks them must limit its own visits and depth. ``repr`` of a
list or tuple walks too, so messages show values with `brief`.

`KeyCheck` limits the cost of hashing the keys of dicts and the items of sets, because a hostile file can choose them.
Python hashes tuples recursively, and a shared tuple once per occurrence. A file can also contain thousands of integers,
floats or tuples with the same hash, which makes building a dict quadratic. Both costs are limited. Strings and bytes
are safe, because Python hashes them with a secret.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from ckptcore.errors import CorruptCheckpointError

Value: TypeAlias = (
    "None | bool | int | float | complex | str | bytes | list[Value] | tuple[Value, ...] | dict[Value, Value] | "
    "set[Value] | frozenset[Value] | Global | Call | CompactObject | OutOfLine | Persistent"
)

_NO_KEYWORDS: Final[Mapping[str, Value]] = MappingProxyType({})
_SHOWN: Final = 80
"""Maximum length of a text in `brief`, in characters."""


@dataclass(frozen=True, slots=True, repr=False)
class Global:
    """The name of a class or function. It is never imported; it may contain dots, or not exist."""

    module: str
    name: str

    def __repr__(self) -> str:
        return f"<{brief(self)}>"


@dataclass(slots=True, eq=False, repr=False, init=False)
class Call:
    """A function call in a pickle, and changes to its result. Nothing is called.

    Equality is identity, for dict keys too, because the equality of the real object is unknown.

    Attributes:
        function: a `Global`, or the `Call` whose result would have been called.
        arguments: positional arguments.
        state: argument of BUILD, for ``__setstate__`` or ``__dict__``, or None.
        appended: items that would have been appended, in order.
        pairs: keys and values that would have been set, in order; keys need not be hashable.
        keywords: keyword arguments; only NEWOBJ_EX has them.
        new: True for ``function.__new__`` (NEWOBJ, NEWOBJ_EX), False for ``function`` (REDUCE).
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
        # A plain `__init__` is faster: `.metadata` creates millions of calls. Most share the empty
        # items and keywords.
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
    """A reference to data outside the pickle. torch uses ``("storage", type, key, device, elements)``."""

    id: Value

    def __repr__(self) -> str:
        return f"<{brief(self)}>"


class CompactObject(tuple[Any, ...]):
    """An object that an `ObjectReader` read in one step: the name of its class, then its parts.

    Equality is identity, so a file cannot choose its hash.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OutOfLine:
    """A long text, or long bytes, of a pickle that was not read into memory. Equality is identity.

    Attributes:
        start, stop: their byte range in the pickle.
        is_text: True for a text, which is UTF-8.
        fetch: reads bytes of the pickle.
    """

    start: int
    stop: int
    is_text: bool
    fetch: Callable[[int, int], bytes]

    def decode(self, encoding: str, errors: str = "strict") -> OutOfLine:
        """Return this value as a text if `errors` is ``surrogatepass``, else as bytes.

        Has the signature of `bytes.decode`, which readers of literals call. They pass ``surrogatepass`` for a text,
        but not for a string of Python 2, which may contain bytes.
        """
        return OutOfLine(self.start, self.stop, errors == "surrogatepass", self.fetch)

    def read(self) -> str | bytes:
        """Return the text or the bytes.

        Raises:
            CorruptCheckpointError: the text is not UTF-8.
        """
        data = self.fetch(self.start, self.stop)
        if not self.is_text:
            return data
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise malformed("it", self.start, f"a text that is not UTF-8 ({error.reason})") from error

    def __repr__(self) -> str:
        return f"<{brief(self)}>"


class Place(NamedTuple):
    """The byte range of a text or of bytes in a pickle.

    Attributes:
        start, stop: the range.
        escaped: True for a line of protocol 0, which has escapes.
    """

    start: int
    stop: int
    escaped: bool = False


class Places:
    """Byte ranges of the texts and bytes of a pickle, by the identity of the value."""

    __slots__ = ("_ranges",)

    def __init__(self) -> None:
        """Create an empty collection."""
        self._ranges: dict[int, tuple[object, Place]] = {}  # by id(); holds the values, so that no id is reused

    def add(self, value: Value, start: int, stop: int, escaped: bool = False) -> None:
        """Add the byte range of a text, which is UTF-8 in the pickle, or of bytes."""
        self._ranges[id(value)] = value, Place(start, stop, escaped)

    def add_literal(self, value: Value, stop: int) -> None:
        """Add the value of an opcode whose argument ends at `stop`. Skips numbers."""
        if isinstance(value, Call):  # a bytearray
            (value,) = value.arguments
        if isinstance(value, bytes):
            self.add(value, stop - len(value), stop)
        elif isinstance(value, str):
            self.add(value, stop - len(value.encode("utf-8", "surrogatepass")), stop)

    def add_line(self, value: Value, start: int, stop: int) -> None:
        """Add the value of a line of protocol 0. Skips numbers."""
        if isinstance(value, str | bytes):
            self.add(value, start, stop, escaped=True)

    def find(self, value: str | bytes) -> Place | None:
        """Return the byte range of a value of this pickle, or None."""
        place = self._ranges.get(id(value))
        return None if place is None else place[1]


def brief(value: Value) -> str:
    """Describe a value for messages, in about 200 characters at most.

    Does not visit nested values.
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
    if isinstance(value, OutOfLine):
        return f"{'text' if value.is_text else 'bytes'} of {value.stop - value.start} bytes"
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"{_kind(value)} of {len(value)}"
    return _shown(value)


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return repr(_cut(value))
    if isinstance(value, bytes):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN:
        return f"an integer of {value.bit_length()} bits"  # str() of a long integer is quadratic, and limited by Python
    return repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _kind(value: Value) -> str:
    return type(value).__name__


def malformed(key: str, position: int, problem: str) -> CorruptCheckpointError:
    """Return the error for invalid content near byte ``position`` of the data."""
    return CorruptCheckpointError(
        f"{key} contains a pickle that cannot be read, near byte {position}: {problem}; the file is damaged or "
        "contains something other than data; restore it or save the checkpoint again",
        key=key,
        start=position,
    )


def truncated(key: str, position: int, stop: int) -> CorruptCheckpointError:
    """Return the error for a pickle that lacks some of bytes ``position`` to ``stop``.

    The error's ``stop`` is beyond the data, so a caller that passed only a part of an object can read more.
    """
    return CorruptCheckpointError(
        f"{key} contains a pickle that ends too early: bytes {position} to {stop} are missing; the "
        "file is cut short or damaged; restore it or save the checkpoint again",
        key=key,
        start=position,
        stop=stop,
    )


PLAIN_KEYS: Final = frozenset({str, bytes, bool, type(None), Call, CompactObject, Global})
"""Types whose hashes a file cannot choose. A `Call` or a `CompactObject` is hashed by identity."""

_MAX_EQUAL_HASHES: Final = 64
"""Maximum number of keys with the same hash in one dict."""
MAX_KEY_PARTS: Final = 100
"""Maximum number of values that make up a key."""
_LARGE: Final = sys.hash_info.modulus
"""Larger integers share their hashes with smaller ones."""


class KeyCheck:
    """Counts equal hashes in the dicts and sets of one pickle. Not thread-safe."""

    def __init__(self, key: str) -> None:
        self._key = key
        # By identity. The tuple holds a reference to the container, so that no other object gets
        # this identity.
        self._seen: dict[int, tuple[object, dict[int, int]]] = {}

    def check(self, container: object, keys: Iterable[Any], position: int) -> None:
        """Check that the keys can be added to the dict or set at limited cost.

        Args:
            container: the dict or set.
            keys: the keys or items to add.
            position: offset in the pickle, in bytes, for the error.

        Raises:
            CorruptCheckpointError: a key is unhashable or too large, or too many keys have one hash.
        """
        for each in keys:
            kind = type(each)
            if kind in PLAIN_KEYS or (kind is int and -_LARGE < each < _LARGE):
                continue
            self._check_parts(each, position)
            counts = self._seen.setdefault(id(container), (container, {}))[1]
            code = hash(each)
            counts[code] = count = counts.get(code, 0) + 1
            if count > _MAX_EQUAL_HASHES:
                raise malformed(
                    self._key, position, f"more than {_MAX_EQUAL_HASHES} keys of one dict or set have the same hash"
                )

    def _check_parts(self, value: Any, position: int) -> None:
        level = [value]
        count = 1
        # Each round goes one level deeper and adds at least one part, so the number of parts limits
        # the depth.
        while level:
            inner: list[Any] = []
            for each in level:
                kind = type(each)
                if kind is tuple or kind is frozenset:
                    count += len(each)
                    if count > MAX_KEY_PARTS:
                        raise malformed(
                            self._key, position, f"a key of a dict or set consists of more than {MAX_KEY_PARTS} values"
                        )
                    inner.extend(each)
                elif kind is Persistent:
                    count += 1
                    inner.append(each.id)
                elif kind not in PLAIN_KEYS and kind is not int and kind is not float:
                    raise malformed(self._key, position, f"a {brief(each)} cannot be a key of a dict or set")
                if count > MAX_KEY_PARTS:
                    raise malformed(
                        self._key, position, f"a key of a dict or set consists of more than {MAX_KEY_PARTS} values"
                    )
            level = inner
