"""Preparing a save: what is to be written and where, looked at and refused where it cannot be. Nothing is written here."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import xxhash

from ckptcore.agreement import Agreement
from ckptcore.commit import refuse_to_replace
from ckptcore.context import Context
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from ckptcore.events import Recording
from ckptcore.exporting import PlannedExport, PreparedExport, plan_exports
from ckptcore.flattening import of_each_process
from ckptcore.locations import resolve_location
from ckptcore.model.tree import JSON, format_path
from ckptcore.parts import Part, PartDescription, TreeDescription, describe_part
from ckptcore.persisting import NOTHING_COMMITTED, Described, fail_everywhere
from ckptcore.root import Member, check_name, new_save_id
from ckptcore.save_requests import OneTree, SaveRequest, check_custom, check_metrics, check_progress

__all__ = ["PreparedSave", "prepare_save", "save_created"]

_Descriptions: TypeAlias = Sequence[PartDescription]


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """A save that can go ahead.

    Attributes:
        described: the checkpoint.
        descriptions: what each of its parts is. They hold the state: to be let go of once it is captured.
        exports: the further checkpoints of the same arrays.
    """

    described: Described
    descriptions: _Descriptions
    exports: Sequence[PreparedExport]

    @property
    def described_parts(self) -> Sequence[tuple[Part, PartDescription]]:
        """Each part with what it is."""
        return tuple(zip(self.described.parts, self.descriptions, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of arrays that this process writes."""
        all_described = [self.described, *(export.described for export in self.exports)]
        return sum(
            item.spec.nbytes for described in all_described for part in described.parts for item in part.plan.items
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
        context.saves.raise_unnoticed()
        chosen = context.registry.layout(request.layout)
        custom = check_custom(request.custom)
        metrics = check_metrics(request.metrics)
        progress = check_progress(request)
        recording.step = progress.get("step")
        values = {"": request.values.state} if isinstance(request.values, OneTree) else dict(request.values)
        location = resolve_location(
            request.location, context.registry, durable=context.durability == "full", config=context.storage
        )
        if composite:
            for name in values:
                check_name(name)
        descriptions = [
            describe_part(name, value, chosen, context.registry, rank=rank, size=size) for name, value in values.items()
        ]
        if size > 1:
            _refuse_what_differs(values, descriptions, size)
        members = (
            {name: part.member(size) for name, part in zip(values, descriptions, strict=True)} if composite else None
        )
        if rank == 0:
            if request.allowed is not None:
                request.allowed()
            refuse_to_replace(location, request.overwrite)
        planned = plan_exports(request.exports, location, list(values), descriptions, context, size=size)
        if rank == 0:
            for export in planned:
                refuse_to_replace(export.location, request.overwrite)
        if size > 1:
            stage.payload = _digest(members, descriptions, planned)
    payloads = stage.payloads
    decided = agreement.lead("save", lambda: _same_trees(payloads, exports=len(planned)))
    save_id, created = decided["save_id"], decided["created"]
    recording.save_id = save_id
    parts = []
    try:
        for name, description in zip(values, descriptions, strict=True):
            member = description.member(size)
            directory = member.directory(name, rank) if composite else ""
            own = member.processes is not None
            parts.append(Part(directory, description.layout, description.plan(rank, size, save_id), own))
    except BaseException as error:  # noqa: BLE001  # told to the other ranks, then raised
        fail_everywhere(agreement, "claim", error)
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
    )
    exports = [
        export.prepare(described, export_id, agreement.part(f"export-{number}"))
        for number, (export, export_id) in enumerate(zip(planned, decided["exports"], strict=True))
    ]
    return PreparedSave(described, descriptions, exports)


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
                "save together only one would be stored; it goes under a name of its own in save_checkpointables. "
                "Nothing was written"
            )


def _digest(
    members: Mapping[str, Member] | None, descriptions: _Descriptions, exports: Sequence[PlannedExport]
) -> JSON:
    """Equal on two ranks exactly if they save the same names, and the same trees and exports where they save them together.

    Notes may differ: on which device an array of one device was is said by each rank in its own way.
    """
    common = [
        _without_notes(description.tree.to_json())
        for description in descriptions
        if isinstance(description, TreeDescription) and not description.own
    ]
    names = None if members is None else [[name, member.kind, member.processes] for name, member in members.items()]
    exported = [[export.layout.name, export.part, list(export.subtree.sources)] for export in exports]
    return xxhash.xxh3_128_hexdigest(json.dumps([names, common, exported], sort_keys=True).encode())


def _without_notes(tree: dict[str, JSON]) -> JSON:
    extras: Any = tree["extras"]
    kept = {leaf: {name: value for name, value in extra.items() if name != "notes"} for leaf, extra in extras.items()}
    columns = {name: column for name, column in tree.items() if name not in ("notes", "note")}
    return {**columns, "extras": kept}


def _same_trees(digests: Sequence[JSON], *, exports: int) -> dict[str, Any]:
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise CheckpointError(
            f"the ranks {different} describe another tree than rank 0 (other keys, shapes, dtypes, values or exports); every rank "
            "must save the same tree; what differs from process to process goes under a name of its own, in PerProcess(...). "
            "Nothing was written"
        )
    ids = [new_save_id() for _ in range(1 + exports)]
    return {"save_id": ids[0], "created": save_created(), "exports": ids[1:]}
