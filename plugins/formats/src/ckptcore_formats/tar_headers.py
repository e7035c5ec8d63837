"""Headers of tar archives: names and byte ranges of members, in the order of the archive.

Formats: POSIX ustar and pax (IEEE Std 1003.1, ``pax``), and the long names of GNU tar. Nothing is extracted.
Every number and name is hostile until checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ckptcore.errors import CorruptCheckpointError

_BLOCK: Final = 512
_REGULAR: Final = (b"0", b"\0", b"7")
_LINKS: Final = {b"1": "a hard link", b"2": "a symbolic link"}
_SPECIAL: Final = {b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file", b"V": "a label"}
_MAX_NAME_BYTES: Final = 1 << 16
"""Longest pax header or long name. Names have at most 4096 bytes on Linux."""
_MAX_MEMBERS: Final = 1 << 20
_READ_BYTES: Final = 1 << 16


class TarMember(NamedTuple):
    """A member.

    Attributes:
        name: its name.
        start: offset of its content in the archive, in bytes.
        nbytes: its length.
        problem: what it is instead of a file, such as a link; empty for a file. Directories are left out.
    """

    name: str
    start: int
    nbytes: int
    problem: str


def is_tar(head: bytes) -> bool:
    """Return True if a file with these first bytes is an archive: its first header has a valid checksum."""
    return len(head) >= _BLOCK and any(head[:_BLOCK]) and _has_checksum(head[:_BLOCK])


def read_members(fetch: Callable[[int, int], bytes], size: int, key: str) -> Iterator[TarMember]:
    """Yield the members of an archive.

    Args:
        fetch: reads the archive.
        size: its length, in bytes.
        key: the archive, for errors.

    Raises:
        CorruptCheckpointError: a header is damaged, or the archive is cut off.
    """
    position, name, length = 0, "", -1
    window, origin = b"", 0
    for _ in range(_MAX_MEMBERS):
        if position + _BLOCK > size:
            return  # some writers leave out the two empty blocks at the end
        if not origin <= position <= origin + len(window) - _BLOCK:
            window, origin = fetch(position, min(position + _READ_BYTES, size)), position
        header = window[position - origin : position - origin + _BLOCK]
        if not any(header):
            return
        if len(header) < _BLOCK or not _has_checksum(header):
            raise _damaged(key, position, "a header has an invalid checksum")
        nbytes = _number(header[124:136], key, position)
        kind, start = header[156:157], position + _BLOCK
        if kind in (b"x", b"g", b"L", b"K"):
            if nbytes > _MAX_NAME_BYTES or start + nbytes > size:
                raise _damaged(key, position, f"a header of {nbytes} bytes")
            content = fetch(start, start + nbytes)
            if kind == b"L":
                name = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind == b"x":
                found = _pax(content, key, position)
                name = found.get("path", name)
                length = _pax_size(found.get("size", "-1"), key, position)
                if any(one.startswith("GNU.sparse.") for one in found):
                    raise _damaged(key, position, "a sparse file", "Unpack it, and load what it contains")
            position = start + -(-nbytes // _BLOCK) * _BLOCK
            continue
        nbytes = nbytes if length < 0 else length
        if kind not in _REGULAR:
            problem = _LINKS.get(kind, _SPECIAL.get(kind, "of an unknown kind"))
            nbytes = nbytes if problem not in _LINKS.values() and kind not in (b"3", b"4", b"5", b"6") else 0
        else:
            problem = ""
        if start + nbytes > size:
            raise _damaged(key, position, f"a member ends at byte {start + nbytes} of {size}: it is cut off")
        if kind != b"5":
            target = _text(header[157:257])
            about = f"{problem} to {target[:80]!r}" if problem in _LINKS.values() else problem
            yield TarMember(name or _name(header), start, nbytes, about)
        position, name, length = start + -(-nbytes // _BLOCK) * _BLOCK, "", -1
    raise _damaged(key, position, f"it has more than {_MAX_MEMBERS} members")


def _has_checksum(header: bytes) -> bool:
    """Return True if the checksum of a header is that of its bytes, with spaces in place of the checksum."""
    text = header[148:156].strip(b" \0")
    total = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    return text.isdigit() and b"8" not in text and b"9" not in text and int(text, 8) == total


def _number(field: bytes, key: str, position: int) -> int:
    """Return a number: octal digits, or big endian if the highest bit is set, as GNU tar writes large ones."""
    if field[0] & 0x80:
        found = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
    else:
        text = field.split(b"\0")[0].strip()
        if text and not (text.isdigit() and b"8" not in text and b"9" not in text):
            raise _damaged(key, position, "a length is no number")
        found = int(text or b"0", 8)
    if not 0 <= found < 1 << 62:
        raise _damaged(key, position, "a length is too large")
    return found


def _pax(content: bytes, key: str, position: int) -> dict[str, str]:
    """Return the records of a pax header: ``length keyword=value`` and a newline."""
    found: dict[str, str] = {}
    while content.strip(b"\0"):
        digits = content.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        keyword, equals, value = content[len(digits) + 1 : length - 1].partition(b"=")
        if length > len(content) or length <= len(digits) + 1 or not equals or content[length - 1 : length] != b"\n":
            raise _damaged(key, position, "a pax header is malformed")
        found[keyword.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[length:]
    return found


def _pax_size(text: str, key: str, position: int) -> int:
    if text != "-1" and not (text.isascii() and text.isdigit() and len(text) < 19):
        raise _damaged(key, position, "a length is no number")
    return int(text)


def _name(header: bytes) -> str:
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    name = _text(header[:100])
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.split(b"\0")[0].decode("utf-8", "surrogateescape")


def _damaged(
    key: str, position: int, reason: str, remedy: str = "Restore it from a copy, or unpack it with tar"
) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{key!r} cannot be read as a tar archive, near byte {position}: {reason}. {remedy}", key=key, start=position
    )
