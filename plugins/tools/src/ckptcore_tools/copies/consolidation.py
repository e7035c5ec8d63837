"""Consolidation of a sharded checkpoint into one directory of safetensors files, by one process or a whole job.

Each file is written by one process, which reads only the arrays of that file. The assignment of files to processes is
computed from the tree on every process, without communication.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import xxhash

from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.commit.location import LocationLike, SubPath, resolve_location, shown_location
from ckptcore.commit.root import CompositeRoot, Root, SaveOrder, new_save_id
from ckptcore.commit.stored_root import Overwrite, next_order, refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    InvalidLocationError,
    NameCollisionError,
    StorageError,
    converts_errors,
)
from ckptcore.events import Recording
from ckptcore.io.snapshot import CountedSnapshot
from ckptcore.job.agreement import Agreement
from ckptcore.loading.reading import check_sizes
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.transfer import ArraySegment, WriteItem, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, naming_arrays
from ckptcore.opening.members import present_members
from ckptcore.opening.open_checkpoints import ATTEMPTS, ConsistentRead, open_either, replaced_too_often, tree_attempts
from ckptcore.plain_safetensors import open_regular_file
from ckptcore.progress import ByteProgress, ProgressCallback
from ckptcore.protocols import SaveCommit, Snapshot, WriteStore
from ckptcore.runtime import runtime_of
from ckptcore.saving.requests import (
    NOTHING_COMMITTED,
    CommitInfo,
    CommitTarget,
    Save,
    SavePart,
    foreign_finder,
    save_created,
)
from ckptcore.saving.writing import PlainCommit, PlainSave, write_save
from ckptcore_tools.copies.foreign_files import check_left_out
from ckptcore_tools.copies.manifests import refuse_destination, refuse_further, refuse_lost
from ckptcore_tools.copies.streaming import StreamedSnapshot, StreamSizes, items_by_object, reading_context
from ckptcore_tools.subtrees import Subtree, SubtreePath, find_subtree, path_keys, unknown_checkpointable

FilePath: TypeAlias = str | os.PathLike[str]
"""Path of a local file."""

TiedNames: TypeAlias = Literal["each", "once"]
"""Names under which a tied array is stored: each of them, or only the first."""

_FILE_SLICE_BYTES: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class _Source:
    """The open checkpoint that is consolidated.

    Attributes:
        opened: the checkpoint.
        subtree: the part to write.
    """

    opened: Checkpoint
    subtree: Subtree


@dataclass(frozen=True, slots=True)
class _SaveWithAliases(PlainSave):
    """A save of a tree whose tied arrays are stored under each of their names. Its root lists them as aliases.

    Attributes:
        aliases: the leaf that each tied leaf is tied to.
    """

    aliases: Mapping[int, int]

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the save."""
        return _CommitWithAliases(save, self.aliases)


class _CommitWithAliases(PlainCommit):
    def __init__(self, save: Save, aliases: Mapping[int, int]) -> None:
        super().__init__(save)
        self._aliases = aliases

    def _completed(self, root: Root | CompositeRoot) -> Root | CompositeRoot:
        assert isinstance(root, Root)  # a consolidated checkpoint is one tree
        return replace(root, tree=replace(root.tree, aliases={**root.tree.aliases, **self._aliases}))


@dataclass(frozen=True, slots=True)
class Consolidation:
    """A consolidation, by one process or a whole job. See `ckptcore.copy` with a subtree, and its arguments."""

    source: LocationLike
    destination: LocationLike
    subtree: SubtreePath
    layout: SafetensorsLayout
    tied: TiedNames
    files: Sequence[FilePath]
    leave_out: Collection[str]
    overwrite: Overwrite
    context: Context

    def run(self, progress: ProgressCallback | None) -> None:
        """Consolidate the checkpoint. Called by every process of the job."""
        runtime = runtime_of(self.context)
        # Get the key before anything can fail: it contains a counter, which must be equal on every rank.
        key = runtime.exchange_key(self.destination)
        job = runtime.job()
        counted = ByteProgress(progress)
        display = shown_location(self.destination)
        recording = Recording("save", display, self.context.observers, rank=job.rank, progress=counted)
        agreement = Agreement(job, key, recording)
        try:
            for _ in range(ATTEMPTS):
                try:
                    nbytes = self._attempt(agreement, recording)
                    break
                except _SourceReplacedError:
                    if agreement.size > 1:
                        raise  # the other ranks have received it, and raise too
            else:
                raise replaced_too_often(self.source)
        except BaseException as error:
            recording.finish(error=error)
            raise
        recording.finish(nbytes)
        counted.end()

    def _attempt(self, agreement: Agreement, recording: Recording) -> int:
        """Describe, agree, read and write. Return the bytes of arrays that this process wrote."""
        context = self.context
        layout = replace(self.layout, standalone=True)  # the files are for other software
        sizes = StreamSizes.of(context)
        with recording.phase("describe"), agreement.stage("describe", meaning=NOTHING_COMMITTED) as stage:
            location = resolve_location(self.destination, runtime_of(context).storages, to_write=True)
            read_from = resolve_location(self.source, runtime_of(context).storages)
            refuse_destination(read_from, location)
            opening = _open(self.source, self.subtree, self.leave_out, context)
            refuse_further(opening.opened, location)
            tree = opening.subtree.tree
            aliases = tree.aliases if self.tied == "each" else {}
            tree = replace(tree, aliases={}) if aliases else tree
            layout.check(tree, agreement.size)
            with _detecting_replacement(opening.opened):
                check_sizes(opening.opened, set(opening.subtree.sources))
                objects = items_by_object(layout, tree, opening.opened, opening.subtree.sources, sizes)
            added_files: Mapping[str, FilePath] = {}
            if agreement.rank == 0:
                refuse_to_replace(location, self.overwrite, foreign_finder(context))
                added_files = _files_by_name(self.files)
                if not path_keys(self.subtree):  # a named subtree may omit other state
                    check_left_out(opening.opened, self.source, [*self.leave_out, *added_files], context)
            if agreement.size > 1:
                stage.payload = _digest(opening, objects, layout.file_names(tree), layout.metadata)
        target = CommitTarget(location, self.overwrite)
        root = opening.opened.root
        order = SaveOrder() if root is None else root.order
        decision = agreement.lead("save", lambda: _decide(stage.payloads, str(self.source), target, order))
        layout = layout.with_own_names(decision["tag"]) if decision["tag"] else layout
        recording.save_id = decision["save_id"]
        items = [
            item for number in _assign_objects(objects, agreement.size)[agreement.rank] for item in objects[number]
        ]
        plan = WritePlan(tree, tuple(items), agreement.rank, agreement.size, decision["save_id"])
        nbytes = sum(item.nbytes for item in items)
        snapshot = StreamedSnapshot(plan, opening.opened, opening.subtree.sources, sizes)
        part = SavePart("", layout, plan, captured=_ConsolidatedFiles(opening, snapshot, added_files, recording))
        save = Save(
            target=target,
            info=CommitInfo(
                save_id=decision["save_id"],
                created=decision["created"],
                custom=opening.opened.origin.custom,
                metrics=opening.opened.origin.metrics,
                progress=root.progress if root is not None else {},
                order=SaveOrder(*decision["order"]),
            ),
            parts=[part],
            strategy=_SaveWithAliases(aliases),
            agreement=agreement,
            recording=recording,
            context=context,
        )
        try:
            write_save(save)
        finally:
            part.close()
        return nbytes


def _open(source: LocationLike, path: SubtreePath, leave_out: Collection[str], context: Context) -> _Source:
    """Open the checkpoint, or the checkpointable that the path begins with, and find the subtree."""
    reading = reading_context(context)
    keys = path_keys(path)

    def open_below(checkpoint: Checkpoint, below: SubtreePath) -> _Source:
        return _Source(checkpoint, find_subtree(checkpoint.tree, below))

    def open_found(checkpoint: Checkpoint | CompositeCheckpoint) -> _Source:
        if isinstance(checkpoint, Checkpoint):
            return open_below(checkpoint, keys)
        members = present_members(checkpoint)
        if (absent := checkpoint.members.keys() - members.keys()) and (not keys or keys[0] in absent):
            refuse_lost(checkpoint, sorted(absent), leave_out)
        if not keys and len(members) == 1:
            return tree_attempts(source, reading).retry_if_replaced(functools.partial(open_below, below=keys))
        if not keys:
            first, display = next(iter(members), "NAME"), checkpoint.location.display
            raise CompositeCheckpointError(
                f"{display} has several checkpointables ({', '.join(members)}), and the files have one tree: name one "
                f"of them, such as subtree={checkpoint.default or first!r}, or give one by its own location, such as "
                f"{display.rstrip('/')}/{first}",
                list(members),
            )
        if keys[0] not in (*members, *itertools.chain.from_iterable(members.values())):
            raise unknown_checkpointable(path, list(members))
        member = SubPath(source, str(keys[0]))
        return tree_attempts(member, reading).retry_if_replaced(functools.partial(open_below, below=keys[1:]))

    if not keys or isinstance(keys[0], str):
        return ConsistentRead(source, reading, open_either).retry_if_replaced(open_found)
    return tree_attempts(source, reading).retry_if_replaced(functools.partial(open_below, below=keys))


def _files_by_name(files: Sequence[FilePath]) -> Mapping[str, FilePath]:
    """Return the files to add, by name.

    Raises:
        InvalidLocationError: if a path is not a file.
        NameCollisionError: if two files have one name, or the name is used for weights or is reserved.
    """
    by_name: dict[str, FilePath] = {}
    for path in files:
        name = os.path.basename(os.fspath(path))
        if not os.path.isfile(path):
            raise InvalidLocationError(f"{os.fspath(path)!r} is not a file; check the path. Nothing was written")
        if (
            name in by_name
            or name.startswith("checkpoint.")
            or name.endswith((".safetensors", ".safetensors.index.json"))
        ):
            raise NameCollisionError(
                f"{os.fspath(path)!r} cannot be added as {name!r}: another file, the weights or ckptcore's own files "
                "use this name. Rename the file. Nothing was written"
            )
        by_name[name] = path
    return by_name


def _digest(
    source: _Source, objects: Sequence[Sequence[WriteItem]], files: Sequence[str], metadata: Mapping[str, str]
) -> JSON:
    """Return a digest that is equal on all ranks if they read the same save and plan the same items and files."""
    checkpoint = source.opened
    saved: JSON = (
        checkpoint.root.save_id if checkpoint.root is not None else [checkpoint.tree.to_json(), checkpoint.state]
    )
    items = [[[item.leaf, [[box.start, box.stop] for box in item.boxes]] for item in of_one] for of_one in objects]
    document = json.dumps([saved, list(source.subtree.sources), items, list(files), dict(metadata)], sort_keys=True)
    return xxhash.xxh3_128_hexdigest(document.encode())


def _decide(digests: Sequence[JSON], source: str, target: CommitTarget, order: SaveOrder) -> dict[str, Any]:
    """Compare the digests of all ranks, and choose the save id, the time, the order and the tag of names."""
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise CheckpointError(
            f"{source}: the ranks {different} read another checkpoint than rank 0, or were called with other "
            "arguments. Call copy with the same arguments on every rank, while no job saves there. Nothing was written"
        )
    save_id = new_save_id()
    order = max(order, next_order(target.location, target.overwrite))
    return {
        "save_id": save_id,
        "created": save_created(),
        "order": list(order),
        "tag": save_id if target.keeps_others else "",
    }


def _assign_objects(objects: Sequence[Sequence[WriteItem]], size: int) -> list[list[int]]:
    """Assign objects to processes: the largest object first, each to the process with the fewest bytes.

    Args:
        objects: the items of each object.
        size: the number of processes.

    Returns:
        The numbers of the objects of each rank, ascending. Every process computes the same result.
    """
    nbytes = [sum(item.nbytes for item in items) for items in objects]
    assigned_bytes = [0] * size
    assigned: list[list[int]] = [[] for _ in range(size)]
    for number in sorted(range(len(objects)), key=lambda number: -nbytes[number]):
        rank = assigned_bytes.index(min(assigned_bytes))
        assigned_bytes[rank] += nbytes[number]
        assigned[rank].append(number)
    return [sorted(numbers) for numbers in assigned]


class _ConsolidatedFiles:
    """The files that one process writes. Arrays are read from the source while they are written."""

    def __init__(
        self, source: _Source, snapshot: StreamedSnapshot, files: Mapping[str, FilePath], recording: Recording
    ) -> None:
        self._source = source
        self._snapshot = snapshot
        self._files = files
        self._progress = recording.progress

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """See `Captured`.

        Raises:
            CorruptCheckpointError: if the source is damaged or was replaced (`_SourceReplacedError`).
        """
        checkpoint = self._source.opened
        snapshot: Snapshot = self._snapshot
        if self._progress is not None:
            self._progress.plan(sum(item.nbytes for item in part.plan.items))
            snapshot = CountedSnapshot(snapshot, self._progress)
        with _detecting_replacement(checkpoint):
            state = part.layout.write(snapshot, store)
        for name, path in self._files.items():
            store.write(name, _file_segments(path))
        if not checkpoint.version.still_exists(checkpoint.location):
            raise _SourceReplacedError(checkpoint)
        return state

    def close(self) -> None:
        """Free the arrays. Can be called again."""
        self._snapshot.close()


@converts_errors
def _detecting_replacement(checkpoint: Checkpoint) -> Iterator[None]:
    """Add the names of arrays to read errors. If the source was replaced, raise `_SourceReplacedError`."""
    try:
        with naming_arrays(checkpoint):
            yield
    except CheckpointError as error:
        if checkpoint.version.is_current(checkpoint.location):
            raise
        raise _SourceReplacedError(checkpoint) from error


class _SourceReplacedError(CorruptCheckpointError):
    """The source was replaced or deleted after it was opened."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(
            f"{checkpoint.location.display} was replaced during the consolidation. Try again while no job saves there"
        )


def _file_segments(path: FilePath) -> list[ArraySegment]:
    """Return the bytes of a local file as segments that are read lazily."""
    size = os.path.getsize(path)

    def segment(start: int) -> ArraySegment:
        box = Box((0,), (min(_FILE_SLICE_BYTES, size - start),))

        def read() -> Sequence[tuple[Box, HostArray]]:
            with open_regular_file(path) as file:
                file.seek(start)
                data: Any = np.frombuffer(file.read(box.size), np.uint8)
            if data.size != box.size:
                raise StorageError(
                    f"{os.fspath(path)!r} ends at byte {start + data.size}, but had {size} bytes before. Do not change "
                    "the file during the copy"
                )
            return ((box, data),)

        return ArraySegment(box, 1, read, lambda: None)

    return [segment(start) for start in range(0, size, _FILE_SLICE_BYTES)]
