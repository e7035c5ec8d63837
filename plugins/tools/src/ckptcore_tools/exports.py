"""Exports: further checkpoints of one save in other layouts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ckptcore.commit.location import Location, LocationLike, Place, Within, absolute_location, resolve_location
from ckptcore.commit.root import Member, Role, new_save_id
from ckptcore.commit.target import refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import InvalidLocationError, TreeMismatchError, UnsupportedLeafError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.loading.foreign import foreign_checkpoints
from ckptcore.model.transfer import WritePlan
from ckptcore.protocols import FurtherSaves, Layout, SaveCommit, SaveStrategy
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import PartDescription, SavePart, SharedItems
from ckptcore.saving.requests import NOTHING_COMMITTED, Save, SaveDraft, fail_before_claim
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore.saving.writing import PlainSave
from ckptcore.step_names import whole_number
from ckptcore_tools.subtrees import Subtree, SubtreePath, find_subtree, path_keys

__all__ = ["Export", "StepExport", "StepExports", "WithExports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A further checkpoint, in another layout, of what a save writes or of a part of it.

    It is a checkpoint by itself: committed, verified, loaded and deleted on its own. The save commits its own
    checkpoint first.

    Attributes:
        location: a path or URL.
        layout: how arrays are laid out: a name, or a layout object with options.
        subtree: the part of the state, such as ``"model"`` or ``("model", "layers", 0)``; paths in the export begin
            there. Of several checkpointables it begins with a name. Empty: all of it.
    """

    location: Place
    layout: str | Layout = "safetensors"
    subtree: SubtreePath = ()


@dataclass(frozen=True, slots=True)
class WithExports:
    """Save with another strategy, and then write exports of the same copy. See `ckptcore.protocols.SaveStrategy`.

    The `overwrite` and the metadata of the save are those of the exports too. After an error of one export the others
    are still written; the error says that the save is committed.

    Attributes:
        exports: the further checkpoints.
        strategy: writes and commits the save itself.

    Raises:
        TypeError: if something is no export.
        ValueError: if the strategy is an update, which has no exports, or has further saves itself.
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
                f"WithExports(..., strategy={self.strategy!r}): an update has no exports. Nothing was written"
            )
        if isinstance(self.strategy, FurtherSaves):
            raise ValueError(  # noqa: TRY004  # a strategy, but one that cannot be wrapped
                f"WithExports(..., strategy={self.strategy!r}): this strategy has further saves itself; give all "
                "exports to one WithExports. Nothing was written"
            )

    @property
    def checks_target(self) -> bool:
        """Whether the strategy of the save checks what is at the location."""
        return self.strategy.checks_target

    @property
    def layouts(self) -> Sequence[str | Layout]:
        """The layouts of the exports."""
        return [export.layout for export in self.exports]

    @property
    def signature(self) -> str:
        """The layouts and subtrees of the exports."""
        names = [layout if isinstance(layout, str) else layout.name for layout in self.layouts]
        subtrees = [path_keys(export.subtree) for export in self.exports]
        return f"exports={list(zip(names, subtrees, strict=True))!r}" if names else ""

    def prepare(self, draft: SaveDraft) -> Save:
        """Plan the exports, refuse what cannot be exported, and prepare the save.

        Raises:
            TreeMismatchError: if the part that is asked for is not there.
            UnsupportedLeafError, NameCollisionError, UnsupportedKeyError: what the layout cannot store.
            InvalidLocationError: if two checkpoints would lie in one place.
            CheckpointExistsError: if something is there that is not to be replaced.
        """
        if not self.exports:
            return self.strategy.prepare(draft)
        target, agreement, context = draft.save.target, draft.save.agreement, draft.save.context
        with agreement.stage("exports", meaning=NOTHING_COMMITTED):
            planned = _plan_exports(self.exports, target.location, draft.descriptions, context, size=agreement.size)
            if agreement.rank == 0:
                for export in planned:
                    refuse_to_replace(export.location, target.overwrite, foreign_checkpoints(context))
        save_ids = agreement.lead("export ids", lambda: [new_save_id() for _ in planned])
        save = self.strategy.prepare(draft)
        further = [
            export.prepare(save, save_id, agreement.part(f"export-{number}"))
            for number, (export, save_id) in enumerate(zip(planned, save_ids, strict=True))
        ]
        return replace(save, strategy=replace(self, strategy=save.strategy), further=further)

    def begin(self, save: Save) -> SaveCommit:
        """Return the commit of the save itself."""
        return self.strategy.begin(save)

    def after_commit(self, save: Save, write: Callable[[Save], None]) -> None:
        """Write and commit the exports one after the other. After an error the others are still written.

        Raises:
            CheckpointError: the first error; it says that the save is committed.
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
                write(replace(export, agreement=export.agreement.recorded(recording), recording=recording))
            except BaseException as error:
                recording.finish(error=error)
                error.add_note(f"{save.target.location.display} is committed; its export to {display} is not")
                if not isinstance(error, Exception):
                    _give_up(save.further[number + 1 :], error)
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
    """A further checkpoint for steps of a `Checkpointer`.

    Exports are kept until they are deleted: preservation policies are for steps, and weights are often to outlive them.

    Attributes:
        directory: a directory, in which each export has a directory with the name of its step.
        layout, subtree: as of an `Export`.
        every: exports the saved steps whose number is a multiple of it.
    """

    directory: LocationLike
    layout: str | Layout = "safetensors"
    subtree: SubtreePath = ()
    every: int = 1

    def __post_init__(self) -> None:
        if whole_number("every", self.every) < 1:
            raise ValueError(f"StepExport(every={self.every!r}): expected at least 1")

    def wants(self, step: int) -> bool:
        """Return whether to export a step that is saved."""
        return step % self.every == 0

    def of_step(self, name: str) -> Export:
        """Return the export of the step with this name."""
        return Export(location=Within(self.directory, name), layout=self.layout, subtree=self.subtree)


@dataclass(frozen=True, slots=True)
class StepExports:
    """Exports of the steps of a `Checkpointer`. See `ckptcore.protocols.StepStrategy`.

    Attributes:
        exports: the further checkpoints.

    Raises:
        TypeError: if something is no `StepExport`.
    """

    exports: Sequence[StepExport]

    def __post_init__(self) -> None:
        for number, export in enumerate(self.exports):
            if not isinstance(export, StepExport):
                raise TypeError(f"StepExports: number {number} is {export!r}; expected a StepExport(directory=...)")

    @property
    def layouts(self) -> Sequence[str | Layout]:
        """The layouts of the exports."""
        return [export.layout for export in self.exports]

    def check(self, steps: str | os.PathLike[str]) -> None:
        """Refuse exports into the directory of the run, or into that of another export.

        Raises:
            ValueError: if there is one.
        """
        taken = {absolute_location(steps): "where the steps are"}
        for number, export in enumerate(self.exports):
            place = absolute_location(export.directory)
            if place in taken:
                raise ValueError(
                    f"StepExports: number {number} goes into {export.directory}, {taken[place]}; give it a directory "
                    "of its own"
                )
            taken[place] = f"where number {number} goes"

    def for_step(self, step: int, name: str, strategy: SaveStrategy[SaveDraft, Save]) -> SaveStrategy[SaveDraft, Save]:
        """Return the strategy of a step, with the exports that want it."""
        exports = [export.of_step(name) for export in self.exports if export.wants(step)]
        return WithExports(exports, strategy) if exports else strategy


@dataclass(frozen=True, slots=True)
class _PlannedExport:
    """A further checkpoint that was asked for, and that its layout can store.

    Attributes:
        location: where to.
        layout: how it is laid out.
        part: the number of the part of the save that it is of.
        subtree: what it is of that part.
    """

    location: Location
    layout: Layout
    part: int
    subtree: Subtree

    def prepare(self, save: Save, save_id: str, agreement: Agreement) -> Save:
        """Plan what this process writes: the boxes that it writes for the save.

        Args:
            save: the save.
            save_id: of the export.
            agreement: of the processes on the export.
        """
        leaves: dict[int, int] = {}  # by leaf of the whole tree, the first that it is in the part
        for leaf, source in enumerate(self.subtree.sources):
            leaves.setdefault(source, leaf)

        def planned(whole: WritePlan) -> tuple[WritePlan, tuple[int, ...]]:
            found = sorted(
                (leaves[item.leaf], number) for number, item in enumerate(whole.items) if item.leaf in leaves
            )
            items = tuple([whole.items[number]._replace(leaf=leaf) for leaf, number in found])
            plan = WritePlan(self.subtree.tree, items, whole.rank, whole.size, save_id)
            return plan, tuple([number for _, number in found])

        part = save.parts[self.part]
        plan, numbers = planned(part.plan)
        at_workers = [planned(whole) for whole in part.worker_plans]
        exported = SavePart(
            "",
            self.layout,
            plan,
            worker_plans=tuple([found for found, _ in at_workers]),
            shared=SharedItems(part, numbers, tuple([items for _, items in at_workers])),
        )
        role: Role = "export" if self.location.lies_in(save.target.location) else "checkpoint"
        return replace(
            save,
            target=replace(save.target, location=self.location),
            info=replace(save.info, save_id=save_id, members=None, role=role),
            parts=[exported],
            strategy=PlainSave(),
            agreement=agreement,
        )


def _plan_exports(
    exports: Sequence[Export],
    location: Location,
    descriptions: Sequence[PartDescription],
    context: Context,
    *,
    size: int,
) -> Sequence[_PlannedExport]:
    """Plan exports of a save to a location, and refuse what cannot be exported. Writes nothing."""
    names = [description.name for description in descriptions]
    planned = []
    for number, export in enumerate(exports):
        try:
            planned.append(_plan_export(export, names, descriptions, context, size))
        except TreeMismatchError as error:
            raise TreeMismatchError(f"exports[{number}]: {error}. Nothing was written", error.differences) from error
    _refuse_one_place([location, *(export.location for export in planned)])
    if names != [""]:
        members = {description.name: description.member(size) for description in descriptions}
        _refuse_places_of_members(location, members, planned)
    return planned


def _plan_export(
    export: Export, names: Sequence[str], descriptions: Sequence[PartDescription], context: Context, size: int
) -> _PlannedExport:
    keys = path_keys(export.subtree)
    part = 0
    if names != [""]:
        if not keys or keys[0] not in names:
            wanted = f"subtree={export.subtree!r}"
            raise TreeMismatchError(
                f"{wanted} names none of the checkpointables {', '.join(map(repr, names))}; an export is of one of "
                "them, so its subtree begins with a name",
                [wanted],
            )
        part, keys = names.index(str(keys[0])), keys[1:]
    description = descriptions[part]
    if not isinstance(description, TreeDescription) or (description.own and size > 1):
        reason = "has files of its own" if not isinstance(description, TreeDescription) else "differs in every process"
        raise UnsupportedLeafError(
            f"{names[part]!r} {reason}, and cannot be exported; export another checkpointable. Nothing was written"
        )
    subtree = find_subtree(description.tree, keys)
    layout = runtime_of(context).registry.layout(export.layout)
    layout.check(subtree.tree, size + len(description.held.at_workers))
    location = resolve_location(
        export.location, runtime_of(context).registry, durable=context.durability == "full", config=context.storage
    )
    return _PlannedExport(location, layout, part, subtree)


def _refuse_one_place(locations: Sequence[Location]) -> None:
    """Refuse checkpoints that would replace each other, and exports around the save: the one inside would be no part of it."""
    for number, location in enumerate(locations):
        for other in locations[:number]:
            if location.identity == other.identity:
                raise InvalidLocationError(
                    f"{location.display} is to hold two checkpoints of one save; give each a location of its own. "
                    "Nothing was written"
                )
            if other.lies_in(location):
                raise InvalidLocationError(
                    f"the export to {location.display} would lie around {other.display}, which is written before it; "
                    "give it another location, or one inside. Nothing was written"
                )


def _refuse_places_of_members(
    location: Location, members: Mapping[str, Member], exports: Sequence[_PlannedExport]
) -> None:
    """Refuse exports into the directory of a checkpointable, which the save has just written when they begin."""
    for export in exports:
        if not export.location.lies_in(location):
            continue
        directory = export.location.identity[len(location.identity) + 1 :].partition("/")[0]
        for name, member in members.items():
            if directory in [member.directory(name, rank) for rank in range(member.processes or 1)]:
                raise InvalidLocationError(
                    f"the export to {export.location.display} would lie where {location.display} keeps its {name!r}; "
                    "give it another location. Nothing was written"
                )


def _give_up(exports: Sequence[Save], interruption: BaseException) -> None:
    """Fail the exports that this process will not write: the other ranks begin each and would wait for it."""
    for export in exports:
        try:
            fail_before_claim(export.agreement, interruption)
        except BaseException as error:
            if error is not interruption:
                raise
