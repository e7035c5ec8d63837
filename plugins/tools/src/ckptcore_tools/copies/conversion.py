"""Converting a checkpoint to another layout, with little of it in memory at a time.

A layout that takes arrays in pieces gets pieces of up to 64 MiB, any other gets whole arrays. They are read ahead of
the writer, by threads of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from ckptcore.builtin import SingleProcess
from ckptcore.builtin.files import FilesLayout, empty_directories, state_of_files
from ckptcore.commit.location import Location, Place, resolve_location
from ckptcore.commit.root import Member, check_name, new_save_id
from ckptcore.commit.target import Overwrite, read_root, refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, NameCollisionError, TransformError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.loading.checkpoint import Checkpoint, CompositeCheckpoint, check_file
from ckptcore.loading.foreign import foreign_checkpoints
from ckptcore.loading.opening import ConsistentRead, is_deleted, open_either, open_member, present_members
from ckptcore.loading.reading import check_sizes
from ckptcore.loading.stored_trees import transformed
from ckptcore.loading.verify import ProgressCallback
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.transfer import ArraySegment, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.planning import plan_write
from ckptcore.protocols import Layout, Transforms, WriteStore
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import SavePart, TreeCaptured
from ckptcore.saving.preparing import save_created
from ckptcore.saving.requests import CommitInfo, Save, Target
from ckptcore.saving.writing import PlainSave, write_save
from ckptcore_tools.copies.destinations import refuse_destination, refuse_further
from ckptcore_tools.copies.reported_save import ReportedSave
from ckptcore_tools.copies.streaming import StreamedSnapshot, StreamSizes, items_by_object, reading_context

__all__ = ["SourceReplaced", "convert_checkpoint"]

_PIECE_BYTES: Final = 1 << 24


class SourceReplaced(Exception):
    """The source was replaced by another save before the conversion. Nothing was written."""


def convert_checkpoint(
    source: Place,
    destination: Place,
    layout: str | Layout,
    overwrite: Overwrite,
    progress: ProgressCallback | None,
    context: Context,
    transforms: Transforms = (),
    *,
    save_id_of: Callable[[str], str] | None = None,
    before_commit: Callable[[], None] = lambda: None,
    only: bytes | None = None,
) -> None:
    """See `ckptcore.copy` with a layout.

    Args:
        source, destination, layout, overwrite, progress, context, transforms: as there.
        save_id_of: gives that of what is written, from that of the source; None: a new one.
        before_commit: called right before the commit; what it raises stops that.
        only: the root of the save that is converted; None: whichever is there.

    Raises:
        SourceReplaced: if the source has another root than `only`.
        What `ckptcore.copy` does.
    """
    chosen = runtime_of(context).registry.layout(layout)
    durable = context.durability == "full"
    resolved = resolve_location(destination, runtime_of(context).registry, durable=durable, config=context.storage)
    read_from = resolve_location(source, runtime_of(context).registry, durable=False, config=context.storage)
    refuse_destination(read_from, resolved)
    refuse_to_replace(resolved, overwrite, foreign_checkpoints(context))

    job = _Conversion(resolved, chosen, overwrite, progress, context, transforms, save_id_of, before_commit, only)
    ConsistentRead(source, job.reading, open_either).retry_if_replaced(functools.partial(job.either, source))


class _Conversion:
    def __init__(
        self,
        destination: Location,
        layout: Layout,
        overwrite: Overwrite,
        progress: ProgressCallback | None,
        context: Context,
        transforms: Transforms,
        save_id_of: Callable[[str], str] | None,
        before_commit: Callable[[], None],
        only: bytes | None,
    ) -> None:
        self._before_commit = before_commit
        self._only = only
        self._save_id_of = save_id_of
        self._transforms = transforms
        self._destination = destination
        self._layout = layout
        self._overwrite = overwrite
        self._progress = progress
        self._context = context
        self.reading = reading_context(context)
        """What the source is read with."""
        self._snapshots: list[StreamedSnapshot] = []
        self._written: str | None = None
        """The save id under which an attempt wrote the source, which was replaced meanwhile."""

    def either(self, source: Place, found: Checkpoint | CompositeCheckpoint) -> None:
        """Convert one tree, or several checkpointables."""
        if self._only is not None and found.mark.root != self._only:
            self._take_back()
            raise SourceReplaced
        if isinstance(found, Checkpoint):
            self._tree(found)
        elif self._transforms:
            raise TransformError(
                f"{found.location.display} holds several checkpointables, and transforms apply to one tree: convert "
                f"them one by one, as in copy({source}/NAME, ..., layout=..., transforms=...). Nothing was converted"
            )
        else:
            self._composite(source, found)

    def _tree(self, opened: Checkpoint) -> None:
        """Write a checkpoint that is one tree."""
        if self._transforms:
            opened = self._transformed(opened)
        refuse_further(opened, self._destination)
        root = opened.root
        save_id = new_save_id() if self._save_id_of is None or root is None else self._save_id_of(root.save_id)
        self._write(save_id, [self._part("", "", opened, save_id, own=False)], None, opened)

    def _transformed(self, opened: Checkpoint) -> Checkpoint:
        """A checkpoint as the transforms make it.

        Raises:
            TransformError: if it has no tree, or they do not fit.
        """
        if opened.layout.name == FilesLayout.name:
            raise TransformError(
                f"{opened.location.display} holds files that an object wrote, and no tree to transform"
            )
        return transformed(opened, self._transforms, self.reading)

    def _composite(self, source: Place, composite: CompositeCheckpoint) -> None:
        """Write every checkpointable that is still there; files as they are."""
        save_id = new_save_id()
        members: dict[str, Member] = {}
        parts = []
        for name, directories in present_members(composite).items():
            member = composite.members[name]
            check_name(name)  # other software has other rules
            there = [directory for directory in directories if not is_deleted(composite, directory)]
            if there and len(there) < (member.processes or 1):
                raise CorruptCheckpointError(
                    f"{name!r} in {composite.location.display} has a state for each of {member.processes} processes, "
                    f"and only {len(there)} are there; delete those too, or convert another checkpoint"
                )
            for directory in there:
                members[name] = member
                opened = self._open(composite, name, directory, source)
                parts.append(self._part(name, directory, opened, save_id, own=member.processes is not None))
        self._write(save_id, parts, members, composite)

    def _open(self, composite: CompositeCheckpoint, name: str, directory: str, source: Place) -> Checkpoint:
        try:
            return open_member(composite, name, directory, source, self.reading)
        except CheckpointNotFoundError as error:
            if composite.root is None:
                error.add_note(
                    f"nothing was converted; the others can be, one by one, as in copy({source}/NAME, ..., layout=...)"
                )
            raise

    def _part(self, name: str, directory: str, opened: Checkpoint, save_id: str, *, own: bool) -> SavePart:
        tree = opened.tree
        if opened.layout.name == FilesLayout.name:
            _refuse_own_names(opened)
            plan = plan_write(tree, {}, rank=0, size=1, save_id=save_id, name=name)
            return SavePart(directory, opened.layout, plan, own, captured=_StoredFiles(opened))
        self._layout.check(tree, 1)
        check_sizes(opened, range(len(tree.leaves)))
        sources, sizes = range(len(tree.leaves)), StreamSizes.of(self._context)
        objects = items_by_object(self._layout, tree, opened, sources, sizes)
        plan = WritePlan(tree, tuple([item for items in objects for item in items]), 0, 1, save_id, name)
        snapshot = StreamedSnapshot(plan, opened, sources, sizes)
        self._snapshots.append(snapshot)
        return SavePart(directory, self._layout, plan, own, captured=TreeCaptured(snapshot))

    def _write(
        self,
        save_id: str,
        parts: Sequence[SavePart],
        members: Mapping[str, Member] | None,
        source: Checkpoint | CompositeCheckpoint,
    ) -> None:
        self._take_back()
        display = self._destination.display
        total = sum(part.plan.tree.nbytes for part in parts)
        handle = ReportedSave(display, total, self._progress) if self._progress is not None else None
        recording = Recording("save", display, self._context.observers, save_id=save_id)
        save = Save(
            target=Target(self._destination, self._overwrite, functools.partial(self._check, source)),
            info=CommitInfo(
                save_id=save_id,
                created=save_created(),
                custom=source.origin.custom,
                metrics=source.origin.metrics,
                progress=source.root.progress if source.root is not None else {},
                members=members,
            ),
            parts=parts,
            strategy=PlainSave(),
            agreement=Agreement(SingleProcess(), "convert"),
            recording=recording,
            context=self._context,
        )
        try:
            write_save(save, handle)
        finally:
            for snapshot in self._snapshots:
                snapshot.close()
            self._snapshots.clear()
        recording.finish(total)
        self._written = save_id

    def _check(self, source: Checkpoint | CompositeCheckpoint) -> None:
        """Look, before the commit, whether further checkpoints that were read are still those that were opened."""
        if isinstance(source, Checkpoint) and source.derived is not None:
            from ckptcore.loading.derived import check_beside  # only who reads further ones needs it

            check_beside(source)
        self._before_commit()

    def _take_back(self) -> None:
        """Remove what an attempt before wrote where it cannot be replaced, and nothing that somebody else saved there since."""
        written, self._written = self._written, None
        if written is None or (self._overwrite and self._destination.commits.replaces_atomically):
            return
        there = read_root(self._destination.store)
        if there is not None and there.save_id == written:
            self._destination.commits.remove(self._destination, new_save_id(), runtime_of(self._context).conditions)


def _refuse_own_names(opened: Checkpoint) -> None:
    """Refuse files of other software that have the names of ckptcore's own.

    Raises:
        NameCollisionError
    """
    for key in opened.objects:
        if key.startswith("checkpoint."):
            raise NameCollisionError(
                f"{opened.location.display} has the file {key!r}; names that begin with 'checkpoint.' are those of "
                "ckptcore's own files, so it cannot stand in a checkpoint of ckptcore. Nothing was converted"
            )


class _StoredFiles:
    """Files of an object that are read from the source as they are written."""

    def __init__(self, opened: Checkpoint) -> None:
        self._opened = opened

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """See `Captured`."""
        for record in self._opened.objects.values():
            check_file(self._opened, record)  # before anything is made of a size that a hostile root may state
            store.write(record.key, [self._piece(record, start) for start in range(0, record.size, _PIECE_BYTES)])
        return state_of_files(empty_directories(self._opened.state))  # checked: the source may be hostile

    def _piece(self, record: ObjectRecord, start: int) -> ArraySegment:
        box = Box((0,), (min(_PIECE_BYTES, record.size - start),))

        def read() -> Sequence[tuple[Box, HostArray]]:
            data = self._opened.store.get(record.key, start, start + box.size)
            return ((box, np.frombuffer(data, np.uint8)),)

        return ArraySegment(box, 1, read, lambda: None)

    def close(self) -> None:
        """Nothing is held."""
