"""Manifests: the objects of a checkpoint, for copying it as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ckptcore.commit.location import Location
from ckptcore.commit.mark import Mark
from ckptcore.commit.root import ROOT_KEY
from ckptcore.model.objects import BLOCK_BYTES, ObjectRecord

__all__ = ["Manifest", "StoredRoot"]


@dataclass(frozen=True, slots=True)
class StoredRoot:
    """A root as it is stored.

    Attributes:
        directory: of what it is the root, within the checkpoint; empty for that of the checkpoint.
        data: its bytes.
        parts: by key within the directory, the bytes of what it names beside objects.
    """

    directory: str
    data: bytes
    parts: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of it and its parts."""
        return len(self.data) + sum(map(len, self.parts.values()))


@dataclass(frozen=True, slots=True)
class Manifest:
    """All objects of a checkpoint that can be loaded.

    Attributes:
        location: where it is.
        mark: identifies the save that was opened.
        root: its root; None where other software wrote it.
        members: the roots of its checkpointables.
        objects: the other objects but `marks`, the largest first.
        marks: objects that tell readers of any software that a checkpoint is there, or may do so: they are best written when all else is.
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
        """One with these objects, told apart."""
        marks: list[ObjectRecord] = []
        objects: list[ObjectRecord] = []
        for record in sorted(records, key=lambda record: (-record.size, record.key)):
            (marks if _may_be_mark(record) else objects).append(record)
        return cls(location, mark, root, tuple(members), tuple(objects), tuple(marks))

    @property
    def roots(self) -> tuple[StoredRoot, ...]:
        """All roots, that of the checkpoint last."""
        return self.members if self.root is None else (*self.members, self.root)

    @property
    def count(self) -> int:
        """How many objects it has, roots and their parts included."""
        return len(self.objects) + len(self.marks) + sum(1 + len(root.parts) for root in self.roots)

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return sum(record.size for record in (*self.objects, *self.marks)) + sum(root.nbytes for root in self.roots)

    @property
    def copy_id(self) -> str:
        """A save id that all copies of this save have, and no other save: 16 hexadecimal digits."""
        digest = xxhash.xxh3_64(b"copy of ")
        if self.root is not None:
            digest.update(self.root.data)
        else:
            for record in sorted((*self.objects, *self.marks), key=lambda record: record.key):
                digest.update(f"{record.key}\0{record.size}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def _may_be_mark(record: ObjectRecord) -> bool:
    """Whether readers may look for an object to learn whether a checkpoint is there: formats have theirs in the top directory."""
    directory, _, name = record.key.rpartition("/")
    return name == ROOT_KEY or (not directory and record.size <= BLOCK_BYTES)
