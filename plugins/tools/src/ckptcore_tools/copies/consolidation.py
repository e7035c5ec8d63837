"""Consolidating a sharded checkpoint into one directory of safetensors, by one process or by the many of a job.

Each file is written by one process, which reads what is in that file and no more. Which process that is, all of them
know from the tree alone.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import xxhash

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.commit.location import LocationLike, Within, resolve_location
from ckptcore.commit.root import Composite, Root, new_save_id
from ckptcore.commit.target import Overwrite, refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    NameCollisionError,
    StorageError,
)
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint, naming_arrays
from ckptcore.loading.foreign import foreign_checkpoints
from ckptcore.loading.opening import ConsistentRead, open_either, tree_read
from ckptcore.loading.reading import check_sizes
from ckptcore.loading.verify import ProgressCallback
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import ArraySegment, WriteItem, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.protocols import SaveCommit, WriteStore
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import SavePart
from ckptcore.saving.preparing import save_created
from ckptcore.saving.requests import NOTHING_COMMITTED, CommitInfo, Save, Target
from ckptcore.saving.writing import PlainCommit, PlainSave, write_save
from ckptcore_tools.copies.destinations import refuse_destination, refuse_further
from ckptcore_tools.copies.reported_save import ReportedSave
from ckptcore_tools.copies.streaming import StreamedSnapshot, StreamSizes, items_by_object, reading_context
from ckptcore_tools.subtrees import Subtree, SubtreePath, find_subtree, path_keys

__all__ = ["FilePath", "TiedNames", "consolidate_checkpoint"]

FilePath: TypeAlias = str | os.PathLike[str]
"""Where a local file is."""

TiedNames: TypeAlias = Literal["each", "once"]
"""Names under which a tied array is stored: each of them, or only the first."""

_FILE_PIECE_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Source:
    """What is consolidated, as it was opened.

    Attributes:
        opened: the checkpoint.
        subtree: the part of it that is written.
    """

    opened: Checkpoint
    subtree: Subtree


@dataclass(frozen=True, slots=True)
class _SaveWithAliases(PlainSave):
    """Save a tree whose tied arrays are stored under each of their names; its root lists them as aliases.

    Attributes:
        aliases: by leaf, the leaf that it is tied to.
    """

    aliases: Mapping[int, int]

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the save."""
        return _CommitWithAliases(save, self.aliases)


class _CommitWithAliases(PlainCommit):
    def __init__(self, save: Save, aliases: Mapping[int, int]) -> None:
        super().__init__(save)
        self._aliases = aliases

    def _completed(self, root: Root | Composite) -> Root | Composite:
        assert isinstance(root, Root)  # what is consolidated is one tree
        return replace(root, tree=replace(root.tree, aliases={**root.tree.aliases, **self._aliases}))


def consolidate_checkpoint(
    source: LocationLike,
    destination: LocationLike,
    subtree: SubtreePath,
    layout: SafetensorsLayout,
    tied: TiedNames,
    files: Sequence[FilePath],
    overwrite: Overwrite,
    progress: ProgressCallback | None,
    context: Context,
) -> None:
    """See `ckptcore.copy` with a subtree."""
    key = runtime_of(context).exchange_key(destination)  # before anything can fail: every rank counts every exchange
    job = runtime_of(context).job()
    recording = Recording("save", str(destination), context.observers, rank=job.rank)
    try:
        nbytes = _consolidate(
            source,
            destination,
            subtree,
            layout,
            tied,
            files,
            overwrite,
            progress,
            context,
            Agreement(job, key, recording),
            recording,
        )  # fmt: skip
    except BaseException as error:
        recording.finish(error=error)
        raise
    recording.finish(nbytes)


def _consolidate(
    source: LocationLike,
    destination: LocationLike,
    path: SubtreePath,
    layout: SafetensorsLayout,
    tied: TiedNames,
    files: Sequence[FilePath],
    overwrite: Overwrite,
    progress: ProgressCallback | None,
    context: Context,
    agreement: Agreement,
    recording: Recording,
) -> int:
    """Describe, agree, read and write; bytes of the arrays that this process wrote."""
    sizes = StreamSizes.of(context)
    with recording.phase("describe"), agreement.stage("describe", meaning=NOTHING_COMMITTED) as stage:
        durable = context.durability == "full"
        location = resolve_location(destination, runtime_of(context).registry, durable=durable, config=context.storage)
        read_from = resolve_location(source, runtime_of(context).registry, durable=False, config=context.storage)
        refuse_destination(read_from, location)
        found = _open(source, path, context)
        refuse_further(found.opened, location)
        tree = found.subtree.tree
        shared = tree.aliases if tied == "each" else {}
        if shared:
            tree = replace(tree, aliases={})
        layout.check(tree, agreement.size)
        with _expect_same(found.opened):
            check_sizes(found.opened, set(found.subtree.sources))
            objects = items_by_object(layout, tree, found.opened, found.subtree.sources, sizes)
        beside: Mapping[str, FilePath] = {}
        if agreement.rank == 0:
            refuse_to_replace(location, overwrite, foreign_checkpoints(context))
            beside = _files_by_name(files)
        if agreement.size > 1:
            stage.payload = _digest(found, objects, layout.file_names(tree), layout.metadata)
    payloads = stage.payloads
    decided = agreement.lead("save", lambda: _same_source(payloads, str(source)))
    recording.save_id = decided["save_id"]
    items = [item for number in _shares(objects, agreement.size)[agreement.rank] for item in objects[number]]
    plan = WritePlan(tree, tuple(items), agreement.rank, agreement.size, decided["save_id"])
    nbytes = sum(item.nbytes for item in items)
    handle = ReportedSave(location.display, nbytes, progress) if progress is not None else None
    snapshot = StreamedSnapshot(plan, found.opened, found.subtree.sources, sizes)
    part = SavePart("", layout, plan, captured=_Consolidated(found, snapshot, beside))
    save = Save(
        target=Target(location, overwrite),
        info=CommitInfo(
            save_id=decided["save_id"],
            created=decided["created"],
            custom=found.opened.origin.custom,
            metrics=found.opened.origin.metrics,
            progress=found.opened.root.progress if found.opened.root is not None else {},
        ),
        parts=[part],
        strategy=_SaveWithAliases(shared),
        agreement=agreement,
        recording=recording,
        context=context,
    )
    try:
        write_save(save, handle)
    finally:
        part.close()
    return nbytes


def _open(source: LocationLike, path: SubtreePath, context: Context) -> _Source:
    """Open what is to be read; of several checkpointables the one that the path begins with."""
    reading = reading_context(context)
    keys = path_keys(path)

    def open_below(found: Checkpoint, below: SubtreePath) -> _Source:
        return _Source(found, find_subtree(found.tree, below))

    def open_found(found: Checkpoint | CompositeCheckpoint) -> _Source:
        if isinstance(found, Checkpoint):
            return open_below(found, keys)
        member = Within(source, str(keys[0]))
        return tree_read(member, reading).retry_if_replaced(functools.partial(open_below, below=keys[1:]))

    if keys and isinstance(keys[0], str):
        return ConsistentRead(source, reading, open_either).retry_if_replaced(open_found)
    return tree_read(source, reading).retry_if_replaced(functools.partial(open_below, below=keys))


def _files_by_name(files: Sequence[FilePath]) -> Mapping[str, FilePath]:
    """Files that go along, by the names that they get.

    Raises:
        InvalidLocationError: if one is no file.
        NameCollisionError: if two have one name, or one has the name of what is written anyway.
    """
    found: dict[str, FilePath] = {}
    for path in files:
        name = os.path.basename(os.fspath(path))
        if not os.path.isfile(path):
            raise InvalidLocationError(f"{os.fspath(path)!r} is to go along, and is no file; check the path")
        if (
            name in found
            or name.startswith("checkpoint.")
            or name.endswith((".safetensors", ".safetensors.index.json"))
        ):
            raise NameCollisionError(
                f"{os.fspath(path)!r} cannot go along as {name!r}: that is the name of another one, of weights, or "
                "of a file of ckptcore's own. Give it another name. Nothing was written"
            )
        found[name] = path
    return found


def _digest(
    source: _Source, objects: Sequence[Sequence[WriteItem]], files: Sequence[str], metadata: Mapping[str, str]
) -> JSON:
    """Return a digest, equal on two ranks if they read the same save and plan the same pieces, files and metadata."""
    opened = source.opened
    saved: JSON = opened.root.save_id if opened.root is not None else [opened.tree.to_json(), opened.state]
    items = [[[item.leaf, [[box.start, box.stop] for box in item.boxes]] for item in of_one] for of_one in objects]
    document = json.dumps([saved, list(source.subtree.sources), items, list(files), dict(metadata)], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(document.encode())


def _same_source(digests: Sequence[JSON], source: str) -> dict[str, str]:
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise CheckpointError(
            f"the ranks {different} found another checkpoint at {source} than rank 0, or were asked for other files: "
            "call copy with the same arguments on each, when nobody saves there. Nothing was written"
        )
    return {"save_id": new_save_id(), "created": save_created()}


def _shares(objects: Sequence[Sequence[WriteItem]], size: int) -> list[list[int]]:
    """Which objects each process writes: the largest first, always to the one that has the fewest bytes.

    Args:
        objects: what is in each.
        size: how many processes there are.

    Returns:
        By rank, the numbers of its objects, ascending. The same on every process.
    """
    amounts = [sum(item.nbytes for item in items) for items in objects]
    taken = [0] * size
    found: list[list[int]] = [[] for _ in range(size)]
    for number in sorted(range(len(objects)), key=lambda number: -amounts[number]):
        rank = taken.index(min(taken))
        taken[rank] += amounts[number]
        found[rank].append(number)
    return [sorted(numbers) for numbers in found]


class _Consolidated:
    """The files of one process, read from the source as they are written."""

    def __init__(self, source: _Source, snapshot: StreamedSnapshot, files: Mapping[str, FilePath]) -> None:
        self._source = source
        self._snapshot = snapshot
        self._files = files

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """See `Captured`.

        Raises:
            CorruptCheckpointError: also if the source was replaced meanwhile.
        """
        opened = self._source.opened
        with _expect_same(opened):
            state = part.layout.write(self._snapshot, store)
        for name, path in self._files.items():
            store.write(name, _file_segments(path))
        if not opened.mark.is_part_of(opened.location):
            raise _replaced(opened)
        return state

    def close(self) -> None:
        """Let go of what was read; again is no error."""
        self._snapshot.close()


@contextmanager
def _expect_same(opened: Checkpoint) -> Iterator[None]:
    """Add the names of arrays to errors about bytes. If the source was replaced, raise an error that says so."""
    try:
        with naming_arrays(opened):
            yield
    except CheckpointError as error:
        if opened.mark.is_at(opened.location):
            raise
        raise _replaced(opened) from error


def _replaced(opened: Checkpoint) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{opened.location.display} was replaced while it was consolidated; begin again when nobody saves there"
    )


def _file_segments(path: FilePath) -> list[ArraySegment]:
    """The bytes of a file that goes along, read when they are wanted."""
    size = os.path.getsize(path)

    def segment(start: int) -> ArraySegment:
        box = Box((0,), (min(_FILE_PIECE_BYTES, size - start),))

        def read() -> Sequence[tuple[Box, HostArray]]:
            with open(path, "rb") as file:
                file.seek(start)
                data: Any = np.frombuffer(file.read(box.size), np.uint8)
            if data.size != box.size:
                raise StorageError(
                    f"{os.fspath(path)!r} ends at byte {start + data.size}, where it had {size} bytes when it was "
                    "looked at; let nobody write it meanwhile"
                )
            return ((box, data),)

        return ArraySegment(box, 1, read, lambda: None)

    return [segment(start) for start in range(0, size, _FILE_PIECE_BYTES)]
