"""Zip and tar archives as read-only storages. A location such as ``model.zip!/policy.pth`` names a member.

Uncompressed members are read directly from the archive. Each compressed member is decompressed into a temporary file
when it is first read. Names in an archive are never used as names of written files.

Supported headers of tar archives: POSIX ustar and pax (IEEE Std 1003.1, ``pax``), and the long names of GNU tar.
Numbers and names in an archive are untrusted, and are checked before use.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, NoReturn

from ckptcore_dcp.reading import STORED, ZipMember, inflated_blocks, read_zip

from ckptcore.errors import CheckpointError, CorruptCheckpointError, InvalidLocationError, ObjectNotFoundError
from ckptcore.model import check_directory_key, check_key
from ckptcore.model.file_kinds import part_of_archive
from ckptcore.protocols import ObjectWriter, PutCondition, StorageBackend, StorageCapabilities
from ckptcore.temporary import TemporaryFile
from ckptcore_formats.compressed_files import codec_of, decompressed, most_content_bytes

_BLOCK: Final = 512
_REGULAR: Final = (b"0", b"\0", b"7")
_LINKS: Final = {b"1": "a hard link", b"2": "a symbolic link"}
_SPECIAL: Final = {b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file", b"V": "a label"}
_MAX_NAME_BYTES: Final = 1 << 16
"""Maximum length of a pax header or a GNU long name, in bytes. Linux allows paths of 4096 bytes."""
_MAX_MEMBERS: Final = 1 << 20
_READ_BYTES: Final = 1 << 16


class TarMember(NamedTuple):
    """A member of a tar archive.

    Attributes:
        name: its name.
        start: offset of its content in the archive, in bytes.
        nbytes: its length.
        problem: description of a member that is not a regular file, such as a link; empty for a regular file.
            Directories are not listed.
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
                records = _pax(content, key, position)
                name = records.get("path", name)
                length = _pax_size(records.get("size", "-1"), key, position)
                if any(record.startswith("GNU.sparse.") for record in records):
                    raise _damaged(key, position, "a sparse file", "Unpack it, and load what it contains")
            position = start + -(-nbytes // _BLOCK) * _BLOCK
            continue
        nbytes = nbytes if length < 0 else length
        if kind not in _REGULAR:
            problem = _LINKS.get(kind, _SPECIAL.get(kind, "of an unknown kind"))
            # As in `tarfile`: links, devices, directories and pipes have no content, even if their header states a
            # size.
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
    """Return True if the checksum of a header equals the sum of its bytes, with the checksum field as spaces."""
    text = header[148:156].strip(b" \0")
    total = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    return text.isdigit() and b"8" not in text and b"9" not in text and int(text, 8) == total


def _number(field: bytes, key: str, position: int) -> int:
    """Decode octal digits, or a big-endian binary number.

    GNU tar writes large numbers in binary, with the highest bit set.
    """
    if field[0] & 0x80:
        number = int.from_bytes(field, "big") & ~(0x80 << 8 * (len(field) - 1))
    else:
        text = field.split(b"\0")[0].strip()
        if text and not (text.isdigit() and b"8" not in text and b"9" not in text):
            raise _damaged(key, position, "a length is no number")
        number = int(text or b"0", 8)
    if not 0 <= number < 1 << 62:
        raise _damaged(key, position, "a length is too large")
    return number


def _pax(content: bytes, key: str, position: int) -> dict[str, str]:
    """Return the records of a pax header: ``length keyword=value`` and a newline."""
    records: dict[str, str] = {}
    while content.strip(b"\0"):
        digits = content.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        keyword, equals, value = content[len(digits) + 1 : length - 1].partition(b"=")
        if length > len(content) or length <= len(digits) + 1 or not equals or content[length - 1 : length] != b"\n":
            raise _damaged(key, position, "a pax header is malformed")
        records[keyword.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[length:]
    return records


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


_HEAD_BYTES: Final = 512
_ZIP_END_BYTES: Final = 22
"""Length of the last record of a zip without a comment (APPNOTE.TXT 4.3.16)."""
_MARK: Final = "!"


def open_archive(storage: StorageBackend, key: str, display: str) -> StorageBackend:
    """Return a storage that contains the members of an archive. Their keys begin with ``NAME!/``. Reads nothing yet.

    Args:
        storage: the storage with the archive.
        key: the archive.
        display: its location as users see it.
    """
    return _ArchiveStorage(storage, key, display)


class _Content(NamedTuple):
    """The bytes of a member.

    Attributes:
        nbytes: length.
        read: returns bytes `start` to `stop` of it.
        problem: why it cannot be read; empty for a file.
    """

    nbytes: int
    read: Callable[[int, int], bytes]
    problem: str = ""


class _ArchiveStorage(StorageBackend):
    """The members of an archive. Thread-safe."""

    def __init__(self, storage: StorageBackend, key: str, display: str) -> None:
        self._storage = storage
        self._key = key
        self._display = display
        self._prefix = f"{key.rpartition('/')[2]}{_MARK}/"
        self._lock = threading.Lock()
        self._found: Mapping[str, _Content] | None = None
        self._outside = ""

    def __repr__(self) -> str:
        return f"<archive {self._display}>"

    @property
    def capabilities(self) -> StorageCapabilities:
        """The capabilities of the storage with the archive."""
        return self._storage.capabilities

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of a member; fewer if it ends earlier."""
        content = self._find(key)
        stop = content.nbytes if stop is None else min(stop, content.nbytes)
        return content.read(start, stop) if start < stop else b""

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """Return a member and a constant tag, because archives are read-only."""
        return self.get(key), self._key

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset."""
        content = self._find(key)
        for offset, buffer in ranges:
            stop = offset + len(buffer)
            data = content.read(offset, min(stop, content.nbytes)) if offset < content.nbytes else b""
            if len(data) != len(buffer):
                raise CorruptCheckpointError(
                    f"{key!r} is too short: it has {content.nbytes} bytes, and bytes {offset} to {stop} are expected. "
                    "Load another checkpoint",
                    key=key,
                    start=min(offset, content.nbytes),
                    stop=stop,
                )
            buffer[:] = data

    def size(self, key: str) -> int:
        """Return the length of a member in bytes."""
        return self._find(key).nbytes

    def list(self, prefix: str = "") -> Iterator[str]:
        """Return the keys of all members below a directory, sorted."""
        directory = check_directory_key(prefix)
        below = f"{directory}/" if directory else ""
        keys = [self._prefix + name for name in self._members()]
        return iter(sorted([key for key in keys if key.startswith(below)]))

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """Return the names one level below a directory, sorted. Names of directories end in ``/``."""
        start = len(prefix.removesuffix("/")) + 1 if prefix else 0
        names = set()
        for key in self.list(prefix):
            name, slash, _ = key[start:].partition("/")
            names.add(name + slash)
        return sorted(names)

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """Refuse to write."""
        self._refuse()

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """Refuse to write."""
        self._refuse()

    def sync(self, keys: Sequence[str]) -> None:
        """Refuse to write."""
        self._refuse()

    def delete(self, keys: Sequence[str]) -> None:
        """Refuse to delete."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise InvalidLocationError(
            f"{self._display} is an archive, which is only read: save to a directory, and pack that if it is needed"
        )

    def _find(self, key: str) -> _Content:
        name = check_key(key)
        member = self._members().get(name.removeprefix(self._prefix)) if name.startswith(self._prefix) else None
        if member is None:
            left_out = f"; {self._outside[:80]!r} is outside of it and left out" if self._outside else ""
            raise ObjectNotFoundError(f"{self._display} has no member {name.removeprefix(self._prefix)!r}{left_out}")
        if member.problem:
            raise InvalidLocationError(
                f"{name.removeprefix(self._prefix)!r} in {self._display} is {member.problem}: name another member, or "
                "unpack the archive"
            )
        return member

    def _members(self) -> Mapping[str, _Content]:
        with self._lock:
            if self._found is None:
                self._found = self._read_members()
            return self._found

    def _read_members(self) -> Mapping[str, _Content]:
        size = self._storage.size(self._key)
        head = self._fetch(0, min(_HEAD_BYTES, size))
        try:
            return self._members_after(head, size)
        except (CorruptCheckpointError, InvalidLocationError):
            # Check this only after an error, because a complete archive may also have the name of a part.
            if (part := part_of_archive(head, self._key)) is None:
                raise
            raise InvalidLocationError(f"{self._display} is {part}, by naming a member of it") from None

    def _members_after(self, head: bytes, size: int) -> Mapping[str, _Content]:
        if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
            return self._of_zip(size)
        if is_tar(head):
            return self._of_tar(self._fetch, size)
        if (codec := codec_of(head)) is not None:
            file, length = decompressed(codec, self._fetch, size, self._key)
            weakref.finalize(self, file.close)

            def fetch(start: int, stop: int) -> bytes:
                return file.read_at(start, stop - start)

            if is_tar(fetch(0, _HEAD_BYTES)):
                return self._of_tar(fetch, length)
            name = self._key.rpartition("/")[2].rpartition(".")[0] or "content"
            return self._named([(name, _Content(length, fetch))])
        if self._fetch(max(0, size - _ZIP_END_BYTES), size)[:4] == b"PK\x05\x06":
            return self._of_zip(size)  # the last part of a split zip may begin with any byte: raises an error
        raise InvalidLocationError(
            f"{self._display} is not a zip or tar archive, so that nothing in it can be named: load it by its own "
            "location"
        )

    def _fetch(self, start: int, stop: int) -> bytes:
        return self._storage.get(self._key, start, stop)

    def _of_tar(self, fetch: Callable[[int, int], bytes], size: int) -> Mapping[str, _Content]:
        members = read_members(fetch, size, self._key)
        return self._named(
            [(member.name, _Content(member.nbytes, _range(fetch, member.start), member.problem)) for member in members]
        )

    def _of_zip(self, size: int) -> Mapping[str, _Content]:
        members = read_zip(self._fetch, 0, size, key=self._key, keep_problems=True)
        return self._named([(name, self._of_member(member)) for name, member in members.items() if name[-1:] != "/"])

    def _of_member(self, member: ZipMember) -> _Content:
        if member.problem:
            return _Content(member.size, self._fetch, member.problem)
        if member.compression == STORED:
            return _Content(member.nbytes, _range(self._fetch, member.start))
        if member.size > most_content_bytes(member.nbytes):
            problem = f"compressed from {member.size} to {member.nbytes} bytes, too much for a temporary copy"
            return _Content(member.size, self._fetch, problem)
        return _Content(member.size, _Inflated(member, self._fetch, self._key).read)

    def _named(self, members: Sequence[tuple[str, _Content]]) -> Mapping[str, _Content]:
        """Return the members by key. Skip members whose name is absolute or is not a valid key."""
        contents: dict[str, _Content] = {}
        for name, content in members:
            parts = [part for part in name.split("/") if part not in ("", ".")]
            key = "/".join(parts)
            try:
                if name.startswith("/"):
                    raise InvalidLocationError("it is absolute")
                check_key(key)
            except CheckpointError:
                self._outside = self._outside or name
                continue
            if key in contents:
                content = content._replace(problem="there twice")
            contents[key] = content
        return contents


def _range(fetch: Callable[[int, int], bytes], origin: int) -> Callable[[int, int], bytes]:
    return lambda start, stop: fetch(origin + start, origin + stop)


class _Inflated:
    """A compressed member of a zip, which is decompressed at the first read. Thread-safe."""

    def __init__(self, member: ZipMember, fetch: Callable[[int, int], bytes], key: str) -> None:
        self._member = member
        self._fetch = fetch
        self._key = key
        self._lock = threading.Lock()
        self._file: TemporaryFile | None = None

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes of the content."""
        with self._lock:
            if self._file is None:
                self._file = self._inflate()
        return self._file.read_at(start, stop - start)

    def _inflate(self) -> TemporaryFile:
        file = TemporaryFile(f"of {self._member.name} in {self._key}")
        try:
            for block in inflated_blocks(self._member, self._fetch, key=self._key):
                file.write(block)
        except BaseException:
            file.close()
            raise
        weakref.finalize(self, file.close)
        return file
