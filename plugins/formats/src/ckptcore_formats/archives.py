"""Zips and tars as read-only storages, so that what is inside can be named: ``model.zip!/policy.pth``.

Members that are stored without compression are read by byte ranges of the archive. Others are decompressed once, at
their first read, into a temporary file. Nothing is unpacked to a name that an archive chooses.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, NoReturn

from ckptcore_dcp.pickle_reading import STORED, ZipMember, inflated_blocks, read_zip

from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
)
from ckptcore.model import check_directory_key, check_key
from ckptcore.model.file_kinds import part_of_archive
from ckptcore.protocols import ObjectWriter, PutCondition, StorageBackend, StorageCapabilities
from ckptcore.temporary import TemporaryFile
from ckptcore_formats.compressed_files import codec_of, decompressed, most_content_bytes
from ckptcore_formats.tar_headers import is_tar, read_members

_HEAD_BYTES: Final = 512
_ZIP_END_BYTES: Final = 22
"""Length of the last record of a zip without a comment (APPNOTE.TXT 4.3.16)."""
_MARK: Final = "!"


def open_archive(storage: StorageBackend, key: str, display: str) -> StorageBackend:
    """Return an archive as a storage, in which the keys of members begin with ``NAME!/``. Reads nothing yet.

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
        """Return a member. Its tag is constant, because an archive is only read."""
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
        found = self._members().get(name.removeprefix(self._prefix)) if name.startswith(self._prefix) else None
        if found is None:
            left_out = f"; {self._outside[:80]!r} is outside of it and left out" if self._outside else ""
            raise ObjectNotFoundError(f"{self._display} has no member {name.removeprefix(self._prefix)!r}{left_out}")
        if found.problem:
            raise InvalidLocationError(
                f"{name.removeprefix(self._prefix)!r} in {self._display} is {found.problem}: name another member, or "
                "unpack the archive"
            )
        return found

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
            if (part := part_of_archive(head, self._key)) is None:  # a whole archive may have the name of a part
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
            return self._of_zip(size)  # the last of several parts begins with any byte: the error says what it is
        raise InvalidLocationError(
            f"{self._display} is not a zip or tar archive, so that nothing in it can be named: load it by its own "
            "location"
        )

    def _fetch(self, start: int, stop: int) -> bytes:
        return self._storage.get(self._key, start, stop)

    def _of_tar(self, fetch: Callable[[int, int], bytes], size: int) -> Mapping[str, _Content]:
        members = read_members(fetch, size, self._key)
        return self._named([(one.name, _Content(one.nbytes, _range(fetch, one.start), one.problem)) for one in members])

    def _of_zip(self, size: int) -> Mapping[str, _Content]:
        members = read_zip(self._fetch, 0, size, key=self._key, keep_problems=True)
        return self._named([(name, self._of_member(one)) for name, one in members.items() if name[-1:] != "/"])

    def _of_member(self, member: ZipMember) -> _Content:
        if member.problem:
            return _Content(member.size, self._fetch, member.problem)
        if member.compression == STORED:
            return _Content(member.nbytes, _range(self._fetch, member.start))
        if member.size > most_content_bytes(member.nbytes):
            problem = f"compressed from {member.size} to {member.nbytes} bytes, too much for a temporary copy"
            return _Content(member.size, self._fetch, problem)
        return _Content(member.size, _Inflated(member, self._fetch, self._key).read)

    def _named(self, found: Sequence[tuple[str, _Content]]) -> Mapping[str, _Content]:
        """Return the members by their key, without those whose name is outside of the archive."""
        contents: dict[str, _Content] = {}
        for name, content in found:
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
