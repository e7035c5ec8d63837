"""What processes tell each other of a rehearsal, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ckptcore.model.arrays import Box
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.objects import CHECKSUM_BYTES, ObjectRecord
from ckptcore.model.transfer import Receipt, WriteItem
from ckptcore.model.tree import JSON
from ckptcore_tools.dry_run.plans import ExportPlan, MemoryPlan, ObjectPlan, ProcessPlan, RequestCounts, SavePlan
from ckptcore_tools.dry_run.writes import WrittenCheckpoint, WrittenProcess

__all__ = ["plan_from_json", "written_from_json", "written_to_json"]


def written_to_json(written: WrittenProcess) -> JSON:
    """What a process tells the leader."""
    return {
        "checkpoints": [_checkpoint_to_json(one) for one in written.checkpoints],
        "memory": asdict(written.memory),
        "untold": list(written.untold),
    }


def _checkpoint_to_json(written: WrittenCheckpoint) -> JSON:
    return {
        "receipts": [
            {
                "rank": receipt.rank,
                "items": [[item.leaf, [[box.start, box.stop] for box in item.boxes]] for item in receipt.items],
                "state": receipt.state,
                "objects": [
                    [record.key, record.size, len(record.checksums) // CHECKSUM_BYTES] for record in receipt.objects
                ],
            }
            for receipt in written.receipts
        ],
        "sizes": dict(written.sizes),
        "at_most": sorted(written.at_most),
        "about": sorted(written.about),
        "array_bytes": written.array_bytes,
        "boxes": written.boxes,
        "requests": asdict(written.requests),
    }


def written_from_json(told: Any, trees: Sequence[Sequence[TreeMetadata]]) -> WrittenProcess:
    """The inverse of `written_to_json`; `trees` are those that the processes write together, by checkpoint and part."""
    return WrittenProcess(
        checkpoints=[
            WrittenCheckpoint(
                receipts=[_receipt(*found) for found in zip(one["receipts"], of_one, strict=True)],
                sizes=one["sizes"],
                at_most=frozenset(one["at_most"]),
                about=frozenset(one["about"]),
                array_bytes=one["array_bytes"],
                boxes=one["boxes"],
                requests=RequestCounts(**one["requests"]),
            )
            for one, of_one in zip(told["checkpoints"], trees, strict=True)
        ],
        memory=MemoryPlan(**told["memory"]),
        untold=told["untold"],
    )


def _receipt(told: Any, tree: TreeMetadata) -> Receipt:
    items = []
    for leaf, boxes in told["items"]:
        record = tree.leaves[leaf]
        assert isinstance(record, ArrayRecord)  # plans have no other items
        items.append(WriteItem(leaf, record.spec, tuple([Box(tuple(start), tuple(stop)) for start, stop in boxes])))
    objects = [ObjectRecord(key, size, bytes(CHECKSUM_BYTES * blocks)) for key, size, blocks in told["objects"]]
    return Receipt(told["rank"], tuple(items), told["state"], tuple(objects))


def plan_from_json(told: Any) -> SavePlan:
    """The plan that the leader told: ``asdict`` of it."""
    exports = [
        ExportPlan(**{**export, "processes": _processes_from_json(export["processes"])}) for export in told["exports"]
    ]
    return SavePlan(
        **{
            **told,
            "processes": _processes_from_json(told["processes"]),
            "memory": tuple([MemoryPlan(**memory) for memory in told["memory"]]),
            "exports": tuple(exports),
            "untold": tuple(told["untold"]),
        }
    )


def _processes_from_json(told: Sequence[Any]) -> tuple[ProcessPlan, ...]:
    return tuple(
        [
            ProcessPlan(
                rank=process["rank"],
                array_bytes=process["array_bytes"],
                boxes=process["boxes"],
                objects=tuple([ObjectPlan(**planned) for planned in process["objects"]]),
                requests=RequestCounts(**process["requests"]),
            )
            for process in told
        ]
    )
