"""Opcodes that contain a value: numbers, texts and bytes of protocols 0 to 5.

They are described in ``Lib/pickletools.py`` of CPython. Each reader takes the data, the offset of
the opcode's argument and the object's key, and returns the value and the end of the argument.
Lengths are checked against the data before use. Numbers have a maximum length, because parsing long
decimal text takes quadratic time.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from struct import Struct
from typing import Any, Final, TypeAlias

from ckptcore_dcp.pickles.values import Call, Global, OutOfLine, Value, malformed, truncated

_FIRST_WINDOW_BYTES: Final = 1 << 11
"""Size of the first read after a long literal. It is short, because the next long literal often follows soon."""
_WINDOW_BYTES: Final = 1 << 16
_OUT_OF_LINE_BYTES: Final = 1 << 14
"""Minimum length of a literal that is not read into memory."""


class DenseFileError(Exception):
    """A pickle that must be read as a whole, because it has few long literals, or a long line."""


class Window:
    """Bytes of a file, with the methods of `bytes` that the machine calls. Not thread-safe.

    A long slice returns an `OutOfLine` instead of bytes. The machine requests long slices only for literals.

    Attributes:
        fetched: the number of bytes read so far.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, *, most_bytes: int | None) -> None:
        """Create a window. Reads nothing yet.

        Args:
            fetch: reads bytes of the file.
            size: length of the file.
            most_bytes: maximum total bytes to read; `DenseFileError` is raised beyond it. None for no limit.
        """
        self._fetch = fetch
        self._size = size
        self._most_bytes = most_bytes
        self._data = b""
        self._start = 0
        self._nbytes = _WINDOW_BYTES
        self.fetched = 0

    def __len__(self) -> int:
        """Return the length of the file."""
        return self._size

    def __getitem__(self, index: int | slice) -> Any:
        """Return a byte, or several."""
        if index.__class__ is int and 0 <= (position := index - self._start) < len(self._data):
            return self._data[position]
        if isinstance(index, slice):
            start, stop, _ = index.indices(self._size)
            if stop - start >= _OUT_OF_LINE_BYTES:
                return OutOfLine(start, stop, False, self._fetch)
            self._move_to(start, stop)
            return self._data[start - self._start : max(start, stop) - self._start]
        if not 0 <= index < self._size:
            raise IndexError(index)
        self._move_to(index, index + 1)
        return self._data[index - self._start]

    def startswith(self, prefix: bytes, start: int) -> bool:
        """Return True if the bytes at an offset are `prefix`."""
        head: bytes = self[start : start + len(prefix)]
        return head == prefix

    def find(self, byte: bytes, start: int, stop: int | None = None) -> int:
        """Return the offset of a byte from `start` on, or -1."""
        stop = self._size if stop is None else min(stop, self._size)
        while start < stop:
            self._move_to(start, start + 1)
            end = min(self._start + len(self._data), stop)
            position = self._data.find(byte, start - self._start, end - self._start)
            if position >= 0:
                return self._start + position
            start = end
        return -1

    def unpacker(self, numbers: struct.Struct) -> Callable[[Any, int], tuple[Any, ...]]:
        """Return `numbers.unpack_from` for this file."""
        return lambda _, start: numbers.unpack(self[start : start + numbers.size])

    def _move_to(self, start: int, stop: int) -> None:
        if self._start <= start and stop <= self._start + len(self._data):
            return
        follows = self._start <= start <= self._start + len(self._data)
        self._nbytes = min(4 * self._nbytes, _WINDOW_BYTES) if follows else _FIRST_WINDOW_BYTES
        stop = min(max(stop, start + self._nbytes), self._size)
        self.fetched += stop - start
        if self._most_bytes is not None and self.fetched > self._most_bytes:
            raise DenseFileError
        self._data = self._fetch(start, stop)
        self._start = start
        if len(self._data) != stop - start:
            raise IndexError(stop)


Literal: TypeAlias = Callable[[bytes, int, str], tuple[Value, int]]

_MAX_INTEGER: Final = 1024
"""Maximum length of an integer, in bytes."""
_MAX_DIGITS: Final = 2500
"""Maximum length of a number written as text, in characters: enough for `_MAX_INTEGER` bytes."""
_INTEGER: Final = re.compile(rb"[+-]?[0-9]+")
_FLOAT: Final = re.compile(rb"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|nan)")
_ESCAPE: Final = re.compile(rb"\\(x[0-9a-fA-F]{2}|[\\'\"nrtabfv]|[0-7]{1,3}|)")
_PLAIN_ESCAPES: Final = {
    b"\\": b"\\", b"'": b"'", b'"': b'"', b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f",
    b"v": b"\v",
}  # fmt: skip
_DOUBLE: Final = Struct(">d")


def line(data: bytes, position: int, key: str) -> tuple[bytes, int]:
    """Return the bytes from ``position`` to the next newline, and the offset after it.

    Raises:
        CorruptCheckpointError: there is no newline.
    """
    end = data.find(b"\n", position)
    if end < 0:
        raise truncated(key, position, len(data) + 1)
    text = data[position:end]
    if not isinstance(text, bytes):  # a long line of a `Window`: its escapes can only be decoded in memory
        raise DenseFileError
    return text, end + 1


def _counted(size: int, *, signed: bool = False) -> Callable[[bytes, int, str], tuple[bytes, int]]:
    """Return a reader of bytes that follow their length, which takes ``size`` bytes."""

    def read(data: bytes, position: int, key: str) -> tuple[bytes, int]:
        start = position + size
        if start > len(data):
            raise truncated(key, position, start)
        length = int.from_bytes(data[position:start], "little", signed=signed)
        if length < 0:
            raise malformed(key, position, f"a length of {length} bytes")
        if length > len(data) - start:
            raise truncated(key, start, start + length)
        return data[start : start + length], start + length

    return read


def _bytes(size: int) -> Literal:
    return _counted(size)


def _text(size: int) -> Literal:
    counted = _counted(size)

    def read(data: bytes, position: int, key: str) -> tuple[Value, int]:
        counted_bytes, end = counted(data, position, key)
        return _unicode(counted_bytes, position, key), end

    return read


def _unicode(text: bytes, position: int, key: str) -> str:
    try:
        return text.decode("utf-8", "surrogatepass")  # like `pickle`: file names can have lone surrogates
    except UnicodeDecodeError as error:
        raise malformed(key, position, f"a text that is not UTF-8 ({error.reason})") from error


def _python2_text(text: bytes) -> str | bytes:
    """Decode a ``str`` of Python 2: text if possible, as torch does, else bytes."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return text


def _python2_string(size: int) -> Literal:
    counted = _counted(size, signed=size == 4)

    def read(data: bytes, position: int, key: str) -> tuple[Value, int]:
        text, end = counted(data, position, key)
        return _python2_text(text), end

    return read


def _quoted_string(data: bytes, position: int, key: str) -> tuple[Value, int]:
    text, end = line(data, position, key)
    return _python2_text(unquoted(text, position, key)), end


def unquoted(text: bytes, position: int, key: str) -> bytes:
    """Return the bytes of a quoted string of Python 2 with escapes.

    Raises:
        CorruptCheckpointError: it has no quotes, or an invalid escape.
    """
    text = text.rstrip(b"\r")
    if len(text) < 2 or text[0] != text[-1] or text[0] not in b"'\"":
        raise malformed(key, position, "a string without quotes")

    def plain(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code in _PLAIN_ESCAPES:
            return _PLAIN_ESCAPES[code]
        if not code:
            raise malformed(key, position, "a string with an invalid escape")
        return bytes([int(code[1:], 16) if code[0] == ord("x") else int(code, 8) & 0xFF])

    return _ESCAPE.sub(plain, text[1:-1])


def _raw_unicode(data: bytes, position: int, key: str) -> tuple[Value, int]:
    text, end = line(data, position, key)
    try:
        return text.decode("raw-unicode-escape"), end
    except UnicodeDecodeError as error:
        raise malformed(key, position, f"a text with an invalid escape ({error.reason})") from error


def _byte_array(data: bytes, position: int, key: str) -> tuple[Value, int]:
    # Represented as a call, like the bytearrays of protocols before 5.
    content, end = _counted(8)(data, position, key)
    return Call(Global("builtins", "bytearray"), (content,)), end


def _integer(size: int, *, signed: bool = False) -> Literal:
    def read(data: bytes, position: int, key: str) -> tuple[Value, int]:
        end = position + size
        if end > len(data):
            raise truncated(key, position, end)
        return int.from_bytes(data[position:end], "little", signed=signed), end

    return read


def _long(size: int) -> Literal:
    def read(data: bytes, position: int, key: str) -> tuple[Value, int]:
        start = position + size
        if start > len(data):
            raise truncated(key, position, start)
        length = int.from_bytes(data[position:start], "little", signed=size == 4)
        if not 0 <= length <= _MAX_INTEGER:
            raise malformed(key, position, f"an integer of {length} bytes; at most {_MAX_INTEGER} are read")
        if length > len(data) - start:
            raise truncated(key, start, start + length)
        return int.from_bytes(data[start : start + length], "little", signed=True), start + length

    return read


def _number_line(data: bytes, position: int, key: str) -> tuple[bytes, int]:
    end = data.find(b"\n", position, position + _MAX_DIGITS + 1)
    if end < 0:
        if len(data) - position <= _MAX_DIGITS:
            raise truncated(key, position, len(data) + 1)
        raise malformed(key, position, f"a number of more than {_MAX_DIGITS} characters")
    return data[position:end].rstrip(b"\r"), end + 1


def _decimal(data: bytes, position: int, key: str) -> tuple[Value, int]:
    digits, end = _number_line(data, position, key)
    if digits == b"00":  # a bool of protocols 0 and 1
        return False, end
    if digits == b"01":
        return True, end
    return _decimal_value(digits, position, key), end


def _decimal_long(data: bytes, position: int, key: str) -> tuple[Value, int]:
    digits, end = _number_line(data, position, key)
    return _decimal_value(digits.removesuffix(b"L"), position, key), end


def _decimal_value(digits: bytes, position: int, key: str) -> int:
    if not _INTEGER.fullmatch(digits):
        raise malformed(key, position, "an invalid integer")
    return int(digits)


def _decimal_float(data: bytes, position: int, key: str) -> tuple[Value, int]:
    digits, end = _number_line(data, position, key)
    if not _FLOAT.fullmatch(digits):
        raise malformed(key, position, "an invalid number")
    return float(digits), end


def _double(data: bytes, position: int, key: str) -> tuple[Value, int]:
    end = position + 8
    if end > len(data):
        raise truncated(key, position, end)
    try:
        (value,) = _DOUBLE.unpack_from(data, position)
    except TypeError:  # a `Window`
        (value,) = _DOUBLE.unpack(data[position:end])
    assert isinstance(value, float)
    return value, end


def _constant(value: Value) -> Literal:
    def read(data: bytes, position: int, key: str) -> tuple[Value, int]:
        return value, position

    return read


LITERALS: Final[Mapping[int, Literal]] = {
    ord("I"): _decimal,  # INT
    ord("L"): _decimal_long,  # LONG
    ord("J"): _integer(4, signed=True),  # BININT
    ord("K"): _integer(1),  # BININT1
    ord("M"): _integer(2),  # BININT2
    0x8A: _long(1),  # LONG1
    0x8B: _long(4),  # LONG4
    ord("F"): _decimal_float,  # FLOAT
    ord("G"): _double,  # BINFLOAT
    ord("S"): _quoted_string,  # STRING
    ord("T"): _python2_string(4),  # BINSTRING
    ord("U"): _python2_string(1),  # SHORT_BINSTRING
    ord("V"): _raw_unicode,  # UNICODE
    0x8C: _text(1),  # SHORT_BINUNICODE
    ord("X"): _text(4),  # BINUNICODE
    0x8D: _text(8),  # BINUNICODE8
    ord("C"): _bytes(1),  # SHORT_BINBYTES
    ord("B"): _bytes(4),  # BINBYTES
    0x8E: _bytes(8),  # BINBYTES8
    0x96: _byte_array,  # BYTEARRAY8
    ord("N"): _constant(None),  # NONE
    0x88: _constant(True),  # NEWTRUE
    0x89: _constant(False),  # NEWFALSE
    ord(")"): _constant(()),  # EMPTY_TUPLE
}
"""Readers by opcode."""
