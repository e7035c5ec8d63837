"""Derived: the arrays of a checkpoint that are made of those of another one as they are read."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ckptcore.derivations import Stored, WholeArray, walk
from ckptcore.derivations.batches import Batch, Fill, Place, StoredRead
from ckptcore.errors import TransformError
from ckptcore.io.memory import allocate
from ckptcore.loading.checkpoint import Checkpoint, extents_of, naming_further, replaced_beside
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ReadPlan
from ckptcore.model.tree import format_path
from ckptcore.planning import plan_read
from ckptcore.protocols import DerivedArray

__all__ = ["Derived", "check_beside", "derive"]

_USUAL_BYTES: Final = 256 << 20
"""What is held beside the arrays that are made, where the options do not say."""

_LEAST_RUN_BYTES: Final = 16 << 20
"""Arrays are made in pieces only if these read runs that are no shorter: blocks at the ends of each are read twice."""

_MOST_BAND_BYTES: Final = 8 << 20
"""What ranks send each other is made of whole bands: none may be much longer than a message."""

_MOST_AGAIN: Final = 1.02
"""How many times as much may be read for pieces as for all at once."""


_Run: TypeAlias = Literal["whole", "long", "short"]
"""A run of elements of a stored array that follow each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """What makes the arrays of an `Checkpoint`.

    Attributes:
        tree: what is made.
        sources: the checkpoint that is read, and those that are put together with it.
        derivations: by number of the leaf, how each array is made; aliases may be left out.
        values: by number of each value that is one of the checkpoint that is read, its number there.
        most_bytes: the most memory that is used beside the arrays that are made. What cannot be made in pieces may exceed it, alone.
        description, changes: see `DerivedArrays`.
        is_builtin: whether opening the checkpoint makes it so by itself, because it refers to others.
    """

    tree: TreeMetadata
    sources: tuple[Checkpoint, ...]
    derivations: Mapping[int, DerivedArray]
    values: Mapping[int, int]
    most_bytes: int = _USUAL_BYTES
    description: str = ""
    changes: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    is_builtin: bool = False
    _lying: dict[int, Counter[int]] = field(default_factory=dict, init=False, repr=False)
    """By checkpoint, and leaf, the bytes that lie in objects as they are; looked up when it is asked for."""

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray]) -> Iterator[int]:
        """See `Checkpoint.read`.

        Raises:
            TransformError: if an array cannot be computed, as where a function of the caller's fails; names it.
            What the reading of the checkpoint does.
        """
        left = [0] * len(plan.items)
        batch = Batch()
        numbers = range(len(plan.items))
        for leaf, together in itertools.groupby(numbers, lambda number: plan.items[number].leaf):
            places = [Place(number, plan.items[number].box, buffers[number]) for number in together]
            for fill in self._fills(self.derivations[leaf], places):
                for owner in fill.owners:
                    left[owner] += 1
                if len(batch) and batch.held_bytes + fill.held_bytes > self.most_bytes:
                    yield from self._run(batch, plan, left)
                batch.add(fill)
        yield from self._run(batch, plan, left)

    def stored(self, leaves: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """See `DerivedArrays.stored`."""
        found: dict[int, dict[int, None]] = {}
        values = [self.values[leaf] for leaf in leaves if leaf in self.values]
        if values:
            found[0] = dict.fromkeys(values)
        originals = [self.tree.aliases.get(leaf, leaf) for leaf in leaves]
        for original in originals:
            for one in walk(self.derivations[original]) if original in self.derivations else ():
                if isinstance(one, Stored):
                    found.setdefault(one.checkpoint, {})[one.leaf] = None
        return {checkpoint: list(numbers) for checkpoint, numbers in found.items()}

    def bands(self, leaf: int, nbytes: int) -> tuple[int, int] | None:
        """See `DerivedArrays.bands`."""
        derivation = self.derivations[leaf]
        spec, whole = derivation.spec, Box.whole(derivation.spec.shape)
        if spec.nbytes <= nbytes:
            return None
        stored = sum([one.spec.nbytes for one in set(walk(derivation)) if isinstance(one, Stored)])
        for axis, extent in enumerate(spec.shape):
            step = max(1, extent * nbytes // spec.nbytes)
            start = min(extent // 2, extent - step)
            band = whole.band(axis, start, start + step)
            if band.size * spec.numpy_dtype.itemsize > _MOST_BAND_BYTES:
                continue
            fill = Fill.of(derivation, [Place(0, band, allocate(ArraySpec(band.shape, spec.dtype)))])
            if fill.read_bytes * extent / step <= stored * _MOST_AGAIN and not self._runs(fill)[None]:
                return axis, step
        return None

    def pieces(self, leaf: int, most_bytes: int) -> Sequence[Box]:
        """See `DerivedArrays.pieces`."""
        derivation = self.derivations[self.tree.aliases.get(leaf, leaf)]
        spec, whole = derivation.spec, Box.whole(derivation.spec.shape)
        if spec.nbytes <= most_bytes:
            return [whole]
        step = max(1, spec.shape[0] * most_bytes // spec.nbytes)
        first = whole.band(0, 0, step)
        # Nothing is read into this: its pages are never touched.
        fill = Fill.of(derivation, [Place(0, first, allocate(ArraySpec(first.shape, spec.dtype)))])
        if not self._reads_runs(fill):
            return [whole]
        return whole.bands(0, step)

    def _run(self, batch: Batch, plan: ReadPlan, left: list[int]) -> Iterator[int]:
        """Make what is in a batch; gives the number of each box that is complete."""
        for fill in batch.run(self._read_stored):
            try:
                fill.compute()
            except Exception as error:
                path = format_path(self.tree.paths[plan.items[fill.owners[0]].leaf])
                raise TransformError(
                    f"{path} could not be made of what {self.sources[0]} holds: {type(error).__name__}: {error}"
                ) from error
            for owner in fill.owners:
                left[owner] -= 1
                if not left[owner]:
                    yield owner

    def _read_stored(self, reads: Sequence[StoredRead]) -> Iterator[int]:
        for checkpoint, below in enumerate(self.sources):
            numbers = [number for number, read in enumerate(reads) if read.array.checkpoint == checkpoint]
            if not numbers:
                continue
            wanted = [(reads[number].array.leaf, (reads[number].box,)) for number in numbers]
            plan = plan_read(below.tree, wanted)
            with naming_further(below) if checkpoint else nullcontext():
                for there in below.read(plan, [reads[number].buffer for number in numbers]):
                    yield numbers[there]

    def _fills(self, derivation: DerivedArray, places: Sequence[Place]) -> Sequence[Fill]:
        """What fills boxes of an array: all at once, or in pieces, where that takes too much memory and they read little more.

        A piece is a band of all boxes, so that what lies between the elements of one, which others take, is not read for each.
        """
        fill = Fill.of(derivation, places)
        if fill.held_bytes <= self.most_bytes:
            return [fill]
        count = -(-fill.held_bytes // self.most_bytes)
        filled = [place for place in places if place.box.size]
        around = _around([place.box for place in filled])
        for axis, extent in enumerate(around.shape):
            step = -(-extent // count)
            if step == extent:
                continue
            bands = [_within(filled, band) for band in around.bands(axis, step)]
            pieces = [Fill.of(derivation, band) for band in bands]
            if sum([piece.read_bytes for piece in pieces]) <= fill.read_bytes * _MOST_AGAIN and all(
                map(self._reads_runs, pieces)
            ):
                empty = [place for place in places if not place.box.size]
                # A layer of a stack may still be too large, and is cut along another axis then.
                parts = [
                    [piece] if piece.held_bytes <= self.most_bytes else self._fills(derivation, band)
                    for piece, band in zip(pieces, bands, strict=True)
                ]
                return [*itertools.chain(*parts), *([Fill.of(derivation, empty)] if empty else [])]
        if len(filled) == 1 or any(isinstance(one, WholeArray) for one in walk(derivation)):
            return [fill]
        if all(self._is_plain(read.array) for read in fill.reads):
            return [fill]  # each by itself would read what lies between its elements
        half = len(places) // 2
        return [*self._fills(derivation, places[:half]), *self._fills(derivation, places[half:])]

    def _reads_runs(self, fill: Fill) -> bool:
        """Whether what is read for a piece are long runs of stored elements, or whole arrays.

        Beside each long run there may be a short one: what lies at its ends is a small part of both. So are the scales of weights.
        """
        counts = self._runs(fill)
        return not counts[None] and counts["short"] <= counts["long"]

    def _runs(self, fill: Fill) -> Counter[_Run | None]:
        """How many runs of each sort are read for a piece."""
        boxes: dict[Stored, dict[Box, None]] = {}
        for read in fill.reads:
            boxes.setdefault(read.array, {})[read.box] = None
        counts = Counter[_Run | None]()
        for array, of_array in boxes.items():
            around = _around(list(of_array))
            together = self._run_of(array, around) if sum([box.size for box in of_array]) == around.size else None
            counts.update([self._run_of(array, box) for box in of_array] if together is None else [together])
        return counts

    def _run_of(self, array: Stored, box: Box) -> _Run | None:
        """What run of elements a box is; None if it is none."""
        whole = Box.whole(array.spec.shape)
        if box == whole:
            return "whole"
        ones = next((axis for axis, extent in enumerate(box.shape) if extent > 1), len(box.shape))
        if box.shape[ones + 1 :] != whole.shape[ones + 1 :] or not self._is_plain(array):
            return None
        return "long" if box.size * array.spec.numpy_dtype.itemsize >= _LEAST_RUN_BYTES else "short"

    def _is_plain(self, array: Stored) -> bool:
        """Whether the elements of a stored array lie in objects as they are, and any range of them can be read."""
        below = self.sources[array.checkpoint]
        if below.derived is not None:
            return False  # it cuts what it makes itself
        if (lying := self._lying.get(array.checkpoint)) is None:
            lying = self._lying[array.checkpoint] = Counter()
            for leaf, _, start, stop in extents_of(below):
                lying[leaf] += stop - start
        return lying[below.tree.aliases.get(array.leaf, array.leaf)] == array.spec.nbytes


def derive(
    opened: Checkpoint,
    tree: TreeMetadata,
    derivations: Mapping[int, DerivedArray],
    *,
    values: Mapping[int, int],
    beside: Sequence[Checkpoint] = (),
    most_bytes: int | None = None,
    description: str = "",
    changes: Mapping[int, tuple[int, str]] | None = None,
) -> Checkpoint:
    """A checkpoint with another tree, whose arrays are made of those of one that is open as they are read.

    It is read as any other: by boxes. Values, which stand in the tree, are those of the new tree.

    Args:
        opened: what is read; its root and all else that it says of itself stay.
        tree: the new tree.
        derivations: by number of each array in the new tree that is no alias, how it is made; `Stored` refers to leaves of `opened`.
        values: by number of each value in the new tree that is one of `opened`, its number there.
        beside: further checkpoints that arrays are made of: those with the numbers from 1 on in a `Stored`.
        most_bytes: the most memory that is used beside the arrays that are made, about; None: 256 MiB. What cannot be made in
            pieces may exceed it, alone.
        description, changes: see `DerivedArrays`.

    Raises:
        TransformError: if an array has no derivation, or one of another spec.
    """
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in tree.aliases:
            continue
        made: ArraySpec | None = derivations[leaf].spec if leaf in derivations else None
        if made != record.spec:
            raise TransformError(
                f"{format_path(tree.paths[leaf])} is said to be {record.spec}, and {made or 'nothing'} is made"
            )
    if opened.derived is not None:
        description = f"{opened.derived.description}\n{description}"
    derived = Derived(
        tree,
        (opened, *beside),
        derivations,
        values,
        most_bytes or _USUAL_BYTES,
        description,
        {} if changes is None else changes,
    )
    return dataclasses.replace(opened, tree=tree, derived=derived, copies=None)


def check_beside(opened: Checkpoint) -> None:
    """Make sure that the further checkpoints that arrays are made of have not been replaced since they were opened.

    Raises:
        CorruptCheckpointError: if one was replaced, so that what was read may be of two saves.
    """
    if opened.derived is None:
        return
    first, *beside = opened.derived.sources
    check_beside(first)
    for other in beside:
        if not other.mark.has_stayed_at(other.location):
            raise replaced_beside(other)


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box that has all of some."""
    starts, stops = zip(*[(box.start, box.stop) for box in boxes], strict=True)
    return Box(tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True))))


def _within(places: Sequence[Place], band: Box) -> list[Place]:
    """What places have of a band."""
    return [
        Place(owner, common, out[common.within(box)])
        for owner, box, out in places
        if (common := box.intersect(band)) is not None
    ]
