"""Zip records and the zip directory: finds the directory, parses its entries, and caches its bytes.

Section numbers such as 4.3.7 refer to PKWARE's APPNOTE 6.3.10.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model.file_kinds import part_of_archive

LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")
"""Fixed part of a local header, before the member's name (4.3.7)."""
DIRECTORY_ENTRY: Final = struct.Struct("<4s6H3I5H2I")
"""Fixed part of a directory entry, before the member's name (4.3.12)."""
END64: Final = struct.Struct("<4sQ2H2I4Q")
"""Zip64 end of directory record, for numbers that need 8 bytes (4.3.14)."""
LOCATOR: Final = struct.Struct("<4sIQI")
"""Zip64 end of directory locator: the position of `END64` (4.3.15)."""
END: Final = struct.Struct("<4s4H2IH")
"""End of directory record, the last record (4.3.16)."""

STORED: Final = 0
DEFLATED: Final = 8
MAX_INFLATE_RATIO: Final = 1100
"""Maximum compression ratio; deflate reaches at most 1032 (https://zlib.net/zlib_tech.html)."""
DESCRIPTOR_FOLLOWS: Final = 1 << 3
"""Flag: sizes and checksum follow the content of a member (4.4.4)."""
FULL16: Final = 0xFFFF
FULL32: Final = 0xFFFFFFFF
"""Value of a field that is too small for its number, which is then in a zip64 record or field."""


Fetch: TypeAlias = Callable[[int, int], bytes]
"""Returns bytes `start` to `stop` of an object, or fewer at its end."""

_ZIP64_FIELD: Final = 1
ENCRYPTED: Final = 1 << 0 | 1 << 6 | 1 << 13
_UTF8: Final = 1 << 11

_SMALL_BYTES: Final = 1 << 15
"""A zip up to this length is read in one request."""
_TAIL_BYTES: Final = 1 << 14
"""Size of the first read at the end of a longer zip."""
_MAX_DIRECTORY_BYTES: Final = 1 << 28
"""Maximum length of a directory, enough for two million members."""


class DirectoryEntry(NamedTuple):
    """An entry of the directory.

    Attributes:
        name: name of the member.
        name_bytes: the name as stored.
        header: offset of the local header in the object, in bytes.
        nbytes, size, crc, compression: as in `ZipMember`.
        flags: general purpose bit flag (4.4.4).
        problem: as in `ZipMember`.
    """

    name: str
    name_bytes: bytes
    header: int
    nbytes: int
    size: int
    crc: int
    compression: int
    flags: int
    problem: str = ""


class ZipBytes:
    """The bytes of a zip. Caches one range of them.

    Attributes:
        start, stop: range of the zip in the object.
        key: the object.
    """

    __slots__ = ("_data", "_data_start", "_fetch", "key", "start", "stop")

    def __init__(self, fetch: Fetch, start: int, stop: int, key: str) -> None:
        self._fetch = fetch
        self.start = start
        self.stop = stop
        self.key = key
        self._data = b""
        self._data_start = stop

    def get(self, start: int, stop: int) -> bytes:
        """Return bytes of the zip by their range in the object.

        Raises:
            CorruptCheckpointError: the object is shorter.
        """
        cached = self._data_start
        if cached <= start and stop <= cached + len(self._data):
            return self._data[start - cached : stop - cached]
        data = self._fetch(start, stop)
        if len(data) != stop - start:
            raise corrupt_zip(
                self.key, start, stop, f"the object is cut off: it has {len(data)} of the {stop - start} bytes"
            )
        return data

    def keep(self, start: int) -> bytes:
        """Read and cache the bytes from `start` to the end of the zip."""
        self._data = self.get(start, self.stop)
        self._data_start = start
        return self._data

    @property
    def is_whole(self) -> bool:
        """True if the whole zip is cached."""
        return self._data_start == self.start


def find_directory(window: ZipBytes) -> tuple[int, int, int]:
    """Return the range of the directory in the object, and its number of entries.

    Raises:
        CorruptCheckpointError: the end of the directory is missing or inconsistent.
    """
    key, start, stop = window.key, window.start, window.stop
    longest = END.size + FULL16 + LOCATOR.size
    tail_start = start if stop - start <= _SMALL_BYTES else stop - _TAIL_BYTES
    end = _find_end(window.keep(tail_start), tail_start, stop)
    if end is None and tail_start > start:
        tail_start = max(start, stop - longest)
        end = _find_end(window.keep(tail_start), tail_start, stop)
    if end is None:
        if (part := part_of_archive(b"", key)) is not None:
            raise CorruptCheckpointError(f"{key!r} is {part}", key=key)
        raise corrupt_zip(key, tail_start, stop, "no end of a zip directory found; the file is cut off or is not a zip")
    record = END.unpack(window.get(end, end + END.size))
    _, disk, directory_disk, here, count, nbytes, offset, _ = record
    limit = end
    locator = window.get(end - LOCATOR.size, end) if end - LOCATOR.size >= start else b""
    if locator[:4] == b"PK\x06\x07":
        _, record_disk, record_offset, disks = LOCATOR.unpack(locator)
        record_start = start + record_offset
        if record_disk or disks > 1 or record_start + END64.size > end - LOCATOR.size:
            raise corrupt_zip(key, end - LOCATOR.size, end, "the zip64 end is not at the position in its locator")
        fields = END64.unpack(window.get(record_start, record_start + END64.size))
        magic, _, _, _, disk64, directory_disk64, here64, count64, nbytes64, offset64 = fields
        old = (disk, directory_disk, here, count), (nbytes, offset)
        new = (disk64, directory_disk64, here64, count64), (nbytes64, offset64)
        for olds, news, full in zip(old, new, (FULL16, FULL32), strict=True):
            if magic != b"PK\x06\x06" or any(
                value not in (full, other) for value, other in zip(olds, news, strict=True)
            ):
                raise corrupt_zip(key, record_start, end, "the two ends of the zip directory disagree")
        disk, directory_disk, here, count, nbytes, offset = (*new[0], *new[1])
        limit = record_start
    if disk or directory_disk or here != count:
        raise corrupt_zip(
            key,
            end,
            stop,
            "it is one of several parts",
            "Join them first, as `zip -s 0 PARTS.zip --out WHOLE.zip` does",
        )
    directory = start + offset
    if directory + nbytes > limit or nbytes < count * DIRECTORY_ENTRY.size:
        raise corrupt_zip(
            key, end, stop, f"{count} entries in {nbytes} bytes at {offset} cannot be the directory; the zip is damaged"
        )
    if nbytes > _MAX_DIRECTORY_BYTES:
        raise corrupt_zip(
            key, end, stop, f"a directory of {nbytes} bytes, where at most {_MAX_DIRECTORY_BYTES} are read"
        )
    return directory, directory + nbytes, count


def _find_end(tail: bytes, tail_start: int, stop: int) -> int | None:
    """Find the last end record whose comment extends to the end of the zip."""
    position = len(tail) - END.size
    while (position := tail.rfind(b"PK\x05\x06", 0, position + 4)) >= 0:
        if position + END.size <= len(tail):
            (comment,) = struct.unpack_from("<H", tail, position + END.size - 2)
            if tail_start + position + END.size + comment == stop:
                return tail_start + position
        position -= 1
        if position < 0:
            break
    return None


def read_entries(
    data: bytes, count: int, window: ZipBytes, directory: int, *, keep_problems: bool = False
) -> list[DirectoryEntry]:
    """Parse the directory that begins at `directory`, and check each entry against the bytes that exist.

    With `keep_problems`, members that cannot be read are returned with a `problem`: members that are encrypted,
    compressed with another method than deflate, or share a name.

    Raises:
        CorruptCheckpointError: an entry is invalid, or of a kind that torch never writes.
    """
    key = window.key
    entries: list[DirectoryEntry] = []
    position = 0
    for _ in range(count):
        if position + DIRECTORY_ENTRY.size > len(data):
            raise corrupt_zip(key, directory + position, directory + len(data), "the zip directory is cut off")
        fields = DIRECTORY_ENTRY.unpack_from(data, position)
        magic, _, _, flags, compression, _, _, crc, nbytes, size, name_n, extra_n, comment_n, disk, _, _, offset = (
            fields
        )
        name_start = position + DIRECTORY_ENTRY.size
        extra_start = name_start + name_n
        stop = extra_start + extra_n + comment_n
        if magic != b"PK\x01\x02" or stop > len(data):
            raise corrupt_zip(key, directory + position, directory + len(data), "the zip directory is damaged")
        name_bytes = data[name_start:extra_start]
        if FULL32 in (nbytes, size, offset) or disk == FULL16:
            extra = data[extra_start : extra_start + extra_n]
            size, nbytes, offset, disk = _zip64_numbers(extra, size, nbytes, offset, disk)
        name = _name(name_bytes, flags, key)
        header = window.start + offset
        problem = ""
        if keep_problems and not disk and (flags & ENCRYPTED or compression not in (STORED, DEFLATED)):
            problem = "encrypted" if flags & ENCRYPTED else f"of compression {compression}"
        elif flags & ENCRYPTED or disk or compression not in (STORED, DEFLATED):
            raise corrupt_zip(
                key,
                header,
                header,
                f"{name!r} is encrypted, in another part, or of compression {compression}",
                "Unpack it and zip the directory again, as `zip -0 -r` does: unencrypted, in one part, uncompressed",
            )
        elif (compression == STORED and nbytes != size) or size > nbytes * MAX_INFLATE_RATIO:
            raise corrupt_zip(key, header, header, f"{name!r} cannot have {size} bytes, stored in {nbytes}")
        if header + LOCAL_HEADER.size + name_n + nbytes > directory:
            raise corrupt_zip(key, header, header, f"{name!r} exceeds the members of the zip")
        entries.append(DirectoryEntry(name, name_bytes, header, nbytes, size, crc, compression, flags, problem))
        position = stop
    counts = Counter([entry.name for entry in entries])
    if len(counts) == len(entries):
        return entries
    if not keep_problems:
        twice = next(name for name, times in counts.items() if times > 1)
        raise corrupt_zip(
            key, directory, directory + len(data), f"two members of the zip have one name, {twice[:80]!r}"
        )
    return [entry if counts[entry.name] == 1 else entry._replace(problem="there twice") for entry in entries]


def _zip64_numbers(extra: bytes, size: int, nbytes: int, offset: int, disk: int) -> tuple[int, int, int, int]:
    """Return the numbers of an entry. Numbers that are too large for it are in its zip64 field (4.5.3)."""
    position = 0
    while position + 4 <= len(extra):
        field, length = struct.unpack_from("<2H", extra, position)
        position += 4
        if field != _ZIP64_FIELD:
            position += length
            continue
        numbers = extra[position : position + length]
        wanted = [size == FULL32, nbytes == FULL32, offset == FULL32]
        if len(numbers) != length or length < 8 * sum(wanted) + 4 * (disk == FULL16):
            break
        numbers64 = iter(struct.unpack_from(f"<{sum(wanted)}Q", numbers))
        size, nbytes, offset = (
            next(numbers64) if large else old for large, old in zip(wanted, (size, nbytes, offset), strict=True)
        )
        if disk == FULL16:
            (disk,) = struct.unpack_from("<I", numbers, 8 * sum(wanted))
        break
    # Without such a field the maximum value is taken literally, and later checks compare it with
    # the bytes that exist.
    return size, nbytes, offset, disk


def _name(name_bytes: bytes, flags: int, key: str) -> str:
    try:
        name = name_bytes.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError as error:
        raise corrupt_zip(key, 0, 0, f"the name {name_bytes[:80]!r} of a member is not UTF-8") from error
    if not name or any(character < " " or character == "\x7f" for character in name):
        raise corrupt_zip(key, 0, 0, f"{name[:80]!r} cannot be the name of a member")
    return name


def corrupt_zip(
    key: str,
    start: int,
    stop: int,
    reason: str,
    remedy: str = "Restore it from a copy, or load another checkpoint",
) -> CorruptCheckpointError:
    """Return an error about bytes `start` to `stop` of an object."""
    return CorruptCheckpointError(
        f"{key!r} cannot be read as a zip: {reason}. {remedy}",
        key=key,
        start=start,
        stop=max(start, stop),
    )
