"""Exports: further checkpoints of one save in other layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckptcore.commit.location import Location, LocationLike, Place, Within, absolute_location, resolve_location
from ckptcore.commit.occupants import refuse_to_replace
from ckptcore.commit.root import Member, Role
from ckptcore.context import Context
from ckptcore.errors import InvalidLocationError, TreeMismatchError, UnsupportedLeafError
from ckptcore.events import Recording
from ckptcore.io.background import SaveHandle
from ckptcore.job.agreement import Agreement
from ckptcore.loading.opening import foreign_checkpoints
from ckptcore.model.transfer import WritePlan
from ckptcore.model.tree import JSON
from ckptcore.plugins import Plugins
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import PartDescription, SavePart
from ckptcore.saving.plain import PlainSave
from ckptcore.saving.prepared import NOTHING_COMMITTED, Save, Target, fail_before_claim
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore.saving.worker_writes import HeldByWorkers
from ckptcore.saving.write import write_save
from ckptcore.step_names import whole_number
from ckptcore.tree.subtrees import Subtree, SubtreePath, find_subtree, path_keys

__all__ = [
    "Export",
    "ExportPlans",
    "PlannedExport",
    "PreparedExport",
    "StepExport",
    "check_exports",
    "plan_exports",
    "write_exports",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A further checkpoint, in another layout, of what a save writes or of a part of it.

    It is a checkpoint by itself: committed, verified, loaded and deleted on its own. The save commits its own checkpoint first.

    Attributes:
        location: where to.
        layout: how arrays are laid out: a name, or a layout object with options.
        subtree: which part of the state, such as ``"model"`` or ``("model", "layers", 0)``; paths in the export begin there. Of
            several checkpointables it begins with a name. Empty: all of it.
    """

    location: Place
    layout: str | Layout = "safetensors"
    subtree: SubtreePath = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExport:
    """A further checkpoint for steps of a `Checkpointer`.

    Exports are kept until they are deleted: preservation policies are for steps, and weights are often to outlive them.

    Attributes:
        directory: where they go: each into a directory with the name of its step.
        layout, subtree: as of an `Export`.
        every: exported are the saved steps whose number is a multiple of it.
    """

    directory: LocationLike
    layout: str | Layout = "safetensors"
    subtree: SubtreePath = ()
    every: int = 1

    def __post_init__(self) -> None:
        if whole_number("every", self.every) < 1:
            raise ValueError(f"StepExport(every={self.every!r}): expected at least 1")

    def wants(self, step: int) -> bool:
        """Whether a step that is saved is exported."""
        return step % self.every == 0

    def of_step(self, name: str) -> Export:
        """The export of the step with this name."""
        return Export(location=Within(self.directory, name), layout=self.layout, subtree=self.subtree)


def check_exports(exports: Sequence[StepExport], steps: LocationLike, plugins: Plugins) -> tuple[StepExport, ...]:
    """The exports of a `Checkpointer`; refuses what would fail the run at the first step that all of it is for.

    Args:
        exports: what the user gave.
        steps: the directory of the run.
        plugins: that know layouts.

    Raises:
        TypeError: if one is no export.
        ValueError: if one goes where the steps are, or where another goes.
        UnknownPluginError: if one has a layout that is not there.
    """
    taken = {absolute_location(steps): "where the steps are"}
    for number, export in enumerate(exports):
        if not isinstance(export, StepExport):
            raise TypeError(
                f"Checkpointer(exports=...): number {number} is {export!r}; expected a StepExport(directory=...)"
            )
        place = absolute_location(export.directory)
        if place in taken:
            raise ValueError(
                f"Checkpointer(exports=...): number {number} goes into {export.directory}, {taken[place]}; give it a directory of its own"
            )
        taken[place] = f"where number {number} goes"
        plugins.layout(export.layout)
    return tuple(exports)


@dataclass(frozen=True, slots=True)
class PreparedExport:
    """A further checkpoint of a save.

    Attributes:
        save: the checkpoint; it has one part.
        source: the part of the save whose arrays it has.
        items: by item of its plan, the number of the item in the plan of that part.
        worker_items: the same for each worker of this controller that writes of it.
    """

    save: Save
    source: SavePart
    items: tuple[int, ...]
    worker_items: tuple[tuple[int, ...], ...] = ()

    @property
    def part(self) -> SavePart:
        """What is written of it."""
        return self.save.parts[0]


@dataclass(frozen=True, slots=True)
class PlannedExport:
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

    def prepare(self, save: Save, save_id: str, agreement: Agreement) -> PreparedExport:
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
            items = tuple([replace(whole.items[number], leaf=leaf) for leaf, number in found])
            plan = WritePlan(self.subtree.tree, items, whole.rank, whole.size, save_id)
            return plan, tuple([number for _, number in found])

        part = save.parts[self.part]
        plan, numbers = planned(part.plan)
        at_workers = [planned(whole) for whole in part.worker_plans]
        exported = SavePart("", self.layout, plan, worker_plans=tuple([found for found, _ in at_workers]))
        role: Role = "export" if self.location.lies_in(save.target.location) else "checkpoint"
        export = replace(
            save,
            target=replace(save.target, location=self.location),
            info=replace(save.info, save_id=save_id, members=None, role=role),
            parts=[exported],
            strategy=PlainSave(),
            agreement=agreement,
        )
        return PreparedExport(export, part, numbers, tuple([items for _, items in at_workers]))


def plan_exports(
    exports: Sequence[Export],
    location: Location,
    descriptions: Sequence[PartDescription],
    context: Context,
    *,
    size: int,
) -> Sequence[PlannedExport]:
    """Plan the exports that are asked for, and refuse what cannot be exported. Writes nothing.

    Args:
        exports: what is asked for.
        location: of the save itself.
        descriptions: the checkpointables; one without a name if the save is one tree.
        context: options.
        size: processes of the job.

    Raises:
        TypeError: if something is no export.
        TreeMismatchError: if the part that is asked for is not there.
        UnsupportedLeafError, NameCollisionError, UnsupportedKeyError: what the layout cannot store.
        InvalidLocationError: if two checkpoints would lie in one place.
    """
    names = [description.name for description in descriptions]
    planned = []
    for number, export in enumerate(exports):
        if not isinstance(export, Export):
            raise TypeError(f"exports[{number}] is {export!r}; expected an Export(location=...). Nothing was written")
        try:
            planned.append(_plan_export(export, names, descriptions, context, size))
        except TreeMismatchError as error:
            raise TreeMismatchError(f"exports[{number}]: {error}. Nothing was written", error.differences) from error
    _refuse_one_place([location, *(export.location for export in planned)])
    if names != [""]:
        members = {description.name: description.member(size) for description in descriptions}
        _refuse_places_of_members(location, members, planned)
    return planned


class ExportPlans:
    """The exports of a save until they are prepared.

    Attributes:
        mismatch: why this rank could not plan them: its tree lacks what is to be exported, and that of another may not.
    """

    def __init__(self, asked: Sequence[Export], target: Target, agreement: Agreement, context: Context) -> None:
        """Plan nothing yet."""
        self.mismatch: str | None = None
        self._asked = asked
        self._target = target
        self._agreement = agreement
        self._context = context
        self._planned: Sequence[PlannedExport] = ()

    def plan(self, descriptions: Sequence[PartDescription]) -> None:
        """Plan the exports of what this rank has. See `plan_exports`."""
        if not self._asked:
            return
        try:
            self._plan(descriptions)
        except TreeMismatchError as error:
            if self._agreement.size == 1:
                raise
            self.mismatch = str(error)

    def plan_united(self, descriptions: Sequence[PartDescription]) -> None:
        """Plan the exports of the union of what all ranks have."""
        with self._agreement.stage("exports", meaning=NOTHING_COMMITTED):
            self._plan(descriptions)

    def _plan(self, descriptions: Sequence[PartDescription]) -> None:
        location, size = self._target.location, self._agreement.size
        self._planned = plan_exports(self._asked, location, descriptions, self._context, size=size)
        if self._agreement.rank == 0:
            for export in self._planned:
                refuse_to_replace(export.location, self._target.overwrite, foreign_checkpoints(self._context))

    def names(self) -> JSON:
        """The layouts and subtrees, to compare them between ranks."""
        registry = runtime_of(self._context).registry
        return [
            [registry.layout(export.layout).name, repr(path_keys(export.subtree))]
            for export in self._asked
            if isinstance(export, Export)
        ]

    def prepare(self, save: Save, save_ids: Sequence[str]) -> Sequence[PreparedExport]:
        """Plan what this process writes of each export."""
        return [
            export.prepare(save, save_id, self._agreement.part(f"export-{number}"))
            for number, (export, save_id) in enumerate(zip(self._planned, save_ids, strict=True))
        ]


def _plan_export(
    export: Export, names: Sequence[str], descriptions: Sequence[PartDescription], context: Context, size: int
) -> PlannedExport:
    keys = path_keys(export.subtree)
    part = 0
    if names != [""]:
        if not keys or keys[0] not in names:
            wanted = f"subtree={export.subtree!r}"
            raise TreeMismatchError(
                f"{wanted} names none of the checkpointables {', '.join(map(repr, names))}; an export is of one of them, so its "
                "subtree begins with a name",
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
    layout.check(subtree.tree, size + len(description.at_workers))
    location = resolve_location(
        export.location, runtime_of(context).registry, durable=context.durability == "full", config=context.storage
    )
    return PlannedExport(location, layout, part, subtree)


def _refuse_one_place(locations: Sequence[Location]) -> None:
    """Refuse checkpoints that would replace each other, and exports around the save: the one inside would be no part of it."""
    for number, location in enumerate(locations):
        for other in locations[:number]:
            if location.identity == other.identity:
                raise InvalidLocationError(
                    f"{location.display} is to hold two checkpoints of one save; give each a location of its own. Nothing was "
                    "written"
                )
            if other.lies_in(location):
                raise InvalidLocationError(
                    f"the export to {location.display} would lie around {other.display}, which is written before it; give it "
                    "another location, or one inside. Nothing was written"
                )


def _refuse_places_of_members(
    location: Location, members: Mapping[str, Member], exports: Sequence[PlannedExport]
) -> None:
    """Refuse exports into the directory of a checkpointable, which the save has just written when they begin."""
    for export in exports:
        if not export.location.lies_in(location):
            continue
        directory = export.location.identity[len(location.identity) + 1 :].partition("/")[0]
        for name, member in members.items():
            if directory in [member.directory(name, rank) for rank in range(member.processes or 1)]:
                raise InvalidLocationError(
                    f"the export to {export.location.display} would lie where {location.display} keeps its {name!r}; give it "
                    "another location. Nothing was written"
                )


def write_exports(
    exports: Sequence[PreparedExport],
    saved: str,
    handle: SaveHandle | None = None,
    at_workers: HeldByWorkers | None = None,
) -> None:
    """Write and commit the exports of a committed save one after the other. After an error the others are still written.

    Args:
        exports: what to write.
        saved: the checkpoint of the save, for messages.
        handle: counts the bytes written.
        at_workers: what workers hold of the save: of its parts in order.

    Raises:
        CheckpointError: the first error; it says that the save is committed.
    """
    failed: list[Exception] = []
    for number, export in enumerate(exports):
        save = export.save
        display = save.target.location.display
        recording = Recording(
            "save",
            display,
            save.context.observers,
            step=save.info.progress.get("step"),
            rank=save.agreement.rank,
            save_id=save.info.save_id,
        )
        try:
            recorded = replace(save, agreement=save.agreement.recorded(recording), recording=recording)
            write_save(recorded, handle, at_workers.share(export.source, export.worker_items) if at_workers else None)
        except BaseException as error:
            recording.finish(error=error)
            error.add_note(f"{saved} is committed; its export to {display} is not")
            if not isinstance(error, Exception):
                _give_up(exports[number + 1 :], error)
                raise
            failed.append(error)
        else:
            recording.finish()
        finally:
            export.part.close()
    if failed:
        for other in failed[1:]:
            failed[0].add_note(f"and then: {type(other).__name__}: {other}")
        raise failed[0]


def _give_up(exports: Sequence[PreparedExport], interruption: BaseException) -> None:
    """Fail the exports that this process will not write: the other ranks begin each and would wait for it."""
    for export in exports:
        try:
            fail_before_claim(export.save.agreement, interruption)
        except BaseException as error:
            if error is not interruption:
                raise
