"""Prepare a save: describe values and target, agree with other ranks, refuse what cannot be saved. Writes nothing."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

import xxhash

from ckptcore.commit.location import Location, resolve_location
from ckptcore.commit.root import Member, Root, SaveOrder, check_name, new_save_id
from ckptcore.commit.stored_root import next_order, read_root, refuse_inside, refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError, UnsupportedVersionError
from ckptcore.events import Recording
from ckptcore.job.agreement import Agreement
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.tree import JSON, format_path
from ckptcore.plugins import Plugins
from ckptcore.protocols import Layout, SaveStrategy
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import PartDescription, describe_part, naming
from ckptcore.saving.requests import (
    NOTHING_COMMITTED,
    CommitInfo,
    CommitTarget,
    OneTree,
    Save,
    SaveDraft,
    SaveRequest,
    foreign_checkpoints,
)
from ckptcore.saving.tree_descriptions import TreeDescription
from ckptcore.tree.flattening import per_process_leaves, per_process_objects

_Descriptions: TypeAlias = Sequence[PartDescription]

_MOST_DIFFERENT: Final = 32
"""Limit of ranks that send the digests of their arrays because these differ. An error names so many."""


def prepare_save(request: SaveRequest, context: Context, recording: Recording, agreement: Agreement) -> Save:
    """Describe the values and the target of a save, and refuse values that cannot be saved. On every rank.

    Writes nothing.

    Raises:
        UnsupportedLeafError, UnsupportedKeyError, NameCollisionError: the values cannot be saved.
        CheckpointExistsError, InvalidLocationError: the target must not be replaced, or is not a valid location.
        ValueError, TypeError: invalid metadata, metrics, step, epoch or strategy.
        BackgroundSaveError: the error of an earlier save of this process was not retrieved. In a job, on every rank.
    """
    runtime, size, strategy = runtime_of(context), agreement.size, request.strategy
    digests: Mapping[str, Mapping[str, int]] = {}
    with agreement.stage("describe", meaning=NOTHING_COMMITTED) as stage:
        runtime.saves.raise_unnoticed()
        info = request.notes.info()
        recording.step = info.progress.get("step")
        overwrite = request.destination.overwrite
        location = resolve_location(request.destination.location, runtime.storages, to_write=True)
        target = CommitTarget(location, overwrite, request.hooks.before_commit)
        descriptions = _describe_parts(request, context, agreement)
        if not isinstance(request.values, OneTree):
            info = info._replace(members={one.name: one.member(size) for one in descriptions})
        order = SaveOrder()
        if agreement.rank == 0:
            _refuse_target(request, target, info, context)
            if request.hooks.order is not None:
                order = request.hooks.order()
            elif overwrite:
                order = next_order(target.location, overwrite)
        if size > 1:
            from ckptcore.saving.replica_digests import replica_digests  # needed only in a job

            common = _common_trees(descriptions)
            digests = {name: replica_digests(one, agreement.rank, size) for name, one in common.items()}
            stage.payload = _digests(info.members, descriptions, strategy, digests)
    payloads = stage.payloads
    decided = agreement.lead("save", lambda: _decide(payloads, descriptions, order, has_others=keeps_others(target)))
    recording.save_id = decided["save_id"]
    if decided["different"]:
        descriptions = _merge_trees(agreement, descriptions, digests, decided["different"], payloads)
    if decided["own_names"] and info.members is None:
        (one,) = descriptions
        descriptions = [one._replace(layout=one.layout.with_own_names(decided["save_id"]) or one.layout)]
    info = info._replace(save_id=decided["save_id"], created=decided["created"], order=SaveOrder(*decided["order"]))
    save = Save(target, info, (), strategy, agreement, recording, context)
    if (workers := runtime.workers()) is not None:
        strategy = workers.save_strategy(strategy)
    return strategy.prepare(SaveDraft(save, descriptions))


def _describe_parts(request: SaveRequest, context: Context, agreement: Agreement) -> _Descriptions:
    """Describe the values, in the order of the request."""
    registry = runtime_of(context).registry
    if (workers := runtime_of(context).workers()) is not None:
        registry = registry.wrapping(workers.leaves_to_save)
    layout, placeholders = registry.layout(request.layout), request.strategy.takes_placeholders
    if isinstance(request.values, OneTree):
        values: Mapping[str, object] = {"": request.values.state}
    elif placeholders:
        raise ValueError(f"strategy={request.strategy!r} is for one tree, not for checkpointables. Nothing was written")
    else:
        values = dict(request.values)
        for name in values:
            check_name(name)
    shared = agreement.size > 1 and share_replicas(layout, request.strategy, registry)
    # Every process of a job uses the same order, because `state_dict` may be collective.
    by_name = {
        name: describe_part(
            name,
            values[name],
            layout,
            registry,
            rank=agreement.rank,
            size=agreement.size,
            replicas=context.job.replicas if shared else None,
            placeholders=placeholders,
            merged=request.strategy.merges_keys,
        )
        for name in sorted(values)
    }
    descriptions = [by_name[name] for name in values]
    if agreement.size > 1 and context.job.replicas.objects == "refuse":
        for description in _common_trees(descriptions).values():
            refuse_per_process_objects(description, agreement.size)
    return descriptions


def _refuse_target(request: SaveRequest, target: CommitTarget, info: CommitInfo, context: Context) -> None:
    """Refuse a location with a checkpoint that may not be replaced. On the leader."""
    if request.hooks.allowed is not None:
        request.hooks.allowed()
    refuse_inside(target.location)
    target.location.commit_method.refuse_place(target.location)
    if not request.strategy.checks_target:
        refuse_to_replace(target.location, target.overwrite, foreign_checkpoints(context))
    if keeps_others(target):
        _refuse_fixed_names(target.location, runtime_of(context).registry.layout(request.layout), info)


def _refuse_fixed_names(location: Location, layout: Layout, info: CommitInfo) -> None:
    """Refuse to replace files of fixed names while other files stay, as far as they are known before the save writes.

    The commit refuses the same for all names.

    Raises:
        CheckpointExistsError
    """
    names = {name.removesuffix("/") for name in location.store.list_names()}
    taken = sorted(names & info.checkpoint_info.members.keys())
    if info.members is None and layout.with_own_names("tag") is None:
        with suppress(CorruptCheckpointError, UnsupportedVersionError):
            root = read_root(location.store)
            taken = sorted(root.objects)[:1] if isinstance(root, Root) and root.layout == layout.name else []
    if taken:
        from ckptcore.commit.overwriting import fixed_names  # only errors need it

        raise fixed_names(location.display, taken)


def save_created() -> str:
    """Return the current time in the format of roots: ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def refuse_per_process_objects(description: TreeDescription, size: int) -> None:
    """Refuse per-process objects in a shared tree, because the checkpoint would store only one of them.

    Equal objects are refused too, because they may differ at a later save of the same job.
    """
    found = [
        f"{format_path(path)} is a {type(thing).__module__}.{type(thing).__qualname__}"
        for path, thing in per_process_objects(description.flat.shape)
    ]
    if found:
        where = f"in {description.name!r}: " if description.name else ""
        more = f"; and {len(found) - 20} more" if len(found) > 20 else ""
        raise UnsupportedLeafError(
            f"{where}{'; '.join(found[:20])}{more}: every process has its own, and a tree that {size} processes save "
            "together stores only one. To store one for each rank, wrap it in PerProcess(...), or save it as a "
            "separate name in save_checkpointables. To store all shards and otherwise the lowest rank's state, as "
            "torch.distributed.checkpoint does, save with "
            'Context(job=JobOptions(replicas=ReplicaOptions(objects="lowest_rank"))). Nothing was written'
        )


def share_replicas(layout: Layout, strategy: SaveStrategy[SaveDraft, Save], registry: Plugins) -> bool:
    """Return True if every layout lets any replica write a box, including the layouts of further saves."""
    layouts = [layout, *map(registry.layout, strategy.layouts)]
    return all(one.capabilities.any_replica_writes for one in layouts)


def _digests(
    members: Mapping[str, Member] | None,
    descriptions: _Descriptions,
    strategy: SaveStrategy[SaveDraft, Save],
    arrays: Mapping[str, Mapping[str, int]],
) -> JSON:
    """Return digests of the names, trees and arrays of this rank. Digests are equal only if names and trees are.

    Ignores notes: each rank names the device of an array differently.
    """
    names = None if members is None else [[name, member.kind, member.processes] for name, member in members.items()]
    trees = {name: tree_digest(description) for name, description in _common_trees(descriptions).items()}
    of_arrays = {name: _digest(dict(digests)) for name, digests in arrays.items()}
    return {"names": _digest(names), "strategy": strategy.signature, "trees": trees, "arrays": of_arrays}


def _common_trees(descriptions: _Descriptions) -> dict[str, TreeDescription]:
    """Return the trees that all ranks save together, by name."""
    return {one.name: one for one in descriptions if isinstance(one, TreeDescription) and not one.own}


def tree_digest(description: TreeDescription) -> str:
    """Return a digest that is equal for two ranks only if they save the same tree and hold boxes of the same arrays.

    Ignores notes.
    """
    return _digest([_without_notes(description.tree.to_json()), sorted(description.holders.remote_leaves)])


def _digest(document: JSON) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


def _without_notes(tree: dict[str, JSON]) -> JSON:
    """Return a tree without notes. Arrays refer to cuts by number: many arrays share cuts, which may be long."""
    extras: Any = tree["extras"]
    cuts: dict[Any, int] = {}
    compact = {}
    for leaf, extra in extras.items():
        compact[leaf] = dict(extra)
        if "cuts" in extra:
            compact[leaf]["cuts"] = cuts.setdefault(extra["cuts"], len(cuts))
    columns = {name: column for name, column in tree.items() if name not in ("notes", "note")}
    return {**columns, "extras": compact, "cuts": list(cuts)}


def keeps_others(target: CommitTarget) -> bool:
    """Return True if a save moves its objects into an existing directory with other files. On the leader."""
    location, overwrite = target.location, target.overwrite
    return (
        overwrite == "keep-other-files"
        and location.commit_method.replaces_atomically
        and bool(location.store.list_names())
    )


def _decide(
    payloads: Sequence[Any], descriptions: _Descriptions, order: SaveOrder, *, has_others: bool
) -> dict[str, Any]:
    """Choose the id and the time of the save, and for each tree that differs, the ranks that send it. On the leader.

    With `has_others`, objects get names of their own, if the layout supports that.

    Raises:
        CheckpointError: the ranks save different checkpointables or further checkpoints.
        UnsupportedLeafError: no rank holds an array that all ranks describe.
    """
    decision: dict[str, Any] = {"save_id": new_save_id(), "created": save_created(), "different": {}}
    decision["own_names"] = has_others
    decision["order"] = list(order)
    if len(payloads) < 2:
        return decision
    for same, kind in (("names", "checkpointables (names, order, kinds)"), ("strategy", "further checkpoints")):
        others = [rank for rank, payload in enumerate(payloads) if payload[same] != payloads[0][same]]
        if others:
            found = f": {payloads[others[0]][same]!r} and {payloads[0][same]!r}" if same == "strategy" else ""
            raise CheckpointError(
                f"the ranks {others} and rank 0 save different {kind}{found}. Save the same ones on every rank; only "
                "the trees may differ. Nothing was written"
            )
    for name, description in _common_trees(descriptions).items():
        groups = _groups(name, payloads)
        senders = [ranks[0] for ranks in groups]
        others = [ranks[0] for ranks in _groups(name, payloads, "arrays") if ranks[0] not in senders]
        if len(groups) == 1:
            _refuse_unheld_arrays(description)
        if len(groups) > 1 or others:
            decision["different"][name] = [*senders, *others[:_MOST_DIFFERENT]]
    return decision


def _refuse_unheld_arrays(description: TreeDescription) -> None:
    """Refuse arrays of which the leader holds no elements. All ranks have equal digests, so no rank holds any."""
    if description.holders.remote_leaves:
        paths = [format_path(description.tree.paths[leaf]) for leaf in sorted(description.holders.remote_leaves)]
        more = f" and {len(paths) - 20} more" if len(paths) > 20 else ""
        raise UnsupportedLeafError(
            f"{', '.join(paths[:20])}{more}: no process of this job holds any shard. Save from the processes that "
            "own the devices or belong to the mesh, or remove it from the state. Nothing was written"
        )


def _groups(name: str, payloads: Sequence[Any], *further: str) -> list[list[int]]:
    """Return the groups of ranks that have the same tree under a name, and the same `further` digests."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, payload in enumerate(payloads):
        ranks.setdefault(tuple([payload[digest][name] for digest in ("trees", *further)]), []).append(rank)
    return list(ranks.values())


def _merge_trees(
    agreement: Agreement,
    descriptions: _Descriptions,
    digests: Mapping[str, Mapping[str, int]],
    senders: Mapping[str, Sequence[int]],
    payloads: Sequence[Any],
) -> _Descriptions:
    """Replace trees that differ between ranks by their union, on every rank.

    One rank of each group with equal trees and digests of arrays sends them to the leader, so that messages do not grow
    with the job.

    Raises:
        TreeMismatchError: on the leader, if trees cannot be merged, or arrays differ that must be equal. Other ranks
            raise RankFailedError with its text.
    """
    own = _common_trees(descriptions)
    with agreement.stage("trees", meaning=NOTHING_COMMITTED) as stage:
        stage.payload = {
            name: [
                own[name].tree.to_json(),
                sorted(own[name].holders.remote_leaves),
                sorted(per_process_leaves(own[name].flat)),
                digests[name],
            ]
            for name, ranks in senders.items()
            if agreement.rank in ranks
        }
    sent: Sequence[Any] = stage.payloads

    def merge() -> dict[str, str]:
        from ckptcore.tree.merge import merge_trees, refuse_different_arrays  # needed only if ranks differ

        merged = {}
        for name, ranks in senders.items():
            received = {rank: sent[rank][name] for rank in ranks}
            trees = {rank: TreeMetadata.from_json(tree) for rank, (tree, *_) in received.items()}
            groups = _groups(name, payloads)
            first = [received[ranks[0]] for ranks in groups]
            with naming(name):
                tree = merge_trees(
                    [trees[ranks[0]] for ranks in groups],
                    groups,
                    size=agreement.size,
                    remote_leaves=[remote_leaves for _, remote_leaves, _, _ in first],
                    may_differ=[may_differ for _, _, may_differ, _ in first],
                )
                alike = [ranks for ranks in _groups(name, payloads, "arrays") if ranks[0] in trees]
                refuse_different_arrays(
                    [trees[ranks[0]] for ranks in alike], alike, [received[ranks[0]][3] for ranks in alike]
                )
                own[name].layout.check(tree, agreement.size)
            merged[name] = json.dumps(tree.to_json())
        return merged

    merged = agreement.lead("union", merge)
    with agreement.stage("united", meaning=NOTHING_COMMITTED):
        for name, encoded in merged.items():
            union = TreeMetadata.from_json(json.loads(encoded))
            with naming(name):
                own[name] = own[name].within(union, rank=agreement.rank, size=agreement.size)
    return [own.get(one.name, one) for one in descriptions]
