"""Conversions of checkpoints to another layout, in bounded memory.

Arrays are read in slices of up to 64 MiB if the layout supports it, otherwise whole, on separate threads ahead of the
writer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from ckptcore.builtin import SingleProcess
from ckptcore.builtin.files import empty_directories, state_of_files
from ckptcore.commit.location import AnyLocation, Location, resolve_location
from ckptcore.commit.root import Member, SaveOrder, check_name, new_save_id
from ckptcore.commit.stored_root import Overwrite, next_order, read_root, refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, NameCollisionError, TransformError
from ckptcore.events import Recording, logger_named
from ckptcore.job.agreement import Agreement
from ckptcore.loading.load import transformed
from ckptcore.loading.reading import check_sizes
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.metadata import ObjectRecord
from ckptcore.model.transfer import ArraySegment, WritePlan
from ckptcore.model.tree import JSON
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, check_additional, check_file, format_names
from ckptcore.opening.members import existing_members, open_member
from ckptcore.opening.open_checkpoints import ConsistentRead, open_either
from ckptcore.planning import plan_write
from ckptcore.progress import ByteProgress, ProgressCallback
from ckptcore.protocols import Layout, Transforms, WriteStore
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import refuse_differences
from ckptcore.saving.requests import (
    CommitInfo,
    CommitTarget,
    Save,
    SavePart,
    TreeCaptured,
    foreign_finder,
    save_created,
)
from ckptcore.saving.writing import PlainSave, write_save
from ckptcore_tools.copies.foreign_files import check_left_out
from ckptcore_tools.copies.manifests import refuse_destination, refuse_further, refuse_lost
from ckptcore_tools.copies.streaming import StreamedSnapshot, StreamSizes, items_by_object, reading_context
from ckptcore_tools.subtrees import find_optimizers

logger = logger_named("ckptcore.copying")

_SLICE_BYTES: Final = 1 << 24


class SourceReplacedError(Exception):
    """The source was replaced by another save before or during the conversion."""


def convert_checkpoint(
    source: AnyLocation,
    destination: AnyLocation,
    layout: str | Layout,
    overwrite: Overwrite,
    progress: ProgressCallback | None,
    context: Context,
    transforms: Transforms = (),
    *,
    copy_id: Callable[[str], str] | None = None,
    before_commit: Callable[[], None] = lambda: None,
    expected_root: bytes | None = None,
    leave_out: Collection[str] = (),
) -> None:
    """Convert a checkpoint. See `ckptcore.copy` with a layout.

    Args:
        source, destination, layout, overwrite, context, transforms, leave_out: see `ckptcore.copy`.
        progress: called with the bytes of arrays that are done and their total, from any thread.
        copy_id: function from the save id of the source to the save id of the copy. None: a new save id.
        before_commit: called before the commit, and again if the source is replaced and converted again. If it raises
            an error, nothing is committed.
        expected_root: the root of the save to convert. None: any root.

    Raises:
        SourceReplacedError: if the source has another root than `expected_root`.
        CheckpointError: see `ckptcore.copy`.
    """
    chosen = runtime_of(context).registry.layout(layout)
    to = resolve_location(destination, runtime_of(context).storages, to_write=True)
    refuse_destination(resolve_location(source, runtime_of(context).storages), to)
    refuse_to_replace(to, overwrite, foreign_finder(context))
    counted = ByteProgress(progress)
    conversion = _Conversion(
        to, chosen, overwrite, counted, context, transforms, leave_out, copy_id, before_commit, expected_root
    )
    reading = conversion.reading_context
    ConsistentRead(source, reading, open_either).retry_if_replaced(functools.partial(conversion.convert, source))
    counted.end()


class _Conversion:
    def __init__(
        self,
        destination: Location,
        layout: Layout,
        overwrite: Overwrite,
        progress: ByteProgress,
        context: Context,
        transforms: Transforms,
        leave_out: Collection[str],
        copy_id: Callable[[str], str] | None,
        before_commit: Callable[[], None],
        expected_root: bytes | None,
    ) -> None:
        self._before_commit = before_commit
        self._expected_root = expected_root
        self._copy_id = copy_id
        self._transforms = transforms
        self._leave_out = leave_out
        self._destination = destination
        self._layout = layout
        self._overwrite = overwrite
        self._progress = progress
        self._context = context
        self.reading_context = reading_context(context)
        """The Context to read the source with."""
        self._snapshots: list[StreamedSnapshot] = []
        self._written: str | None = None
        """Save id of the previous attempt, which is invalid because the source was replaced."""

    def convert(self, source: AnyLocation, checkpoint: Checkpoint | CompositeCheckpoint) -> None:
        """Convert one tree, or several checkpointables."""
        if self._expected_root is not None and checkpoint.version.root != self._expected_root:
            self._remove_previous_attempt()
            raise SourceReplacedError
        if isinstance(checkpoint, Checkpoint):
            self._convert_single(source, checkpoint)
        elif self._transforms:
            raise TransformError(
                f"{checkpoint.location.display} contains several checkpointables, and transforms apply to one tree. "
                f"Convert each by its own location, such as {source}/{next(iter(checkpoint.members), 'NAME')}. Nothing "
                "was converted"
            )
        else:
            self._convert_composite(source, checkpoint)

    def _convert_single(self, source: AnyLocation, source_checkpoint: Checkpoint) -> None:
        """Write a checkpoint of one tree, or of files."""
        checkpoint = source_checkpoint
        if self._transforms:
            checkpoint = self._transformed(checkpoint)
        self._warn_of_optimizers(checkpoint)
        refuse_further(checkpoint, self._destination)
        root = checkpoint.root
        save_id = new_save_id() if self._copy_id is None or root is None else self._copy_id(root.save_id)
        if CommitTarget(self._destination, self._overwrite).keeps_others:
            self._layout = self._layout.with_own_names(save_id) or self._layout
        part = self._part("", "", checkpoint, save_id, own=False)
        self._check_left_out(source, source_checkpoint)
        self._write(save_id, [part], None, checkpoint)

    def _warn_of_optimizers(self, checkpoint: Checkpoint) -> None:
        """Log a warning if weights files for other software will contain an optimizer state."""
        if self._copy_id is None and self._layout.name == "safetensors" and (parts := find_optimizers(checkpoint.tree)):
            name = f"subtree={parts.others[0]!r}" if parts.others else f"transforms={parts.transforms}"
            logger.warning(
                "%s has %s, and so has the copy. For files of weights for other software, copy with %s",
                checkpoint.location.display,
                parts,
                name,
            )

    def _transformed(self, checkpoint: Checkpoint) -> Checkpoint:
        """Apply the transforms.

        Raises:
            TransformError: if the checkpoint has no tree, or the transforms do not fit.
        """
        if checkpoint.is_files:
            raise TransformError(
                f"{checkpoint.location.display} contains files of a checkpointable, and no tree to transform"
            )
        return transformed(checkpoint, self._transforms, self.reading_context)

    def _convert_composite(self, source: AnyLocation, composite: CompositeCheckpoint) -> None:
        """Write every checkpointable that is not deleted. Files are copied."""
        save_id = new_save_id()
        members: dict[str, Member] = {}
        parts = []
        existing_of = {name: list(directories) for name, directories in existing_members(composite)}
        refuse_lost(composite, [name for name, existing in existing_of.items() if not existing], self._leave_out)
        for name, member in composite.members.items():
            existing = existing_of[name]
            if existing:
                check_name(name)  # other software allows other names
            if existing and len(existing) < (member.processes or 1):
                raise CorruptCheckpointError(
                    f"{composite.location.display}: {name!r} was saved by {member.processes} processes, but only "
                    f"{len(existing)} of them exist. Delete these too, by ckptcore.delete ({format_names(existing)}), "
                    "or convert another one"
                )
            for directory in existing:
                members[name] = member
                checkpoint = self._open(composite, name, directory, source)
                parts.append(self._part(name, directory, checkpoint, save_id, own=member.processes is not None))
        self._check_left_out(source, composite)
        self._write(save_id, parts, members, composite)

    def _check_left_out(self, source: AnyLocation, checkpoint: Checkpoint | CompositeCheckpoint) -> None:
        """Check that no state is lost. With transforms, the copy may lose tensors, because the caller chooses them."""
        check_left_out(checkpoint, source, self._leave_out, self.reading_context, tensors=not self._transforms)

    def _open(self, composite: CompositeCheckpoint, name: str, directory: str, source: AnyLocation) -> Checkpoint:
        try:
            return open_member(composite, name, directory, source, self.reading_context)
        except CheckpointNotFoundError as error:
            if composite.root is None:
                error.add_note(f"Nothing was converted. The others can be converted by location, such as {source}/NAME")
            raise

    def _part(self, name: str, directory: str, checkpoint: Checkpoint, save_id: str, *, own: bool) -> SavePart:
        tree = checkpoint.tree
        if checkpoint.is_files:
            _refuse_own_names(checkpoint)
            plan = plan_write(tree, {}, rank=0, size=1, save_id=save_id, name=name)
            return SavePart(directory, self._layout, plan, own, captured=_StoredFiles(checkpoint), is_files=True)
        self._layout.check(tree, 1)
        if name:
            refuse_differences(self._layout, "which only a checkpoint of one tree can have: copy each object by itself")
        check_sizes(checkpoint, range(len(tree.leaves)))
        sources, sizes = range(len(tree.leaves)), StreamSizes.of(self._context)
        objects = items_by_object(self._layout, tree, checkpoint, sources, sizes)
        plan = WritePlan(tree, tuple([item for items in objects for item in items]), 0, 1, save_id, name)
        snapshot = StreamedSnapshot(plan, checkpoint, sources, sizes)
        self._snapshots.append(snapshot)
        return SavePart(directory, self._layout, plan, own, captured=TreeCaptured(snapshot))

    def _write(
        self,
        save_id: str,
        parts: Sequence[SavePart],
        members: Mapping[str, Member] | None,
        source: Checkpoint | CompositeCheckpoint,
    ) -> None:
        self._remove_previous_attempt()
        display = self._destination.display
        total = sum(part.plan.tree.nbytes for part in parts)
        self._progress.plan(total)
        order = SaveOrder() if source.root is None else source.root.order
        recording = Recording("save", display, self._context.observers, save_id=save_id, progress=self._progress)
        save = Save(
            target=CommitTarget(self._destination, self._overwrite, functools.partial(self._check, source)),
            info=CommitInfo(
                save_id=save_id,
                created=save_created(),
                custom=source.origin.custom,
                metrics=source.origin.metrics,
                progress=source.root.progress if source.root is not None else {},
                members=members,
                order=max(order, next_order(self._destination, self._overwrite)),
                default=source.default if isinstance(source, CompositeCheckpoint) else None,
            ),
            parts=parts,
            strategy=PlainSave(),
            agreement=Agreement(SingleProcess(), "convert"),
            recording=recording,
            context=self._context,
        )
        try:
            write_save(save)
        finally:
            for snapshot in self._snapshots:
                snapshot.close()
            self._snapshots.clear()
        recording.finish(total)
        self._written = save_id

    def _check(self, source: Checkpoint | CompositeCheckpoint) -> None:
        """Check before the commit that bases and other sources were not replaced, and call `before_commit`."""
        if isinstance(source, Checkpoint):
            check_additional(source)
        self._before_commit()

    def _remove_previous_attempt(self) -> None:
        """Remove the checkpoint of a previous attempt if the next one cannot replace it. Keep other saves."""
        written, self._written = self._written, None
        if written is None or (self._overwrite and self._destination.commit_method.replaces_atomically):
            return
        root = read_root(self._destination.store)
        if root is not None and root.save_id == written:
            with suppress(CheckpointNotFoundError):  # another process deleted it
                self._destination.commit_method.remove(self._destination)


def _refuse_own_names(checkpoint: Checkpoint) -> None:
    """Refuse files of other software with names that ckptcore reserves.

    Raises:
        NameCollisionError: if there is such a file.
    """
    for key in checkpoint.objects:
        if key.startswith("checkpoint."):
            raise NameCollisionError(
                f"{checkpoint.location.display}: the file name {key!r} is reserved, because names of ckptcore's own "
                "files begin with 'checkpoint.'. Rename the file. Nothing was converted"
            )


class _StoredFiles:
    """Files of a checkpointable that are read from the source while they are written."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._opened = checkpoint

    def write(self, part: SavePart, store: WriteStore) -> JSON:
        """See `Captured`."""
        for record in self._opened.objects.values():
            check_file(self._opened, record)  # a hostile root can declare any size
            store.write(record.key, [self._segment(record, start) for start in range(0, record.size, _SLICE_BYTES)])
        return state_of_files(empty_directories(self._opened.state))  # encode it again: the source can be hostile

    def _segment(self, record: ObjectRecord, start: int) -> ArraySegment:
        box = Box((0,), (min(_SLICE_BYTES, record.size - start),))

        def read() -> Sequence[tuple[Box, HostArray]]:
            data = self._opened.store.get(record.key, start, start + box.size)
            return ((box, np.frombuffer(data, np.uint8)),)

        return ArraySegment(box, 1, read, lambda: None)

    def close(self) -> None:
        """See `Captured`. There is nothing to free."""
