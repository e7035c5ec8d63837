"""Exports: additional checkpoints of a save, in other layouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from ckptcore.commit.location import (
    AnyLocation,
    Location,
    LocationLike,
    SubPath,
    absolute_location,
    expect_directory_name,
    resolve_location,
)
from ckptcore.commit.root import ROOT_KEY, Claim, Member, Role, new_save_id
from ckptcore.commit.stored_root import refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import InvalidLocationError, TreeMismatchError, UnsupportedLeafError
from ckptcore.events import Recording
from ckptcore.io.snapshot import StateBoxes
from ckptcore.job.agreement import Agreement
from ckptcore.model.arrays import Box
from ckptcore.model.transfer import WritePlan
from ckptcore.protocols import Layout, SaveCommit, SaveStrategy
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import FilesDescription, PartDescription, TreeDescription
from ckptcore.saving.requests import (
    NOTHING_COMMITTED,
    ArraySource,
    CommitTarget,
    Save,
    SaveDraft,
    SavePart,
    as_integer,
    failing_before_claim,
    foreign_finder,
    save_created,
)
from ckptcore.saving.writing import PlainSave
from ckptcore_tools.subtrees import (
    Subtree,
    SubtreePath,
    find_optimizers,
    find_subtree,
    path_keys,
    unknown_checkpointable,
)

__all__ = ["Export", "StepExport", "StepExports", "WithExports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """An additional checkpoint of the state of a save, or of a subtree, in another layout.

    It is an independent checkpoint, which is committed after the checkpoint of the save and can be verified, loaded and
    deleted alone.

    Attributes:
        location: a path or URL.
        layout: the name of a layout, or a layout object with options.
        subtree: the part of the state, such as ``"model"`` or ``("model", "layers", 0)``. Paths in the export are
            relative to it. With several checkpointables it is required, and starts with the name of one. Empty:
            everything. None, the default: everything, but an optimizer state in safetensors is an error, because other
            software expects only weights in such files.
    """

    location: AnyLocation
    layout: str | Layout = "safetensors"
    subtree: SubtreePath | None = None


@dataclass(frozen=True, slots=True)
class WithExports:
    """A strategy that saves with another strategy and then writes exports of the same snapshot.

    See `ckptcore.protocols.SaveStrategy`. Exports have the same `overwrite` and metadata as the save. If an export
    fails, the others are still written, and the error states that the save is committed.

    Attributes:
        exports: the exports.
        strategy: the strategy of the save.

    Raises:
        TypeError: if an element of `exports` is not an `Export`.
        ValueError: if the strategy is an update, or writes additional checkpoints itself.
    """

    exports: Sequence[Export]
    strategy: SaveStrategy[SaveDraft, Save] = field(default_factory=PlainSave)

    takes_placeholders: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for number, export in enumerate(self.exports):
            if not isinstance(export, Export):
                raise TypeError(
                    f"exports[{number}] is {export!r}; expected an Export(location=...). Nothing was written"
                )
        if self.strategy.takes_placeholders:
            raise ValueError(
                f"WithExports(..., strategy={self.strategy!r}): updates do not support exports. Nothing was written"
            )
        if self.strategy.layouts:
            raise ValueError(
                f"WithExports(..., strategy={self.strategy!r}): this strategy writes additional checkpoints itself. "
                "Pass all exports to one WithExports. Nothing was written"
            )

    @property
    def merges_keys(self) -> bool:
        """True if the strategy of the save merges the keys of dicts."""
        return self.strategy.merges_keys

    @property
    def checks_target(self) -> bool:
        """True if the strategy of the save checks the target itself."""
        return self.strategy.checks_target

    @property
    def layouts(self) -> Sequence[str | Layout]:
        """The layouts of the exports."""
        return [export.layout for export in self.exports]

    @property
    def signature(self) -> str:
        """The layouts and subtrees of the exports, as text."""
        names = [layout if isinstance(layout, str) else layout.name for layout in self.layouts]
        subtrees = [path_keys(export.subtree or ()) for export in self.exports]
        return f"exports={list(zip(names, subtrees, strict=True))!r}" if names else ""

    def prepare(self, draft: SaveDraft) -> Save:
        """Plan the exports, and prepare the save.

        Raises:
            TreeMismatchError: if a subtree does not exist.
            UnsupportedLeafError, NameCollisionError, UnsupportedKeyError: if a layout cannot store a part of the state.
            InvalidLocationError: if two checkpoints would have the same location.
            CheckpointExistsError: if a location exists and `overwrite` does not allow replacing it.
            StorageError: if an export cannot be written to its location.
        """
        if not self.exports:
            return self.strategy.prepare(draft)
        target, agreement, context = draft.save.target, draft.save.agreement, draft.save.context
        with agreement.stage("exports", meaning=NOTHING_COMMITTED):
            planned = _plan_exports(self.exports, target.location, draft.descriptions, context, size=agreement.size)
            if agreement.rank == 0:
                for export in planned:
                    refuse_to_replace(export.location, target.overwrite, foreign_finder(context))
                _refuse_merged_names(planned, target, draft.save.info.save_id)
        save_ids = agreement.lead("export ids", lambda: [new_save_id() for _ in planned])
        save = self.strategy.prepare(draft)
        further = [
            export.prepare(save, save_id, agreement.part(f"export-{number}"))
            for number, (export, save_id) in enumerate(zip(planned, save_ids, strict=True))
        ]
        return save._replace(strategy=replace(self, strategy=save.strategy), further=further)

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the save, without exports."""
        return self.strategy.begin(save)

    def after_commit(self, save: Save, write: Callable[[Save], None]) -> None:
        """Write and commit the exports one after another.

        If an export fails, the others are still written. An interruption, such as KeyboardInterrupt, fails the
        remaining exports on all processes.

        Raises:
            Exception: the first error of an export, with a note that the save is committed.
        """
        failed: list[Exception] = []
        for number, export in enumerate(save.further):
            display, rank = export.target.location.display, export.agreement.rank
            recording = Recording(
                "save",
                display,
                export.context.observers,
                step=export.info.progress.get("step"),
                rank=rank,
                save_id=export.info.save_id,
            )
            try:
                write(export._replace(agreement=export.agreement.recorded(recording), recording=recording))
            except BaseException as error:
                recording.finish(error=error)
                error.add_note(f"{save.target.location.display} is committed; its export to {display} is not")
                if not isinstance(error, Exception):
                    _fail_remaining(save.further[number + 1 :], error)
                    raise
                failed.append(error)
            else:
                recording.finish()
            finally:
                for part in export.parts:
                    part.close()
        if failed:
            for other in failed[1:]:
                failed[0].add_note(f"and then: {type(other).__name__}: {other}")
            raise failed[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExport:
    """An export of the steps of a `Checkpointer`.

    Preservation policies do not delete exports, because weights are often needed longer than steps.

    Attributes:
        directory: a directory. Each export is written to a subdirectory with the name of its step.
        layout, subtree: see `Export`.
        every: export the saved steps whose number is a multiple of this.
    """

    directory: LocationLike
    layout: str | Layout = "safetensors"
    subtree: SubtreePath | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if as_integer("every", self.every) < 1:
            raise ValueError(f"StepExport(every={self.every!r}): expected at least 1")

    def wants(self, step: int) -> bool:
        """Return True if a saved step is exported."""
        return step % self.every == 0

    def of_step(self, name: str) -> Export:
        """Return the export of a step."""
        return Export(location=SubPath(self.directory, name), layout=self.layout, subtree=self.subtree)


@dataclass(frozen=True, slots=True)
class StepExports:
    """Exports of the steps of a `Checkpointer`. See `ckptcore.protocols.StepStrategy`.

    Attributes:
        exports: the exports.

    Raises:
        TypeError: if an element of `exports` is not a `StepExport`.
    """

    exports: Sequence[StepExport]

    def __post_init__(self) -> None:
        for number, export in enumerate(self.exports):
            if not isinstance(export, StepExport):
                raise TypeError(f"StepExports: exports[{number}] is {export!r}; expected a StepExport(directory=...)")

    @property
    def layouts(self) -> Sequence[str | Layout]:
        """The layouts of the exports."""
        return [export.layout for export in self.exports]

    def check(self, steps: str | os.PathLike[str]) -> None:
        """Refuse two exports to one directory, and exports to the directory of the run.

        Raises:
            ValueError: if there is such an export.
        """
        used = {absolute_location(steps): "the steps"}
        for number, export in enumerate(self.exports):
            location = absolute_location(export.directory)
            if location in used:
                raise ValueError(
                    f"StepExports: exports[{number}] writes to {export.directory}, the directory of {used[location]}. "
                    "Give it another directory"
                )
            used[location] = f"exports[{number}]"

    def for_step(self, step: int, name: str, strategy: SaveStrategy[SaveDraft, Save]) -> SaveStrategy[SaveDraft, Save]:
        """Return the strategy for a step, with the exports of this step."""
        exports = [export.of_step(name) for export in self.exports if export.wants(step)]
        return WithExports(exports, strategy) if exports else strategy


@dataclass(frozen=True, slots=True)
class _PlannedExport:
    """An export that its layout can store.

    Attributes:
        location: the location.
        layout: the layout.
        part: the number of the exported part of the save.
        subtree: the exported subtree of this part.
    """

    location: Location
    layout: Layout
    part: int
    subtree: Subtree

    def keys(self) -> Iterator[str]:
        """Yield the keys of objects and directories that are known before the export is written."""
        yield ROOT_KEY
        yield from self.layout.names_in_keys(WritePlan(self.subtree.tree, (), 0, 1, ""))

    def prepare(self, save: Save, save_id: str, agreement: Agreement) -> Save:
        """Return the save of the export. In it, this process writes the same boxes as in the save.

        Args:
            save: the save.
            save_id: the save id of the export.
            agreement: the agreement of the processes for the export.
        """
        leaves: dict[int, int] = {}  # leaf of the whole tree -> first leaf of the subtree with its elements
        for leaf, source in enumerate(self.subtree.sources):
            leaves.setdefault(source, leaf)

        part = save.parts[self.part]
        assert part.source is not None and not isinstance(part.source, FilesDescription)  # a tree, not yet captured
        whole = part.plan
        items = [item._replace(leaf=leaves[item.leaf]) for item in whole.items if item.leaf in leaves]
        items.sort(key=lambda item: item.leaf)
        plan = WritePlan(self.subtree.tree, tuple(items), whole.rank, whole.size, save_id)
        exported = SavePart("", self.layout, plan, source=_SubtreeSource(part.source, self.subtree.sources))
        role: Role = "export" if self.location.is_within(save.target.location) else "checkpoint"
        return save._replace(
            target=save.target._replace(location=self.location),
            info=save.info._replace(save_id=save_id, members=None, role=role),
            parts=[exported],
            strategy=PlainSave(),
            agreement=agreement,
        )


class _SubtreeSource(NamedTuple):
    """The arrays of a subtree. See `ckptcore.saving.requests.ArraySource`.

    Attributes:
        whole: the arrays of the whole tree.
        leaves: for each leaf of the subtree, the number of the leaf of the whole tree that has the same elements.
    """

    whole: ArraySource
    leaves: Sequence[int]

    def boxes(self, leaf: int, boxes: tuple[Box, ...]) -> StateBoxes:
        """Return boxes of a leaf of the subtree."""
        return self.whole.boxes(self.leaves[leaf], boxes)


def _plan_exports(
    exports: Sequence[Export],
    location: Location,
    descriptions: Sequence[PartDescription],
    context: Context,
    *,
    size: int,
) -> Sequence[_PlannedExport]:
    """Plan the exports of a save to a location. Writes nothing."""
    names = [description.name for description in descriptions]
    planned = []
    for number, export in enumerate(exports):
        try:
            planned.append(_plan_export(export, names, descriptions, context, size))
        except TreeMismatchError as error:
            raise TreeMismatchError(f"exports[{number}]: {error}. Nothing was written", error.differences) from error
    _refuse_overlaps([location, *(export.location for export in planned)])
    if names != [""]:
        members = {description.name: description.member(size) for description in descriptions}
        _refuse_member_directories(location, members, planned)
    return planned


def _plan_export(
    export: Export, names: Sequence[str], descriptions: Sequence[PartDescription], context: Context, size: int
) -> _PlannedExport:
    keys = path_keys(export.subtree or ())
    part = 0
    if names != [""]:
        if not keys or keys[0] not in names:
            raise unknown_checkpointable(export.subtree or (), names)
        part, keys = names.index(str(keys[0])), keys[1:]
    description = descriptions[part]
    if not isinstance(description, TreeDescription) or (description.own and size > 1):
        reason = "writes its own files" if not isinstance(description, TreeDescription) else "differs on every process"
        raise UnsupportedLeafError(
            f"{names[part]!r} cannot be exported, because it {reason}. Export another checkpointable. Nothing was "
            "written"
        )
    subtree = find_subtree(description.tree, keys)
    layout = runtime_of(context).registry.layout(export.layout)
    if export.subtree is None and layout.name == "safetensors" and (optimizers := find_optimizers(subtree.tree)):
        parts = f", such as subtree={optimizers.others[0]!r}" if optimizers.others else ""
        raise TreeMismatchError(
            f"there is {optimizers}, and safetensors are files of weights for other software. Pass the part to export"
            f"{parts}, or subtree=() for everything",
            [f"{name} is the state of an optimizer" for name in optimizers.optimizers],
        )
    layout.check(subtree.tree, size)
    expect_directory_name(export.location)
    location = resolve_location(export.location, runtime_of(context).storages, to_write=True)
    return _PlannedExport(location, layout, part, subtree)


def _refuse_overlaps(locations: Sequence[Location]) -> None:
    """Refuse two checkpoints with one location, and an export whose directory contains the save or an earlier export.

    The outer checkpoint would be written after the inner one, and would not contain it.
    """
    for number, location in enumerate(locations):
        for other in locations[:number]:
            if location.identity == other.identity:
                raise InvalidLocationError(
                    f"{location.display} is the location of two checkpoints of one save. Give each its own location. "
                    "Nothing was written"
                )
            if other.is_within(location):
                raise InvalidLocationError(
                    f"{location.display}: the directory of this export contains {other.display}, which is written "
                    "first. Give it another location, or one inside. Nothing was written"
                )


def _refuse_merged_names(exports: Sequence[_PlannedExport], target: CommitTarget, save_id: str) -> None:
    """Refuse names that the file system of an export cannot distinguish, before the first checkpoint is committed.

    Raises:
        NameCollisionError, InvalidLocationError: see `Transaction.expect_distinct`.
    """
    locations = [target.location, *(export.location for export in exports)]
    for export in exports:
        # The directory of the save does not exist yet, so test an export inside it in the parent directory.
        location = target.location if export.location.is_within(target.location) else export.location
        if location.commit_method.claims_by_root:
            continue  # object stores compare the bytes of keys
        parent = location.identity.rpartition("/")[0]
        names = [other.name for other in locations if other.identity.rpartition("/")[0] == parent]
        # Use a separate name, because another save to the location may be running.
        place = replace(location, display=export.location.display, name=save_id, identity=f"{parent}/{save_id}")
        trial = place.commit_method.begin(place, Claim(save_id, save_created()), overwrite=False)
        try:
            trial.expect_distinct(export.keys)
            trial.expect_distinct(names.copy)
        finally:
            trial.abort()


def _refuse_member_directories(
    location: Location, members: Mapping[str, Member], exports: Sequence[_PlannedExport]
) -> None:
    """Refuse exports to the directory of a checkpointable of the save."""
    for export in exports:
        if not export.location.is_within(location):
            continue
        directory = export.location.identity[len(location.identity) + 1 :].partition("/")[0]
        for name, member in members.items():
            if directory in [member.directory(name, rank) for rank in range(member.processes or 1)]:
                raise InvalidLocationError(
                    f"{export.location.display}: an export cannot use the directory of {name!r} of "
                    f"{location.display}. Give it another location. Nothing was written"
                )


def _fail_remaining(exports: Sequence[Save], interruption: BaseException) -> None:
    """Fail the exports that this process no longer writes, because the other ranks would wait for this process."""
    for export in exports:
        try:
            with failing_before_claim(export.agreement):
                raise interruption
        except BaseException as error:
            if error is not interruption:
                raise
