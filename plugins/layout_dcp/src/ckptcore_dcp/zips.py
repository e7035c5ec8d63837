"""Zip directories, read in a few ranges of an object: where the bytes of each member are.

The format is PKWARE's APPNOTE 6.3.10: local headers (4.3.7) with members behind them, data descriptors behind those
whose header does not tell their size (4.3.9), the directory (4.3.12), and its end (4.3.14 to 4.3.16). ``torch.save``
writes members that are not compressed, aligned to 64 bytes by an extra field of the local header, with a data
descriptor behind each. Every number in a zip is hostile until it is compared with the bytes that there are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from isal import isal_zlib

from ckptcore.errors import ChecksumError
from ckptcore_dcp.zip_directories import ENCRYPTED, Entry, Fetch, Window, corrupt_zip, find_directory, read_entries
from ckptcore_dcp.zip_records import DEFLATED, DESCRIPTOR_FOLLOWS, LOCAL_HEADER, STORED

__all__ = ["ZipMember", "most_pickle_bytes", "read_member", "read_zip", "torch_members"]

_ALIGNMENT: Final = 64
"""To what torch aligns the bytes of members, at least."""
_NEAR_BYTES: Final = 1 << 16
"""Local headers that are no farther apart are read in one request."""

_MOST_PICKLE_GROWTH: Final = 16
"""Largest growth of a compressed pickle. torch.save does not compress; its pickles zipped again grow about 5 times."""
_ANY_PICKLE: Final = 1 << 12


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A member of a zip.

    Attributes:
        name: as the directory has it.
        start: where its bytes begin in the object, in bytes.
        nbytes: how many bytes it takes in the object.
        size: how many it has, once inflated.
        crc: the CRC-32 of those; zero where the writer did not compute it
            (``torch.serialization.set_crc32_options(False)``).
        compression: `STORED` or `DEFLATED`.
        descriptor: bytes of the data descriptor right behind its bytes: the signature, the CRC-32 and both sizes, 16 or
            24 bytes. Zero: none is known to be there.
    """

    name: str
    start: int
    nbytes: int
    size: int
    crc: int
    compression: int
    descriptor: int = 0


def read_zip(fetch: Fetch, start: int, stop: int, *, key: str) -> Mapping[str, ZipMember]:
    """The members of the zip in bytes `start` to `stop` of an object, by name, in the order of its directory.

    Takes one request for a short zip. Of a longer one the end and the directory are read, and where the bytes of
    members that torch did not write begin, is read of their headers, near ones together.

    Raises:
        CorruptCheckpointError: it is no zip, or one that is damaged, encrypted, in several parts, or compressed by
            anything but deflate.
    """
    if not 0 <= start <= stop:
        raise corrupt_zip(key, start, start, f"a zip cannot be in bytes {start} to {stop}")
    window = Window(fetch, start, stop, key)
    directory, directory_stop, count = find_directory(window)
    data = window.get(directory, directory_stop)
    entries = read_entries(data, count, window, directory)
    return _located(entries, window, directory)


def read_member(fetch: Fetch, member: ZipMember, *, key: str, limit: int = 1 << 30) -> bytes:
    """All bytes of a member, inflated and compared with their CRC-32.

    Args:
        fetch: reads the object.
        member: of `read_zip`.
        key: the object, for errors.
        limit: the longest member to read, inflated, in bytes.

    Raises:
        CorruptCheckpointError: it is longer than `limit`, or does not inflate to what the directory says.
        ChecksumError: the CRC-32 differs.
    """
    stop = member.start + member.nbytes
    if member.size > limit:
        raise corrupt_zip(
            key, member.start, stop, f"{member.name!r} has {member.size} bytes, where at most {limit} are read"
        )
    data = fetch(member.start, stop)
    if len(data) != member.nbytes:
        raise corrupt_zip(
            key, member.start, stop, f"{member.name!r} is cut off after {len(data)} of {member.nbytes} bytes"
        )
    if member.compression == DEFLATED:
        data = _inflated(data, member, key)
    if member.crc and (found := isal_zlib.crc32(data)) != member.crc:
        raise ChecksumError(
            f"{member.name!r} in {key!r} is damaged: expected the CRC-32 {member.crc:08x} that the zip states, found "
            f"{found:08x}; restore the file from a copy, or load another checkpoint",
            key=key,
            start=member.start,
            stop=stop,
        )
    return data


def most_pickle_bytes(stored: int) -> int:
    """Return the limit of the length of a pickle, in bytes, for its stored length.

    Each byte of a pickle can be an object of 200 bytes. Without a limit, 4 kB of deflate become 4 MB of pickle and 1 GB
    of objects.
    """
    return max(_ANY_PICKLE, _MOST_PICKLE_GROWTH * stored)


def torch_members(members: Mapping[str, ZipMember]) -> Mapping[str, ZipMember]:
    """The members of a file of torch.save by the names that torch knows them by: ``data.pkl``, ``byteorder``, ``data/0``.

    All of them are in one folder, that of ``data.pkl``; it is called ``archive``, or as the file was. Empty where there
    is none.
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


def _located(entries: Sequence[Entry], window: Window, directory: int) -> Mapping[str, ZipMember]:
    """The members, once it is known where the bytes of each begin."""
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
    asked = [number for number in order if number not in starts]
    first = 0
    while first < len(asked):
        last = first
        while (
            last + 1 < len(asked)
            and _header_stop(entries[asked[last + 1]]) - _header_stop(entries[asked[last]]) <= _NEAR_BYTES
        ):
            if _header_stop(entries[asked[last + 1]]) - entries[asked[first]].header > 1 << 22:
                break
            last += 1
        group = asked[first : last + 1]
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
            entry.name, start, entry.nbytes, entry.size, entry.crc, entry.compression, descriptor
        )
    return members


def _derived(entry: Entry, following: int, zip_start: int) -> int | None:
    """Where the bytes of a member begin, where that is sure without a look at its local header; else None.

    What torch writes is known from both sides. Members lie without gaps, so a data descriptor of 16 or 24 bytes ends
    where the next one begins; and an extra field of 4 bytes and as few more as it takes aligns the bytes to 64 in the
    zip, or more. A zip of another writer has no such field. To fit, it would have to differ in both by the same.
    """
    if not entry.flags & DESCRIPTOR_FOLLOWS or entry.compression != STORED:
        return None
    least = entry.header + LOCAL_HEADER.size + len(entry.name_bytes) + 4
    for descriptor in (16, 24):
        start = following - descriptor - entry.nbytes
        offset = start - zip_start
        if offset <= 0 or offset % _ALIGNMENT:
            continue
        aligned_to = offset & -offset  # the largest power of two that it is a multiple of
        # A field of zip64 numbers stands there too, where the size or the offset is large: up to 28 bytes.
        if 0 <= start - least < aligned_to and start - least < (1 << 16) - 4:
            return start
    return None


def _header_stop(entry: Entry) -> int:
    return entry.header + LOCAL_HEADER.size + len(entry.name_bytes)


def _start_behind_header(data: bytes, data_start: int, entry: Entry, key: str) -> int:
    place = entry.header - data_start
    magic, _, flags, compression, _, _, _, _, _, name_n, extra_n = LOCAL_HEADER.unpack_from(data, place)
    name_bytes = data[place + LOCAL_HEADER.size : place + LOCAL_HEADER.size + len(entry.name_bytes)]
    if magic != b"PK\x03\x04" or name_n != len(entry.name_bytes) or name_bytes != entry.name_bytes:
        raise corrupt_zip(key, entry.header, _header_stop(entry), f"no header of {entry.name!r} is there")
    if compression != entry.compression or flags & ENCRYPTED:
        raise corrupt_zip(
            key, entry.header, _header_stop(entry), f"the header of {entry.name!r} and the directory do not agree"
        )
    return _header_stop(entry) + int(extra_n)


def _inflated(data: bytes, member: ZipMember, key: str) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        inflated = inflater.decompress(data, member.size + 1)
    except zlib.error as error:
        raise corrupt_zip(
            key, member.start, member.start + member.nbytes, f"{member.name!r} does not inflate: {error}"
        ) from error
    if len(inflated) != member.size or not inflater.eof or inflater.unused_data:
        raise corrupt_zip(
            key,
            member.start,
            member.start + member.nbytes,
            f"{member.name!r} inflates to {len(inflated)} bytes or more, where {member.size} are stated",
        )
    return inflated
