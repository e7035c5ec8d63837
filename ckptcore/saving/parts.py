"""SavePart: one tree of a save, or the files of one object, from the description to the receipts."""

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
    "FilesDescription",
    "PartDescription",
    "SavePart",
    "SharedItems",
    "TreeCaptured",
    "describe_part",
    "naming",
]


@dataclass(slots=True)
class SavePart:
    """One tree, or the files of one object. The stages of a save fill it: description, plans, capture, receipts.

    Attributes:
        directory: its directory within the checkpoint; empty if the part is the whole checkpoint.
        layout: stores it.
        plan: what this process writes of it.
        own: True if every process writes a part of its own. Otherwise all processes write it together.
        worker_plans: what each worker of this controller writes of it; empty if none holds any of it.
        source: the arrays or files to capture; None after the capture.
        captured: what is written; None before the capture, and after `close`.
        receipts: what was written here; on the leader, before the commit, by all ranks.
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
        """The plans of this process and of its workers."""
        return (self.plan, *self.worker_plans)

    def close(self) -> None:
        """Release what was captured. Closing again is no error."""
        captured, self.captured, self.source = self.captured, None, None
        if captured is not None:
            captured.close()


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


class ArraySource(Protocol):
    """The arrays of a part, until they are captured."""

    def copy(self, item: WriteItem, memory: HostMemory) -> Sequence[Pending[HostArray]]:
        """Begin to copy the boxes of an item of the plan into memory of the save."""
        ...

    def view(self, item: WriteItem) -> Sequence[Pending[HostArray]]:
        """Begin to bring the boxes of an item of the plan to the host, without a copy if they are there."""
        ...


class Captured(Protocol):
    """The captured content of a part. It does not change after the save began."""

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """Write it, and return the state of the layout for the receipt."""
        ...

    def close(self) -> None:
        """Release it. Closing again is no error."""
        ...


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


@dataclass(frozen=True, slots=True)
class FilesDescription:
    """An object that writes files of its own.

    Attributes:
        name: the name of the checkpointable.
        layout: the layout of files.
        value: the object.
        handler: lets the object write.
    """

    name: str
    layout: Layout
    value: object
    handler: FilesHandler

    def member(self, size: int) -> Member:
        """Return its entry in the root of a composite."""
        return Member("files", size)

    def plans(self, rank: int, size: int, save_id: str) -> tuple[WritePlan, ...]:
        """Plan no arrays."""
        return (WritePlan(TreeMetadata(Node("dict", (), ()), ()), (), 0, 1, save_id, self.name),)

    def capture(self) -> _FilesCaptured:
        """Let the object write what must not change into a directory of the local disk."""
        from ckptcore.builtin.staging import StagingDirectory  # only objects that write files need it

        directory = StagingDirectory()
        try:
            with naming(self.name):
                return _FilesCaptured(self.name, directory, self.handler.save(self.value, directory.path))
        except BaseException:
            directory.close()
            raise


class _FilesCaptured:
    """Files that an object has written, or writes in a continuation. See `Captured`."""

    def __init__(self, name: str, directory: StagingDirectory, continuation: Continuation | None) -> None:
        self._name = name
        self._directory = directory
        self._continuation = continuation

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """Let the object write the rest, and store every file. The state has the empty directories."""
        if self._continuation is not None:
            with naming(self._name):
                self._continuation()
        with naming(self._name):
            found, empty = _files_below(str(self._directory.path))
            state = state_of_files(empty)
        for path, key in found:
            store.write(key, [_segment_of(path)])
        return state

    def close(self) -> None:
        """Remove the local files."""
        self._directory.close()


PartDescription: TypeAlias = TreeDescription | FilesDescription


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
    """Describe a value to save, and refuse what cannot be saved. Writes nothing.

    Args:
        name: the name of the checkpointable; empty if it is the whole checkpoint, which is a tree.
        value: the checkpointable.
        layout: the layout of trees.
        plugins: give the handlers.
        rank, size: of this process in the job.
        replicas: how processes share the elements that several of them hold; None: replica 0 writes them.
        executor: the workers of this controller, if it has some.
        placeholders: True if placeholders may stand for leaves of the base of an update.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: with the name.
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


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Add the name of a checkpointable to errors. An empty name adds nothing."""
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


def _files_below(directory: str) -> tuple[Sequence[tuple[str, str]], Sequence[str]]:
    """Return the path and the key of every file, and the keys of empty directories.

    Raises:
        UnsupportedLeafError: something is neither a file nor a directory.
        NameCollisionError: something has the name of one of ckptcore's own files.
        OSError: a directory cannot be read.
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


def _segment_of(path: str) -> Segment:
    """Return the bytes of a file, which are mapped when they are written."""
    size = os.path.getsize(path)
    if not size:
        return BytesSegment(b"")
    box = Box((0,), (size,))

    def map_bytes() -> Sequence[tuple[Box, HostArray]]:
        return ((box, np.memmap(path, np.uint8, "r", shape=(size,))),)

    return ArraySegment(box, 1, map_bytes, lambda: None)
