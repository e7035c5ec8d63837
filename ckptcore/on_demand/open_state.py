"""OpenState: a checkpoint that stays open for small reads and memory maps, and detects a replacement."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn, TypeVar
from urllib.parse import unquote

import numpy as np

from ckptcore.builtin.local_files import LocalFile
from ckptcore.commit.location import AnyLocation, IndirectLocation
from ckptcore.commit.stored_root import LocationVersion
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, NotMappableError
from ckptcore.io.block_cache import BlockCache
from ckptcore.io.chunk_reads import native_reader
from ckptcore.io.elements import is_little
from ckptcore.loading.reading import incomplete_read
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.opening.checkpoint import Checkpoint, naming_arrays
from ckptcore.opening.open_checkpoints import tree_attempts
from ckptcore.planning import plan_read
from ckptcore.runtime import runtime_of

T = TypeVar("T")

_FILE: Final = "file://"

_MAX_HELD: Final = 150
"""Maximum number of open objects of one checkpoint. Each has a file descriptor, or two if it is mapped. Many systems
limit a process to 1024."""


class OpenState:
    """A checkpoint that stays open to read parts of its arrays. Thread-safe.

    All bytes are from the save that was opened: open objects belong to it, and any other read checks the root again
    afterwards. Pickles and deep copies have the location and the options, except observers and the job. They open the
    checkpoint at their first use.

    Attributes:
        is_closed: True after `close`.
    """

    def __init__(self, location: AnyLocation, context: Context) -> None:
        """Open a checkpoint. Reads its root and no array.

        Raises:
            Errors of `ckptcore.opening.open_checkpoints.open_tree`.
        """
        self.context = context
        self.is_closed = False
        self._now: Checkpoint | None = tree_attempts(location, context, runtime_of(context).parsed_roots).open()
        self._location = _absolute(location, self._now)
        self._version: _Version | LocationVersion = self._now.version
        self._held: dict[str, BlockCache | None] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> _Reference:
        # The digest of a large root takes longer than a slice, and only copies need it.
        version = _Version.of(self._version) if isinstance(self._version, LocationVersion) else self._version
        return _Reference(self._location, self.context.of_another_process(), version, self.is_closed)

    def __setstate__(self, reference: _Reference) -> None:
        self._location, self.context, self._version, self.is_closed = reference
        self._now = None
        self._held = {}
        self._lock = threading.Lock()

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint.

        Raises:
            ValueError: it was closed.
            CheckpointNotFoundError: this is a copy, not used before, and the checkpoint was replaced or deleted.
        """
        now = self._now
        if now is not None:
            return now
        with self._lock:
            if self.is_closed:
                raise ValueError("the checkpoint is closed: open it again, or read before the end of its with block")
            if self._now is None:
                checkpoint = tree_attempts(self._location, self.context, runtime_of(self.context).parsed_roots).open()
                assert isinstance(self._version, _Version)  # only copies are opened at their first use
                if not self._version.still_exists(checkpoint.version):
                    raise _replaced(checkpoint)
                self._now = checkpoint
            return self._now

    def close(self) -> None:
        """Close the checkpoint, and its objects once no read uses them."""
        with self._lock:
            self._now = None
            self.is_closed = True
            self._held.clear()

    def attempt(self, read: Callable[[Checkpoint], T]) -> T:
        """Call a function whose result is valid without another check of the root, such as a read of open objects.

        Raises:
            CheckpointNotFoundError: `read` failed because the checkpoint was replaced or deleted.
            Errors of `read`. Errors about bytes name the arrays that contain them.
        """
        try:
            return read(self.checkpoint)
        except CheckpointError as error:
            self.explain(error)

    def explain(self, error: CheckpointError) -> NoReturn:
        """Raise the final error for an error of a read.

        Raises:
            CheckpointNotFoundError: the checkpoint was replaced or deleted.
            CheckpointError: otherwise the error, with the names of the affected arrays.
            ValueError: the checkpoint was closed.
        """
        checkpoint = self.checkpoint
        if not checkpoint.version.is_current(checkpoint.location):
            raise _replaced(checkpoint) from error
        with naming_arrays(checkpoint):
            raise error

    def guard(self, read: Callable[[Checkpoint], T]) -> T:
        """Call a function that reads any objects, and check afterwards that the checkpoint was not replaced.

        Raises:
            CheckpointNotFoundError: the checkpoint was replaced or deleted, even if `read` succeeded.
            Errors of `read`. Errors about bytes name the arrays that contain them.
        """
        checkpoint = self.checkpoint
        result = self.attempt(read)
        if not checkpoint.version.has_current_root(checkpoint.location):
            raise _replaced(checkpoint)
        return result

    def check_not_replaced(self) -> None:
        """Check after reading that the checkpoint was not replaced.

        Raises:
            CheckpointNotFoundError: it was replaced or deleted.
        """
        checkpoint = self.checkpoint
        if not checkpoint.version.still_exists(checkpoint.location):
            raise _replaced(checkpoint)

    def hold(self, key: str) -> BlockCache | None:
        """Open an object of the checkpoint. Returns None if the storage cannot keep objects open, or too many are open.

        Raises:
            CheckpointNotFoundError: the checkpoint was replaced or deleted.
            Errors of `ObjectReader.open_cached`, which the caller explains.
        """
        try:
            return self._held[key]
        except KeyError:
            if len(self._held) >= _MAX_HELD:
                return None
        checkpoint = self.checkpoint
        held = checkpoint.store.open_cached(key)
        if not checkpoint.version.has_current_root(checkpoint.location):
            raise _replaced(checkpoint)
        with self._lock:
            # Do not keep the object if another thread closed the checkpoint meanwhile.
            return self._held.setdefault(key, held) if self._now is not None else held

    def read(self, leaf: int, boxes: Sequence[Box], buffers: Sequence[HostArray]) -> None:
        """Read boxes of an array, each into the buffer at the same position.

        Raises:
            CorruptCheckpointError: bytes are missing or wrong.
            CheckpointNotFoundError: see `guard`.
        """

        def fill(checkpoint: Checkpoint) -> None:
            count = sum(1 for _ in checkpoint.read(plan_read(checkpoint.tree, [(leaf, boxes)]), buffers))
            if count != len(boxes):
                raise incomplete_read(checkpoint, leaf)

        self.guard(fill)


class _Reference(NamedTuple):
    """The content of a pickle of an `OpenState`."""

    location: AnyLocation
    context: Context
    version: _Version
    is_closed: bool


def _absolute(location: AnyLocation, checkpoint: Checkpoint) -> AnyLocation:
    """Return a location that another process can open, whatever its working directory is."""
    if not isinstance(location, IndirectLocation) and checkpoint.location.identity.startswith("file:"):
        return checkpoint.location.absolute
    return location


class _Version(NamedTuple):
    """The identity of the opened save, for pickles. Has a digest instead of the root, which may be large.

    Attributes:
        digest: a digest of the root, which differs between any two saves. If there is no root, it only covers the size
            of an object.
        names: see `LocationVersion`.
    """

    digest: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, version: LocationVersion) -> _Version:
        root = version.root
        content = root if isinstance(root, bytes) else repr(version._replace(names=())).encode()
        return cls(hashlib.sha256(content).hexdigest(), version.names)

    def still_exists(self, now: LocationVersion) -> bool:
        """Return True if everything in this version still exists: see `LocationVersion.still_exists`."""
        current = _Version.of(now)
        return current.digest == self.digest and set(self.names) <= set(current.names)


def _replaced(checkpoint: Checkpoint) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{checkpoint.location.display} was replaced or deleted after it was opened: open it again"
    )


class PlainExtent(NamedTuple):
    """The location of an array that is uncompressed, little endian, in C order and in one object.

    Attributes:
        key: the object.
        offset: offset of the first element, in bytes.
        has_checksum: True if a checksum follows the elements in the object.
    """

    key: str
    offset: int
    has_checksum: bool


def find_plain_extent(checkpoint: Checkpoint, leaf: int) -> PlainExtent | None:
    """Return the location of an array; None if the array cannot be read directly from one object.

    An array cannot be read directly if it is compressed, computed, empty, in several chunks, or read by the layout's
    native reader, or if this host has copies of its checkpoint.

    Raises:
        CorruptCheckpointError: the metadata of its location is damaged.
    """
    record = checkpoint.tree.leaves[leaf]
    if not isinstance(record, ArrayRecord) or 0 in record.spec.shape or checkpoint.read_instead:
        return None
    leaf = checkpoint.tree.aliases.get(leaf, leaf)
    shape, index = record.spec.shape, checkpoint.index
    # Look up only the chunk of the first element, because an array may have millions of chunks. If this chunk is the
    # whole array, the array has no other chunk.
    chunks = iter(index.boxes(leaf, Box.whole((1,) * len(shape))))
    chunk = next(chunks, None)
    if chunk is None or not chunk.is_plain or chunk.box.stop != shape or any(chunk.box.start) or next(chunks, None):
        return None
    if chunk.is_exact:
        return PlainExtent(chunk.key, chunk.offset, False)
    native = native_reader(index)
    if native is not None and native.reads(leaf, checkpoint.store):
        return None
    located = index.locate([chunk], checkpoint.store)
    if located.encoded or located.inline or located.fills:
        return None
    return PlainExtent(located.keys[0], located.starts[0], bool(located.checksums))


def map_array(checkpoint: Checkpoint, leaf: int, spec: ArraySpec, name: str) -> HostArray:
    """Map an array into memory. The file stays mapped, and keeps its disk space, until the last view is released.

    Args:
        checkpoint: the checkpoint.
        leaf: the number of the array.
        spec: its shape and dtype.
        name: its name, for errors.

    Raises:
        NotMappableError: the array cannot be mapped; gives the reason.
        CorruptCheckpointError: the file is too short, or the metadata of its location is damaged.
    """
    address = checkpoint.store.address
    if address is None or not address.url.startswith(_FILE):
        place = "is" if address is None else f"is at {address.url},"
        raise _refusal(checkpoint, name, f"{place} not on a local disk")
    if not spec.size:
        return np.ndarray(spec.shape, spec.numpy_dtype, b"")
    if not is_little(spec.numpy_dtype):
        raise _refusal(checkpoint, name, "has another byte order in files than this machine has in memory")
    extent = find_plain_extent(checkpoint, leaf)
    if extent is None:
        raise _refusal(checkpoint, name, f"is compressed or in several pieces in the layout {checkpoint.layout.name}")
    root = unquote(address.url.removeprefix(_FILE), errors="surrogateescape").rstrip("/") or "/"
    file = LocalFile(extent.key, f"{root}/{extent.key}", os.path.dirname(root))
    stop = extent.offset + spec.nbytes
    if stop > file.status.st_size:
        raise CorruptCheckpointError(
            f"{extent.key!r} is too short: expected bytes {extent.offset} to {stop}, found {file.status.st_size} "
            "bytes. It was truncated: restore it from a copy, or load another checkpoint",
            key=extent.key, start=min(extent.offset, file.status.st_size), stop=stop,
        )  # fmt: skip
    return np.ndarray(spec.shape, spec.numpy_dtype, file.map(), extent.offset)


def _refusal(checkpoint: Checkpoint, name: str, reason: str) -> NotMappableError:
    return NotMappableError(
        f"{name} of {checkpoint.location.display} cannot be mapped into memory: it {reason}. Read it by indexing, "
        "such as array[...], or convert the checkpoint to safetensors on a local disk"
    )
