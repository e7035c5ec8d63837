"""Preparation of a version in a cache, while an older version is used: its files, and what changed in them."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

import numpy as np

from ckptcore.builtin.local_calls import SystemCall, allocate, close_descriptor
from ckptcore.context import Context
from ckptcore.errors import StorageFullError
from ckptcore.io.threads import IOThreads, for_each
from ckptcore.loading.reading import check_sizes, incomplete_read
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.metadata import BLOCK_BYTES
from ckptcore.model.transfer import ReadItem, ReadPlan
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.runtime import runtime_of
from ckptcore_versions.cache import Cache, CachedFile, CachedVersion
from ckptcore_versions.held_version import BaseVersion
from ckptcore_versions.local_files import (
    INDEX_NAME,
    FilePlan,
    Part,
    array_of,
    box_of,
    checksums_of_file,
    map_file,
    pieces,
)

_COPY_BYTES: Final = 64 << 20
"""Maximum bytes of one call that copies a part of a file in the kernel."""


class LocalVersion(NamedTuple):
    """A complete version in a cache, with its files mapped.

    Attributes:
        cached: the version.
        plan: its files.
        memory: the memory of each file, by name; changes of it stay private.
    """

    cached: CachedVersion
    plan: FilePlan
    memory: Mapping[str, mmap.mmap]

    @classmethod
    def open(cls, cached: CachedVersion, plan: FilePlan) -> LocalVersion:
        """Map a version.

        Raises:
            StorageError
        """
        memory = {file.name: map_file(os.path.join(cached.directory, file.name), file.nbytes) for file in plan.files}
        return cls(cached, plan, memory)

    def parts(self) -> Iterator[tuple[Part, HostArray]]:
        """Yield each part with its elements."""
        for file in self.plan.files:
            for part in file.parts:
                yield part, array_of(part, self.memory[file.name])


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
        self._directory = ""
        self._present: LocalVersion | None = None
        self._files: Mapping[str, CachedFile] = {}
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
        check_sizes(self._checkpoint, {part.leaf for file in self._plan.files for part in file.parts})
        if base is not None and base.plan.files != self._plan.files:
            base = None
        self._directory = self._cache.begin()
        self._create_files()
        self._read_all()
        self._changed = all_boxes(self._plan) if base is None else self._compare(base)
        self._files = self._checksums(base)

    def complete(self) -> Prepared:
        """Make the version durable and complete, and map it.

        Raises:
            StorageFullError, StorageError
        """
        if self._present is not None:
            return Prepared(self._present, {})
        cached = self._cache.complete(self._directory, self.version, self._files)
        return Prepared(LocalVersion.open(cached, self._plan), self._changed)

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
                _write(descriptor, 0, file.head)
        if self._plan.index is not None:
            with self._opened(INDEX_NAME, os.O_CREAT | os.O_EXCL) as descriptor:
                _write(descriptor, 0, self._plan.index)

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
        """Read all parts from the storage, straight into the mapped files."""
        checkpoint = self._checkpoint
        with ExitStack() as closing:
            parts: list[Part] = []
            arrays: list[HostArray] = []
            for file in self._plan.files:
                memory = map_file(self._path(file.name), file.nbytes, writable=True)
                for part in file.parts:
                    if part.box.size:
                        parts.append(part)
                        arrays.append(array_of(part, memory))
            closing.callback(arrays.clear)
            missing = dict(enumerate(parts))
            plan = ReadPlan(checkpoint.tree, tuple([ReadItem(part.leaf, part.box) for part in parts]))
            for number in checkpoint.read(plan, arrays):
                missing.pop(number, None)
            for part in missing.values():
                raise incomplete_read(checkpoint, part.leaf)

    def _compare(self, base: LocalVersion) -> dict[int, tuple[Box, ...]]:
        """Return the boxes that differ from the base, in pieces."""
        changed: dict[int, list[Box]] = {}
        adding = threading.Lock()

        def compare(piece: tuple[Part, HostArray, HostArray, Box]) -> None:
            part, old, new, box = piece
            if not np.array_equal(_bytes(box_of(old, part.box, box)), _bytes(box_of(new, part.box, box))):
                with adding:
                    changed.setdefault(part.leaf, []).append(box)

        def all_pieces() -> Iterator[tuple[Part, HostArray, HostArray, Box]]:
            for file in self._plan.files:
                memory = map_file(self._path(file.name), file.nbytes)
                for part in file.parts:
                    old, new = array_of(part, base.memory[file.name]), array_of(part, memory)
                    for box in pieces(part.box, part.spec.numpy_dtype.itemsize):
                        yield part, old, new, box

        for_each(self._threads, all_pieces(), compare)
        return {leaf: tuple(sorted(boxes)) for leaf, boxes in sorted(changed.items())}

    def _checksums(self, base: LocalVersion | None) -> dict[str, CachedFile]:
        """Return the files with the checksums of their blocks. Computes those of blocks that changed."""
        files: dict[str, CachedFile] = {}
        for file in self._plan.files:
            with map_file(self._path(file.name), file.nbytes) as memory:
                if base is None:
                    checksums = checksums_of_file(memory, self._threads)
                else:
                    before = base.cached.files[file.name].checksums
                    checksums = checksums_of_file(memory, self._threads, _blocks(file.parts, self._changed), before)
                files[file.name] = CachedFile(file.nbytes, checksums)
        return files


def all_boxes(plan: FilePlan) -> dict[int, tuple[Box, ...]]:
    """Return the boxes of all parts, by leaf."""
    boxes: dict[int, list[Box]] = {}
    for file in plan.files:
        for part in file.parts:
            boxes.setdefault(part.leaf, []).append(part.box)
    return {leaf: tuple(of_leaf) for leaf, of_leaf in boxes.items()}


def _blocks(parts: Sequence[Part], changed: Mapping[int, Sequence[Box]]) -> set[int]:
    """Return the numbers of the blocks of a file in which elements changed."""
    blocks: set[int] = set()
    for part in parts:
        for box in changed.get(part.leaf, ()):
            common = part.box.intersect(box) if box != part.box else box
            if common is None:
                continue
            for start, stop in part.ranges(common):
                blocks.update(range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)))
    return blocks


def _bytes(piece: HostArray) -> HostArray:
    """Return the bytes of a contiguous array, because an element that is NaN is not equal to itself."""
    return piece.reshape(-1).view(np.uint8)


def _write(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
