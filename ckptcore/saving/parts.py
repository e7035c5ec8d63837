"""The parts of a save: trees, and objects that write files of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import numpy as np

from ckptcore.builtin.files import FilesLayout, state_of_files
from ckptcore.commit.root import Member
from ckptcore.errors import NameCollisionError, TreeMismatchError, UnsupportedKeyError, UnsupportedLeafError
from ckptcore.io.snapshot import BoundedSnapshot, SnapshotShare
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.transfer import ArraySegment, BytesSegment, Pending, Receipt, Segment, WriteItem, WritePlan
from ckptcore.model.tree import JSON, Node
from ckptcore.planning.replicas import ReplicaOptions
from ckptcore.plugins import Plugins
from ckptcore.protocols import (
    Continuation,
    Executor,
    FilesHandler,
    HostMemory,
    Layout,
    Snapshot,
    WriteStore,
)
from ckptcore.saving.tree_descriptions import TreeDescription, describe_tree
from ckptcore.tree.flattening import PerProcess

if TYPE_CHECKING:
    from ckptcore.builtin.staging import StagingDirectory

__all__ = [
    "ArraySource",
    "Captured",
    "FilesCaptured",
    "FilesDescription",
    "PartDescription",
    "SavePart",
    "SharedItems",
    "TreeCaptured",
    "describe_part",
    "files_below",
    "naming",
    "segment_of",
]


def segment_of(path: str) -> Segment:
    """The bytes of a file, mapped when they are wanted."""
    size = os.path.getsize(path)
    if not size:
        return BytesSegment(b"")
    box = Box((0,), (size,))

    def map_bytes() -> Sequence[tuple[Box, HostArray]]:
        return ((box, np.memmap(path, np.uint8, "r", shape=(size,))),)

    return ArraySegment(box, 1, map_bytes, lambda: None)


def files_below(directory: str) -> tuple[Sequence[tuple[str, str]], Sequence[str]]:
    """The path and the key of every file, and the keys of empty directories.

    Raises:
        UnsupportedLeafError: if there is something that is neither a file nor a directory.
        NameCollisionError: if something has the name of one of ckptcore's own files.
        OSError: if a directory cannot be read.
    """
    found = []
    empty = []
    for parent, directories, names in os.walk(directory, onerror=_raise):
        if not directories and not names and parent != directory:
            empty.append(_own_key(parent, directory))
        for name in [*names, *(name for name in directories if os.path.islink(os.path.join(parent, name)))]:
            path = os.path.join(parent, name)
            key = _own_key(path, directory)
            if os.path.islink(path) or not os.path.isfile(path):
                raise UnsupportedLeafError(
                    f"the object wrote {key!r}, which is no plain file; only files can be stored"
                )
            found.append((path, key))
    return sorted(found), sorted(empty)


def _own_key(path: str, directory: str) -> str:
    key = os.path.relpath(path, directory).replace(os.sep, "/")
    if key.startswith("checkpoint."):
        raise NameCollisionError(
            f"the object wrote {key!r}; names that begin with 'checkpoint.' are those of ckptcore's own files"
        )
    return key


def _raise(error: OSError) -> NoReturn:
    raise error


class ArraySource(Protocol):
    """The arrays of a part, until they are captured."""

    def copy(self, item: WriteItem, memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Begin to copy the boxes of an item of the plan into memory of the save."""
        ...

    def view(self, item: WriteItem) -> Sequence[Pending[HostArray]]:
        """Begin to bring the boxes of an item of the plan to the host, without a copy if they are there."""
        ...


@dataclass(frozen=True, slots=True)
class SharedItems:
    """The items of a part that a part of a further save writes too.

    Attributes:
        part: the part that captures them.
        items: by item of the plan of the further part, the number of the item in the plan of that part.
        worker_items: the same for each worker of this controller that writes of it.
    """

    part: SavePart
    items: tuple[int, ...]
    worker_items: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class SavePart:
    """One tree, or the files of one object, from the value to the receipts. The stages of a save fill it one after the other.

    Attributes:
        directory: within the checkpoint; empty if the part is the whole checkpoint.
        layout: stores it.
        plan: what this process writes of it.
        own: True if every process writes a part of its own. Otherwise all processes write it together.
        worker_plans: what each worker of this controller writes of it; empty if none has any of it.
        source: what is captured; None once it is.
        captured: what is written; None before the capture and once it was closed.
        receipts: of what was written; on the leader those of all ranks before the commit.
        shared: the items that it shares with a part of another save, which captures them; None if it captures its own.
    """

    directory: str
    layout: Layout
    plan: WritePlan
    own: bool = False
    worker_plans: tuple[WritePlan, ...] = ()
    source: ArraySource | FilesDescription | None = None
    captured: Captured | None = None
    receipts: Sequence[Receipt] = ()
    shared: SharedItems | None = None

    @property
    def plans(self) -> tuple[WritePlan, ...]:
        """What this process and its workers write of it."""
        return (self.plan, *self.worker_plans)

    def close(self) -> None:
        """Release what was captured. Again is no error."""
        captured, self.captured, self.source = self.captured, None, None
        if captured is not None:
            captured.close()


class Captured(Protocol):
    """The captured content of a part. It does not change after the save began."""

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """Write it; the layout's receipt."""
        ...

    def close(self) -> None:
        """Let go of what it holds; again is no error."""
        ...


@dataclass(frozen=True, slots=True)
class FilesDescription:
    """An object that writes files of its own.

    Attributes:
        name: of the checkpointable.
        layout: the one of files.
        value: the object.
        handler: what makes it write.
    """

    name: str
    layout: Layout
    value: object
    handler: FilesHandler

    def member(self, size: int) -> Member:
        """What the root of a composite says of it."""
        return Member("files", size)

    def plans(self, rank: int, size: int, save_id: str) -> tuple[WritePlan, ...]:
        """Plan no arrays."""
        return (WritePlan(TreeMetadata(Node("dict", (), ()), ()), (), 0, 1, save_id, self.name),)

    def capture(self) -> FilesCaptured:
        """Let the object capture what must not change, into a directory of the local disk."""
        from ckptcore.builtin.staging import StagingDirectory  # only objects that write files need it

        directory = StagingDirectory()
        try:
            with naming(self.name):
                return FilesCaptured(self.name, directory, self.handler.save(self.value, directory.path))
        except BaseException:
            directory.close()
            raise


PartDescription: TypeAlias = TreeDescription | FilesDescription


@dataclass(frozen=True, slots=True)
class TreeCaptured:
    """The arrays of a tree. See `Captured`."""

    snapshot: Snapshot

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """See `Captured`."""
        return part.layout.write(self.snapshot, store)

    def close(self) -> None:
        """Release what is not written, and let copies wait for it no longer."""
        if isinstance(self.snapshot, BoundedSnapshot | SnapshotShare):
            self.snapshot.writer_ended()


class FilesCaptured:
    """Files that an object has written, or will write when it is told to go on."""

    def __init__(self, name: str, directory: StagingDirectory, continuation: Continuation | None) -> None:
        self._name = name
        self._directory = directory
        self._continuation = continuation

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """Let the object write the rest, and store every file; the receipt tells of empty directories."""
        if self._continuation is not None:
            with naming(self._name):
                self._continuation()
        with naming(self._name):
            found, empty = files_below(str(self._directory.path))
            state = state_of_files(empty)
        for path, key in found:
            store.write(key, [segment_of(path)])
        return state

    def close(self) -> None:
        """Remove the local files."""
        self._directory.close()


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let an error say which checkpointable it is about; nothing where the whole checkpoint has no name."""
    if not name:
        yield
        return
    try:
        yield
    except TreeMismatchError as error:
        raise TreeMismatchError(f"in {name!r}: {error}", error.differences) from error
    except (UnsupportedLeafError, UnsupportedKeyError, NameCollisionError) as error:
        raise type(error)(f"in {name!r}: {error}") from error
    except Exception as error:
        error.add_note(f"This was raised as {name!r} was saved. Nothing was committed")
        raise


def describe_part(
    name: str,
    value: object,
    layout: Layout,
    plugins: Plugins,
    *,
    rank: int,
    size: int,
    replicas: ReplicaOptions | None = None,
    executor: Executor[Any, Any] | None = None,
    placeholders: bool = False,
) -> PartDescription:
    """Look at what is to be saved under a name, and refuse what cannot be. Writes nothing.

    Args:
        name: of the checkpointable; empty where it is the whole checkpoint, and then a tree.
        value: the checkpointable.
        layout: how trees are to be laid out.
        plugins: to find who handles it.
        rank, size: which process of how many this is.
        replicas: how those that hold the same elements share them; None: they do not.
        executor: the workers that hold the elements of leaves, where this process is their controller.
        placeholders: whether some of the whole checkpoint may be left to the base of an update.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: say the name, too.
    """
    own = isinstance(value, PerProcess)
    if isinstance(value, PerProcess):
        if not name:
            raise UnsupportedLeafError(
                "PerProcess(...) is for what has a name of its own: use save_checkpointables. Nothing was written"
            )
        value = value.value
    with naming(name):
        if name:
            handled = plugins.dispatch_named(value)
            if handled.files is not None:
                return FilesDescription(name, FilesLayout(), value, handled.files)
            own = own or (handled.checkpointable is not None and handled.checkpointable.per_process)
        return describe_tree(
            name, value, layout, plugins, rank, size, replicas, executor, own=own, placeholders=placeholders
        )
