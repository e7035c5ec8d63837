"""HeldWeights: the elements of the newest version that this process holds, as the base of its next delta."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from ckptcore.errors import StorageError, StorageFullError
from ckptcore.io.elements import bytes_of, copy_elements
from ckptcore.io.memory import allocate
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.transfer import WritePlan
from ckptcore.model.tree import TreePath
from ckptcore.planning.partition import cut_box
from ckptcore_versions.deltas.chunks import part_of
from ckptcore_versions.held_version import BaseVersion

_ALIGNMENT: Final = 64
"""Alignment of arrays in a mapped file, in bytes."""

_PIECE_BYTES: Final = 1 << 20


class ReadBase(Protocol):
    """Reads boxes of the version that is held."""

    def __call__(self, boxes: Sequence[tuple[TreePath, ArraySpec, Box]], buffers: Sequence[HostArray]) -> list[bool]:
        """Fill a buffer for each box. Return False for each box of an array that the version lacks.

        Raises:
            CheckpointError: the version cannot be read.
        """


Allocate = Callable[[Sequence[ArraySpec]], Sequence[HostArray]]
"""Allocates memory for the boxes of a version; not initialised."""


@dataclass(slots=True)
class _HeldBox:
    """A box of an array.

    Attributes:
        box: the box.
        elements: its elements, contiguous.
        is_held: True if the elements are those of the version. False if the version lacks the array.
    """

    box: Box
    elements: HostArray
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class _HeldArray:
    spec: ArraySpec
    boxes: Sequence[_HeldBox]


class HeldWeights:
    """One copy of the boxes that this process publishes: those of the last committed version. See `HeldVersion`.

    While a version is written, its elements replace those of its base, box by box, each once it is encoded. If the
    version is not committed, the copy is a mixture, and the next `hold` reads it from the storage.

    One publish at a time uses it. During a publish, its methods may be called from any thread.
    """

    def __init__(self, allocate_boxes: Allocate) -> None:
        """Hold nothing yet. `allocate_boxes` returns the memory of the copy."""
        self._allocate = allocate_boxes
        self._arrays: dict[TreePath, _HeldArray] = {}
        self._base: BaseVersion | None = None
        self._content: tuple[int, str] | None = None
        """The number and the save id of the version that the elements are of; None if they are a mixture."""

    @property
    def version(self) -> BaseVersion:
        """The version that the running publish is relative to. See `HeldVersion`."""
        assert self._base is not None  # `hold` got it, or the publish is full
        return self._base

    @property
    def nbytes(self) -> int:
        """The bytes of the copy."""
        return sum([held.elements.nbytes for array in self._arrays.values() for held in array.boxes])

    def elements(self, path: TreePath, spec: ArraySpec, box: Box) -> HostArray | None:
        """See `HeldVersion`. The view is valid until the box is replaced."""
        array = self._arrays.get(path)
        if array is None or array.spec != spec:
            return None
        for held in array.boxes:
            if held.box.contains(box):
                return part_of(held.elements, box, held.box) if held.is_held else None
        return None

    def hold(self, plan: WritePlan, base: BaseVersion | None, read: ReadBase) -> None:
        """Hold the boxes that the next version writes, with the elements of its base.

        Reads only what is not held yet: after a restart, after a failed publish, and of arrays whose boxes changed.

        Args:
            plan: the boxes of the next version in this process.
            base: the last committed version; None for a full version, which needs no elements.
            read: reads boxes of the base.

        Raises:
            CheckpointError: the base cannot be read. Nothing is held then.
            InsufficientMemoryError, StorageFullError: there is no memory for the copy.
        """
        current = self._content is not None and base is not None and self._content == (base.number, base.save_id)
        known, self._arrays, self._content, self._base = self._arrays, {}, None, base
        wanted = {plan.tree.paths[item.leaf]: (item.spec, item.boxes) for item in plan.items}
        arrays = {path: array for path, array in known.items() if wanted.get(path) == (array.spec, _boxes_of(array))}
        del known
        missing = [path for path in wanted if path not in arrays]
        shapes = [ArraySpec(box.shape, wanted[path][0].dtype) for path in missing for box in wanted[path][1]]
        memory = iter(self._allocate(shapes))
        for path in missing:
            spec, boxes = wanted[path]
            arrays[path] = _HeldArray(spec, [_HeldBox(box, next(memory)) for box in boxes])
        if base is not None:
            unread = missing if current else list(wanted)
            held = [held for path in unread for held in arrays[path].boxes]
            requests = [(path, arrays[path].spec, held.box) for path in unread for held in arrays[path].boxes]
            for each, is_held in zip(held, read(requests, [each.elements for each in held]), strict=True):
                each.is_held = is_held
            self._content = base.number, base.save_id
        self._arrays = arrays

    def replace(self, path: TreePath, arrays: Sequence[HostArray]) -> None:
        """Replace the elements of an array by those of the version that is being written.

        Args:
            path: the path of the array.
            arrays: the elements of each box of the plan.
        """
        self._content = None
        for held, array in zip(self._arrays[path].boxes, arrays, strict=True):
            copy_elements(held.elements, array)

    def committed(self, number: int, save_id: str) -> None:
        """Hold the version that was written, because it is committed."""
        for array in self._arrays.values():
            for held in array.boxes:
                held.is_held = True
        self._content = number, save_id

    def pieces(self, path: TreePath) -> Iterator[memoryview] | None:
        """Yield the elements of an array as bytes in C order; None if this process does not hold all of it.

        Each piece has at most 1 MiB. Elements are little endian.
        """
        array = self._arrays[path]
        if sum([held.box.size for held in array.boxes]) != array.spec.size:  # the boxes of a plan do not overlap
            return None
        return _pieces(array)


def _boxes_of(array: _HeldArray) -> tuple[Box, ...]:
    return tuple([held.box for held in array.boxes])


def _pieces(array: _HeldArray) -> Iterator[memoryview]:
    dtype = array.spec.numpy_dtype
    for piece in cut_box(Box.whole(array.spec.shape), dtype.itemsize, _PIECE_BYTES):
        elements = np.empty(piece.shape, dtype)
        for held in array.boxes:
            if (common := piece.intersect(held.box)) is not None:
                copy_elements(part_of(elements, common, piece), part_of(held.elements, common, held.box))
        yield bytes_of(elements)


def in_host_memory(specs: Sequence[ArraySpec]) -> Sequence[HostArray]:
    """Allocate arrays in host memory."""
    return [allocate(spec) for spec in specs]


def in_files_of(directory: str) -> Allocate:
    """Return a function that allocates arrays in mapped files of a local directory.

    The files have no names, so that nothing is left of them when the process ends. The kernel can write their pages to
    the disk when memory is needed for something else.
    """

    def in_file(specs: Sequence[ArraySpec]) -> Sequence[HostArray]:
        offsets, size = [], 0
        for spec in specs:
            offsets.append(size)
            size += -(-spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size == 0:
            return in_host_memory(specs)
        memory = _mapped_file(directory, size)
        return [
            np.ndarray(spec.shape, spec.numpy_dtype, memory, offset)
            for spec, offset in zip(specs, offsets, strict=True)
        ]

    return in_file


def _mapped_file(directory: str, size: int) -> mmap.mmap:
    """Map a new file without a name.

    Raises:
        StorageFullError, StorageError: the file cannot be created with this size.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            # Reserve the space: a write to a mapped page without space on the disk would end the process.
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (StorageFullError if is_full else StorageError)(
            f"{directory}: cannot create a file of {size} bytes for the base of the next version: {error}. "
            f"{'Free space, pass' if is_full else 'Pass'} another base_directory=, or none to hold the base in memory"
        ) from error
