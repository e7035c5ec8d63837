"""Results of calls to a few known functions: builtins and NumPy scalars.

Older protocols represent values that have no opcode as calls of builtins. The functions and arguments
are those of ``Lib/pickle.py`` and ``Objects/setobject.c`` of CPython.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError
from ckptcore_dcp.pickles.keys import KeyCheck
from ckptcore_dcp.pickles.values import Call, Global, Value

__all__ = ["builtin_value", "scalar_value"]

_ENCODE: Final = Global("_codecs", "encode")
"""Protocols 0 to 2 store bytes as text with the same code points."""
_BUILTINS: Final = ("builtins", "__builtin__")
"""Name of the module in Python 3 and Python 2. Pickles of protocols 0 to 2 have the latter."""


def builtin_value(call: Call) -> Value:
    """Return the result of a call of certain builtins, or the call itself. No class named by the file is used.

    The builtins are bytes (``_codecs.encode(text, "latin1")`` in protocols 0 to 2), set, frozenset
    and complex. A bytearray becomes bytes. Among the items of a set, only calls that encode bytes
    are replaced. A set whose items `KeyCheck` rejects stays a call.
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
        return _latin1_bytes(call)
    if function.module not in _BUILTINS:
        return call
    match function.name, arguments:
        case "bytes" | "bytearray", ():
            return b""
        case "bytes" | "bytearray", (bytes() as found,):
            return found
        case "bytearray", (Call() as inner,) if inner.function == _ENCODE:  # protocol 2
            encoded = _latin1_bytes(inner)
            return encoded if isinstance(encoded, bytes) else call
        case "bytearray", (str(), "latin-1" | "latin1"):  # protocols 0 to 2 of older Pythons
            return _latin1_bytes(call)
        case "complex", (float() as real, float() as imaginary):
            return complex(real, imaginary)
        case "set", ():
            return set()
        case "frozenset", ():
            return frozenset()
        case "set", (list() as items,):
            made = _build_set(items)
            return call if made is None else made
        case "frozenset", (list() as items,):
            made = _build_set(items)
            return call if made is None else frozenset(made)
    return call


def _latin1_bytes(call: Call) -> Value:
    """Return the bytes of a text encoded with latin-1, or the call itself."""
    match call.arguments:
        case (str() as text, "latin1" | "latin-1"):
            try:
                return text.encode("latin-1")
            except UnicodeEncodeError:  # no writer does this; leave the call as it is
                return call
    return call


def _build_set(items: Sequence[Value]) -> set[Value] | None:
    """Return a set of the items, or None if hashing them is not cheap."""
    plain = [_latin1_bytes(item) if isinstance(item, Call) and item.function == _ENCODE else item for item in items]
    try:
        KeyCheck("").check(plain, plain, 0)
    except CorruptCheckpointError:  # the caller keeps the call
        return None
    return set(plain)


_MAKERS: Final = frozenset(Global(f"numpy.{package}.multiarray", "scalar") for package in ("core", "_core"))
_DTYPE: Final = Global("numpy", "dtype")
_CODES: Final = frozenset(
    ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"],
)


def scalar_value(call: Call) -> bool | int | float | complex | None:
    """Return the number in a pickled NumPy scalar, or None for other calls.

    The call is ``scalar(dtype, bytes)``. The dtype is ``dtype("f8", False, True)`` with a state
    that contains a version and ``<``, ``>`` or ``|`` (NumPy's `generic.__reduce__` and
    `dtype.__reduce__`).
    """
    if call.function not in _MAKERS or len(call.arguments) != 2:
        return None
    dtype, data = call.arguments
    if isinstance(data, Call) and not any(isinstance(argument, Call) for argument in data.arguments):
        data = builtin_value(data)
    if not isinstance(dtype, Call) or dtype.function != _DTYPE or not dtype.arguments or not isinstance(data, bytes):
        return None
    code, state = dtype.arguments[0], dtype.state
    order: Value = state[1] if isinstance(state, tuple) and len(state) > 1 else "|"
    if not isinstance(code, str) or code not in _CODES or order not in ("<", ">", "|"):
        return None
    kind = np.dtype(f"{order}{code}")
    if len(data) != kind.itemsize:
        return None
    number = np.frombuffer(data, kind)[0].item()
    assert isinstance(number, bool | int | float | complex)  # the only types of these codes
    return number
