"""Mutations of inputs by their structure, in addition to the mutations of bytes of the fuzzer."""

from __future__ import annotations

import json
import pickletools
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

import msgpack  # type: ignore[import-untyped]  # it has no types
from ckptcore_testing.hostile_json import tamper

MutatorName: TypeAlias = Literal["bytes", "json", "json lines", "msgpack", "pickle"]

Mutator: TypeAlias = Callable[[bytes, random.Random], bytes | None]
"""Returns a changed input; None if it cannot parse the input."""


def _json(data: bytes, choices: random.Random) -> bytes | None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(choices.choice((1, 1, 1, 2, 3))):
        document = tamper(document, choices)
    try:
        return json.dumps(document, separators=(",", ":")).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None


def _json_lines(data: bytes, choices: random.Random) -> bytes | None:
    lines = data.split(b"\n")
    number = choices.randrange(len(lines))
    changed = _json(lines[number], choices)
    return None if changed is None else b"\n".join([*lines[:number], changed, *lines[number + 1 :]])


def _msgpack(data: bytes, choices: random.Random) -> bytes | None:
    try:
        document: Any = msgpack.unpackb(data, strict_map_key=False)
        changed: bytes = msgpack.packb(tamper(document, choices), use_bin_type=True)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return None
    return changed


_HOSTILE_OPCODES: Final = (
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nload\n", b"c\n\n", b"R", b"b", b"\x81", b"Q", b"0", b"2", b"(",
    b"t", b"l", b"d", b"e", b"a", b"s", b"u", b"N", b"}", b"]", b")", b"K\x00", b"J\xff\xff\xff\xff", b"h\x00",
    b"q\x00", b"\x94", b"\x8a\x09" + 9 * b"\xff", b"X\xff\xff\xff\xff", b"\x8d" + 8 * b"\xff", b"\x95" + 8 * b"\xff",
    b"j\xff\xff\xff\xff", b"U\x03../", b"X\x0b\x00\x00\x00/etc/passwd", b"G\x7f\xf8" + bytes(6), b"I9999999999999\n",
    b".",
)  # fmt: skip


def _pickle(data: bytes, choices: random.Random) -> bytes | None:
    try:
        starts = [position for _, _, position in pickletools.genops(data) if position is not None]
    except (ValueError, UnicodeDecodeError, OverflowError):
        return None
    opcodes = [data[start:stop] for start, stop in zip(starts, [*starts[1:], len(data)], strict=True)]
    for _ in range(choices.choice((1, 1, 1, 2, 4))):
        at = choices.randrange(len(opcodes))
        match choices.randrange(5):
            case 0 if len(opcodes) > 1:
                del opcodes[at]
            case 1:
                opcodes.insert(at, choices.choice(opcodes))
            case 2:
                opcodes[at] = choices.choice(opcodes)
            case 3:
                opcodes.insert(at, choices.choice(_HOSTILE_OPCODES))
            case _:
                opcodes[at] = choices.choice(_HOSTILE_OPCODES)
    return b"".join(opcodes)


def _none(data: bytes, choices: random.Random) -> bytes | None:
    return None


MUTATORS: Final[Mapping[MutatorName, Mutator]] = {
    "bytes": _none,
    "json": _json,
    "json lines": _json_lines,
    "msgpack": _msgpack,
    "pickle": _pickle,
}
