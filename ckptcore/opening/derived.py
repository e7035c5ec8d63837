"""Derived checkpoints, whose arrays are computed from the arrays of other checkpoints during a read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field
from typing import Final, Literal, TypeAlias

from ckptcore.derivations import ChangedArray, Stored, WholeArray, walk
from ckptcore.errors import CorruptCheckpointError, MissingDistributionError, StorageError, TransformError
from ckptcore.io.elements import copy_elements
from ckptcore.io.memory import allocate
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ReadPlan
from ckptcore.model.tree import format_path
from ckptcore.opening.checkpoint import Checkpoint, extents_of, naming_additional
from ckptcore.planning import plan_read
from ckptcore.protocols import DerivedArray, Part
from ckptcore.records import NamedTuple, dataclass

_DEFAULT_BYTES: Final = 256 << 20
"""Default limit of memory in addition to the memory of the computed arrays."""

_LEAST_RUN_BYTES: Final = 16 << 20
"""Minimum size of a contiguous read for a piece of an array: shorter reads would waste time, because the
blocks at both ends are read twice."""

_MAX_BAND_BYTES: Final = 8 << 20
"""Maximum size of a band. Ranks send each other whole bands, which must not be much larger than a message."""

_CHANGES_BYTES: Final = 32 << 20
"""Maximum bytes of the parts of a `ChangedArray` that are in memory together, unless one part is larger."""

_MAX_REREAD: Final = 1.02
"""Maximum ratio of the bytes read in pieces to the bytes of one read of the whole."""


_RunKind: TypeAlias = Literal["whole", "long", "short"]
"""Kind of a contiguous range of elements of a stored array: the whole array, or a long or short range."""


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """Computes the arrays of a `Checkpoint` from those of other checkpoints.

    Attributes:
        tree: the derived tree.
        sources: the checkpoint that is read, and additional checkpoints that are combined with it.
        derivations: by leaf number, the derived array. Aliases may have no entry.
        values: the values of the derived tree that come from the first source: by leaf number, the leaf number in that
            source.
        most_bytes: limit of memory in addition to the memory of the computed arrays. A single array that cannot be
            computed in pieces may exceed it.
        description: a description of the transforms and of the bases of an update, which must be equal on every rank of
            a job; empty if there are neither transforms nor bases.
        changes: changes that `Matching` allowed; may differ by rank. By leaf number: the number of the leaf in the tree
            before `Matching`, and the change in words, empty if the array is unchanged.
        is_builtin: True if the arrays come from the checkpoint's bases, not from transforms of the user.
    """

    tree: TreeMetadata
    sources: tuple[Checkpoint, ...]
    derivations: Mapping[int, DerivedArray]
    values: Mapping[int, int]
    most_bytes: int = _DEFAULT_BYTES
    description: str = ""
    changes: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    is_builtin: bool = False
    _plain_bytes: dict[int, Counter[int]] = field(default_factory=dict, init=False, repr=False)
    """By source and leaf, the number of stored bytes; filled on demand. See `_is_plain`."""

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterator[int]:
        """See `Checkpoint.read`.

        Raises:
            TransformError: an array cannot be computed, for instance because a function of the caller failed. The
                message names the array.
            Errors of reading the sources.
        """
        left = [0] * len(plan.items)
        batch: list[_Fill] = []
        held = 0
        numbers = range(len(plan.items))
        for leaf, together in itertools.groupby(numbers, lambda number: plan.items[number].leaf):
            outputs = [BoxOutput(number, plan.items[number].box, buffers[number]) for number in together]
            for fill in self._fills(self.derivations[leaf], outputs):
                for owner in fill.owners:
                    left[owner] += 1
                if batch and held + fill.held_bytes > self.most_bytes:
                    yield from self._run(batch, plan, left)
                    held = 0
                batch.append(fill)
                held += fill.held_bytes
        yield from self._run(batch, plan, left)

    def stored(self, leaves: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Return the numbers of the stored leaves that the given leaves are computed from, by index of source."""
        by_source: dict[int, dict[int, None]] = {}
        values = [self.values[leaf] for leaf in leaves if leaf in self.values]
        if values:
            by_source[0] = dict.fromkeys(values)
        originals = [self.tree.aliases.get(leaf, leaf) for leaf in leaves]
        for original in originals:
            for array in walk(self.derivations[original]) if original in self.derivations else ():
                if isinstance(array, Stored):
                    by_source.setdefault(array.checkpoint, {})[array.leaf] = None
        return {checkpoint: list(numbers) for checkpoint, numbers in by_source.items()}

    @property
    def leaves_from_bases(self) -> Sequence[int]:
        """The numbers of the arrays that are computed from other sources than the first, in order; no aliases."""
        return [leaf for leaf in sorted(self.derivations) if any(self.stored((leaf,)))]

    def bands(self, leaf: int, nbytes: int) -> tuple[int, int] | None:
        """Return the axis along which to divide an array into bands of about `nbytes` bytes, and the extent of a band.

        The extent is the number of indices along the axis. Bands are parts of the computed array, of at most 8 MiB.
        Each band reads contiguous ranges of stored bytes. All bands together read at most 2 % more bytes than one read
        of the whole array. Returns None if no axis allows such bands, or if the array has at most `nbytes` bytes.
        """
        derivation = self.derivations[leaf]
        spec, whole = derivation.spec, Box.whole(derivation.spec.shape)
        if spec.nbytes <= nbytes:
            return None
        stored = sum([array.spec.nbytes for array in set(walk(derivation)) if isinstance(array, Stored)])
        for axis, extent in enumerate(spec.shape):
            step = max(1, extent * nbytes // spec.nbytes)
            start = min(extent // 2, extent - step)  # the first and the last band may read less than other bands
            band = whole.band(axis, start, start + step)
            if band.size * spec.numpy_dtype.itemsize > _MAX_BAND_BYTES:
                continue
            fill = _Fill.of(derivation, [BoxOutput(0, band, allocate(ArraySpec(band.shape, spec.dtype)))])
            if fill.read_bytes * extent / step <= stored * _MAX_REREAD and not self._runs(fill)[None]:
                return axis, step
        return None

    def pieces(self, leaf: int, most_bytes: int) -> Sequence[Box]:
        """Return bands of an array along its first axis, of at most `most_bytes` if possible.

        A band has at least one index of that axis. Returns the whole array if it is small enough, or if a band does not
        read long contiguous ranges: separate bands would then read many bytes several times.
        """
        derivation = self.derivations[self.tree.aliases.get(leaf, leaf)]
        spec, whole = derivation.spec, Box.whole(derivation.spec.shape)
        if spec.nbytes <= most_bytes:
            return [whole]
        if any(isinstance(array, ChangedArray) for array in walk(derivation)):
            return [whole]
        step = max(1, spec.shape[0] * most_bytes // spec.nbytes)
        first = whole.band(0, 0, step)
        # Only for planning: nothing is read into this memory.
        fill = _Fill.of(derivation, [BoxOutput(0, first, allocate(ArraySpec(first.shape, spec.dtype)))])
        if not self._reads_runs(fill):
            return [whole]
        return whole.bands(0, step)

    def _run(self, batch: list[_Fill], plan: ReadPlan, left: list[int]) -> Iterator[int]:
        """Read and compute a batch, and empty it. Yields the number of each box that is complete."""
        for fill in _read_fills(batch, self._read_stored):
            try:
                fill.compute(self._read_stored)
            except (MissingDistributionError, StorageError):
                raise
            except CorruptCheckpointError as error:
                path = format_path(self.tree.paths[plan.items[fill.owners[0]].leaf])
                raise type(error)(f"{path} of {self.sources[0]}: {error}") from error
            except Exception as error:
                path = format_path(self.tree.paths[plan.items[fill.owners[0]].leaf])
                raise TransformError(
                    f"{path} could not be computed from {self.sources[0]}: {type(error).__name__}: {error}"
                ) from error
            for owner in fill.owners:
                left[owner] -= 1
                if not left[owner]:
                    yield owner

    def _read_stored(self, reads: Sequence[_StoredRead]) -> Iterator[int]:
        by_source: dict[int, list[int]] = {}
        for number, read in enumerate(reads):
            by_source.setdefault(read.array.checkpoint, []).append(number)
        for index, numbers in sorted(by_source.items()):
            source = self.sources[index]
            wanted = [(reads[number].array.leaf, (reads[number].box,)) for number in numbers]
            plan = plan_read(source.tree, wanted)
            with naming_additional(source) if index else nullcontext():
                for item in source.read(plan, [reads[number].buffer for number in numbers]):
                    yield numbers[item]

    def _fills(self, derivation: DerivedArray, outputs: Sequence[BoxOutput]) -> Sequence[_Fill]:
        """Return the fills of boxes of an array: one fill, or several if one fill needs too much memory.

        First tries to cut all boxes into bands along an axis, one fill for each band. All bands together must read at
        most 2 % more bytes than one fill. Each band cuts all boxes, because their stored elements may be interleaved.
        If no axis allows such bands, divides the list of boxes, or returns one fill that exceeds the memory limit.
        """
        fill = _Fill.of(derivation, outputs)
        if fill.held_bytes <= self.most_bytes:
            return [fill]
        count = -(-fill.held_bytes // self.most_bytes)
        filled = [output for output in outputs if output.box.size]
        around = _bounding_box([output.box for output in filled])
        for axis, extent in enumerate(around.shape):
            step = -(-extent // count)
            if step == extent:
                continue
            bands = [_in_band(filled, band) for band in around.bands(axis, step)]
            pieces = [_Fill.of(derivation, band) for band in bands]
            if sum([piece.read_bytes for piece in pieces]) <= fill.read_bytes * _MAX_REREAD and all(
                map(self._reads_runs, pieces)
            ):
                empty = [output for output in outputs if not output.box.size]
                # A band may still be too large, for example one layer of stacked weights: cut it along another axis.
                parts = [
                    [piece] if piece.held_bytes <= self.most_bytes else self._fills(derivation, band)
                    for piece, band in zip(pieces, bands, strict=True)
                ]
                return [*itertools.chain(*parts), *([_Fill.of(derivation, empty)] if empty else [])]
        if len(filled) == 1 or any(isinstance(array, WholeArray | ChangedArray) for array in walk(derivation)):
            return [fill]
        if all(self._is_plain(read.array) for read in fill.reads):
            return [fill]  # separate boxes would read the bytes between their elements several times
        half = len(outputs) // 2
        return [*self._fills(derivation, outputs[:half]), *self._fills(derivation, outputs[half:])]

    def _reads_runs(self, fill: _Fill) -> bool:
        """Return True if a piece reads long contiguous ranges of stored elements, or whole arrays.

        One short range, such as the scales of weights, is allowed for each long range. A short range also reads the
        whole blocks at both of its ends, but they have few bytes compared with the long range.
        """
        counts = self._runs(fill)
        return not counts[None] and counts["short"] <= counts["long"]

    def _runs(self, fill: _Fill) -> Counter[_RunKind | None]:
        """Count the contiguous ranges of each kind that a piece reads; None counts boxes that are not contiguous."""
        boxes: dict[Stored, dict[Box, None]] = {}
        for read in fill.reads:
            boxes.setdefault(read.array, {})[read.box] = None
        counts = Counter[_RunKind | None]()
        for array, of_array in boxes.items():
            around = _bounding_box(list(of_array))
            together = self._run_of(array, around) if sum([box.size for box in of_array]) == around.size else None
            counts.update([self._run_of(array, box) for box in of_array] if together is None else [together])
        return counts

    def _run_of(self, array: Stored, box: Box) -> _RunKind | None:
        """Return the kind of contiguous range that a box is; None if it is not contiguous."""
        whole = Box.whole(array.spec.shape)
        if box == whole:
            return "whole"
        # In C order, a box is contiguous if it is complete along all axes after the first axis with several elements.
        ones = next((axis for axis, extent in enumerate(box.shape) if extent > 1), len(box.shape))
        if box.shape[ones + 1 :] != whole.shape[ones + 1 :] or not self._is_plain(array):
            return None
        return "long" if box.size * array.spec.numpy_dtype.itemsize >= _LEAST_RUN_BYTES else "short"

    def _is_plain(self, array: Stored) -> bool:
        """Return True if the elements of a stored array are uncompressed, so that any range of them can be read."""
        source = self.sources[array.checkpoint]
        if source.derived is not None:
            return False  # a derived source divides its own reads
        if (plain := self._plain_bytes.get(array.checkpoint)) is None:
            plain = self._plain_bytes[array.checkpoint] = Counter()
            for leaf, _, start, stop in extents_of(source):
                plain[leaf] += stop - start
        return plain[source.tree.aliases.get(array.leaf, array.leaf)] == array.spec.nbytes


def derive(
    source: Checkpoint,
    tree: TreeMetadata,
    derivations: Mapping[int, DerivedArray],
    *,
    values: Mapping[int, int],
    additional: Sequence[Checkpoint] = (),
    most_bytes: int | None = None,
    description: str = "",
    changes: Mapping[int, tuple[int, str]] | None = None,
    is_builtin: bool = False,
) -> Checkpoint:
    """Return a checkpoint with another tree, whose arrays are computed from those of an open checkpoint.

    The result is read in boxes like any other checkpoint. It has the root, version and origin of `source`.

    Args:
        source: the open checkpoint that is read.
        tree: the new tree, with its values.
        derivations: by leaf number, the derived array, for each array of the new tree that is not an alias. A `Stored`
            refers to leaves of `source`.
        values: the values of the new tree that come from `source`: by leaf number, the leaf number in `source`.
        additional: additional sources; `Stored.checkpoint` is 1 for the first of them.
        most_bytes: see `Derived`; None: 256 MiB.
        description, changes, is_builtin: see `Derived`.

    Raises:
        TransformError: an array has no derivation, or its derivation has another shape or dtype.
    """
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases:
            continue
        spec: ArraySpec | None = derivations[leaf].spec if leaf in derivations else None
        if spec != record.spec:
            path = format_path(tree.paths[leaf])
            raise TransformError(f"{path} is declared as {record.spec}, but its derivation is {spec or 'missing'}")
    if source.derived is not None:
        description = "\n".join(filter(None, (source.derived.description, description)))
    limit = most_bytes or _DEFAULT_BYTES
    derived = Derived(tree, (source, *additional), derivations, values, limit, description, changes or {}, is_builtin)
    return dataclasses.replace(source, tree=tree, derived=derived, read_instead=derived.read)


def _bounding_box(boxes: Sequence[Box]) -> Box:
    """Return the bounding box of boxes."""
    starts, stops = zip(*[(box.start, box.stop) for box in boxes], strict=True)
    return Box(tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True))))


def _in_band(outputs: Sequence[BoxOutput], band: Box) -> list[BoxOutput]:
    """Return the parts of outputs that are in a band."""
    return [
        BoxOutput(owner, common, out[common.within(box)])
        for owner, box, out in outputs
        if (common := box.intersect(band)) is not None
    ]


@dataclass(frozen=True, slots=True)
class _StoredRead:
    """A box of a stored array that is read.

    Attributes:
        array: the array.
        box: the box.
        buffer: the memory to fill: C-contiguous, of the box's shape.
        fill: the fill that needs it.
    """

    array: Stored
    box: Box
    buffer: HostArray
    fill: _Fill


_ReadAll: TypeAlias = Callable[[Sequence[_StoredRead]], Iterator[int]]
"""Reads boxes; yields the number of each once it is complete."""


class BoxOutput(NamedTuple):
    """The destination of a box of a derived array.

    Attributes:
        owner: a number that the caller chose to identify the box.
        box: the box.
        out: memory with the shape of the box, and any strides.
    """

    owner: int
    box: Box
    out: HostArray


@dataclass(slots=True, eq=False)
class _Fill:
    """A plan to fill boxes of a derived array together. Shared inputs are read and computed once.

    Attributes:
        owners: the owners of the boxes.
        reads: the boxes of stored arrays to read.
        waiting: the number of reads that are not complete.
        steps: the computations after the reads, in order.
        held_bytes: bytes of memory in addition to that of the boxes.
    """

    owners: Sequence[int]
    reads: list[_StoredRead] = field(default_factory=list)
    waiting: int = 0
    steps: list[Callable[[], None]] = field(default_factory=list)
    held_bytes: int = 0
    _parts: dict[tuple[DerivedArray, Box], HostArray] = field(default_factory=dict)
    _changed: dict[tuple[ChangedArray, Box], HostArray] = field(default_factory=dict)
    _results: dict[WholeArray, list[HostArray]] = field(default_factory=dict)
    _read_more: list[_ReadAll] = field(default_factory=list)
    """The function with which steps read, during `compute`."""

    @classmethod
    def of(cls, derivation: DerivedArray, outputs: Sequence[BoxOutput]) -> _Fill:
        """Plan how to fill boxes. Reads nothing. Allocates memory, but does not touch it before a read fills it."""
        fill = cls([output.owner for output in outputs])
        for _, box, out in outputs:
            if box.size:
                fill._plan(derivation, box, out)
        fill._parts.clear()
        fill._changed.clear()
        return fill

    @property
    def read_bytes(self) -> int:
        """Bytes that are read. Equal boxes are counted once."""
        return sum({(read.array, read.box): read.buffer.nbytes for read in self.reads}.values())

    def compute(self, read: _ReadAll) -> None:
        """Run the steps, after all of `reads`.

        Args:
            read: reads the parts of a `ChangedArray` that are not in `reads`.
        """
        steps, self.steps = self.steps[::-1], []
        self._results.clear()
        self._read_more = [read]
        while steps:
            steps.pop()()  # the memory of a step is released before the next step
        self._read_more.clear()

    def _plan(self, derivation: DerivedArray, box: Box, out: HostArray) -> None:
        """Plan the reads and steps that write a box of an array to `out`."""
        if isinstance(derivation, Stored):
            if out.flags.c_contiguous:
                self.reads.append(_StoredRead(derivation, box, out, self))
            else:
                # Read into new memory and copy: layouts do not read into memory with gaps.
                self.steps.append(functools.partial(copy_elements, out, self._computed(derivation, box)))
            return
        if isinstance(derivation, WholeArray):
            result = self._result(derivation)
            self.steps.append(lambda: copy_elements(out, result[0][box.slices]))
            return
        if isinstance(derivation, ChangedArray):
            self._plan_changes(derivation, box, out)
            return
        needed, views = derivation.needed(box), derivation.views(box, out)
        parts: list[HostArray] = []
        for part, view in zip(needed, views or [None] * len(needed), strict=True):
            if view is None:
                parts.append(self._computed(derivation.inputs[part.number], part.box))
            else:
                self._plan(derivation.inputs[part.number], part.box, view)
                parts.append(view)
        if views is None or any(view is None for view in views):
            self.steps.append(functools.partial(derivation.make, box, parts, out))

    def _result(self, derivation: WholeArray) -> list[HostArray]:
        """Return the list that will contain the whole array, which is computed once."""
        if (result := self._results.get(derivation)) is None:
            result = self._results[derivation] = []
            whole = Box.whole(derivation.spec.shape)
            parts = [self._computed(derivation.inputs[part.number], part.box) for part in derivation.needed(whole)]
            self.held_bytes += derivation.spec.nbytes
            self.steps.append(lambda: result.append(derivation.compute(parts)))
        return result

    def _plan_changes(self, derivation: ChangedArray, box: Box, out: HostArray) -> None:
        """Plan the reads and steps that write a box of a changed array to `out`. Boxes share one changed part."""
        first, *changes = derivation.needed(box)
        elements = self._changed.get((derivation, first.box))
        if elements is None:
            is_direct = first.box == box and out.flags.c_contiguous
            elements = out if is_direct else allocate(ArraySpec(first.box.shape, derivation.spec.dtype))
            self.held_bytes += 0 if is_direct else elements.nbytes
            self._changed[derivation, first.box] = elements
            self._plan(derivation.inputs[first.number], first.box, elements)
            self._plan_windows(derivation, changes, elements)
        if elements is not out:
            within = elements[box.within(first.box)]
            self.steps.append(lambda: copy_elements(out, within))

    def _plan_windows(self, derivation: ChangedArray, changes: Sequence[Part], elements: HostArray) -> None:
        """Plan the changes in windows of a few MiB. The parts of the first window are read with those of other arrays.

        The parts of further windows get memory when the changes before them are complete.
        """
        windows: list[list[Stored]] = []
        room = 0
        for part in changes:
            array = derivation.inputs[part.number]
            if not isinstance(array, Stored) or part.box != Box.whole(array.spec.shape):
                raise TypeError(f"{type(derivation).__name__} is changed by {array}, expected whole stored arrays")
            if not windows or array.spec.nbytes > room:
                windows.append([])
                room = _CHANGES_BYTES
            windows[-1].append(array)
            room -= array.spec.nbytes
        number = 1
        for window in windows:
            reads = [self._read_of(array) for array in window] if number == 1 else []
            self.reads.extend(reads)
            self.steps.append(functools.partial(self._change, derivation, number, window, reads, elements))
            number += len(window)
        self.held_bytes += max([sum([array.spec.nbytes for array in window]) for window in windows], default=0)

    def _change(
        self,
        derivation: ChangedArray,
        number: int,
        window: Sequence[Stored],
        reads: Sequence[_StoredRead],
        elements: HostArray,
    ) -> None:
        """Change an array by the parts of a window, the first of which has the given number. Read them if necessary."""
        if not reads:
            reads = [self._read_of(array) for array in window]
            (read_more,) = self._read_more
            for _ in read_more(reads):
                pass
        for part, read in enumerate(reads, start=number):
            derivation.change(part, read.buffer, elements)

    def _read_of(self, array: Stored) -> _StoredRead:
        return _StoredRead(array, Box.whole(array.spec.shape), allocate(array.spec), self)

    def _computed(self, derivation: DerivedArray, box: Box) -> HostArray:
        """Return the memory for a box of an array. It is allocated once per box."""
        if (out := self._parts.get((derivation, box))) is None:
            out = self._parts[derivation, box] = allocate(ArraySpec(box.shape, derivation.spec.dtype))
            self.held_bytes += out.nbytes
            self._plan(derivation, box, out)
        return out


def _read_fills(fills: list[_Fill], read: _ReadAll) -> Iterator[_Fill]:
    """Read for several fills together: a box that several of them need is read once.

    Args:
        fills: the fills; the list is emptied, so that their memory can be released one by one.
        read: reads boxes.

    Yields:
        Each fill once its reads are complete. The caller computes it.
    """
    same: dict[tuple[Stored, Box], list[_StoredRead]] = {}
    ready = [fill for fill in fills if not fill.reads]
    for fill in fills:
        fill.waiting = len(fill.reads)
        for each in fill.reads:
            same.setdefault((each.array, each.box), []).append(each)
        fill.reads = []
    fills.clear()
    yield from ready
    wanted = list(same.values())
    del same
    for number in read([first for first, *_ in wanted]):
        first, *others = wanted[number]
        wanted[number] = []  # releases memory as soon as its fill is complete
        for other in others:
            copy_elements(other.buffer, first.buffer)
        for each in (first, *others):
            each.fill.waiting -= 1
            if not each.fill.waiting:
                yield each.fill
