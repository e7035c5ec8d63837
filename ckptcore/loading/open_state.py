"""OpenState: a checkpoint that stays open for small reads and maps, and notices that it was replaced."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeVar
from urllib.parse import unquote

import numpy as np

from ckptcore.builtin.local_files import LocalFile
from ckptcore.commit.location import AnyLocation
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, NotMappableError
from ckptcore.io.block_cache import BlockCache
from ckptcore.io.chunk_reads import native_reader
from ckptcore.io.elements import is_little
from ckptcore.loading.checkpoint import Checkpoint, naming_arrays
from ckptcore.loading.opening import tree_read
from ckptcore.loading.reading import unread
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.planning import plan_read
from ckptcore.runtime import runtime_of

__all__ = ["OpenState", "PlainPlace", "find_plain_place", "map_array"]

T = TypeVar("T")

_FILE: Final = "file://"

_MOST_HELD: Final = 150
"""Limit of open objects: each takes a file descriptor, or two if it is mapped. Many systems allow a process 1024."""


class OpenState:
    """A checkpoint that stays open for reads of parts. Any thread.

    All bytes are of the save that was opened: objects that are held open belong to it, and after any other read the
    root is checked again.

    Attributes:
        is_closed: True after `close`.
    """

    def __init__(self, location: AnyLocation, context: Context) -> None:
        """Open a checkpoint. Reads its root and no array.

        Raises:
            What `ckptcore.loading.opening.open_tree` does.
        """
        self.context = context
        self.is_closed = False
        self._now: Checkpoint | None = tree_read(location, context, runtime_of(context).known_roots).open()
        self._held: dict[str, BlockCache | None] = {}
        self._lock = threading.Lock()

    @property
    def opened(self) -> Checkpoint:
        """The checkpoint.

        Raises:
            ValueError: if it was closed.
        """
        now = self._now
        if now is None:
            raise ValueError("the checkpoint is closed; open it again, or read before the end of its with block")
        return now

    def close(self) -> None:
        """Close the checkpoint, and its objects once no read uses them."""
        with self._lock:
            self._now = None
            self.is_closed = True
            self._held.clear()

    def attempt(self, read: Callable[[Checkpoint], T]) -> T:
        """Call a function that reads only objects that are held open, or nothing.

        Raises:
            CheckpointNotFoundError: if the checkpoint was replaced or deleted, where `read` raises something for it.
            What `read` does. Errors about bytes name the arrays that contain them.
        """
        try:
            return read(self.opened)
        except CheckpointError as error:
            self.explain(error)

    def explain(self, error: CheckpointError) -> NoReturn:
        """Raise the error that an error of a read becomes.

        Raises:
            CheckpointNotFoundError: if the checkpoint was replaced or deleted.
            CheckpointError: else the error, which names the arrays that contain the wrong bytes.
            ValueError: if the checkpoint was closed.
        """
        opened = self.opened
        if not opened.version.is_current(opened.location):
            raise _replaced(opened) from error
        with naming_arrays(opened):
            raise error

    def guard(self, read: Callable[[Checkpoint], T]) -> T:
        """Call a function that reads.

        Raises:
            CheckpointNotFoundError: if the checkpoint was replaced or deleted, whatever `read` raises or gives then.
            What `read` does. Errors about bytes name the arrays that contain them.
        """
        opened = self.opened
        made = self.attempt(read)
        if not opened.version.has_current_root(opened.location):
            raise _replaced(opened)
        return made

    def expect_there(self) -> None:
        """Check after reading that the checkpoint was not replaced.

        Raises:
            CheckpointNotFoundError: if it was replaced or deleted.
        """
        opened = self.opened
        if not opened.version.still_exists(opened.location):
            raise _replaced(opened)

    def hold(self, key: str) -> BlockCache | None:
        """Return an open object of the checkpoint; None if the storage holds no objects open, or too many are open.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError: as `guard` does.
        """
        with self._lock:
            if key in self._held:
                return self._held[key]
            if len(self._held) >= _MOST_HELD:
                return None
        held = self.guard(lambda opened: opened.store.open_cached(key))
        with self._lock:
            return self._held.setdefault(key, held) if self._now is not None else held

    def read(self, leaf: int, boxes: Sequence[Box], buffers: Sequence[HostArray]) -> None:
        """Fill a buffer with each box of an array.

        Raises:
            CorruptCheckpointError: where bytes are missing or wrong.
            CheckpointNotFoundError: as `guard` does.
        """

        def fill(opened: Checkpoint) -> None:
            count = sum(1 for _ in opened.read(plan_read(opened.tree, [(leaf, boxes)]), buffers))
            if count != len(boxes):
                raise unread(opened, leaf)

        self.guard(fill)


def _replaced(opened: Checkpoint) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{opened.location.display} was replaced or deleted after it was opened, and what is there now is another "
        "checkpoint or none; open it again"
    )


@dataclass(frozen=True, slots=True)
class PlainPlace:
    """AnyLocation of all elements of an array: uncompressed, little endian and in C order.

    Attributes:
        key: the object.
        offset: of the first element in it, in bytes.
        is_sealed: True if a checksum is right behind them.
    """

    key: str
    offset: int
    is_sealed: bool


def find_plain_place(opened: Checkpoint, leaf: int) -> PlainPlace | None:
    """Return the place of an array; None if it is compressed, in several chunks, or in no known place.

    Raises:
        CorruptCheckpointError: the metadata that describes the place is damaged.
    """
    record = opened.tree.leaves[leaf]
    if not isinstance(record, ArrayRecord) or not record.spec.size or opened.read_instead:
        return None
    leaf = opened.tree.aliases.get(leaf, leaf)
    whole = Box.whole(record.spec.shape)
    index = opened.index
    chunks = iter(index.boxes(leaf, whole))
    chunk = next(chunks, None)
    if chunk is None or not chunk.is_plain or chunk.box != whole or next(chunks, None) is not None:
        return None
    if chunk.is_exact:
        return PlainPlace(chunk.key, chunk.offset, False)
    native = native_reader(index)
    if native is not None and native.reads(leaf, opened.store):
        return None
    places = index.locate([chunk], opened.store)
    if places.encoded or places.inline or places.fills:
        return None
    return PlainPlace(places.keys[0], places.starts[0], bool(places.checksums))


def map_array(opened: Checkpoint, leaf: int, spec: ArraySpec, name: str) -> HostArray:
    """Map an array. Its file stays mapped, and on the disk, until the last view of it is gone.

    Args:
        opened: the checkpoint.
        leaf: the number of the array.
        spec: of it.
        name: of it, for errors.

    Raises:
        NotMappableError: says why it cannot be.
        CorruptCheckpointError: if the file ends before it does.
    """
    address = opened.store.address
    if address is None or not address.url.startswith(_FILE):
        raise _refusal(
            opened, name, "is not on a local disk" if address is None else f"is at {address.url}, not on a local disk"
        )
    if not spec.size:
        return np.ndarray(spec.shape, spec.numpy_dtype, b"")
    if not is_little(spec.numpy_dtype):
        raise _refusal(opened, name, "has another byte order in files than this machine has in memory")
    place = find_plain_place(opened, leaf)
    if place is None:
        raise _refusal(
            opened,
            name,
            f"does not stand in one file as it is in memory: the layout {opened.layout.name} has it compressed, or "
            "in pieces",
        )
    root = unquote(address.url.removeprefix(_FILE), errors="surrogateescape").rstrip("/") or "/"
    file = LocalFile(place.key, f"{root}/{place.key}", os.path.dirname(root))
    stop = place.offset + spec.nbytes
    if stop > file.status.st_size:
        raise CorruptCheckpointError(
            f"{place.key!r} is too short: expected bytes {place.offset} to {stop}, found {file.status.st_size} bytes "
            "in all; it was cut off, restore it from a copy, or load another checkpoint",
            key=place.key, start=min(place.offset, file.status.st_size), stop=stop,
        )  # fmt: skip
    return np.ndarray(spec.shape, spec.numpy_dtype, file.map(), place.offset)


def _refusal(opened: Checkpoint, name: str, reason: str) -> NotMappableError:
    return NotMappableError(
        f"{name} of {opened.location.display} cannot be mapped into memory: it {reason}; read it by indexing, as "
        "array[...], or convert the checkpoint to safetensors on a local disk"
    )
