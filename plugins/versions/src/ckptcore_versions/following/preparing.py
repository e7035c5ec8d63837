"""Preparation of a version in a cache, while an older version is used: its files, and what changed in them."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ckptcore.builtin.local_calls import SystemCall, allocate, close_descriptor
from ckptcore.context import Context
from ckptcore.derivations import Stored
from ckptcore.errors import StorageFullError
from ckptcore.io.threads import IOThreads, for_each
from ckptcore.loading.reading import check_sizes, incomplete_read
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore.opening.checkpoint import Checkpoint, check_additional
from ckptcore.runtime import runtime_of
from ckptcore_versions.following.cache import Cache, CachedFile
from ckptcore_versions.following.local_files import (
    INDEX_NAME,
    FilePlan,
    Part,
    array_of,
    blocks_of,
    box_of,
    checksums_of_file,
    enter_pages,
    map_file,
    pieces,
)
from ckptcore_versions.following.local_version import LocalVersion, Origin
from ckptcore_versions.following.patching import (
    LARGEST_WINDOW_BYTES,
    EncodedObjects,
    FilePatching,
    patches_of,
    write_all,
)
from ckptcore_versions.held_version import BaseVersion


class Prepared(NamedTuple):
    """A version that was prepared.

    Attributes:
        local: the version.
        changed: by leaf, the boxes that differ from the base; those of all parts if there was no base.
    """

    local: LocalVersion
    changed: Mapping[int, tuple[Box, ...]]


class Preparation:
    """The preparation of one version, in a hidden directory of a cache.

    Attributes:
        version: the identity of the version.
    """

    def __init__(
        self, cache: Cache, checkpoint: Checkpoint, version: BaseVersion, plan: FilePlan, context: Context
    ) -> None:
        """Prepare nothing yet.

        Args:
            cache: where to prepare it.
            checkpoint: the version, opened.
            version: its identity.
            plan: its files.
            context: options.
        """
        self.version = version
        self._cache = cache
        self._checkpoint = checkpoint
        self._plan = plan
        self._threads: IOThreads = runtime_of(context).io_threads
        self._context = context
        self._origin: Origin | None = None
        self._directory = ""
        self._present: LocalVersion | None = None
        self._is_from_base = False
        self._files: dict[str, CachedFile] = {}
        self._memory: dict[str, mmap.mmap] = {}
        self._changed: Mapping[int, tuple[Box, ...]] = {}

    def run(self, base: LocalVersion | None) -> None:
        """Prepare all files, unless the base is this version. `complete` or `discard` must follow, also after an error.

        Args:
            base: the version before; None if there is none.

        Raises:
            CorruptCheckpointError: the version or its chain is damaged.
            StorageFullError: the disk of the cache is full.
            StorageError
        """
        if base is not None and base.cached.version == self.version and self.version.digest:
            self._present = base
            return
        if not self.version.digest:
            self._origin = Origin.of(self._checkpoint.location, self._context)  # before its content is read
        self._is_from_base = base is not None and _is_last_source(self._checkpoint, base)
        if base is not None and self._patch(base):
            return
        check_sizes(self._checkpoint, {part.leaf for file in self._plan.files for part in file.parts})
        self._directory = self._cache.begin(self.version.number)
        self._create_files()
        self._read_all()
        check_additional(self._checkpoint)
        self._changed = all_boxes(self._plan) if base is None else self._changes(base)
        self._map_all(base)

    def _patch(self, base: LocalVersion) -> bool:
        """Write the files of the base with the changes of deltas. Return False if they are not that.

        Only the elements of the base have many bytes, and its files exist. So sizes that a hostile delta states are not
        checked before.
        """
        derived = self._checkpoint.derived
        patches = patches_of(derived, self._plan) if derived is not None and self._is_from_base else None
        if patches is None:
            return False
        writers = {
            name: FilePatching(self._checkpoint, of_file, base.cached.files[name], self._threads)
            for name, of_file in patches.items()
        }
        if any(writer.largest > LARGEST_WINDOW_BYTES for writer in writers.values()):
            return False
        self._directory = self._cache.begin(self.version.number)
        self._create_files()
        encoded = EncodedObjects(self._checkpoint, list(itertools.chain.from_iterable(patches.values())))
        for name, writer in writers.items():
            with self._opened(name) as descriptor:
                writer.write(os.path.join(base.cached.directory, name), self._path(name), descriptor, encoded)
            base.cached.verify(name, blocks_of(writer.unverified), self._threads)
        check_additional(self._checkpoint)
        changed: dict[int, dict[Box, None]] = {}
        for patch in itertools.chain.from_iterable(patches.values()):
            changed.setdefault(patch.part.leaf, {}).update(dict.fromkeys(patch.changed))
        self._changed = {leaf: _joined(boxes) for leaf, boxes in sorted(changed.items()) if boxes}
        self._map_all(base, writers)
        return True

    def complete(self) -> Prepared:
        """Make the version durable and complete, and map it.

        Raises:
            StorageFullError, StorageError
        """
        if self._present is not None:
            return Prepared(self._present, {})
        cached = self._cache.complete(self._directory, self.version, self._files)
        return Prepared(LocalVersion(cached, self._plan, self._memory, self._origin), self._changed)

    def discard(self) -> None:
        """Remove the files, unless the version is complete."""
        if self._directory:
            self._cache.discard(self._directory)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _create_files(self) -> None:
        """Create the files with their headers, and allocate their space: mapped memory cannot report a full disk.

        Raises:
            StorageFullError, StorageError
        """
        status = os.statvfs(self._directory)
        free = status.f_bavail * status.f_frsize
        if free < self._plan.nbytes:  # for file systems that cannot allocate
            raise StorageFullError(
                f"{self._cache.directory} has {free} bytes free, and the version {self.version.number} needs "
                f"{self._plan.nbytes}: free some space. The version before is intact"
            )
        for file in self._plan.files:
            with self._opened(file.name, os.O_CREAT | os.O_EXCL) as descriptor:
                os.ftruncate(descriptor, file.nbytes)
                allocate(descriptor, file.nbytes)
                write_all(descriptor, 0, file.head)
        if self._plan.index is not None:
            with self._opened(INDEX_NAME, os.O_CREAT | os.O_EXCL) as descriptor:
                write_all(descriptor, 0, self._plan.index)

    @contextmanager
    def _opened(self, name: str, flags: int = 0) -> Iterator[int]:
        path = self._path(name)
        with SystemCall("write", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
            try:
                yield descriptor
            finally:
                close_descriptor(descriptor, path)

    def _read_all(self) -> None:
        """Read all parts, straight into the mapped files."""
        targets: list[tuple[Part, HostArray]] = []
        for file in self._plan.files:
            memory = map_file(self._path(file.name), file.nbytes, writable=True)
            targets += [(part, array_of(part, memory)) for part in file.parts if part.box.size]
        # All at once: objects of deltas have the arrays stripe by stripe, so each group of arrays would read nearly all
        # bytes of an object.
        self._read_parts(targets)

    def _read_parts(self, targets: Sequence[tuple[Part, HostArray]]) -> None:
        missing = {number: part for number, (part, _) in enumerate(targets)}
        plan = ReadPlan(self._checkpoint.tree, tuple([ReadItem(part.leaf, part.box) for part, _ in targets]))
        for number in self._checkpoint.read(plan, [array for _, array in targets]):
            missing.pop(number, None)
        for part in missing.values():
            raise incomplete_read(self._checkpoint, part.leaf)

    def _changes(self, base: LocalVersion) -> dict[int, tuple[Box, ...]]:
        """Return the pieces that differ from the base, by leaf. Arrays that are those of the base are not compared."""
        derived = self._checkpoint.derived if self._is_from_base else None
        compared: list[tuple[str, Part]] = []
        for file in self._plan.files:
            for part in file.parts:
                of_base = None if derived is None else Stored(part.spec, part.leaf, len(derived.sources) - 1)
                if derived is None or derived.derivations[part.leaf] != of_base:
                    compared.append((file.name, part))
        changed: dict[int, list[Box]] = {}
        for leaf, box in self._compare(base, compared):
            changed.setdefault(leaf, []).append(box)
        return {leaf: _joined(boxes) for leaf, boxes in sorted(changed.items())}

    def _compare(self, base: LocalVersion, parts: Sequence[tuple[str, Part]]) -> list[tuple[int, Box]]:
        """Return the leaf and the box of each piece of parts, given with their files, that differs from the base."""
        changed: list[tuple[int, Box]] = []
        memory = {file.name: map_file(self._path(file.name), file.nbytes) for file in self._plan.files}

        def compare(piece: tuple[Part, HostArray, HostArray, Box]) -> None:
            part, old, new, box = piece
            if not np.array_equal(_bytes(box_of(old, part.box, box)), _bytes(box_of(new, part.box, box))):
                changed.append((part.leaf, box))  # atomic

        def all_pieces() -> Iterator[tuple[Part, HostArray, HostArray, Box]]:
            for name, part in parts:
                old, new = array_of(part, base.memory[name]), array_of(part, memory[name])
                for box in pieces(part.box, part.spec.numpy_dtype.itemsize):
                    yield part, old, new, box

        for_each(self._threads, all_pieces(), compare)
        return changed

    def _map_all(self, base: LocalVersion | None, writers: Mapping[str, FilePatching] | None = None) -> None:
        """Map all files, and compute the checksums of their blocks.

        Args:
            base: the version before.
            writers: what wrote the files, with the checksums that it knows; None: the changes are `_changed`.
        """
        for file in self._plan.files:
            path = self._path(file.name)
            self._memory[file.name] = map_file(path, file.nbytes)
            blocks: Collection[int] | None = None
            known = b""
            if writers is not None:
                known, blocks = bytes(writers[file.name].checksums), writers[file.name].unknown
            elif base is not None:
                known, blocks = base.cached.files[file.name].checksums, _changed_blocks(file.parts, self._changed)
            checksums = checksums_of_file(path, file.nbytes, self._threads, blocks, known)
            self._files[file.name] = CachedFile(file.nbytes, checksums)
            enter_pages(self._memory[file.name])


def _is_last_source(checkpoint: Checkpoint, base: LocalVersion) -> bool:
    """Return True if the arrays of a version are computed from the files of a local version."""
    return checkpoint.derived is not None and checkpoint.derived.sources[-1].location.display == base.cached.directory


def all_boxes(plan: FilePlan) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of all parts, by leaf."""
    boxes: dict[int, list[Box]] = {}
    for file in plan.files:
        for part in file.parts:
            boxes.setdefault(part.leaf, []).append(part.box)
    return {leaf: tuple(of_leaf) for leaf, of_leaf in boxes.items()}


def _joined(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return boxes in order, with adjacent ones joined, along the last axis first: few boxes are copied fast."""
    joined = sorted(boxes)
    for axis in reversed(range(len(joined[0].start))):
        if len({(box.start[axis], box.stop[axis]) for box in joined}) == 1:
            continue
        across = sorted([(box.band(axis, 0, 0), box) for box in joined])
        joined = []
        for number, (others, box) in enumerate(across):
            if number and others == across[number - 1][0] and joined[-1].stop[axis] == box.start[axis]:
                joined[-1] = Box(joined[-1].start, box.stop)
            else:
                joined.append(box)
    return tuple(sorted(joined))


def _changed_blocks(parts: Sequence[Part], changed: Mapping[int, Sequence[Box]]) -> set[int]:
    """Return the numbers of the blocks of a file in which elements changed."""
    common = [(part, part.box.intersect(box)) for part in parts for box in changed.get(part.leaf, ())]
    return blocks_of([part.extent(box) for part, box in common if box is not None])


def _bytes(piece: HostArray) -> HostArray:
    """Return the bytes of a contiguous array, because an element that is NaN is not equal to itself."""
    return piece.reshape(-1).view(np.uint8)
