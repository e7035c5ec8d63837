"""Local versions: complete versions in a cache, which are bases of newer ones."""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.commit.location import Location, resolve_location
from ckptcore.commit.stored_root import LocationVersion, read_version
from ckptcore.commit.subdirectory import stamps_of
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    UncommittedCheckpointError,
)
from ckptcore.io.chunk_reads import StoredFormat
from ckptcore.model.arrays import HostArray
from ckptcore.model.metadata import ObjectRecord, TreeMetadata
from ckptcore.model.tree import JSON
from ckptcore.opening.bases import with_chain
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, reader_of
from ckptcore.opening.open_checkpoints import open_stored, open_tree
from ckptcore.planning import ChunkColumns, ChunkTable
from ckptcore.protocols import BaseReference, ChunkIndex
from ckptcore.runtime import runtime_of
from ckptcore_versions.following.cache import CachedVersion
from ckptcore_versions.following.local_files import FilePlan, Part, array_of, map_file


class Origin(NamedTuple):
    """A version of other software, as it was when it was read. It has no save id, and can be written again.

    Attributes:
        location: its location.
        content: a digest of what its metadata states, such as the checksums of a delta, and of the names of its files.
            The metadata of a full version states no checksums: on file systems, the inodes, sizes and modification
            times of its files show that they were written again.
    """

    location: Location
    content: str

    @classmethod
    def of(cls, location: Location, context: Context) -> Origin:
        """Describe a version.

        Raises:
            CheckpointError: it cannot be read, or does not exist.
        """
        link, store = open_stored(location, read_version(location), context), location.store
        state = None if isinstance(link, CompositeCheckpoint) else link.state
        names, stamps = sorted(store.list_names()), dict[str, str]()
        is_delta = isinstance(link, Checkpoint) and link.layout.base(link.tree, state) is not None
        if not is_delta:
            stamps = {**stamps_of(store, [name for name in names if not name.endswith("/")])}
        stated = json.dumps([state, names, stamps])
        return cls(location, hashlib.sha256(stated.encode("utf-8", "surrogateescape")).hexdigest())

    def remains(self, context: Context) -> bool:
        """Return True if the version is the same, or was deleted since."""
        try:
            return Origin.of(self.location, context) == self
        except CheckpointNotFoundError:
            return True
        except (CorruptCheckpointError, InvalidLocationError, UncommittedCheckpointError):
            return False


class LocalVersion(NamedTuple):
    """A complete version in a cache, with its files mapped.

    Attributes:
        cached: the version.
        plan: its files.
        memory: the memory of each file, by name; changes of it stay private.
        origin: where it was read; None if it comes from the cache. Only versions of other software need it.
    """

    cached: CachedVersion
    plan: FilePlan
    memory: Mapping[str, mmap.mmap]
    origin: Origin | None = None

    @classmethod
    def open(cls, cached: CachedVersion, plan: FilePlan) -> LocalVersion:
        """Map a version.

        Raises:
            StorageError
        """
        memory = {file.name: map_file(os.path.join(cached.directory, file.name), file.nbytes) for file in plan.files}
        return cls(cached, plan, memory)

    def as_checkpoint(self, context: Context) -> Checkpoint:
        """Return the files as an open checkpoint, which has only some boxes of arrays. Reads verify their blocks."""
        columns = ChunkColumns()
        for file in self.plan.files:
            for part in file.parts:
                columns.add(part.leaf, file.name, part.offset, part.box)
        objects = {name: ObjectRecord(name, file.nbytes, file.checksums) for name, file in self.cached.files.items()}
        location = resolve_location(self.cached.directory, runtime_of(context).storages)
        stored = StoredFormat(_LocalLayout(), columns.to_json())
        store = reader_of(location.store, objects, context)
        return Checkpoint(location, read_version(location), None, stored, self.plan.tree, store)

    def parts(self) -> Iterator[tuple[Part, HostArray]]:
        """Yield each part with its elements."""
        for file in self.plan.files:
            for part in file.parts:
                yield part, array_of(part, self.memory[file.name])

    def _copy_of(self, context: Context, reference: BaseReference) -> Checkpoint | None:
        """Return the files as an open checkpoint if they are those of a base; None otherwise."""
        version = self.cached.version
        is_same = (reference.save_id, reference.digest) == (version.save_id, version.digest)
        if not is_same:
            return None
        if not version.digest and (
            reference.name != version.name or not (self.origin and self.origin.remains(context))
        ):
            return None
        return self.as_checkpoint(context)


class _LocalLayout(SafetensorsLayout):
    """The layout of local files, which may have only some boxes of an array."""

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the table of the boxes."""
        return _LocalTable(tree, state)


class _LocalTable(ChunkTable):
    """The boxes of a local version. A follower reads no others."""

    def uncovered(self, leaf: int) -> str | None:
        """Return None, because arrays need not be complete."""
        return None


def open_from_base(
    location: Location,
    version: LocationVersion,
    context: Context,
    find_base: Callable[[Checkpoint], LocalVersion | None],
    plan_of: Callable[[Checkpoint], FilePlan],
) -> Checkpoint:
    """Open a version. If a local version is in its chain, the arrays are computed from the files of that one.

    Args:
        location: the location.
        version: its version.
        context: options.
        find_base: returns a local version; called with the version as if it stored all arrays itself. A version of
            other software then has only the arrays that changed.
        plan_of: returns the files of an open version.

    Raises:
        Errors of `open_tree`.
    """
    link = _open_link(location, version, context)
    base = None if link is None else find_base(link)
    if link is None or base is None:
        return open_tree(location, version, context)
    opened = with_chain(link, context, known=functools.partial(base._copy_of, context))
    return opened if plan_of(opened).files == base.plan.files else open_tree(location, version, context)


def _open_link(location: Location, version: LocationVersion, context: Context) -> Checkpoint | None:
    """Return a version as if it stored all arrays itself; None if it has no base, or cannot be opened."""
    try:
        link = open_stored(location, version, context)
        if isinstance(link, CompositeCheckpoint) or link.is_files or link.read_instead is not None:
            return None
        return None if link.layout.base(link.tree, link.state) is None else link
    except CheckpointError:
        return None  # `open_tree` raises it
