"""PeerStorage: the memory of a job's hosts as a storage. Objects survive the loss of hosts, up to the number of copies.

Each object has an entry on a few members of the job's memory, chosen by its key. The entry of a small object, such as
the root of a checkpoint, has its data. A large one is a blob in the memory of the host that writes it, with copies on
other hosts, or fragments on several hosts; its entry names the hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import unquote

from ckptcore.errors import InvalidLocationError, ObjectNotFoundError, StorageFullError
from ckptcore.model.metadata import check_directory_key, check_key
from ckptcore.protocols import (
    IF_ABSENT,
    Buffer,
    ObjectWriter,
    PutCondition,
    RangeReader,
    StorageBackend,
    StorageCapabilities,
    StorageOptions,
)
from ckptcore_recovery.peers import spreading
from ckptcore_recovery.peers.blobs import BlobWriter, put_entry, reader_of, withdraw
from ckptcore_recovery.peers.host_memory import Entry
from ckptcore_recovery.peers.joined_jobs import session_of
from ckptcore_recovery.peers.messages import PIECE_BYTES
from ckptcore_recovery.peers.session import INLINE_BYTES, Session

SCHEME: Final = "peers"


def open_storage(url: str, options: StorageOptions) -> PeerStorage:
    """Open ``peers://JOB`` or ``peers://JOB/DIRECTORY``. Makes no request.

    Raises:
        InvalidLocationError
    """
    job, _, directory = url.partition("://")[2].partition("/")
    if not job:
        raise InvalidLocationError(f"the URL {url!r} has no name of a job; expected {SCHEME}://job/directory")
    directory = check_directory_key(unquote(directory, errors="surrogateescape"))
    return PeerStorage(job, directory + "/" if directory else "")


class PeerStorage(StorageBackend):
    """The objects below a prefix in the memory of a job. Thread-safe."""

    capabilities = StorageCapabilities(request_bytes=PIECE_BYTES, part_bytes=PIECE_BYTES)

    def __init__(self, job: str, prefix: str, session: Session | None = None) -> None:
        """Open a directory.

        Args:
            job: the name of the job.
            prefix: the prefix of all keys.
            session: the session to use; None: that of this process.
        """
        self._job = job
        self._prefix = prefix
        self._is_given = session is not None
        self._found = session

    def __repr__(self) -> str:
        return f"PeerStorage({SCHEME}://{self._job}/{self._prefix})"

    @property
    def _session(self) -> Session:
        if self._found is None:
            self._found = session_of(self._job)
        return self._found

    def _session_now(self) -> Session:
        """Return the session for a listing. A process outside the job gets the present view: the job may have moved."""
        if not self._is_given:
            self._found = session_of(self._job)
        return self._session

    def _below(self, prefix: str) -> str:
        directory = check_directory_key(prefix)
        return self._prefix + (directory + "/" if directory else "")

    def _find(self, key: str) -> Entry:
        return self._session.find(self._prefix + check_key(key))

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `StorageBackend`."""
        return self._read(key, start, stop)[0]

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """See `StorageBackend`."""
        return self._read(key, 0, None)

    def _read(self, key: str, start: int, stop: int | None) -> tuple[bytes, str]:
        """Return bytes of an object, and its tag."""
        while True:
            entry = self._find(key)
            if entry.data is not None:
                return entry.data[start:stop], str(entry.version)
            first = min(start, entry.size)
            data = bytearray((entry.size if stop is None else max(first, min(stop, entry.size))) - first)
            try:
                reader_of(self._session, self._prefix, key, entry).get_into([(first, memoryview(data))])
            except ObjectNotFoundError:
                continue  # it was replaced; if it was deleted, `_find` raises
            return bytes(data), str(entry.version)

    def get_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """See `StorageBackend`."""
        self.open_reader(key).get_into(ranges)

    def open_reader(self, key: str) -> RangeReader:
        """See `StorageBackend`. Reads stay on this object even if another one replaces it."""
        return reader_of(self._session, self._prefix, key, self._find(key))

    def size(self, key: str) -> int:
        """See `StorageBackend`."""
        return self._find(key).size

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`."""
        whole = self._prefix + check_key(key)
        if len(data) > INLINE_BYTES:
            writer = BlobWriter(self._session, whole, len(data), condition)
            try:
                writer.write_at(0, data)
                return writer.complete()
            except BaseException:
                writer.abort()
                raise
        try:
            return put_entry(self._session, whole, Entry(0, len(data), bytes(data)), condition)
        except StorageFullError:
            withdraw(self._session, whole)  # members that had room for it would keep it
            raise

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return self._writer(key, size, None)

    def open_new(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`."""
        return self._writer(key, size, IF_ABSENT)

    def _writer(self, key: str, size: int | None, condition: PutCondition | None) -> ObjectWriter:
        whole = self._prefix + check_key(key)
        if size is None:
            return _WriterOfUnknownSize(self._session, whole, condition)
        return BlobWriter(self._session, whole, size, condition)

    def sync(self, keys: Sequence[str]) -> None:
        """Check that the objects exist. Memory is not durable; copies protect it."""
        for key in keys:
            self._find(key)

    # --- names --------------------------------------------------------------------------------------------------------

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `StorageBackend`."""
        return iter(self.list_sizes(prefix))

    def list_sizes(self, prefix: str = "") -> Mapping[str, int]:
        """See `StorageBackend`."""
        start = len(self._prefix)
        sizes = spreading.sizes_below(self._session_now(), self._below(prefix))
        return {key[start:]: size for key, size in sizes.items()}

    def list_names(self, prefix: str = "") -> Sequence[str]:
        """See `StorageBackend`."""
        below = self._below(prefix)
        names = set()
        for key in spreading.sizes_below(self._session_now(), below):
            name, slash, _ = key[len(below) :].partition("/")
            names.add(name + slash)
        return sorted(names)

    def delete(self, keys: Sequence[str]) -> None:
        """See `StorageBackend`."""
        spreading.delete(self._session, [self._prefix + check_key(key) for key in keys])


class _WriterOfUnknownSize:
    """Collects the pieces of an object whose size is unknown until it is complete. Thread-safe."""

    def __init__(self, session: Session, key: str, condition: PutCondition | None) -> None:
        self._session = session
        self._key = key
        self._condition = condition
        self._pieces: dict[int, bytes] | None = {}

    def write_at(self, offset: int, data: Buffer) -> None:
        """See `ObjectWriter`."""
        if self._pieces is None:
            raise ValueError(f"{self._key!r} is complete or was aborted; nothing more can be written")
        if offset < 0:
            raise ValueError(f"cannot write at {offset} of {self._key!r}")
        if len(data):
            self._pieces[offset] = bytes(data)

    def finish(self) -> None:
        """See `ObjectWriter`."""
        if self._pieces is None:
            raise ValueError(f"{self._key!r} is complete or was aborted already")
        size = max((offset + len(piece) for offset, piece in self._pieces.items()), default=0)
        writer = BlobWriter(self._session, self._key, size, self._condition)
        try:
            for offset, piece in self._pieces.items():
                writer.write_at(offset, piece)
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        self._pieces = None

    def abort(self) -> None:
        """See `ObjectWriter`."""
        self._pieces = None
