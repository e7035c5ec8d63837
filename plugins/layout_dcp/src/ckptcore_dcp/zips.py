"""Reader of zip files in a few range requests: locates the bytes of each member.

The format is PKWARE's APPNOTE 6.3.10: local headers (4.3.7) with members after them, data
descriptors after members whose header has no sizes (4.3.9), the directory (4.3.12), and its end
(4.3.14 to 4.3.16). ``torch.save`` writes uncompressed members, aligned to 64 bytes by an extra
field of the local header, each followed by a data descriptor. Numbers in a zip are untrusted, and are checked against
the bytes that exist.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from isal import isal_zlib

from ckptcore.errors import ChecksumError
from ckptcore_dcp.zip_directories import (
    DEFLATED,
    DESCRIPTOR_FOLLOWS,
    ENCRYPTED,
    LOCAL_HEADER,
    STORED,
    DirectoryEntry,
    Fetch,
    ZipBytes,
    corrupt_zip,
    find_directory,
    read_entries,
)

_ALIGNMENT: Final = 64
"""Minimum alignment of member content written by torch."""
_NEAR_BYTES: Final = 1 << 16
"""Local headers at most this far apart are read in one request, up to 4 MiB."""

_MAX_PICKLE_GROWTH: Final = 16
"""Maximum ratio of a pickle to its stored size. torch.save does not compress; recompressed pickles reach about 5."""
_ALWAYS_ALLOWED_BYTES: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A member of a zip.

    Attributes:
        name: name in the directory.
        start: offset of its content in the object, in bytes.
        nbytes: stored length.
        size: length after decompression.
        crc: CRC-32 of the decompressed content; zero if the writer did not compute it
            (``torch.serialization.set_crc32_options(False)``).
        compression: `STORED` or `DEFLATED`.
        descriptor: length of the data descriptor that directly follows: the signature, the CRC-32 and
            both sizes, 16 or 24 bytes. Zero if none is known.
        problem: why its content cannot be read; empty if it can.
    """

    name: str
    start: int
    nbytes: int
    size: int
    crc: int
    compression: int
    descriptor: int = 0
    problem: str = ""


def read_zip(fetch: Fetch, start: int, stop: int, *, key: str, keep_problems: bool = False) -> Mapping[str, ZipMember]:
    """Return the members of the zip in bytes `start` to `stop` of an object, in the order of its directory.

    A short zip takes one request. For a longer zip, the end and the directory are read. Local
    headers of members that torch did not write are read too, neighbouring headers in one request.

    With `keep_problems`, members that cannot be read are returned with a `problem`: members that are encrypted,
    compressed with another method than deflate, or share a name.

    Raises:
        CorruptCheckpointError: it is not a zip, or it is damaged, encrypted, split into several parts,
            or compressed with another method than deflate.
    """
    if not 0 <= start <= stop:
        raise corrupt_zip(key, start, start, f"a zip cannot be in bytes {start} to {stop}")
    window = ZipBytes(fetch, start, stop, key)
    directory, directory_stop, count = find_directory(window)
    data = window.get(directory, directory_stop)
    entries = read_entries(data, count, window, directory, keep_problems=keep_problems)
    return _located(entries, window, directory)


def read_member(fetch: Fetch, member: ZipMember, *, key: str, limit: int = 1 << 30) -> bytes:
    """Return the content of a member, decompressed, and verified if its CRC-32 is known.

    Args:
        fetch: reads the object.
        member: member from `read_zip`.
        key: the object, for errors.
        limit: maximum decompressed length, in bytes.

    Raises:
        CorruptCheckpointError: it is longer than `limit`, is cut off, or does not decompress to the stated size.
        ChecksumError: the CRC-32 differs.
    """
    stop = member.start + member.nbytes
    if member.size > limit:
        raise corrupt_zip(key, member.start, stop, f"{member.name!r} has {member.size} bytes; at most {limit} are read")
    data = fetch(member.start, stop)
    if len(data) != member.nbytes:
        raise corrupt_zip(
            key, member.start, stop, f"{member.name!r} is cut off after {len(data)} of {member.nbytes} bytes"
        )
    if member.compression == DEFLATED:
        data = _inflated(data, member, key)
    if member.crc and (checksum := isal_zlib.crc32(data)) != member.crc:
        raise ChecksumError(
            f"{member.name!r} in {key!r} is damaged: expected the CRC-32 {member.crc:08x} of the zip directory, found "
            f"{checksum:08x}; restore the file from a copy, or load another checkpoint",
            key=key,
            start=member.start,
            stop=stop,
        )
    return data


def max_pickle_bytes(stored: int) -> int:
    """Return the maximum length of a pickle, in bytes, for its stored length.

    Each byte of a pickle can create an object of 200 bytes. Without a limit, 4 kB of deflate data
    become 4 MB of pickle and 1 GB of objects.
    """
    return max(_ALWAYS_ALLOWED_BYTES, _MAX_PICKLE_GROWTH * stored)


def torch_members(members: Mapping[str, ZipMember]) -> Mapping[str, ZipMember]:
    """Return the members of a torch.save file by torch's names: ``data.pkl``, ``byteorder``, ``data/0``.

    All members are in the folder of ``data.pkl``, called ``archive`` or like the file. Returns an
    empty mapping if there is no such folder, or more than one.
    """
    folders = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(folders) != 1:
        return {}
    folder = folders[0]
    return {
        name.removeprefix(folder): member
        for name, member in members.items()
        if name.startswith(folder) and not name.endswith("/")
    }


def _located(entries: Sequence[DirectoryEntry], window: ZipBytes, directory: int) -> Mapping[str, ZipMember]:
    """Locate the content of each member."""
    order = sorted(range(len(entries)), key=lambda number: entries[number].header)
    nexts = [0] * len(entries)
    for number, following in zip(order, [*order[1:], None], strict=True):
        nexts[number] = directory if following is None else entries[following].header
        entry = entries[number]
        if entry.header + LOCAL_HEADER.size + len(entry.name_bytes) + entry.nbytes > nexts[number]:
            raise corrupt_zip(window.key, entry.header, nexts[number], f"{entry.name!r} and another member overlap")
    starts: dict[int, int] = {}
    if not window.is_whole:
        for number, entry in enumerate(entries):
            if (derived := _derived(entry, nexts[number], window.start)) is not None:
                starts[number] = derived
    unknown = [number for number in order if number not in starts]
    first = 0
    while first < len(unknown):
        last = first
        while (
            last + 1 < len(unknown)
            and _header_stop(entries[unknown[last + 1]]) - _header_stop(entries[unknown[last]]) <= _NEAR_BYTES
        ):
            if _header_stop(entries[unknown[last + 1]]) - entries[unknown[first]].header > 1 << 22:
                break
            last += 1
        group = unknown[first : last + 1]
        group_start = entries[group[0]].header
        data = window.get(group_start, _header_stop(entries[group[-1]]))
        for number in group:
            starts[number] = _start_behind_header(data, group_start, entries[number], window.key)
        first = last + 1
    members: dict[str, ZipMember] = {}
    for number, entry in enumerate(entries):
        start, following = starts[number], nexts[number]
        gap = following - start - entry.nbytes
        if gap < 0:
            raise corrupt_zip(window.key, start, following, f"{entry.name!r} and another member overlap")
        descriptor = gap if entry.flags & DESCRIPTOR_FOLLOWS and gap in (16, 24) else 0
        members[entry.name] = ZipMember(
            entry.name, start, entry.nbytes, entry.size, entry.crc, entry.compression, descriptor, entry.problem
        )
    return members


def _derived(entry: DirectoryEntry, following: int, zip_start: int) -> int | None:
    """Return the start of the content of a member if it is certain without the local header, else None.

    The position of content written by torch follows from both sides. Members have no gaps, so a
    data descriptor of 16 or 24 bytes ends where the next header begins. An extra field of at least
    4 bytes aligns the content to 64 bytes or more in the zip. Other writers have no such field,
    so for them the position computed here could be aligned only by accident.
    """
    if not entry.flags & DESCRIPTOR_FOLLOWS or entry.compression != STORED:
        return None
    least = entry.header + LOCAL_HEADER.size + len(entry.name_bytes) + 4
    for descriptor in (16, 24):
        start = following - descriptor - entry.nbytes
        offset = start - zip_start
        if offset <= 0 or offset % _ALIGNMENT:
            continue
        aligned_to = offset & -offset  # the largest power of two that divides it
        # The extra fields may also contain zip64 sizes and offset, which take up to 28 bytes.
        if 0 <= start - least < aligned_to and start - least < (1 << 16) - 4:
            return start
    return None


def _header_stop(entry: DirectoryEntry) -> int:
    return entry.header + LOCAL_HEADER.size + len(entry.name_bytes)


def _start_behind_header(data: bytes, data_start: int, entry: DirectoryEntry, key: str) -> int:
    position = entry.header - data_start
    magic, _, flags, compression, _, _, _, _, _, name_n, extra_n = LOCAL_HEADER.unpack_from(data, position)
    name_bytes = data[position + LOCAL_HEADER.size : position + LOCAL_HEADER.size + len(entry.name_bytes)]
    if magic != b"PK\x03\x04" or name_n != len(entry.name_bytes) or name_bytes != entry.name_bytes:
        raise corrupt_zip(key, entry.header, _header_stop(entry), f"the local header of {entry.name!r} is missing")
    if not entry.problem and (compression != entry.compression or flags & ENCRYPTED):
        raise corrupt_zip(
            key, entry.header, _header_stop(entry), f"the header of {entry.name!r} and the directory disagree"
        )
    return _header_stop(entry) + int(extra_n)


def _inflated(data: bytes, member: ZipMember, key: str) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        read_storage = inflater.decompress(data, member.size + 1)
    except zlib.error as error:
        raise corrupt_zip(
            key, member.start, member.start + member.nbytes, f"{member.name!r} does not inflate: {error}"
        ) from error
    if len(read_storage) != member.size or not inflater.eof or inflater.unused_data:
        raise corrupt_zip(
            key,
            member.start,
            member.start + member.nbytes,
            f"{member.name!r} inflates to {len(read_storage)} bytes or more; the directory states {member.size}",
        )
    return read_storage


@dataclass(frozen=True, slots=True)
class DescriptorChecksum:
    """Bytes after a zip member that contain its CRC-32: the data descriptor, or the rest of the zip. Thread-safe.

    Attributes:
        parts: the bytes between which the checksum is inserted, little endian. The checksum occurs
            ``len(parts) - 1`` times.
        nbytes: total length, with the checksums.
    """

    parts: tuple[bytes, ...]
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(map(len, self.parts)) + 4 * (len(self.parts) - 1))

    name = "CRC-32"

    is_enough = False

    def of(self, data: memoryview) -> int:
        """Return the CRC-32 of zip and zlib."""
        return isal_zlib.crc32(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """Return the CRC-32 of two consecutive byte ranges."""
        return isal_zlib.crc32_combine(first, second, second_bytes)

    def encode(self, value: int) -> bytes:
        """Return the parts joined by the checksum."""
        return value.to_bytes(4, "little").join(self.parts)
