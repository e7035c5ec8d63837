"""Calls of a few builtins, by which older protocols hold values that have no opcode of their own.

``Lib/pickle.py`` and ``Objects/setobject.c`` of CPython tell what is called with what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore_dcp.pickles.keys import KeyCheck
from ckptcore_dcp.pickles.values import Call, Global, Value

__all__ = ["builtin_value"]

_ENCODE: Final = Global("_codecs", "encode")
"""How the protocols 0 to 2 hold bytes: as a text of the same code points."""
_BUILTINS: Final = ("builtins", "__builtin__")
"""What Python 3 and Python 2 call the module; pickles of the protocols 0 to 2 have the latter."""


def builtin_value(call: Call) -> Value:
    """What a call of a few builtins makes, or the call itself if it is none of these. No class of a file is asked.

    bytes (which the protocols 0 to 2 hold as ``_codecs.encode(text, "latin1")``), set, frozenset and complex; a
    bytearray is given as bytes. Items of sets are given as they are, except bytes. A set of what must not be hashed
    stays a call.
    """
    function, arguments = call.function, call.arguments
    if (
        not isinstance(function, Global)
        or call.new
        or call.keywords
        or call.state is not None
        or call.appended
        or call.pairs
    ):
        return call
    if function == _ENCODE:
        return _encoded(call)
    if function.module not in _BUILTINS:
        return call
    match function.name, arguments:
        case "bytes" | "bytearray", ():
            return b""
        case "bytes" | "bytearray", (bytes() as found,):
            return found
        case "bytearray", (Call() as inner,) if inner.function == _ENCODE:  # protocol 2
            encoded = _encoded(inner)
            return encoded if isinstance(encoded, bytes) else call
        case "bytearray", (str(), "latin-1" | "latin1"):  # protocols 0 to 2 of older Pythons
            return _encoded(call)
        case "complex", (float() as real, float() as imaginary):
            return complex(real, imaginary)
        case "set", ():
            return set()
        case "frozenset", ():
            return frozenset()
        case "set", (list() as items,):
            made = _set(items)
            return call if made is None else made
        case "frozenset", (list() as items,):
            made = _set(items)
            return call if made is None else frozenset(made)
    return call


def _encoded(call: Call) -> Value:
    """The bytes that a text and the name of the codec latin-1 stand for, or the call itself."""
    match call.arguments:
        case (str() as text, "latin1" | "latin-1"):
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:  # no writer does this; the call stays what it is
                return call
    return call


def _set(items: Sequence[Value]) -> set[Value] | None:
    """A set of the items, or None if it would not be cheap to hash them."""
    plain = [_encoded(item) if isinstance(item, Call) and item.function == _ENCODE else item for item in items]
    try:
        KeyCheck("").check(plain, plain, 0)
    except CorruptCheckpointError:  # the caller knows the call, and decides what becomes of it
        return None
    return set(plain)
