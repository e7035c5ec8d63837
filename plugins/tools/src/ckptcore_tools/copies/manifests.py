"""Manifests list every object that a copy of a checkpoint needs. Also checks that a copy does not delete its source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import xxhash

from ckptcore.commit.location import AnyLocation, Location
from ckptcore.commit.names import is_hidden_name
from ckptcore.commit.root import ROOT_KEY, Root
from ckptcore.commit.root_json import decode_root
from ckptcore.commit.stored_root import LocationVersion, deletion_mark, read_root
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StoragePermissionError,
)
from ckptcore.events import logger_named
from ckptcore.inspection.completeness import FileCheck, lost_problem
from ckptcore.io.threads import for_each, requests_of
from ckptcore.model.metadata import BLOCK_BYTES, ObjectRecord
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, format_names
from ckptcore.opening.members import is_deleted, lost_members, member_opener, open_member, present_members
from ckptcore.opening.open_checkpoints import ConsistentRead, open_stored
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore_tools.copies.foreign_files import expect_files, matches_any


def refuse_destination(source: Location, destination: Location) -> None:
    """Refuse a destination that is the source, contains it, or is one of its checkpointables.

    A new directory inside the source is allowed.

    Raises:
        InvalidLocationError: before anything is written.
    """
    if destination.identity == source.identity:
        raise InvalidLocationError(
            f"{source.display} is both source and destination. Give another destination. Nothing was written"
        )
    if source.is_within(destination):
        raise InvalidLocationError(
            f"{destination.display} contains the source, {source.display}, which would be deleted. Give another "
            "destination. Nothing was written"
        )
    if destination.is_within(source):
        existing = read_root(destination.store)
        if isinstance(existing, Root) and existing.role == "member":
            raise InvalidLocationError(
                f"{destination.display} is one of the checkpointables of the source, {source.display}, which would "
                "lose it. Give another destination. Nothing was written"
            )


def refuse_further(checkpoint: Checkpoint, destination: Location) -> None:
    """Refuse a destination that is or contains another checkpoint that the copy reads, such as a base.

    Raises:
        InvalidLocationError: before anything is written.
    """
    if checkpoint.derived is None:
        return
    first, *further = checkpoint.derived.sources
    refuse_further(first, destination)
    for other in further:
        refuse_further(other, destination)
        if other.location.is_within(destination):
            raise InvalidLocationError(
                f"{destination.display} {'is' if other.location.identity == destination.identity else 'contains'} "
                f"{other.location.display}, which {first.location.display} reads arrays from. Give another "
                "destination. Nothing was written"
            )


logger = logger_named("ckptcore.copying")

_OWN_PREFIX: Final = "checkpoint."
"""Prefix of the names of ckptcore's own objects: a root and its parts."""


@dataclass(frozen=True, slots=True)
class StoredRoot:
    """A root as it is stored.

    Attributes:
        directory: its directory within the checkpoint; empty for the root of the checkpoint itself.
        data: its bytes.
        parts: the bytes of its other parts, by key within the directory.
    """

    directory: str
    data: bytes
    parts: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the root and its parts."""
        return len(self.data) + sum(map(len, self.parts.values()))


@dataclass(frozen=True, slots=True)
class Manifest:
    """All objects of a committed checkpoint.

    Attributes:
        location: the location.
        version: identifies the save that was opened.
        root: the root. None if other software wrote the checkpoint.
        members: the roots of the checkpointables.
        objects: all other objects except `markers`, the largest first.
        markers: objects that readers of any software may use to recognise a checkpoint. Write them after
            `objects`.
        foreign_base: the base of a checkpoint of other software that is stored as differences; empty if there is none.
    """

    location: Location
    version: LocationVersion
    root: StoredRoot | None
    members: tuple[StoredRoot, ...]
    objects: tuple[ObjectRecord, ...]
    markers: tuple[ObjectRecord, ...]
    foreign_base: str = ""

    @classmethod
    def of(
        cls,
        location: Location,
        version: LocationVersion,
        root: StoredRoot | None,
        members: Sequence[StoredRoot],
        records: Iterable[ObjectRecord],
    ) -> Manifest:
        """Return a manifest of these objects, with the markers separated."""
        markers: list[ObjectRecord] = []
        objects: list[ObjectRecord] = []
        for record in sorted(records, key=lambda record: (-record.size, record.key)):
            (markers if _may_be_marker(record) else objects).append(record)
        return cls(location, version, root, tuple(members), tuple(objects), tuple(markers))

    @property
    def roots(self) -> tuple[StoredRoot, ...]:
        """All roots; the root of the checkpoint is the last one."""
        return self.members if self.root is None else (*self.members, self.root)

    def keys(self) -> Iterator[str]:
        """Yield the keys of all objects."""
        for record in (*self.objects, *self.markers):
            yield record.key
        for root in self.roots:
            for key in (ROOT_KEY, *root.parts):
                yield f"{root.directory}/{key}" if root.directory else key

    @property
    def count(self) -> int:
        """Number of objects, including roots and their parts."""
        return len(self.objects) + len(self.markers) + sum(1 + len(root.parts) for root in self.roots)

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(record.size for record in (*self.objects, *self.markers)) + sum(root.nbytes for root in self.roots)

    @property
    def copy_id(self) -> str:
        """Save id of all copies of this save: 16 hexadecimal digits, computed from its root.

        Without a root, it is computed from the keys and sizes of the objects. Two saves with equal keys and sizes then
        have the same id.
        """
        digest = xxhash.xxh3_64(b"copy of ")
        if self.root is not None:
            digest.update(self.root.data)
        else:
            for record in sorted((*self.objects, *self.markers), key=lambda record: record.key):
                digest.update(f"{record.key}\0{record.size}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def refuse_lost(composite: CompositeCheckpoint, absent: Collection[str], leave_out: Collection[str] = ()) -> None:
    """Refuse a checkpoint that lacks some of its checkpointables, unless ckptcore deleted them.

    Args:
        composite: the checkpoint.
        absent: the names of the checkpointables without any file.
        leave_out: names or patterns of checkpointables that a copy of a checkpoint of other software may lack.

    Raises:
        CorruptCheckpointError: names the missing checkpointables.
    """
    told = leave_out if composite.root is None else ()
    lost = [name for name in absent if not matches_any(name, told)]
    if (problem := lost_problem(composite, lost)) is not None:
        way_on = "" if composite.root is not None else f", or convert it with leave_out={lost}"
        raise CorruptCheckpointError(
            f"{composite.location.display}: {problem.message}{way_on}. Nothing was written", key=problem.key
        )


def refuse_differences(manifest: Manifest) -> None:
    """Refuse a checkpoint of other software that is stored as differences from a base.

    Raises:
        InvalidLocationError: its files alone cannot be loaded.
    """
    if manifest.foreign_base:
        raise InvalidLocationError(
            f"{manifest.location.display} is stored as differences from {manifest.foreign_base}, so that a copy of its "
            "files cannot be loaded alone. Pass layout='safetensors' to write all arrays, or copy the directory of "
            "versions with copy_steps. Nothing was written"
        )


def read_manifest(source: AnyLocation, context: Context, *, without: Location | None = None) -> Manifest:
    """List the objects of a checkpoint. Reads roots, sizes and foreign metadata, but no array.

    The manifest includes objects that no root names, such as metadata files of formats and files that users added.
    Exceptions are hidden directories, and objects with ckptcore's reserved names that no root names.

    Args:
        source: the location of the checkpoint.
        context: options.
        without: the destination of the copy. Its objects are left out if it is inside the checkpoint.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: if there is no committed checkpoint.
        InvalidLocationError: if the source is one file.
        CorruptCheckpointError: if a root cannot be read, or if an object is missing or has the wrong size; also if
            other software lists a checkpointable that is missing.
    """
    reader = _ManifestReader(source, context, without)
    return ConsistentRead(source, context, open_stored).retry_if_replaced(reader.read)


class _ManifestReader:
    def __init__(self, source: AnyLocation, context: Context, without: Location | None) -> None:
        self._source = source
        self._context = context
        self._without = without

    def read(self, checkpoint: Checkpoint | CompositeCheckpoint) -> Manifest:
        """Return the manifest of a checkpoint."""
        if checkpoint.root is None:
            return self._read_foreign(checkpoint)
        return self._read_single(checkpoint) if isinstance(checkpoint, Checkpoint) else self._read_composite(checkpoint)

    def _read_single(self, checkpoint: Checkpoint) -> Manifest:
        """Return the manifest of a checkpoint of one tree, or of files."""
        location = checkpoint.location
        root = _stored_root(checkpoint, "")
        named = self._with_sizes(location.store, checkpoint.objects.values())
        others = self._other_objects(location, checkpoint.objects.keys(), {""})
        return Manifest.of(location, checkpoint.version, root, (), [*named, *others])

    def _read_composite(self, composite: CompositeCheckpoint) -> Manifest:
        """Return the manifest of a checkpoint of several checkpointables, without deleted ones."""
        location = composite.location
        members, records, deleted = [], [], []
        for name, directories in present_members(composite).items():
            for directory in directories:
                if is_deleted(composite, directory):
                    deleted.append(directory)
                    continue
                checkpoint = open_member(composite, name, directory, self._source, self._context)
                members.append(_stored_root(checkpoint, directory))
                records.extend(
                    [record._replace(key=f"{directory}/{record.key}") for record in checkpoint.objects.values()]
                )
        if lost := lost_members(composite, composite.members.keys() - present_members(composite).keys()):
            logger.warning(
                "%s is copied without %s, which it lists and which is missing: lost, or never copied there",
                location.display,
                format_names(lost),
            )
        root = _stored_root(composite, "")
        named = self._with_sizes(location.store, records)
        own = {"", *[member.directory for member in members]}
        others = self._other_objects(location, {record.key for record in records}, own, deleted)
        marks = self._with_sizes(location.store, _marks_of_deletions(composite))
        return Manifest.of(location, composite.version, root, members, [*named, *others, *marks])

    def _read_foreign(self, checkpoint: Checkpoint | CompositeCheckpoint) -> Manifest:
        """Return the manifest of a checkpoint of other software: every file of the directory."""
        location = checkpoint.location
        if checkpoint.version.is_object:
            raise InvalidLocationError(
                f"{location.display} is a file, and only directories can be copied. Give the directory that contains "
                "it, or copy the file with another program"
            )
        open_one = member_opener(checkpoint, self._source, self._context)
        files = FileCheck(self._context).check(checkpoint, self._source, open_one)
        base = ""
        if isinstance(checkpoint, CompositeCheckpoint):
            refuse_lost(checkpoint, files.deleted)
            for name, directories in present_members(checkpoint).items():
                with suppress(CheckpointNotFoundError):  # no installed layout reads it, so its files are unknown
                    for directory in directories:
                        expect_files(open_one(name, directory), directory)
        else:
            expect_files(checkpoint, "")
            reference = checkpoint.layout.base(checkpoint.tree, checkpoint.state)
            base = "" if reference is None else reference.name
        # A base is copied by itself, if at all: engines have the first version of slime's directories.
        for problem in [each for each in files.problems if not (each.key or "").startswith("../")]:
            raise CorruptCheckpointError(
                f"{problem.message}. Copy another checkpoint, or restore this one. Nothing was written", key=problem.key
            )
        manifest = Manifest.of(location, checkpoint.version, None, (), self._other_objects(location, (), ()))
        return replace(manifest, foreign_base=base)

    def _other_objects(
        self, location: Location, named: Collection[str], own: Collection[str], deleted: Collection[str] = ()
    ) -> list[ObjectRecord]:
        """Return the objects that no root names.

        Args:
            location: the location of the checkpoint.
            named: keys that roots name.
            own: directories with a root. There, objects with ckptcore's reserved names are left out.
            deleted: directories of deleted checkpointables.
        """
        excluded = [f"{directory}/" for directory in deleted]
        if self._without is not None and self._without.is_within(location):
            excluded.append(f"{self._without.identity[len(location.identity) + 1 :]}/")
        try:
            listed = list(location.store.list())
        except StoragePermissionError as error:
            if not own:
                raise
            logger.warning(
                "%s is copied without the files that do not belong to the checkpoint: %s", location.display, error
            )
            return []
        keys = []
        for key in listed:
            directory, _, name = key.rpartition("/")
            if key in named or (directory in own and name.startswith(_OWN_PREFIX)):
                continue
            if key.startswith(tuple(excluded)) or any(map(is_hidden_name, directory.split("/"))):
                continue
            keys.append(key)
        return self._with_sizes(location.store, [ObjectRecord(key, -1) for key in keys])

    def _with_sizes(self, store: StorageBackend, records: Iterable[ObjectRecord]) -> list[ObjectRecord]:
        """Return the objects that exist, with their sizes.

        Args:
            store: the storage of the checkpoint.
            records: the objects. The size is -1 if it is unknown.

        Raises:
            CorruptCheckpointError: if an object does not have the known size. A hostile root can state any size, so
                sizes are checked before memory is allocated for them.
        """
        records = list(records)
        sizes: dict[str, int] = {}
        add_size = partial(_add_size, store, sizes)
        for_each(runtime_of(self._context).io_threads, records, add_size, parallelism=requests_of(store).concurrency)
        sized = []
        for record in records:
            size = sizes.get(record.key)
            if record.size < 0:
                if size is not None:  # None: deleted since it was listed
                    sized.append(record._replace(size=size))
                continue
            if size != record.size:
                problem = "is missing" if size is None else f"has {size} bytes"
                raise CorruptCheckpointError(
                    f"{record.key} {problem}, but {record.size} bytes were written. Copy another checkpoint, or "
                    "restore this one",
                    key=record.key,
                    start=min(size or 0, record.size),
                    stop=max(size or 0, record.size),
                )
            sized.append(record)
        return sized


def _marks_of_deletions(composite: CompositeCheckpoint) -> list[ObjectRecord]:
    """Return the objects that record deleted checkpointables, so that the copy does not seem to lack them."""
    root = composite.root
    assert root is not None  # other software leaves no marks
    absent = root.members.keys() - present_members(composite).keys()
    told = absent.difference(lost_members(composite, absent))
    return [
        ObjectRecord(deletion_mark(root.save_id, root.members[name].directory(name, rank)), -1)
        for name in sorted(told)
        for rank in range(root.members[name].processes or 1)
    ]


def _add_size(store: StorageBackend, sizes: dict[str, int], record: ObjectRecord) -> None:
    try:
        sizes[record.key] = store.size(record.key)
    except ObjectNotFoundError:
        return  # the caller handles the missing size


def _stored_root(checkpoint: Checkpoint | CompositeCheckpoint, directory: str) -> StoredRoot:
    """Read the root of a checkpoint of ckptcore as bytes, with its parts, and check that they can be decoded.

    Args:
        checkpoint: the checkpoint.
        directory: its directory within the checkpoint that is copied.
    """
    store, data = checkpoint.location.store, checkpoint.version.root
    assert isinstance(data, bytes)  # ckptcore wrote this checkpoint, so it has a root
    parts: dict[str, bytes] = {}

    def read_part(key: str, size: int) -> bytes:
        try:
            data = parts[key] = store.get(key, 0, size)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(f"{key}, a part of the root, is missing: {error}", key=key) from error
        return data

    decode_root(data, read_part)
    return StoredRoot(directory, data, parts)


def _may_be_marker(record: ObjectRecord) -> bool:
    """Return True if readers may recognise a checkpoint by this object: a root, or a small object at the top level."""
    directory, _, name = record.key.rpartition("/")
    return name == ROOT_KEY or (not directory and record.size <= BLOCK_BYTES)
