"""Installation of a version: writes into weights what changed since the follower last wrote into them."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptcore.context import Context
from ckptcore.errors import TargetUndefinedError, TreeMismatchError
from ckptcore.io.elements import copy_elements
from ckptcore.io.threads import IOThreads, for_each
from ckptcore.loading.in_place import load_into_target
from ckptcore.loading.load import Load, LoadRequest, recorded_load
from ckptcore.loading.new_values import NewValue, flatten_like
from ckptcore.loading.reading import LeafRead, TreeRead, allocate_for
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint
from ckptcore.protocols import LeafHandler, ReadStrategy
from ckptcore.runtime import runtime_of
from ckptcore.tree.shapes import first_fixed
from ckptcore_versions.following.local_files import box_of, pieces

if TYPE_CHECKING:
    from ckptcore_versions.following.version import Version

_THREADED_BYTES: Final = 4 << 20
"""From this number of bytes on, several threads copy an array. To wake a thread takes as long as to copy 0.5 MB."""

_ALL: Final = None
"""The pending boxes of a leaf of which nothing is known."""


@dataclass(slots=True)
class _Written:
    """Knowledge about a leaf that a follower wrote.

    Attributes:
        name: the name of the array.
        boxes: the boxes of the array that the leaf has.
        leaf: the leaf, or a weak reference to it.
        pending: the boxes that changed since the write.
    """

    name: str
    boxes: tuple[Box, ...]
    leaf: object
    pending: dict[Box, None]


class WrittenWeights:
    """The leaves that a follower wrote, and what changed in the versions since. Thread-safe.

    A leaf is recognised by the object itself, as long as it exists. An object such as a module may return other leaves
    over the same memory each time. As long as the object exists, its leaves are kept, so that no other array can get
    the address of their memory.

    Attributes:
        lock: held while weights are written, and while a new version becomes the newest.
    """

    def __init__(self) -> None:
        """Know no leaf."""
        self.lock = threading.RLock()
        self._of_leaves: dict[int, _Written] = {}
        self._of_roots: dict[int, tuple[weakref.ref[object], dict[Hashable, _Written]]] = {}

    def add_changes(self, changed: Mapping[str, Sequence[Box]]) -> None:
        """Add what a new version changed, by name."""
        for written in self._all():
            written.pending.update(dict.fromkeys(changed.get(written.name, ())))

    def _all(self) -> Iterator[_Written]:
        yield from list(self._of_leaves.values())
        for _, of_root in list(self._of_roots.values()):
            yield from of_root.values()

    def forget_all(self) -> None:
        """Forget all leaves, so that they are written whole."""
        self._of_leaves.clear()
        self._of_roots.clear()

    def take(self, weights: object) -> _Knowledge:
        """Return what is known about weights, and forget what is known about them as a whole."""
        entry = self._of_roots.pop(id(weights), None)
        of_root = entry[1] if entry is not None and entry[0]() is weights else {}
        return _Knowledge(self, of_root)

    def forget_leaf(self, leaf: object) -> _Written | None:
        """Return what is known about a leaf by the object itself, and forget it."""
        written = self._of_leaves.pop(id(leaf), None)
        if written is None or not isinstance(written.leaf, weakref.ref) or written.leaf() is not leaf:
            return None
        return written

    def note(self, weights: object, leaves: Iterable[tuple[Hashable, str, tuple[Box, ...], object]]) -> None:
        """Note that leaves have the newest version.

        Args:
            weights: the value that has the leaves.
            leaves: for each leaf, its identity, the name of the array, its boxes, and the leaf.
        """
        key = id(weights)
        try:
            root = weakref.ref(weights, lambda _: self._of_roots.pop(key, None))
        except TypeError:  # such as a dict
            for _, name, boxes, leaf in leaves:
                self._note_leaf(name, boxes, leaf)
            return
        self._of_roots[key] = (
            root,
            {identity: _Written(name, boxes, leaf, {}) for identity, name, boxes, leaf in leaves},
        )

    def _note_leaf(self, name: str, boxes: tuple[Box, ...], leaf: object) -> None:
        key = id(leaf)
        try:
            reference = weakref.ref(leaf, lambda _: self._of_leaves.pop(key, None))
        except TypeError:
            return  # the next write is a whole one
        self._of_leaves[key] = _Written(name, boxes, reference, {})


class LocalArrays(NamedTuple):
    """The arrays of a local version.

    Attributes:
        checkpoint: the version, opened; only its tree is used.
        names: by leaf, the name of the array.
        parts: by leaf, the local boxes with their elements. An array that is tied to an earlier one is not listed.
    """

    checkpoint: Checkpoint
    names: Mapping[int, str]
    parts: Mapping[int, Sequence[tuple[Box, HostArray]]]


class _Knowledge(NamedTuple):
    """Knowledge about weights that are being written."""

    log: WrittenWeights
    of_root: Mapping[Hashable, _Written]

    def pending(self, identity: Hashable, name: str, boxes: tuple[Box, ...], leaf: object) -> Sequence[Box] | None:
        """Return the boxes to write; None: all."""
        written = self.log.forget_leaf(leaf) or self.of_root.get(identity)
        if written is None or written.name != name or written.boxes != boxes:
            return _ALL
        return list(written.pending)


class Installation(ReadStrategy[Load[object]]):
    """A load of a local version that writes only what changed.

    Attributes:
        written_bytes: bytes that were written so far.
    """

    def __init__(
        self,
        local: LocalArrays,
        known: _Knowledge,
        context: Context,
    ) -> None:
        """Write nothing yet.

        Args:
            local: the version.
            known: what is known about the weights.
            context: options.
        """
        self.written_bytes = 0
        self._local = local
        self._known = known
        self._context = context
        self._threads: IOThreads = runtime_of(context).io_threads
        self._noted: list[tuple[Hashable, str, tuple[Box, ...], object]] = []
        self._views: dict[tuple[int, tuple[Box, ...]], Sequence[HostArray]] = {}

    def run(self, load: Load[object]) -> object:
        """See `ReadStrategy`."""
        load.read_planned = self._write
        reading = load.plan(load.open())
        for leaf_read in [*reading.leaf_reads, *(reading.first.leaf_reads if reading.first is not None else ())]:
            # Refuses before anything is changed.
            self._views[leaf_read.leaf, tuple(leaf_read.boxes)] = self._viewed(reading.checkpoint, leaf_read)
        load.begin(reading)
        load.read(reading)
        return load.build(reading)

    @property
    def noted(self) -> Sequence[tuple[Hashable, str, tuple[Box, ...], object]]:
        """The leaves that have the version now: see `WrittenWeights.note`."""
        return self._noted

    def _write(self, reading: TreeRead, context: Context) -> None:
        """Write or build every leaf of a plan from the local files."""
        for leaf_read in reading.leaf_reads:
            if leaf_read.array is not None or not leaf_read.boxes:
                reading.finish_leaf(leaf_read, reading.buffers_of(leaf_read))
                continue
            self._write_leaf(reading, leaf_read)

    def _write_leaf(self, reading: TreeRead, leaf_read: LeafRead) -> None:
        boxes, leaf, handler = tuple(leaf_read.boxes), leaf_read.abstract, leaf_read.handler
        name = self._local.names[leaf_read.leaf]
        identity = _identity(leaf_read.leaf, handler, leaf)
        pending = self._known.pending(identity, name, boxes, leaf)
        views = self._views[leaf_read.leaf, boxes]
        if pending is not None:
            pending = [box for box in pending if any(box.intersect(own) is not None for own in boxes)]
        if pending is not None and not pending:
            _keep(reading, leaf_read)
        else:
            self._fill(reading, leaf_read, views, pending)
        position = leaf_read.positions[0]
        is_filled = reading.filled is not None and reading.filled[position]
        present = leaf if is_filled else reading.leaves[position]
        self._noted.append((_identity(leaf_read.leaf, handler, present), name, boxes, present))

    def _fill(
        self, reading: TreeRead, leaf_read: LeafRead, views: Sequence[HostArray], pending: Sequence[Box] | None
    ) -> None:
        """Write elements into the memory of a leaf, or let its handler copy or build them."""
        handler, leaf, record = leaf_read.handler, leaf_read.abstract, leaf_read.record
        spec = record.spec
        memory: list[HostArray] = []
        if reading.filled is not None:
            for box in leaf_read.boxes:
                destination = handler.destination(leaf, record, box)
                if destination is None or destination.shape != box.shape or destination.dtype != spec.numpy_dtype:
                    break
                memory.append(destination)
        if len(memory) == len(views):
            for box, destination, view in zip(leaf_read.boxes, memory, views, strict=True):
                common = [box] if pending is None else [inside for part in pending if (inside := part.intersect(box))]
                self._copy(box, destination, view, common)
            reading.finish_leaf(leaf_read, memory)
            return
        buffers = []
        for box, view in zip(leaf_read.boxes, views, strict=True):
            if reading.filled is not None and handler.memory_to_fill(leaf) is not None and view.flags.c_contiguous:
                buffers.append(view)  # the handler copies it
                self.written_bytes += view.nbytes
                continue
            # A leaf that is built may keep the memory, which must not be that of a file.
            buffer = allocate_for(reading.checkpoint, leaf_read.leaf, ArraySpec(box.shape, spec.dtype))
            self._copy(box, buffer, view, [box])
            buffers.append(buffer)
        reading.finish_leaf(leaf_read, buffers)

    def _copy(self, box: Box, destination: HostArray, view: HostArray, common: Sequence[Box]) -> None:
        """Copy boxes of the elements of `box`."""
        itemsize = view.dtype.itemsize
        self.written_bytes += sum([part.size for part in common]) * itemsize

        def copy(part: Box) -> None:
            copy_elements(box_of(destination, box, part), box_of(view, box, part))

        if view.nbytes < _THREADED_BYTES:
            if common == [box]:
                copy_elements(destination, view)
                return
            for part in common:
                copy(part)
        else:
            for_each(self._threads, (piece for part in common for piece in pieces(part, itemsize)), copy)

    def _viewed(self, checkpoint: Checkpoint, leaf_read: LeafRead) -> Sequence[HostArray]:
        """Return the elements of the boxes that a leaf needs, in the local files.

        Raises:
            TreeMismatchError: the local files do not have a box.
        """
        views: list[HostArray] = []
        for box in leaf_read.boxes if leaf_read.array is None else ():
            for kept, elements in self._local.parts.get(leaf_read.leaf, ()):
                if kept.contains(box):
                    views.append(elements if kept == box else box_of(elements, kept, box))
                    break
            else:
                path = format_path(checkpoint.tree.paths[leaf_read.leaf])
                raise TreeMismatchError(
                    f"{path}: the weights need the elements from {list(box.start)} to {list(box.stop)}, which the "
                    "cache does not have. Follow with like= these weights, or without like=. Nothing was changed",
                    [f"{path}: the cache does not have all elements that the weights need"],
                )
        return views


def _identity(number: int, handler: LeafHandler, leaf: object) -> Hashable:
    memory = handler.identity(leaf)
    return (number, id(leaf) if memory is None else memory)


def _keep(reading: TreeRead, leaf_read: LeafRead) -> None:
    """Keep a leaf that has the version already."""
    for position in leaf_read.positions:
        reading.leaves[position] = leaf_read.abstract
        if reading.filled is not None:
            reading.filled[position] = True


class Installer:
    """Writes versions of one follower into weights."""

    def __init__(self, request: LoadRequest, context: Context) -> None:
        """Know no weights.

        Args:
            request: options of each load.
            context: options.
        """
        self._known = WrittenWeights()
        self._newest: Version | None = None
        self._request = request
        self._context = context

    def add(self, version: Version) -> None:
        """Make a version the newest. Waits until an installation has ended."""
        with self._known.lock:
            self._known.add_changes(version.changed)
            self._newest = version

    def install(self, version: Version, local: LocalArrays, weights: object) -> object:
        """See `Version.load_into`."""
        with self._known.lock:
            is_newest = version is self._newest
            if not is_newest:
                self._known.forget_all()
            strategy = Installation(local, self._known.take(weights), self._context)
            try:
                installed = self._load(local.checkpoint, weights, strategy)
            except BaseException as error:
                self._known.forget_all()
                if not isinstance(error, TargetUndefinedError):
                    raise
                raise TargetUndefinedError(
                    f"version {version.number} was written in part: the weights are a mixture of two versions. Do not "
                    f"use them before a load_into succeeds, which then writes everything. {error}"
                ) from error
            finally:
                version.written_bytes = strategy.written_bytes
            if is_newest:
                self._known.note(installed, strategy.noted)
            return installed

    def _load(self, checkpoint: Checkpoint, weights: object, strategy: Installation) -> object:
        request = dataclasses.replace(self._request, strategy=strategy)
        with recorded_load(checkpoint.location.display, self._context) as recording:
            if _is_fixed(checkpoint, weights, self._context, request):
                return Load(checkpoint, NewValue(weights), self._context, recording, request).run()
            return load_into_target(checkpoint, weights, self._context, recording, request)


def _is_fixed(checkpoint: Checkpoint, weights: object, context: Context, request: LoadRequest) -> bool:
    """Return True if a leaf can be neither written nor replaced in its container, as in a tuple of JAX arrays."""
    flat = flatten_like(checkpoint, weights, context, request)
    replaced = [
        handler is not None and handler.memory_to_fill(leaf) is None
        for handler, leaf in zip(flat.handlers, flat.leaves, strict=True)
    ]
    return first_fixed(flat.shape, replaced) is not None
