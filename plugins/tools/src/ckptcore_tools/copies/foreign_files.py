"""Files of other software that a copy needs, or that it leaves out. Reads no array."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Final

from ckptcore.commit.location import AnyLocation
from ckptcore.context import Context
from ckptcore.errors import (
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from ckptcore.inspection.left_out import MOST_NAMED, OTHER_FORMATS, files_read_by, left_out_of
from ckptcore.model import ArrayRecord, Box
from ckptcore.model.metadata import unreadable_error
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, missing_file
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either

_BATCH_CHUNKS: Final = 1024

_OF_OTHERS: Final = (".gguf", ".onnx", ".tflite")
"""Suffixes of models that were exported from the weights, for other software."""


def expect_files(checkpoint: Checkpoint, directory: str) -> None:
    """Refuse a tree of other software with missing parts: a file, a chunk, or boxes of an array.

    Args:
        checkpoint: the tree.
        directory: its directory within the checkpoint; empty for all of it.

    Raises:
        CorruptCheckpointError: names the missing part.
    """
    try:
        _expect_values(checkpoint)
        _expect_arrays(checkpoint)
    except CorruptCheckpointError as error:
        within = f"{directory}: " if directory else ""
        raise CorruptCheckpointError(f"{within}{error}. Nothing was written", key=error.key) from None


def _expect_values(checkpoint: Checkpoint) -> None:
    """Refuse a leaf that cannot be read because its file is missing. Other damage is copied as it is."""
    for record in checkpoint.tree.leaves:
        error = unreadable_error(record)
        if isinstance(error, CorruptCheckpointError) and error.key is not None:
            try:
                checkpoint.location.store.size(error.key)
            except (ObjectNotFoundError, InvalidLocationError):
                raise error from None


def _expect_arrays(checkpoint: Checkpoint) -> None:
    """Refuse an array that lacks boxes or the file of a chunk. `FileCheck` has checked files with known extents."""
    index, tree = checkpoint.index, checkpoint.tree
    arrays = {leaf: record.spec for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    sizes = dict(_listed(checkpoint))
    for leaf, spec in arrays.items():
        with suppress(UnsupportedLeafError):  # this process cannot read the array
            index.check([leaf])
            if leaf not in tree.aliases and not any(True for _ in index.extents(leaf)):
                _expect_chunks(checkpoint, leaf, Box.whole(index.stored_specs.get(leaf, spec).shape), sizes)


def _listed(checkpoint: Checkpoint) -> Mapping[str, int]:
    """Return the sizes of all objects, or nothing if the listings of the storage have no sizes."""
    return {} if checkpoint.version.is_object else checkpoint.location.store.list_sizes() or {}


def _expect_chunks(checkpoint: Checkpoint, leaf: int, box: Box, sizes: dict[str, int]) -> None:
    """Look up the chunks of an array in batches. Adds the sizes of objects that were not listed."""
    if not box.size:
        return
    chunks = iter(checkpoint.index.boxes(leaf, box))
    while batch := list(itertools.islice(chunks, _BATCH_CHUNKS)):
        try:
            extents = [(chunk.key, chunk.offset, chunk.offset) for chunk in batch if chunk.is_exact]
            if others := [chunk for chunk in batch if not chunk.is_exact]:
                located = checkpoint.index.locate(others, checkpoint.store)
                for row, (key, start) in enumerate(zip(located.keys, located.starts, strict=True)):
                    if key and row not in located.inline and row not in located.fills:
                        extents.append((key, start, located.stops.get(row) or start))
            for key, start, stop in extents:
                if key not in sizes or stop > sizes[key]:  # a listing may be outdated
                    sizes[key] = checkpoint.store.size(key)
                if not start <= stop <= sizes[key]:
                    raise CorruptCheckpointError(
                        f"{key} has {sizes[key]} bytes, and a chunk ends at byte {stop}: it was cut off. Restore it "
                        "from a copy, or copy another checkpoint",
                        key=key,
                    )
        except ObjectNotFoundError as error:
            raise missing_file(checkpoint, error) from error


def _other_weights_of(
    checkpoint: Checkpoint | CompositeCheckpoint, source: AnyLocation, context: Context, left_out: Collection[str]
) -> tuple[str, ...]:
    """Return files of other software whose names say that they have the same weights in another format.

    Copies leave these files out without an error. Each can be loaded by its own location. `left_out` is the result of
    `left_out_of` for the checkpoint.
    """
    if checkpoint.root is not None or checkpoint.version.is_object:
        return ()
    read, _ = files_read_by(checkpoint, source, context)
    names = [name for name in checkpoint.location.store.list_names() if name not in read and name not in left_out]
    return tuple([name for name in names if OTHER_FORMATS.fullmatch(name) or name.endswith(_OF_OTHERS)])


def in_directory_of(source: AnyLocation, context: Context) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Open a checkpoint. Return the results of `left_out_of` and `_other_weights_of`."""

    def find(checkpoint: Checkpoint | CompositeCheckpoint) -> tuple[tuple[str, ...], tuple[str, ...]]:
        left_out = left_out_of(checkpoint, source, context)
        return left_out, _other_weights_of(checkpoint, source, context, left_out)

    return ConsistentRead(source, context, open_either).retry_if_replaced(find)


def check_left_out(
    checkpoint: Checkpoint | CompositeCheckpoint,
    source: AnyLocation,
    leave_out: Collection[str],
    context: Context,
    *,
    tensors: bool = True,
) -> None:
    """Check that a copy in another form loses no state.

    Args:
        checkpoint: the checkpoint.
        source: its location.
        leave_out: names or patterns of files that may be left out.
        context: opens checkpointables.
        tensors: False to allow the loss of tensors that an index omits.

    Raises:
        TreeMismatchError: names the files and tensors that the copy would lose.
    """
    lost = [
        name
        for name in left_out_of(checkpoint, source, context)
        if (tensors or ": " not in name) and not matches_any(name.partition(": ")[0], leave_out)
    ]
    if lost:
        more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
        raise TreeMismatchError(
            f"{checkpoint.location.display}: {'; '.join(lost[:MOST_NAMED])}{more}: no part of the checkpoint in this "
            "directory, so the copy would lose it. Copy the directory as it is, without layout and subtree; or, if it "
            "is not needed, pass leave_out=[...] with the names of the files, or leave_out=['*']. Nothing was written",
            [f"left out: {name}" for name in lost],
        )


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a name equals or matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
