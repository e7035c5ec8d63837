"""The opcodes of None, booleans and numbers, which use neither the memo nor the work list."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

from ckptcore.errors import UnsupportedLeafError
from ckptcore_dcp.pickles.values import brief

__all__ = ["PLAIN_OPCODES"]


def _none(value: None) -> bytes:
    return b"N"


def _bool(value: bool) -> bytes:
    return b"\x88" if value else b"\x89"


def _integer(value: int) -> bytes:
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
            f"{brief(value)} cannot be written to a pickle that torch reads; expected at most 255 bytes; store it as "
            "a text"
        )
    return b"\x8a%c" % len(body) + body


def _float(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


PLAIN_OPCODES: Final[Mapping[type, Callable[[Any], bytes]]] = {
    int: _integer,
    float: _float,
    bool: _bool,
    type(None): _none,
}
"""Encoders of values that use neither the memo nor the work list."""
