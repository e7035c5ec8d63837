"""Prepare a save: describe what is to be written and where, and refuse what cannot be. Writes nothing."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import xxhash

from ckptcore.commit.location import resolve_location
from ckptcore.commit.root import Member, check_name, new_save_id
from ckptcore.commit.target import refuse_inside, refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import JSON, format_path
from ckptcore.plugins import Plugins
from ckptcore.protocols import FurtherSaves, Layout, SaveStrategy
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import PartDescription, describe_part, naming
from ckptcore.saving.requests import (
    NOTHING_COMMITTED,
    OneTree,
    Save,
    SaveDraft,
    SaveRequest,
    Target,
    foreign_checkpoints,
)
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore.tree.flattening import leaves_of_each_process, of_each_process

__all__ = ["prepare_save", "save_created", "tree_digest"]

_Descriptions: TypeAlias = Sequence[PartDescription]


def prepare_save(request: SaveRequest, context: Context, recording: Recording, agreement: Agreement) -> Save:
    """Describe what is to be saved and where, and refuse what cannot be. On every rank; writes nothing.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError, CheckpointExistsError, InvalidLocationError
        ValueError, TypeError: for what is no metadata, metric, step or epoch.
        BackgroundSaveError: an earlier save failed unnoticed in this process; in a job on every rank.
    """
    runtime, size = runtime_of(context), agreement.size
    with agreement.stage("describe", meaning=NOTHING_COMMITTED) as stage:
        runtime.saves.raise_unnoticed()
        info = request.notes.info()
        recording.step = info.progress.get("step")
        durable = context.durability == "full"
        location = resolve_location(
            request.destination.place, runtime.registry, durable=durable, config=context.storage
        )
        target = Target(location, request.destination.overwrite, request.hooks.before_commit)
        if request.strategy.takes_placeholders and not isinstance(request.values, OneTree):
            raise ValueError(
                f"strategy={request.strategy!r} is for one tree, not for checkpointables. Nothing was written"
            )
        descriptions = _describe_parts(request, context, agreement)
        if not isinstance(request.values, OneTree):
            info = replace(info, members={one.name: one.member(size) for one in descriptions})
        if agreement.rank == 0:
            _refuse_target(request, target, context)
        if size > 1:
            stage.payload = _digests(info.members, descriptions, request.strategy)
    payloads = stage.payloads
    decided = agreement.lead("save", lambda: _decide(payloads, descriptions))
    recording.save_id = decided["save_id"]
    if decided["different"]:
        descriptions = _unite(agreement, descriptions, decided["different"], payloads)
    save = Save(
        target=target,
        info=replace(info, save_id=decided["save_id"], created=decided["created"]),
        parts=(),
        strategy=request.strategy,
        agreement=agreement,
        recording=recording,
        context=context,
    )
    return request.strategy.prepare(SaveDraft(save, descriptions))


def _describe_parts(request: SaveRequest, context: Context, agreement: Agreement) -> _Descriptions:
    """Describe what is to be saved, in the order that was given."""
    registry, executor = runtime_of(context).registry, runtime_of(context).workers()
    layout = registry.layout(request.layout)
    values = {"": request.values.state} if isinstance(request.values, OneTree) else dict(request.values)
    if not isinstance(request.values, OneTree):
        for name in values:
            check_name(name)
    shared = agreement.size > 1 or executor is not None
    replicas = context.job.replicas if shared and _share_replicas(layout, request.strategy, registry) else None
    # The same order on every process of a job, because `state_dict` may be collective.
    by_name = {
        name: describe_part(
            name,
            values[name],
            layout,
            registry,
            rank=agreement.rank,
            size=agreement.size,
            replicas=replicas,
            executor=executor,
            placeholders=request.strategy.takes_placeholders,
        )
        for name in sorted(values)
    }
    descriptions = [by_name[name] for name in values]
    if agreement.size > 1 and context.job.replicas.objects == "refuse":
        _refuse_what_differs(descriptions, agreement.size)
    return descriptions


def _refuse_target(request: SaveRequest, target: Target, context: Context) -> None:
    """Refuse a location whose checkpoint is not to be replaced. On the leader."""
    if request.hooks.allowed is not None:
        request.hooks.allowed()
    refuse_inside(target.location)
    if not request.strategy.checks_target:
        refuse_to_replace(target.location, target.overwrite, foreign_checkpoints(context))


def save_created() -> str:
    """Now, as the root of a checkpoint states it: ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _refuse_what_differs(descriptions: _Descriptions, size: int) -> None:
    """Refuse objects in shared trees of which every process has one of its own: one of them would be stored.

    Also where they are equal now, so that a job that could save once can save again.
    """
    for description in descriptions:
        if not isinstance(description, TreeDescription) or description.own:
            continue
        found = [
            f"{format_path(path)} is a {type(thing).__module__}.{type(thing).__qualname__}"
            for path, thing in of_each_process(description.flat.shape)
        ]
        if found:
            where = f"in {description.name!r}: " if description.name else ""
            more = f"; and {len(found) - 20} more" if len(found) > 20 else ""
            raise UnsupportedLeafError(
                f"{where}{'; '.join(found[:20])}{more}: every process has one of its own, and of a tree that {size} processes "
                "save together only one would be stored. To keep one for each rank, put it under a name of its own in "
                "save_checkpointables. To store all shards and otherwise the lowest rank's state, as "
                "torch.distributed.checkpoint does, save with "
                'Context(job=JobOptions(replicas=ReplicaOptions(objects="lowest_rank"))). Nothing was written'
            )


def _share_replicas(layout: Layout, strategy: SaveStrategy[SaveDraft, Save], registry: Plugins) -> bool:
    """Return whether processes may share what they all hold. Further saves have the boxes that each process writes for the save."""
    further = strategy.layouts if isinstance(strategy, FurtherSaves) else ()
    layouts = [layout, *map(registry.layout, further)]
    return all(one.capabilities.any_replica_writes for one in layouts)


def _digests(
    members: Mapping[str, Member] | None,
    descriptions: _Descriptions,
    strategy: SaveStrategy[SaveDraft, Save],
) -> JSON:
    """Digests of what this rank saves. They are equal on two ranks only if these save the same.

    Notes may differ: each rank names the device of an array in its own way.
    """
    names = None if members is None else [[name, member.kind, member.processes] for name, member in members.items()]
    trees = {str(number): tree_digest(description) for number, description in _common_trees(descriptions)}
    signature = strategy.signature if isinstance(strategy, FurtherSaves) else ""
    return {"names": _digest(names), "strategy": signature, "trees": trees}


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


def _decide(payloads: Sequence[Any], descriptions: _Descriptions) -> dict[str, Any]:
    """On the leader: what is the save, and which ranks are to tell it their trees, by number of the part.

    Raises:
        CheckpointError: if the ranks save other things.
        UnsupportedLeafError: if no rank holds an array that all know of.
    """
    decision: dict[str, Any] = {"save_id": new_save_id(), "created": save_created(), "different": {}}
    if len(payloads) < 2:
        return decision
    for same, kind in (("names", "checkpointables (names, order, kinds)"), ("strategy", "further checkpoints")):
        others = [rank for rank, payload in enumerate(payloads) if payload[same] != payloads[0][same]]
        if others:
            found = f": {payloads[others[0]][same]!r} and {payloads[0][same]!r}" if same == "strategy" else ""
            raise CheckpointError(
                f"the ranks {others} save other {kind} than rank 0{found}; every rank must give the same, and may give other trees "
                "under them. Nothing was written"
            )
    groups = {number: _groups(number, payloads) for number in payloads[0]["trees"]}
    decision["different"] = {
        number: [ranks[0] for ranks in by_tree] for number, by_tree in groups.items() if len(by_tree) > 1
    }
    for number, description in _common_trees(descriptions):
        if str(number) not in decision["different"]:
            _refuse_what_nobody_holds(description)
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
        from ckptcore.tree.merge import unite_trees  # only jobs whose ranks have different trees need it

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
