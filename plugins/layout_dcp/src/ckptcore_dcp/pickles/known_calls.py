"""Results of calls to a few known builtins.

Older protocols represent values that have no opcode as calls of builtins. The functions and arguments
are those of ``Lib/pickle.py`` and ``Objects/setobject.c`` of CPython.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckptcore.errors import CorruptCheckpointError
from ckptcore_dcp.pickles.values import Call, Global, KeyCheck, OutOfLine, Value

_ENCODE: Final = Global("_codecs", "encode")
"""Protocols 0 to 2 store bytes as text with the same code points."""
_TYPED: Final = ("restore_type_tag", *(f"build_{kind}list" for kind in ("int", "tensor", "double", "bool")))
_BUILTINS: Final = ("builtins", "__builtin__")
"""Name of the module in Python 3 and Python 2. Pickles of protocols 0 to 2 have the latter."""


def builtin_value(call: Call) -> Value:
    """Return the result of a call of certain builtins, or the call itself. No class named by the file is used.

    The builtins are bytes (``_codecs.encode(text, "latin1")`` in protocols 0 to 2), set, frozenset
    and complex. A bytearray becomes bytes. Among the items of a set, only calls that encode bytes
    are replaced. A set whose items `KeyCheck` rejects stays a call. A list or dict of TorchScript,
    whose call states its type (``torch/jit/_pickle.py``), becomes that list or dict.
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
    if function.module == "torch.jit._pickle" and function.name in _TYPED and arguments:
        return arguments[0]
    if function.module not in _BUILTINS:
        return call
    match function.name, arguments:
        case "bytes" | "bytearray", ():
            return b""
        case "bytes" | "bytearray", (bytes() as content,):
            return content
        case "bytes" | "bytearray", (OutOfLine() as content,):
            return content
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
