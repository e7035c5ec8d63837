"""Loaded boxes: reads all arrays of an open checkpoint in boxes, one after the other, with bounded memory."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from ckptcore.context import Context
from ckptcore.errors import CorruptCheckpointError
from ckptcore.events import Recording
from ckptcore.io.threads import BackgroundThreads
from ckptcore.loading.load import LoadRequest, bytes_requested, fill_report, transformed
from ckptcore.loading.reading import allocate_for, check_sizes, default_handlers, incomplete_read
from ckptcore.loading.selections import chosen_leaves
from ckptcore.matching.options import Matched
from ckptcore.model import BLOCK_BYTES
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.tree import TreePath, format_path
from ckptcore.on_demand.open_state import OpenState
from ckptcore.on_demand.pieces import BatchSizes, ChunkLookup, Order, StoredPiece, batches_of, pieces_of
from ckptcore.opening.checkpoint import Checkpoint, check_additional
from ckptcore.planning import plan_read
from ckptcore.records import dataclass
from ckptcore.runtime import runtime_of
from ckptcore.select import Selection

MAX_PLANNED_CHUNKS: Final = 1 << 20
"""Maximum number of chunks of an array that are sorted by storage order. An array with more chunks is divided without
regard to them, so some chunks may be read twice."""

_BUDGET_BYTES: Final = 128 << 20
"""Default limit of the bytes of boxes in memory, including those that were read ahead."""

_BATCHES: Final = 2
"""Batches in memory: one is read while the caller receives the boxes of the other."""

_MAX_CUTS: Final = 1 << 20
"""Maximum parts of a box whose chunk is unknown. Real arrays need fewer; a hostile root may state any shape."""


@dataclass(frozen=True, slots=True)
class LoadedBox:
    """A box of an array of a checkpoint, with its elements.

    Attributes:
        path: path of the array in the tree.
        tied: other paths with the same array, which is yielded once.
        spec: shape and dtype of the whole array.
        box: the box, in elements.
        elements: the elements of the box in new memory, which the caller may change and keep.
    """

    path: TreePath
    tied: tuple[TreePath, ...]
    spec: ArraySpec
    box: Box
    elements: HostArray

    @property
    def name(self) -> str:
        """The path as text, formatted as in errors and reports: ``layers[0]/w``."""
        return format_path(self.path)


def iter_boxes(
    state: OpenState, request: LoadRequest, first: Selection | Sequence[Selection]
) -> Generator[LoadedBox, None, None]:
    """Plan the reads of an open checkpoint. Returns a generator that reads. See `OpenCheckpoint.iter_boxes`."""
    context = state.context
    rank, location = runtime_of(context).job().rank, state.checkpoint.location.display
    # The load begins with the iteration: a generator that is never iterated over cannot report an end.
    recording = Recording("load", location, context.observers, rank=rank, spans=False)
    try:
        selections = [first] if isinstance(first, Selection) else first

        def plan(stored: Checkpoint) -> tuple[Checkpoint, Sequence[Sequence[int]], Callable[[], None]]:
            checkpoint = transformed(stored, request.transforms, context)
            groups = _leaf_groups(checkpoint, request.select, selections, context)
            chosen = {leaf for leaves in groups for leaf in leaves}
            check_sizes(checkpoint, chosen)
            matched, before = _matched(checkpoint, chosen, context), bytes_requested(checkpoint)

            def finish() -> None:
                if request.report is not None:
                    fill_report(request.report, checkpoint, matched, before)

            return checkpoint, groups, finish

        with recording.phase("open"):
            checkpoint, groups, finish = state.attempt(plan)
        batch_bytes = max(1, (context.memory.load_bytes or _BUDGET_BYTES) // _BATCHES)
        batches = (batch for leaves in groups for batch in _batches(checkpoint, leaves, batch_bytes))
    except BaseException as error:
        recording.finish(error=error)
        raise
    return _read_batches(state, checkpoint, batches, recording, finish)


def _matched(checkpoint: Checkpoint, chosen: Container[int], context: Context) -> Matched:
    """Return the leaves that are loaded, for the report."""
    array, _ = default_handlers(runtime_of(context).registry)
    originals = [checkpoint.tree.aliases.get(leaf, leaf) for leaf in range(len(checkpoint.tree.leaves))]
    handlers = [array if leaf in chosen else None for leaf in originals]
    return Matched(range(len(originals)), handlers, skeleton=checkpoint.tree.skeleton)


def _leaf_groups(
    checkpoint: Checkpoint, select: Selection | None, first: Sequence[Selection], context: Context
) -> Sequence[Sequence[int]]:
    """Return the arrays to load, each once, in groups: the selections of `first` in order, then all others."""
    tree = checkpoint.tree
    arrays = {leaf for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    left = arrays if select is None else arrays & chosen_leaves(checkpoint, select, context)
    left = {tree.aliases.get(leaf, leaf) for leaf in left}
    groups: list[Sequence[int]] = []
    for selection in first:
        wanted = {tree.aliases.get(leaf, leaf) for leaf in chosen_leaves(checkpoint, selection, context)}
        groups.append(sorted(wanted & left))
        left -= wanted
    return [*groups, sorted(left)]


def _batches(checkpoint: Checkpoint, leaves: Sequence[int], most_bytes: int) -> Iterable[Sequence[StoredPiece]]:
    """Return batches of pieces in storage order, so that few bytes are read twice. Each batch is one read.

    Raises:
        CorruptCheckpointError: the metadata states an array that is too large to be real.
    """
    pieces: list[StoredPiece] = []
    alone: list[Sequence[StoredPiece]] = []
    for leaf in leaves:
        for piece in _pieces(checkpoint, leaf, most_bytes):
            if piece.chunk is None and piece.nbytes > most_bytes * _MAX_CUTS:
                raise CorruptCheckpointError(
                    f"{format_path(checkpoint.tree.paths[leaf])} of {checkpoint.location.display} is recorded as "
                    f"{_spec_of(checkpoint, leaf)}, more than {_MAX_CUTS} parts of {most_bytes} bytes: its metadata is "
                    "damaged. Load another checkpoint"
                )
            is_whole = piece.chunk is not None and not piece.chunk.is_plain
            if is_whole and most_bytes < piece.nbytes:
                alone.append((piece,))  # a part of it would take as much memory and time, because it is decoded whole
            else:
                pieces.append(piece)
    sizes = BatchSizes(aim=most_bytes, most=most_bytes, block=BLOCK_BYTES)
    alone.sort(key=_order)
    return heapq.merge(alone, batches_of(pieces, sizes), key=_order)  # lazy: cuts large pieces only as they are read


def _order(batch: Sequence[StoredPiece]) -> Order:
    return batch[0].order


def _pieces(checkpoint: Checkpoint, leaf: int, most_bytes: int) -> Iterable[StoredPiece]:
    """Return the pieces of an array: its stored chunks, or the boxes in which a derived array is computed."""
    spec = _spec_of(checkpoint, leaf)
    itemsize = spec.numpy_dtype.itemsize
    if not spec.size:
        return (StoredPiece(leaf, Box.whole(spec.shape), itemsize),)
    if checkpoint.derived is not None:
        return [StoredPiece(leaf, box, itemsize) for box in checkpoint.derived.pieces(leaf, most_bytes)]
    whole = Box.whole(spec.shape)
    chunks = list(itertools.islice(checkpoint.index.boxes(leaf, whole), MAX_PLANNED_CHUNKS + 1))
    if len(chunks) > MAX_PLANNED_CHUNKS:
        # Divide the array without its chunks: a few bytes of metadata may state millions of them.
        return (StoredPiece(leaf, whole, itemsize),)
    return pieces_of(leaf, whole, itemsize, ChunkLookup(chunks))


def _read_batches(
    state: OpenState,
    checkpoint: Checkpoint,
    batches: Iterable[Sequence[StoredPiece]],
    recording: Recording,
    finish: Callable[[], None],
) -> Generator[LoadedBox, None, None]:
    recording.begin()
    tied: dict[int, list[TreePath]] = {}
    for leaf, original in checkpoint.tree.aliases.items():
        tied.setdefault(original, []).append(checkpoint.tree.paths[leaf])

    def read(batch: Sequence[StoredPiece]) -> list[LoadedBox]:
        with recording.phase("read", sum([piece.box.size * piece.itemsize for piece in batch])):
            return state.guard(lambda _: _read(checkpoint, batch, tied))

    given = 0
    try:
        for parts in _read_ahead(batches, read):
            while parts:
                given += parts[0].elements.nbytes
                yield parts.pop(0)
        state.attempt(lambda _: check_additional(checkpoint))
        state.check_not_replaced()
    except GeneratorExit:  # the caller closed the iterator
        recording.finish(given)
        raise
    except BaseException as error:
        recording.finish(given, error)
        raise
    finally:
        finish()
    recording.finish(given)


def _read_ahead(
    batches: Iterable[Sequence[StoredPiece]], read: Callable[[Sequence[StoredPiece]], list[LoadedBox]]
) -> Iterator[list[LoadedBox]]:
    """Read each batch in the background while the caller uses the previous batch."""
    reader = BackgroundThreads(1, "ckptcore-read-ahead")
    before: Future[list[LoadedBox]] | None = None
    try:
        for batch in batches:
            ahead = reader.submit(partial(read, batch))
            if before is not None:
                yield before.result()
            before = ahead
        if before is not None:
            yield before.result()
    finally:
        reader.join()


def _read(
    checkpoint: Checkpoint, batch: Sequence[StoredPiece], tied: Mapping[int, Sequence[TreePath]]
) -> list[LoadedBox]:
    parts: list[LoadedBox] = []
    for piece in batch:
        spec = _spec_of(checkpoint, piece.leaf)
        elements = allocate_for(checkpoint, piece.leaf, ArraySpec(piece.box.shape, spec.dtype))
        path, others = checkpoint.tree.paths[piece.leaf], tuple(tied.get(piece.leaf, ()))
        parts.append(LoadedBox(path, others, spec, piece.box, elements))
    plan = plan_read(checkpoint.tree, [(piece.leaf, (piece.box,)) for piece in batch])
    left = set(range(len(batch))).difference(checkpoint.read(plan, [part.elements for part in parts]))
    if left:
        raise incomplete_read(checkpoint, batch[min(left)].leaf)
    return parts


def _spec_of(checkpoint: Checkpoint, leaf: int) -> ArraySpec:
    record = checkpoint.tree.leaves[leaf]
    assert isinstance(record, ArrayRecord)  # only arrays are loaded
    return record.spec
