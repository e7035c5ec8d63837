"""Manifests: every object that a copy of a checkpoint needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import xxhash

from ckptcore.commit.location import Location, Place
from ckptcore.commit.root import ROOT_KEY
from ckptcore.commit.root_json import decode_root
from ckptcore.commit.target import Mark, is_hidden_name
from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError, InvalidLocationError, ObjectNotFoundError
from ckptcore.io.requests import requests_of
from ckptcore.io.threads import run_each
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint
from ckptcore.loading.opening import ConsistentRead, is_deleted, open_either, open_member, present_members
from ckptcore.model.objects import BLOCK_BYTES, ObjectRecord
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of

__all__ = ["Manifest", "StoredRoot", "read_manifest"]

_OWN_PREFIX: Final = "checkpoint."
"""What the names of ckptcore's own objects begin with: a root and its parts."""


@dataclass(frozen=True, slots=True)
class StoredRoot:
    """A root as it is stored.

    Attributes:
        directory: its directory within the checkpoint; empty for the root of the checkpoint itself.
        data: its bytes.
        parts: the bytes of its further parts, by key within the directory.
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
    """All objects of a checkpoint that can be loaded.

    Attributes:
        location: its location.
        mark: identifies the save that was opened.
        root: its root; None if other software wrote it.
        members: the roots of its checkpointables.
        objects: all other objects except `marks`, the largest first.
        marks: objects by which readers of any software may recognise a checkpoint. Write them last.
    """

    location: Location
    mark: Mark
    root: StoredRoot | None
    members: tuple[StoredRoot, ...]
    objects: tuple[ObjectRecord, ...]
    marks: tuple[ObjectRecord, ...]

    @classmethod
    def of(
        cls,
        location: Location,
        mark: Mark,
        root: StoredRoot | None,
        members: Sequence[StoredRoot],
        records: Iterable[ObjectRecord],
    ) -> Manifest:
        """Return a manifest of these objects, with the marks separated."""
        marks: list[ObjectRecord] = []
        objects: list[ObjectRecord] = []
        for record in sorted(records, key=lambda record: (-record.size, record.key)):
            (marks if _may_be_mark(record) else objects).append(record)
        return cls(location, mark, root, tuple(members), tuple(objects), tuple(marks))

    @property
    def roots(self) -> tuple[StoredRoot, ...]:
        """All roots; the root of the checkpoint is the last one."""
        return self.members if self.root is None else (*self.members, self.root)

    @property
    def count(self) -> int:
        """Number of objects, including roots and their parts."""
        return len(self.objects) + len(self.marks) + sum(1 + len(root.parts) for root in self.roots)

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(record.size for record in (*self.objects, *self.marks)) + sum(root.nbytes for root in self.roots)

    @property
    def copy_id(self) -> str:
        """Save id of all copies of this save, and of no other save: 16 hexadecimal digits."""
        digest = xxhash.xxh3_64(b"copy of ")
        if self.root is not None:
            digest.update(self.root.data)
        else:
            for record in sorted((*self.objects, *self.marks), key=lambda record: record.key):
                digest.update(f"{record.key}\0{record.size}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def read_manifest(source: Place, context: Context, *, without: Location | None = None) -> Manifest:
    """Find out what a checkpoint is made of. Reads roots and asks for the size of every object; reads none.

    What stands in its directory beside what its root names is part of it: marks of formats, files of the user's. Hidden
    directories are not, and names of ckptcore's own that no root names.

    Args:
        source: where it is.
        context: options.
        without: a location that is not part of it though it may lie inside: where it is copied to.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError: if there is none.
        InvalidLocationError: if it is one file.
        CorruptCheckpointError: if a root cannot be read, or an object is not there with the size that it was written
            with.
    """
    reading = _Reading(source, context, without)
    return ConsistentRead(source, context, open_either).retry_if_replaced(reading.either)


class _Reading:
    def __init__(self, source: Place, context: Context, without: Location | None) -> None:
        self._source = source
        self._context = context
        self._without = without

    def either(self, found: Checkpoint | CompositeCheckpoint) -> Manifest:
        """The manifest of a checkpoint."""
        if found.root is None:
            return self._foreign(found)
        return self._tree(found) if isinstance(found, Checkpoint) else self._composite(found)

    def _tree(self, opened: Checkpoint) -> Manifest:
        """The manifest of a checkpoint that is one tree, or files."""
        location = opened.location
        root = _stored_root(opened, "")
        named = self._sized(location.store, opened.objects.values())
        beside = self._beside(location, opened.objects.keys(), {""})
        return Manifest.of(location, opened.mark, root, (), [*named, *beside])

    def _composite(self, composite: CompositeCheckpoint) -> Manifest:
        """The manifest of a checkpoint of several checkpointables, of those that are still there."""
        location = composite.location
        members, records, deleted = [], [], []
        for name, directories in present_members(composite).items():
            for directory in directories:
                if is_deleted(composite, directory):
                    deleted.append(directory)
                    continue
                opened = open_member(composite, name, directory, self._source, self._context)
                members.append(_stored_root(opened, directory))
                records.extend([record._replace(key=f"{directory}/{record.key}") for record in opened.objects.values()])
        root = _stored_root(composite, "")
        named = self._sized(location.store, records)
        own = {"", *[member.directory for member in members]}
        beside = self._beside(location, {record.key for record in records}, own, deleted)
        return Manifest.of(location, composite.mark, root, members, [*named, *beside])

    def _foreign(self, found: Checkpoint | CompositeCheckpoint) -> Manifest:
        """The manifest of what other software wrote: every file."""
        location = found.location
        if found.mark.is_object:
            raise InvalidLocationError(
                f"{location.display} is one file, and what is copied is a directory: give the directory that it is "
                "in, or copy the file with your own tools"
            )
        return Manifest.of(location, found.mark, None, (), self._beside(location, (), ()))

    def _beside(
        self, location: Location, named: Collection[str], own: Collection[str], deleted: Collection[str] = ()
    ) -> list[ObjectRecord]:
        """What is there beside what roots name.

        Args:
            location: of the checkpoint.
            named: keys that roots name.
            own: directories in which names of ckptcore's own go by a root.
            deleted: directories of checkpointables that were deleted.
        """
        left_out = [f"{directory}/" for directory in deleted]
        if self._without is not None and self._without.lies_in(location):
            left_out.append(f"{self._without.identity[len(location.identity) + 1 :]}/")
        keys = []
        for key in location.store.list():
            directory, _, name = key.rpartition("/")
            if key in named or (directory in own and name.startswith(_OWN_PREFIX)):
                continue
            if key.startswith(tuple(left_out)) or any(map(is_hidden_name, directory.split("/"))):
                continue
            keys.append(key)
        return self._sized(location.store, [ObjectRecord(key, -1) for key in keys])

    def _sized(self, store: StorageBackend, records: Iterable[ObjectRecord]) -> list[ObjectRecord]:
        """Objects that are there; those of which the size is known must have it.

        Args:
            store: of the checkpoint.
            records: the objects; the size is -1 where it is not known.

        Raises:
            CorruptCheckpointError: before anything is made of a size that a hostile root may state.
        """
        records = list(records)
        sizes: dict[str, int] = {}
        look = partial(_look_at, store, sizes)
        run_each(runtime_of(self._context).io_threads, records, look, parallelism=requests_of(store).concurrency)
        found = []
        for record in records:
            size = sizes.get(record.key)
            if record.size < 0:
                if size is not None:  # else it went since it was listed
                    found.append(record._replace(size=size))
                continue
            if size != record.size:
                there = "is not there" if size is None else f"has {size} bytes"
                raise CorruptCheckpointError(
                    f"{record.key} {there}, where {record.size} bytes were written; copy another checkpoint, or "
                    "restore this one",
                    key=record.key,
                    start=min(size or 0, record.size),
                    stop=max(size or 0, record.size),
                )
            found.append(record)
        return found


def _look_at(store: StorageBackend, sizes: dict[str, int], record: ObjectRecord) -> None:
    try:
        sizes[record.key] = store.size(record.key)
    except ObjectNotFoundError:
        return  # which the caller sees


def _stored_root(found: Checkpoint | CompositeCheckpoint, directory: str) -> StoredRoot:
    """The root of a checkpoint of ours as it is stored, and its parts, which are checked.

    Args:
        found: the checkpoint.
        directory: its name within the checkpoint that is copied.
    """
    store, data = found.location.store, found.mark.root
    assert isinstance(data, bytes)  # it is one of ours
    parts: dict[str, bytes] = {}

    def read_part(key: str, size: int) -> bytes:
        try:
            data = parts[key] = store.get(key, 0, size)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(f"{key}, a part of the root, is missing: {error}", key=key) from error
        return data

    decode_root(data, read_part)
    return StoredRoot(directory, data, parts)


def _may_be_mark(record: ObjectRecord) -> bool:
    """Return True if readers may recognise a checkpoint by this object. Formats have theirs in the top directory."""
    directory, _, name = record.key.rpartition("/")
    return name == ROOT_KEY or (not directory and record.size <= BLOCK_BYTES)
