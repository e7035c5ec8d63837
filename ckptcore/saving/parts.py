"""SavePart: one tree of a save, or the files of one object. The stages of a save fill it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np

from ckptcore.builtin.files import state_of_files
from ckptcore.commit.root import NO_LEAVES, Member
from ckptcore.errors import (
    CheckpointError,
    NameCollisionError,
    TreeMismatchError,
    UnsupportedKeyError,
    UnsupportedLeafError,
    converts_errors,
)
from ckptcore.io.snapshot import StateBoxes, StateCopy
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import ArraySegment, BytesSegment, Receipt, Segment, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.planning.plans import ReplicaOptions
from ckptcore.plugins import Plugins
from ckptcore.protocols import (
    Continuation,
    FilesHandler,
    Layout,
    Snapshot,
    WriteStore,
)
from ckptcore.saving.tree_descriptions import TreeDescription, describe_tree
from ckptcore.tree.flattening import PerProcess

if TYPE_CHECKING:
    from ckptcore.builtin.staging import StagingDirectory


@dataclass(slots=True)
class SavePart:
    """One tree, or the files of one object. The stages of a save fill it: description, plans, capture, receipts.

    Attributes:
        directory: its directory within the checkpoint; empty if the part is the whole checkpoint.
        layout: the layout that stores it. For files: the layout of the trees of the save.
        plan: the boxes that this process writes.
        own: True if every process writes its own part. Otherwise all processes write it together.
        source: the arrays or files to capture; None after the capture.
        captured: the captured content; None before the capture, and after `close`.
        receipts: the receipts of this process. On the leader, before the commit, those of all ranks.
        is_files: True for the files of an object, which need no layout.
    """

    directory: str
    layout: Layout
    plan: WritePlan
    own: bool = False
    source: ArraySource | FilesDescription | None = None
    captured: Captured | None = None
    receipts: Sequence[Receipt] = ()
    is_files: bool = False

    def close(self) -> None:
        """Release the captured content. Closing again is no error."""
        captured, self.captured, self.source = self.captured, None, None
        if captured is not None:
            captured.close()


class ArraySource(Protocol):
    """The arrays of a part before the capture."""

    def boxes(self, leaf: int, boxes: tuple[Box, ...]) -> StateBoxes:
        """Return boxes of a leaf, by its number in the plan of the part."""
        ...


class Captured(Protocol):
    """The captured content of a part. It does not change while the save runs."""

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """Write it, and return the state of the layout for the receipt."""
        ...

    def close(self) -> None:
        """Release it. Closing again is no error."""
        ...


class TreeCaptured(NamedTuple):
    """The arrays of a tree. See `Captured`.

    Attributes:
        snapshot: the arrays.
        copy: the running copy of which they are; None for views, and arrays that exist already.
        unreleased: the items of the snapshot that are not released yet, as far as `close` releases them.
    """

    snapshot: Snapshot
    copy: StateCopy | None = None
    unreleased: Collection[int] = ()

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """See `Captured`."""
        return part.layout.write(self.snapshot, store)

    def close(self) -> None:
        """Stop the copy from waiting for the writer, and release the arrays that a failed writer has left."""
        if self.copy is not None:
            self.copy.end_writing()
        for item in list(self.unreleased):
            with suppress(Exception):  # a copy that failed has no memory to free, and its error was raised already
                self.snapshot.release(item)


class FilesDescription(NamedTuple):
    """An object that writes its own files.

    Attributes:
        name: the name of the checkpointable.
        layout: the layout of the trees of the save, which writes the metadata files of the checkpoint.
        value: the object.
        handler: saves the object.
    """

    name: str
    layout: Layout
    value: object
    handler: FilesHandler

    def member(self, size: int) -> Member:
        """Return its entry in the root of a composite."""
        return Member("files", size)

    def plan(self, rank: int, size: int, save_id: str) -> WritePlan:
        """Return a plan without arrays."""
        return WritePlan(NO_LEAVES, (), 0, 1, save_id, self.name)

    def capture(self) -> _FilesCaptured:
        """Run the first phase of the object's save, into a directory of the local disk."""
        from ckptcore.builtin.staging import StagingDirectory  # needed only by objects that write files

        directory = StagingDirectory()
        try:
            with naming(self.name):
                return _FilesCaptured(self.name, directory, self.handler.save(self.value, directory.path))
        except BaseException:
            directory.close()
            raise


class _FilesCaptured:
    """Files that an object has written, or will write in a continuation. See `Captured`."""

    def __init__(self, name: str, directory: StagingDirectory, continuation: Continuation | None) -> None:
        self._name = name
        self._directory = directory
        self._continuation = continuation

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """Run the continuation, and store every file. The returned state lists the empty directories."""
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
    placeholders: bool = False,
    refusals: list[CheckpointError] | None = None,
    merged: bool = False,
) -> PartDescription:
    """Describe a value to save, and refuse what cannot be saved. Writes nothing.

    Args:
        name: the name of the checkpointable; empty if it is the whole checkpoint, which is a tree.
        value: the checkpointable.
        layout: the layout of trees.
        plugins: find the handlers.
        rank, size: the rank of this process, and the number of processes of the job.
        replicas: how replicas divide the boxes that they write; None: replica 0 writes them.
        placeholders: True if the state may have placeholders for leaves of the base of an update.
        refusals: gets everything that cannot be saved, instead of an error; None: raise an error.
        merged: True if other saves add keys to the dicts of the value. See `SaveStrategy.merges_keys`.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: with the name of the checkpointable.
    """
    own = False
    if name and isinstance(value, PerProcess):
        own = True
        value = value.value
    with naming(name):
        if name:
            handled = plugins.dispatch_named(value)
            if handled.files is not None:
                return FilesDescription(name, layout, value, handled.files)
            own = own or (handled.checkpointable is not None and handled.checkpointable.per_process)
        return describe_tree(
            name,
            value,
            layout,
            plugins,
            rank,
            size,
            replicas,
            own=own,
            placeholders=placeholders,
            refusals=refusals,
            merged=merged,
        )


@converts_errors
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
        error.add_note(f"This error occurred while {name!r} was saved. Nothing was committed")
        raise


def _files_below(directory: str) -> tuple[Sequence[tuple[str, str]], Sequence[str]]:
    """Return the path and the key of every file, and the keys of empty directories.

    Raises:
        UnsupportedLeafError: an entry is neither a file nor a directory.
        NameCollisionError: a name begins with ``checkpoint.``, which is reserved for ckptcore's own files.
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
                    f"the object wrote {key!r}, which is not a regular file; only files can be stored"
                )
            found.append((path, key))
    return sorted(found), sorted(empty)


def _own_key(path: str, directory: str) -> str:
    key = os.path.relpath(path, directory).replace(os.sep, "/")
    if key.startswith("checkpoint."):
        raise NameCollisionError(
            f"the object wrote {key!r}; names that begin with 'checkpoint.' are reserved for ckptcore's own files"
        )
    return key


def _raise(error: OSError) -> NoReturn:
    raise error


def _segment_of(path: str) -> Segment:
    """Return the bytes of a file as a segment, which maps the file when it is written."""
    size = os.path.getsize(path)
    if not size:
        return BytesSegment(b"")
    box = Box((0,), (size,))

    def map_bytes() -> Sequence[tuple[Box, HostArray]]:
        return ((box, np.memmap(path, np.uint8, "r", shape=(size,))),)

    return ArraySegment(box, 1, map_bytes, lambda: None)
