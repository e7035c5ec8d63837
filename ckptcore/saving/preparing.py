"""Preparing a save: what is to be written and where, looked at and refused where it cannot be. Nothing is written here."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

from ckptcore.commit.location import resolve_location
from ckptcore.commit.occupants import refuse_inside, refuse_to_replace
from ckptcore.commit.root import Member, check_name, new_save_id
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, TreeMismatchError, UnsupportedLeafError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.loading.opening import foreign_checkpoints
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import JSON, format_path
from ckptcore.protocols import Executor, Layout, SharesReplicas
from ckptcore.runtime import runtime_of
from ckptcore.saving.exporting import Export, PlannedExport, PreparedExport, plan_exports
from ckptcore.saving.parts import Part, PartDescription, describe_part, naming
from ckptcore.saving.persisting import NOTHING_COMMITTED, Described, fail_before_claim, fail_everywhere
from ckptcore.saving.save_requests import OneTree, SaveRequest, check_custom, check_metrics, check_progress
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore.tree.flattening import leaves_of_each_process, of_each_process
from ckptcore.tree.merge import unite_trees
from ckptcore.tree.subtrees import path_keys

if TYPE_CHECKING:
    from ckptcore.saving.host_persisting import CopyDescription

__all__ = ["PreparedSave", "prepare_save", "save_created", "tree_digest"]

_Descriptions: TypeAlias = Sequence[PartDescription]


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """A save that can go ahead.

    Attributes:
        described: the checkpoint.
        descriptions: what each of its parts is. They hold the state: to be let go of once it is captured.
        exports: the further checkpoints of the same arrays.
        executor: the workers that write of it what its parts say; None where this process writes all.
    """

    described: Described
    descriptions: Sequence[PartDescription | CopyDescription]
    exports: Sequence[PreparedExport]
    executor: Executor | None = None

    @property
    def described_parts(self) -> Sequence[tuple[Part, PartDescription | CopyDescription]]:
        """Each part with what it is."""
        return tuple(zip(self.described.parts, self.descriptions, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of arrays that this process and its workers write."""
        all_described = [self.described, *(export.described for export in self.exports)]
        return sum(
            item.nbytes
            for described in all_described
            for part in described.parts
            for plan in part.plans
            for item in plan.items
        )


def prepare_save(request: SaveRequest, context: Context, recording: Recording, agreement: Agreement) -> PreparedSave:
    """Look at what is to be saved and where, and refuse what cannot be.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError, CheckpointExistsError, InvalidLocationError
        ValueError, TypeError: for what is no metadata, metric, step or epoch.
        BackgroundSaveError: an earlier save failed unnoticed, here; in a job the other ranks hear of it.
    """
    rank, size = agreement.rank, agreement.size
    composite = not isinstance(request.values, OneTree)
    with agreement.stage("describe", meaning=NOTHING_COMMITTED) as stage:
        runtime_of(context).saves.raise_unnoticed()
        executor = runtime_of(context).workers()
        chosen = runtime_of(context).registry.layout(request.layout)
        custom = check_custom(request.custom)
        metrics = check_metrics(request.metrics)
        progress = check_progress(request)
        recording.step = progress.get("step")
        values = {"": request.values.state} if isinstance(request.values, OneTree) else dict(request.values)
        location = resolve_location(
            request.location, runtime_of(context).registry, durable=context.durability == "full", config=context.storage
        )
        if composite:
            for name in values:
                check_name(name)
        replicas = context.job.replicas if _share_replicas(chosen, request.exports, context) else None
        # The same order on every process of a job, because `state_dict` may be collective.
        described_by_name = {
            name: describe_part(
                name,
                values[name],
                chosen,
                runtime_of(context).registry,
                rank=rank,
                size=size,
                replicas=replicas,
                executor=executor,
                placeholders=request.base is not None,
            )
            for name in sorted(values)
        }
        descriptions: _Descriptions = [described_by_name[name] for name in values]
        if size > 1 and context.job.replicas.objects == "refuse":
            _refuse_what_differs(values, descriptions, size)
        members = (
            {name: part.member(size) for name, part in zip(values, descriptions, strict=True)} if composite else None
        )
        if rank == 0:
            if request.allowed is not None:
                request.allowed()
            refuse_inside(location)
            if not request.partial:
                refuse_to_replace(location, request.overwrite, foreign_checkpoints(context))

        def plan_all() -> Sequence[PlannedExport]:  # of the descriptions there are when it is called
            found = plan_exports(request.exports, location, list(values), descriptions, context, size=size)
            if rank == 0:
                for export in found:
                    refuse_to_replace(export.location, request.overwrite, foreign_checkpoints(context))
            return found

        planned: Sequence[PlannedExport] = ()
        unplanned = None
        try:
            planned = plan_all()
        except TreeMismatchError as error:
            if size == 1:
                raise
            unplanned = str(error)  # another rank may have what is to be exported
        if size > 1:
            stage.payload = _told(members, descriptions, request.exports, unplanned, context)
    payloads = stage.payloads
    decided = agreement.lead("save", lambda: _decide(payloads, descriptions, exports=len(request.exports)))
    save_id, created = decided["save_id"], decided["created"]
    recording.save_id = save_id
    if decided["different"]:
        descriptions = _unite(agreement, descriptions, decided["different"], payloads)
        with agreement.stage("exports", meaning=NOTHING_COMMITTED):
            planned = plan_all()
    session = None
    if request.partial:
        from ckptcore.saving.session_planning import plan_session  # only who saves in sessions needs it

        session = plan_session(agreement, location, descriptions, save_id, created)
        save_id, created = session.planned.partial.save_id, session.planned.partial.created
        recording.save_id = save_id
    update = None
    if request.base is not None:
        from ckptcore.saving.updating import plan_update  # only who refers to others needs it

        update, written = plan_update(agreement, location, descriptions, request.base, context)
        descriptions = [written]
    hosts = None if request.on_hosts is None or len(request.on_hosts.hosts.groups) == 1 else request.on_hosts.hosts
    parts = []
    try:
        for name, description in zip(values, descriptions, strict=True):
            member = description.member(size)
            directory = member.directory(name, rank) if composite else ""
            own = member.processes is not None
            plan, worker_plans = description.plan(rank, size, save_id), description.worker_plans(save_id)
            if session is not None:
                plan = session.placed(plan)
            parts.append(Part(directory, description.layout, plan, own, worker_plans))
    except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
        if hosts is not None:
            from ckptcore.saving.host_persisting import FIRST_STAGE

            fail_everywhere(agreement, FIRST_STAGE, error)
        fail_before_claim(agreement, error)
    described = Described(
        location=location,
        overwrite=request.overwrite,
        custom=custom,
        metrics=metrics,
        progress=progress,
        save_id=save_id,
        created=created,
        parts=parts,
        members=members,
        before_commit=request.before_commit,
        agreement=agreement,
        on_hosts=request.on_hosts,
        session=None if session is None else session.planned,
        update=update,
    )
    copied: Sequence[CopyDescription] = ()
    if hosts is not None:
        from ckptcore.saving.host_persisting import add_host_copies  # only who has hosts needs it

        trees = list(_common_trees(descriptions))
        described, copied = add_host_copies(described, trees, hosts, runtime_of(context).registry)
    exports = [
        export.prepare(described, export_id, agreement.part(f"export-{number}"))
        for number, (export, export_id) in enumerate(zip(planned, decided["exports"], strict=True))
    ]
    used = executor if any(part.worker_plans for part in parts) else None
    return PreparedSave(described, [*descriptions, *copied], exports, used)


def save_created() -> str:
    """Now, as the root of a checkpoint states it: ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _refuse_what_differs(values: Mapping[str, object], descriptions: _Descriptions, size: int) -> None:
    """Refuse objects in shared trees of which every process has one of its own: one of them would be stored.

    Also where they are equal now, so that a job that could save once can save again.
    """
    for name, description in zip(values, descriptions, strict=True):
        if not isinstance(description, TreeDescription) or description.own:
            continue
        found = [
            f"{format_path(path)} is a {type(thing).__module__}.{type(thing).__qualname__}"
            for path, thing in of_each_process(description.flat.shape)
        ]
        if found:
            where = f"in {name!r}: " if name else ""
            more = f"; and {len(found) - 20} more" if len(found) > 20 else ""
            raise UnsupportedLeafError(
                f"{where}{'; '.join(found[:20])}{more}: every process has one of its own, and of a tree that {size} processes "
                "save together only one would be stored. To keep one for each rank, put it under a name of its own in "
                "save_checkpointables. To store all shards and otherwise the lowest rank's state, as "
                "torch.distributed.checkpoint does, save with "
                'Context(job=JobOptions(replicas=ReplicaOptions(objects="lowest_rank"))). Nothing was written'
            )


def _share_replicas(layout: Layout, exports: Sequence[Export], context: Context) -> bool:
    """Whether processes may share what they all hold: each writes for the exports the boxes that it writes for the save."""
    layouts = [
        layout,
        *(runtime_of(context).registry.layout(export.layout) for export in exports if isinstance(export, Export)),
    ]
    return all(isinstance(one, SharesReplicas) and one.shares_replicas for one in layouts)


def _told(
    members: Mapping[str, Member] | None,
    descriptions: _Descriptions,
    exports: Sequence[Export],
    unplanned: str | None,
    context: Context,
) -> JSON:
    """What a rank tells of what it saves: digests that are equal exactly where two ranks save the same.

    Notes may differ: on which device an array of one device was is said by each rank in its own way.
    """
    names = None if members is None else [[name, member.kind, member.processes] for name, member in members.items()]
    exported = [
        [runtime_of(context).registry.layout(export.layout).name, repr(path_keys(export.subtree))]
        for export in exports
        if isinstance(export, Export)
    ]
    trees = {str(number): tree_digest(description) for number, description in _common_trees(descriptions)}
    return {"names": _digest([names, exported]), "trees": trees, "unplanned": unplanned}


def _common_trees(descriptions: _Descriptions) -> Iterator[tuple[int, TreeDescription]]:
    """The trees that all ranks save together, with the numbers of their parts."""
    for number, description in enumerate(descriptions):
        if isinstance(description, TreeDescription) and not description.own:
            yield number, description


def tree_digest(description: TreeDescription) -> str:
    """Equal for two ranks exactly where they save the same tree, and hold the same of its arrays; notes may differ."""
    return _digest([_without_notes(description.tree.to_json()), sorted(description.elsewhere)])


def _digest(document: JSON) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def _without_notes(tree: dict[str, JSON]) -> JSON:
    """A tree without its notes, and with each way of cutting arrays once: there are few, of as many boundaries as a job has shards."""
    extras: Any = tree["extras"]
    cuts: dict[Any, int] = {}
    kept = {}
    for leaf, extra in extras.items():
        kept[leaf] = dict(extra)
        if "cuts" in extra:
            kept[leaf]["cuts"] = cuts.setdefault(extra["cuts"], len(cuts))
    columns = {name: column for name, column in tree.items() if name not in ("notes", "note")}
    return {**columns, "extras": kept, "cuts": list(cuts)}


def _decide(payloads: Sequence[Any], descriptions: _Descriptions, *, exports: int) -> dict[str, Any]:
    """On the leader: what is the save, and which ranks are to tell it their trees, by number of the part.

    Raises:
        CheckpointError: if the ranks save other things.
        TreeMismatchError: if the trees are the same and an export is of what they do not have.
        UnsupportedLeafError: if no rank holds an array that all know of.
    """
    ids = [new_save_id() for _ in range(1 + exports)]
    decision = {"save_id": ids[0], "created": save_created(), "exports": ids[1:], "different": {}}
    if len(payloads) < 2:
        return decision
    others = [rank for rank, payload in enumerate(payloads) if payload["names"] != payloads[0]["names"]]
    if others:
        raise CheckpointError(
            f"the ranks {others} save other checkpointables or exports than rank 0 (names, order, kinds); every rank must give the "
            "same, and may give other trees under them. Nothing was written"
        )
    groups = {number: _groups(number, payloads) for number in payloads[0]["trees"]}
    decision["different"] = {
        number: [ranks[0] for ranks in by_tree] for number, by_tree in groups.items() if len(by_tree) > 1
    }
    for number, description in _common_trees(descriptions):
        if str(number) not in decision["different"]:
            _refuse_what_nobody_holds(description)
    unplanned = next((payload["unplanned"] for payload in payloads if payload["unplanned"] is not None), None)
    if unplanned is not None and not decision["different"]:
        raise TreeMismatchError(unplanned, [unplanned])
    return decision


def _refuse_what_nobody_holds(description: TreeDescription) -> None:
    """Refuse arrays that the leader only knows of; the other ranks have told the same."""
    if description.elsewhere:
        paths = [format_path(description.tree.paths[leaf]) for leaf in sorted(description.elsewhere)]
        more = f" and {len(paths) - 20} more" if len(paths) > 20 else ""
        raise UnsupportedLeafError(
            f"no rank holds any of {', '.join(paths[:20])}{more}: expected some of its devices, or processes of its mesh, to be in the "
            "job that saves; let the processes that hold it take part, or leave it out. Nothing was written"
        )


def _groups(number: str, payloads: Sequence[Any]) -> list[list[int]]:
    """The ranks that save the same tree of a part, by tree."""
    ranks: dict[str, list[int]] = {}
    for rank, payload in enumerate(payloads):
        ranks.setdefault(payload["trees"][number], []).append(rank)
    return list(ranks.values())


def _unite(
    agreement: Agreement, descriptions: _Descriptions, senders: Mapping[str, Sequence[int]], payloads: Sequence[Any]
) -> _Descriptions:
    """Let every rank have the union of all trees of each part of which they have different ones.

    Of the ranks that have the same tree one tells it to the leader, so that what is told does not grow with the job.

    Raises:
        TreeMismatchError: on the leader, if trees cannot be united; RankFailedError with its text on the others.
    """
    own = dict(_common_trees(descriptions))
    with agreement.stage("trees", meaning=NOTHING_COMMITTED) as stage:
        stage.payload = {
            number: [
                own[int(number)].tree.to_json(),
                sorted(own[int(number)].elsewhere),
                sorted(leaves_of_each_process(own[int(number)].flat)),
            ]
            for number, ranks in senders.items()
            if agreement.rank in ranks
        }
    told_trees: Sequence[Any] = stage.payloads

    def unite() -> dict[str, str]:
        united = {}
        for number, ranks in senders.items():
            trees, elsewhere, may_differ = zip(*[told_trees[rank][number] for rank in ranks], strict=True)
            found = [TreeMetadata.from_json(tree) for tree in trees]
            description = descriptions[int(number)]
            assert isinstance(description, TreeDescription)  # only trees are told
            with naming(description.name):
                tree = unite_trees(
                    found,
                    _groups(number, payloads),
                    size=agreement.size,
                    elsewhere=elsewhere,
                    may_differ=may_differ,
                )
                description.layout.check(tree, agreement.size)
            united[number] = json.dumps(tree.to_json())
        return united

    told = agreement.lead("union", unite)
    made = list(descriptions)
    with agreement.stage("united", meaning=NOTHING_COMMITTED):
        for number, encoded in told.items():
            description = made[int(number)]
            assert isinstance(description, TreeDescription)
            union = TreeMetadata.from_json(json.loads(encoded))
            with naming(description.name):
                made[int(number)] = description.within(union, rank=agreement.rank, size=agreement.size)
    return made
