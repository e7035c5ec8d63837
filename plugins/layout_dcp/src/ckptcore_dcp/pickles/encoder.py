"""Encodes a value as a pickle of protocol 2 or 4. The same value gives the same bytes in every process.

The opcodes are described in ``Lib/pickletools.py`` of CPython. Protocol 2 output uses only opcodes
that ``torch.load`` accepts with ``weights_only=True``. For small lists, tuples and dicts of texts,
integers and floats, the output equals that of `pickle.dumps` if equal texts are the same object.
The encoder uses a work list instead of recursion, so the nesting depth is not limited.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ckptcore.errors import UnsupportedLeafError
from ckptcore_dcp.pickles.values import Call, Global, Persistent, Value, brief


def _none_opcode(value: None) -> bytes:
    return b"N"


def _bool_opcode(value: bool) -> bytes:
    return b"\x88" if value else b"\x89"


def _int_opcodes(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -0x80000000 <= value < 0x80000000:
        return b"J" + value.to_bytes(4, "little", signed=True)
    size = (value.bit_length() >> 3) + 1
    body = value.to_bytes(size, "little", signed=True)
    if size > 1 and body[-1] == 0xFF and body[-2] & 0x80:  # -2**(8 * n - 1) needs one byte less
        body = body[:-1]
    if len(body) > 255:
        raise UnsupportedLeafError(
            f"{brief(value)} cannot be written to a pickle that torch reads; expected at most 255 bytes; save "
            "it as text"
        )
    return b"\x8a%c" % len(body) + body


def _float_opcodes(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


_PLAIN_OPCODES: Final[Mapping[type, Callable[[Any], bytes]]] = {
    int: _int_opcodes,
    float: _float_opcodes,
    bool: _bool_opcode,
    type(None): _none_opcode,
}
"""Functions that return the opcodes of a value, for types that need neither the memo nor the work list."""


_FLAT: Final = frozenset({int, str, bool, float, type(None), bytes, Global})
"""Types that are written without the work list."""


class _Opcodes:
    """An entry of the work list: opcodes to write."""

    __slots__ = ("opcodes",)

    def __init__(self, opcodes: bytes) -> None:
        self.opcodes = opcodes


class _Steps:
    """An entry of the work list: the items, pairs and state of a call. Skipped if the call was already written."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces


class _Build:
    """An entry of the work list: opcodes that build a tuple, set or call from its parts on the reader's stack."""

    __slots__ = ("discard", "opcodes", "value")

    def __init__(self, value: Any, opcodes: bytes, discard: bytes) -> None:
        self.value = value
        self.opcodes = opcodes
        self.discard = discard
        """Opcodes that remove the parts from the reader's stack. Used if the value was already written in a cycle."""


def _is_flat(value: tuple[Value, ...]) -> bool:
    """Return whether a tuple contains only values of `_FLAT` types, and tuples of such values."""
    for each in value:
        if each.__class__ not in _FLAT and (each.__class__ is not tuple or not _FLAT.issuperset(map(type, each))):
            return False
    return True


def _sorted_items(items: Iterable[Value]) -> list[Value]:
    """Return the items of a set, sorted if all are texts, bytes or numbers, so that processes use the same order."""
    ordered: list[Any] = list(items)
    kinds = set(map(type, ordered))
    if (len(kinds) == 1 and kinds <= {str, bytes, int, float, bool}) or kinds <= {int, float, bool}:
        ordered.sort()
    return ordered


_BATCH: Final = 1000
"""Maximum number of items per APPENDS, SETITEMS or ADDITEMS, as in `pickle`. It limits the reader's stack."""
_FRAME: Final = 64 * 1024
"""Minimum size at which a frame of protocol 4 is ended, in bytes. The last frame may be smaller."""
_SMALLEST_FRAME: Final = 4
"""Minimum size of a body that is written with a FRAME opcode, in bytes."""
_TUPLES: Final = (b")", b"\x85", b"\x86", b"\x87")
"""EMPTY_TUPLE, TUPLE1, TUPLE2 and TUPLE3."""


_LONG: Final = 1000
"""Longer lists of numbers are written by Python's own pickle, which is 20 times as fast."""

_NUMBERS: Final = frozenset({type(None), bool, int, float})


def write_pickle(value: Value, *, protocol: int) -> bytes:
    """Return the pickle of a value, with protocol 2 (as ``torch.save``) or 4 (as ``.metadata``).

    A list, dict, tuple, set or `Call` that occurs several times is written once, and is one object
    again after reading. Equal texts, bytes and globals are shared. Sets of texts, of bytes or of
    numbers are written in sorted order, other sets in iteration order. To write a `bytearray`, pass
    the `Call` that creates it.

    Raises:
        UnsupportedLeafError: the value contains something other than a `Value`, or a tuple or `Call`
            that contains itself, except through a list, a dict, or the items or state of a `Call`.
        ValueError: the protocol is not supported.
    """
    if protocol not in (2, 4):
        raise ValueError(f"cannot write a pickle of protocol {protocol}; expected 2 or 4")
    if protocol == 2 and value.__class__ in _PLAIN_OPCODES:
        # Fast path for most values.
        return b"\x80\x02" + _PLAIN_OPCODES[value.__class__](value) + b"."
    if value.__class__ in (list, tuple) and len(value) > _LONG and {*map(type, value)} <= _NUMBERS:
        return pickle.dumps(value, protocol)
    return _Encoder(protocol).encode(value)


class _Encoder:
    """Writes one pickle. Not thread-safe; the value must not change during encoding."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._parts: list[bytes] = []
        self._done: list[bytes] = []
        self._memo: dict[object, int] = {}  # keys: id() of containers and calls, (type, value) of other values
        self._open: dict[int, int] = {}  # size of the memo when `_enter` was called, by id()
        self._todo: list[Any] = []
        self._kept: list[object] = []  # keeps the encoder's own objects alive, so that their id() is not reused
        self._writers: dict[type, Callable[[Any], None]] = {
            str: self._text,
            int: self._plain,
            tuple: self._tuple,
            Call: self._call,
            dict: self._dict,
            list: self._list,
            Global: self._global,
            float: self._plain,
            bool: self._plain,
            type(None): self._plain,
            bytes: self._bytes,
            Persistent: self._persistent,
            complex: self._complex,
            set: self._set,
            frozenset: self._frozenset,
        }

    def encode(self, value: Value) -> bytes:
        """See `write_pickle`."""
        todo, writers, parts = self._todo, self._writers, self._parts
        todo.append(value)
        framed = self._protocol >= 4
        count = 0
        while todo:
            item = todo.pop()
            kind = item.__class__
            if kind is _Opcodes:
                parts.append(item.opcodes)
            elif kind is _Build:
                self._finish(item)
            elif kind is _Steps:
                self._later(item.pieces)
            else:
                writer = writers.get(kind)
                if writer is None:
                    raise UnsupportedLeafError(
                        f"a value of {kind.__module__}.{kind.__qualname__} cannot be written to a pickle of data; "
                        "expected None, bool, int, float, complex, str, bytes, list, tuple, dict, set or the "
                        "description of a torch object; convert it first"
                    )
                writer(item)
            count += 1
            if framed and count % 1024 == 0:
                self._end_frame(_FRAME)
        parts.append(b".")
        if not framed:
            return b"\x80\x02" + b"".join(parts)
        self._end_frame(0)
        return b"\x80\x04" + b"".join(self._done)

    def _end_frame(self, least: int) -> None:
        """End a frame if it has at least `least` bytes."""
        body = b"".join(self._parts)
        self._parts.clear()  # keep the same list, because `encode` has a reference to it
        if len(body) < least:
            self._parts.append(body)
            return
        if len(body) >= _SMALLEST_FRAME:
            self._done.append(b"\x95" + len(body).to_bytes(8, "little"))
        self._done.append(body)

    def _recall(self, name: object) -> bool:
        """Write a reference to a memo entry. Return False if there is none."""
        index = self._memo.get(name)
        if index is None:
            return False
        self._parts.append(b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little"))
        return True

    def _memoize(self, name: object) -> None:
        index = self._memo[name] = len(self._memo)
        if self._protocol >= 4:
            self._parts.append(b"\x94")
        else:
            self._parts.append(b"q%c" % index if index < 256 else b"r" + index.to_bytes(4, "little"))

    def _enter(self, value: Any) -> None:
        """Record that the parts of a value will be written. Raise an error if the value contains itself.

        A cycle through a list, a dict, or the items or state of a call is allowed, because such an object
        enters the memo before its content is written. So the memo grows in each round of an allowed cycle.
        """
        size = len(self._memo)
        if self._open.get(id(value)) == size:
            raise UnsupportedLeafError(f"a {brief(value)} contains itself, which a pickle cannot represent")
        self._open[id(value)] = size

    def _finish(self, made: _Build) -> None:
        value = made.value
        self._open.pop(id(value), None)
        index = self._memo.get(id(value))
        if index is not None:  # a cycle: one of the parts contains the value, and already wrote it
            self._parts.append(made.discard)
            self._recall(id(value))
            if value.__class__ is Call:
                del self._todo[-1]  # skip its items and state, which were already written
            return
        self._parts.append(made.opcodes)
        self._memoize(id(value))

    def _plain(self, value: Any) -> None:
        self._parts.append(_PLAIN_OPCODES[value.__class__](value))

    def _text(self, value: str) -> None:
        name = (str, value)
        if self._recall(name):
            return
        body = value.encode("utf-8", "surrogatepass")
        if len(body) < 256 and self._protocol >= 4:
            self._parts.append(b"\x8c%c" % len(body) + body)
        else:
            self._parts.append(self._counted(b"X", b"\x8d", body))
        self._memoize(name)

    def _bytes(self, value: bytes) -> None:
        name = (bytes, value)
        if self._protocol >= 4:
            if self._recall(name):
                return
            if len(value) < 256:
                self._parts.append(b"C%c" % len(value) + value)
            else:
                self._parts.append(self._counted(b"B", b"\x8e", value))
            self._memoize(name)
        else:  # also for empty bytes: `pickle` calls ``bytes``, which torch rejects with weights_only=True
            self._reduce(name, Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))

    def _counted(self, opcode: bytes, long_opcode: bytes, body: bytes) -> bytes:
        if len(body) < 2**32:
            return opcode + len(body).to_bytes(4, "little") + body
        if self._protocol < 4:
            raise UnsupportedLeafError(
                f"a text of {len(body)} bytes cannot be written to a pickle of protocol 2; expected less than 4 GiB; "
                "save an array of its bytes"
            )
        return long_opcode + len(body).to_bytes(8, "little") + body

    def _complex(self, value: complex) -> None:
        module = "builtins" if self._protocol >= 4 else "__builtin__"
        self._reduce(None, Global(module, "complex"), (value.real, value.imag))

    def _reduce(self, name: object, function: Global, arguments: tuple[Value, ...]) -> None:
        """Write a function call that builds a value for which there is no opcode.

        Args:
            name: key of the value in the memo; None to write the value again at each use.
            function: the function to call.
            arguments: at most two values that are not containers.
        """
        if name is not None and self._recall(name):
            return
        self._global(function)
        if not arguments:
            self._parts.append(b")")
        for argument in arguments:
            self._writers[type(argument)](argument)
        if arguments:
            self._parts.append(b"\x86" if len(arguments) == 2 else b"\x85")
            if name is not None:
                self._memoize((tuple, name))  # never recalled; keeps the memo numbers equal to those of `pickle`
        self._parts.append(b"R")
        if name is not None:
            self._memoize(name)

    def _global(self, value: Global) -> None:
        name = (Global, value.module, value.name)
        if self._recall(name):
            return
        if self._protocol >= 4:
            self._text(value.module)
            self._text(value.name)
            self._parts.append(b"\x93")
        else:
            if "\n" in value.module or "\n" in value.name:
                raise UnsupportedLeafError(
                    f"{brief(value)!r} contains a line break, which pickles of protocol 2 cannot represent"
                )
            self._parts.append(f"c{value.module}\n{value.name}\n".encode())
        self._memoize(name)

    def _persistent(self, value: Persistent) -> None:
        self._todo.append(_Opcodes(b"Q"))
        self._todo.append(value.id)

    def _tuple(self, value: tuple[Value, ...]) -> None:
        if not value:
            self._parts.append(b")")
            return
        if self._recall(id(value)):
            return
        count = len(value)
        if _is_flat(value):  # fast path without the work list: most tuples are shapes
            if count > 3:
                self._parts.append(b"(")
            for each in value:
                self._writers[each.__class__](each)
            self._parts.append(_TUPLES[count] if count <= 3 else b"t")
            self._memoize(id(value))
            return
        self._enter(value)
        if count <= 3:
            self._todo.append(_Build(value, _TUPLES[count], b"0" * count))
        else:
            self._parts.append(b"(")
            self._todo.append(_Build(value, b"t", b"1"))
        self._todo.extend(reversed(value))

    def _list(self, value: list[Value]) -> None:
        if self._recall(id(value)):
            return
        self._parts.append(b"]")
        self._memoize(id(value))
        self._later(self._batches(value, b"a", b"e"))

    def _dict(self, value: dict[Value, Value]) -> None:
        if self._recall(id(value)):
            return
        self._parts.append(b"}")
        self._memoize(id(value))
        self._later(self._batches(value.items(), b"s", b"u"))

    def _set(self, value: set[Value]) -> None:
        if self._recall(id(value)):
            return
        if self._protocol < 4:
            self._enter(value)
            self._set_call(value, "set")
            return
        self._parts.append(b"\x8f")
        self._memoize(id(value))
        work: list[Any] = []
        items = _sorted_items(value)
        for start in range(0, len(items), _BATCH):
            work.append(_Opcodes(b"("))
            work.extend(items[start : start + _BATCH])
            work.append(_Opcodes(b"\x90"))
        self._later(work)

    def _frozenset(self, value: frozenset[Value]) -> None:
        if self._recall(id(value)):
            return
        self._enter(value)
        if self._protocol < 4:
            self._set_call(value, "frozenset")
            return
        self._parts.append(b"(")
        self._todo.append(_Build(value, b"\x91", b"1"))
        self._todo.extend(reversed(_sorted_items(value)))

    def _set_call(self, value: set[Value] | frozenset[Value], name: str) -> None:
        self._global(Global("__builtin__", name))
        self._parts.append(b"]")
        self._later([*self._batches(_sorted_items(value), b"a", b"e"), _Build(value, b"\x85R", b"00")])

    def _call(self, value: Call) -> None:
        if self._recall(id(value)):
            return
        after: list[Any] = []
        if value.appended:
            after += self._batches(value.appended, b"a", b"e")
        if value.pairs:
            after += self._batches(value.pairs, b"s", b"u")
        if value.state is not None:
            after += [value.state, _Opcodes(b"b")]
        if value.function.__class__ is Global and not value.keywords and _is_flat(value.arguments):
            self._writers[Global](value.function)
            self._tuple(value.arguments)
            self._parts.append(b"\x81" if value.new else b"R")
            self._memoize(id(value))
            self._later(after)
            return
        self._enter(value)
        todo = self._todo
        todo.append(_Steps(after))
        if value.keywords:
            if not value.new or self._protocol < 4:
                raise UnsupportedLeafError(
                    f"a {brief(value)} has keywords, which only NEWOBJ_EX of protocol 4 supports"
                )
            todo.append(_Build(value, b"\x92", b"000"))
            keywords = dict(value.keywords)
            self._kept.append(keywords)
            todo.append(keywords)
        else:
            todo.append(_Build(value, b"\x81" if value.new else b"R", b"00"))
        todo.append(value.arguments)
        todo.append(value.function)

    def _later(self, work: list[Any]) -> None:
        work.reverse()
        self._todo.extend(work)

    def _batches(self, items: Iterable[Any], opcodes: bytes, many: bytes) -> list[Any]:
        """Return work list entries that add items, or pairs, to the container on the reader's stack.

        Args:
            items: the items, or pairs if `many` is SETITEMS.
            opcodes: opcode that adds a single item or pair.
            many: opcode that adds the items or pairs after a MARK.
        """
        rows: Sequence[Any] = list(items)
        if not rows:
            return []
        flat = many == b"u"
        if len(rows) == 1:
            return [*(rows[0] if flat else rows), _Opcodes(opcodes)]
        work: list[Any] = []
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            work.append(_Opcodes(b"("))
            if flat:
                for pair in batch:
                    work.extend(pair)
            else:
                work.extend(batch)
            work.append(_Opcodes(many))
        return work
