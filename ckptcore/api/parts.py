"""Reading parts of arrays as they are asked for, and arrays part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context, default_context
from ckptcore.loading.load_reports import LoadReport
from ckptcore.loading.load_requests import LoadRequest
from ckptcore.loading.loaded_parts import LoadedPart, load_in_parts
from ckptcore.loading.open_checkpoints import OpenCheckpoint, StoredPath, load_box
from ckptcore.model.arrays import Box, HostArray
from ckptcore.protocols import Transforms
from ckptcore.select import Selection

__all__ = ["load_parts", "load_slice", "open"]


def open(location: LocationLike, *, context: Context | None = None) -> OpenCheckpoint:
    """Open a checkpoint to look at it, and to read parts of its arrays as they are indexed. Reads no array.

    What is given is a mapping of the tree: ``opened["params/w"][0:16]`` reads just those rows. It is to be closed, best by ``with``.

    Args:
        location: as for `load`.
        context: options; checksums are compared as loads do.

    Raises:
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
        CompositeCheckpointError: if it holds several checkpointables: open one by its own location.
    """
    return OpenCheckpoint(location, context or default_context())


def load_slice(location: LocationLike, path: StoredPath, box: Box, *, context: Context | None = None) -> HostArray:
    """Load a box of one array; reads nothing of the others.

    Args:
        location: as for `load`.
        path: of the array, as for ``open(location)[path]``.
        box: which elements.
        context: options.

    Raises:
        UnknownPathError: if nothing is at the path.
        TreeMismatchError: if it is no array, or the box does not lie in it.
        CheckpointNotFoundError, UncommittedCheckpointError, CorruptCheckpointError
    """
    return load_box(location, path, box, context or default_context())


def load_parts(
    location: LocationLike,
    *,
    context: Context | None = None,
    select: Selection | None = None,
    transforms: Transforms = (),
    first: Selection | Sequence[Selection] = (),
    report: LoadReport | None = None,
) -> Iterator[LoadedPart]:
    """Load the arrays of a checkpoint in boxes, one after the other, on a machine that need not have memory for all of them.

    Reads ahead of who takes the parts: together with those that were not taken yet, about ``MemoryOptions.load_bytes`` are in memory, or
    128 MiB. What can only be read whole (a compressed chunk, what other software stored with one checksum) may exceed that, alone. Boxes
    come in the order in which they are stored, and no byte is read twice for them. Small values are in ``metadata(location).abstract``.

    Args:
        location: as for `load`.
        context: options.
        select: as for `load`.
        transforms: as for `load`; boxes are those of what they make.
        first: what comes before all else; of several selections one after the other.
        report: is told what was read when the last part was taken, or the iterator is closed; values count as skipped.

    Raises:
        What `load` does, as long as nothing is read; while parts are taken, and then the ones before are what was stored:
        CorruptCheckpointError: if bytes are not what was written.
        CheckpointNotFoundError: if the checkpoint was replaced or deleted meanwhile. Of a checkpoint without checksums also parts
            that were given before may then be of another save.
    """
    request = LoadRequest(select=select, transforms=transforms, report=report)
    return load_in_parts(location, context or default_context(), request, first)
