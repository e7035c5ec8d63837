"""Flat vectors that are stored in several files, and arrays that are ranges of these vectors. See `deepspeed`."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import ArraySpec
from ckptcore.planning import boxes_of_range
from ckptcore_formats.assembly import RESTORE, Divided, Entry, Part, Piece, Refused, Run, run_of


def guarded(make: Callable[[], Entry]) -> Entry:
    """Return an array, or a leaf with the error if it cannot be read, so that other leaves can still be loaded."""
    try:
        return make()
    except (CorruptCheckpointError, UnsupportedLeafError) as error:
        return Refused(error)


def stored_run(part: Part | None, path: str) -> Run:
    """Return the elements of a tensor in the file of a rank.

    Args:
        part: the tensor; None if the file lacks it.
        path: the array, for errors.

    Raises:
        CorruptCheckpointError, UnsupportedLeafError: there is no tensor, or see `run_of`.
    """
    tensor = None if part is None else part.tensor
    if part is None or tensor is None:
        raise CorruptCheckpointError(f"{path} has no tensor in the file of a rank: {RESTORE}")
    return run_of(tensor, part.storages, path=path)


class Vector:
    """A flat vector that consists of several runs, in order.

    Attributes:
        runs: the runs.
        dtype, kind: dtype and leaf kind of all runs.
        starts: the position of each run, followed by the length of the vector, in elements.
    """

    def __init__(self, runs: Sequence[Run], path: str) -> None:
        """Join runs.

        Raises:
            CorruptCheckpointError: they have different dtypes.
        """
        self.runs = runs
        kinds = {(run.spec.dtype, run.kind) for run in runs}
        if len(kinds) != 1:
            raise CorruptCheckpointError(f"{path} has partitions of {len(kinds)} dtypes: {RESTORE}")
        ((self.dtype, self.kind),) = kinds
        self.starts = [0, *itertools.accumulate([run.size for run in runs])]

    def pieces(self, position: int, shape: tuple[int, ...], first: int, last: int) -> Iterator[Piece]:
        """Yield the pieces with elements `first` to `last` of an array. Element `first` is at `position`."""
        number = bisect.bisect_right(self.starts, position) - 1
        while first < last:
            run, skip = self.runs[number], position - self.starts[number]
            count = min(last - first, run.size - skip)
            for box in boxes_of_range(shape, first, first + count):
                yield run.piece(box, skip)
                skip += box.size
            first, position, number = first + count, position + count, number + 1

    def array(self, shape: tuple[int, ...], pieces: Sequence[Piece]) -> Divided:
        """Return an array of the dtype of the vector."""
        return Divided(ArraySpec(shape, self.dtype), self.kind, pieces)


def in_slices(runs: Sequence[Run], shape: tuple[int, ...], path: str) -> Divided:
    """Return an array that is divided into slices: each process has one slice, in a separate tensor."""
    return in_vectors([Vector([run], path) for run in runs], 0, shape, path)


def in_vectors(vectors: Sequence[Vector], position: int, shape: tuple[int, ...], path: str) -> Divided:
    """Return an array that is divided into slices: each process has one slice, at `position` of its vector."""
    size = math.prod(shape)
    extent = -(-size // len(vectors))
    pieces: list[Piece] = []
    for rank, vector in enumerate(vectors):
        first, last = min(rank * extent, size), min((rank + 1) * extent, size)
        if position + last - first > vector.starts[-1]:
            raise CorruptCheckpointError(
                f"{path} {list(shape)} needs the elements {position} to {position + last - first} of the partition of "
                f"rank {rank}, which has {vector.starts[-1]}: {RESTORE}"
            )
        pieces.extend(vector.pieces(position, shape, first, last))
    return vectors[0].array(shape, pieces)
