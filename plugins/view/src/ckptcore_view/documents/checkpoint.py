"""Documents about a checkpoint: origin, files, timeline and checkpointables; its tree, and a summary."""

from __future__ import annotations

import hashlib
import heapq
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ckptcore_tools.formatting import format_layout, format_leaf_type
from ckptcore_tools.locations import describe_and_check

from ckptcore.context import Context
from ckptcore.events import Event, readable_events
from ckptcore.inspection.completeness import FileCheck, Problem
from ckptcore.model import (
    JSON,
    ArrayRecord,
    Attribute,
    TreeMetadata,
    TreePath,
    column_summary,
    format_path,
    unreadable_error,
)
from ckptcore.opening.checkpoint import Checkpoint, CompositeCheckpoint, Origin
from ckptcore.opening.members import member_opener, present_members
from ckptcore.redaction import redacted, redacted_location
from ckptcore.results import CheckpointMetadata
from ckptcore_view.documents.request import Request, number_to_json
from ckptcore_view.open_tree import OpenTree
from ckptcore_view.viewed import Viewed

_MAX_FILES: Final = 2_000
_MAX_EVENTS: Final = 500
_MAX_PROBLEMS: Final = 200
_MAX_PLACES: Final = 64
"""Limit of the links to per-process states of one checkpointable."""
_MAX_VALUE_CHARACTERS: Final = 200

_LARGEST: Final = 8
"""Number of arrays in a summary."""

_OPTIMIZER: Final = frozenset(
    {
        "optimizer", "optimizers", "optim", "opt_state", "optimizer_state", "optimizer_states", "exp_avg",
        "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "mu", "nu", "master_params",
    }
)  # fmt: skip
"""Names of optimizer states in PyTorch, Optax, DeepSpeed and Lightning, in lower case."""


def summary_of(name: str, tree: TreeMetadata, place: str = "", *, inside: str = "") -> dict[str, Any]:
    """Return the arrays, parameters and bytes of each dtype and role, and the largest arrays. Ties are counted once.

    Args:
        name: the name of the checkpointable; empty for a checkpoint of one tree.
        tree: its tree.
        place: its place in the checkpoint.
        inside: the name of the directory, such as ``optimizer``, if a checkpointable is opened alone.
    """
    counts: dict[tuple[int, bool], int] = {}
    records: dict[int, ArrayRecord] = {}  # equal arrays share a record, so most are found by identity
    sizes: dict[int, int] = {}
    above: dict[TreePath, bool] = {}
    is_inside = _is_of_optimizer((name, inside))
    aliases, paths = tree.aliases, tree.paths
    sized_leaves: list[tuple[int, int]] = []  # bytes and -leaf, so that the first of equal leaves wins
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord) or leaf in aliases:
            continue
        path, number = paths[leaf], id(record)
        is_state = above.get(path[:-1])
        if is_state is None:
            is_state = above[path[:-1]] = is_inside or _is_of_optimizer(path[:-1])
        is_state = is_state or _is_of_optimizer(path[-1:])
        if number not in records:
            records[number], sizes[number] = record, record.spec.nbytes
        counts[number, is_state] = counts.get((number, is_state), 0) + 1
        sized_leaves.append((sizes[number], -leaf))
    dtypes: dict[str, list[int]] = {}
    roles: dict[str, list[int]] = {}
    for (number, is_state), count in counts.items():
        spec = records[number].spec
        totals = (count, count * spec.size, count * spec.nbytes)
        _add(dtypes, spec.dtype, totals)
        _add(roles, "optimizer" if is_state else _role(spec.dtype), totals)
    largest = [-number for _, number in heapq.nlargest(_LARGEST, sized_leaves)]
    return {
        "dtypes": dtypes,
        "roles": roles,
        "largest": [
            {
                "part": name,
                "place": place,
                "leaf": leaf,
                "path": format_path(tree.paths[leaf]),
                "type": str(tree.leaves[leaf].spec),  # type: ignore[union-attr]  # it is an array
                "nbytes": tree.leaves[leaf].spec.nbytes,  # type: ignore[union-attr]  # it is an array
            }
            for leaf in largest
        ],
    }


def merged_summary(summaries: Sequence[Mapping[str, Any]]) -> JSON:
    """Return the summary of several trees together."""
    merged: dict[str, Any] = {"dtypes": {}, "roles": {}}
    for kind, totals in merged.items():
        for summary in summaries:
            for key, counts in summary[kind].items():
                _add(totals, key, counts)
    arrays = [array for summary in summaries for array in summary["largest"]]
    merged["largest"] = sorted(arrays, key=operator.itemgetter("nbytes"), reverse=True)[:_LARGEST]
    return merged


def _add(totals: dict[str, list[int]], key: str, counts: Sequence[int]) -> None:
    before = totals.get(key, (0, 0, 0))
    totals[key] = [old + new for old, new in zip(before, counts, strict=True)]


def _role(dtype: str) -> str:
    """Return the role of an array outside of optimizers. Parameters have floating point or complex dtypes."""
    return "parameters" if "float" in dtype or dtype.startswith("complex") else "other"


def _is_of_optimizer(path: TreePath) -> bool:
    for key in path:
        text = key.name if isinstance(key, Attribute) else key
        if isinstance(text, str) and not _OPTIMIZER.isdisjoint(text.lower().split(".")):
            return True
    return False


def checkpoint_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return the origin, files and timeline of a checkpoint. Parameter: ``at``, its place."""
    request.check_wanted()
    place = request.text("at")
    composite = viewed.members(place)
    if composite is None:
        return viewed.read_current(place, lambda open_tree: _tree_checkpoint(open_tree, viewed.context))
    checkpoint, files = describe_and_check(viewed.locate(place), viewed.context)
    return {**_composite_checkpoint(composite, checkpoint), **_problems(files.problems)}


def _tree_checkpoint(open_tree: OpenTree, context: Context) -> Mapping[str, JSON]:
    checkpoint, root, outline = open_tree.checkpoint, open_tree.checkpoint.root, open_tree.outline
    location = open_tree.location
    files = FileCheck(context).check(checkpoint, location, member_opener(checkpoint, location, context))
    data = checkpoint.version.root
    timeline = None if root is None else root.timeline
    return {
        **_origin(checkpoint.origin, location),
        "save_id": None if root is None else root.save_id,
        "digest": f"sha256:{hashlib.sha256(data).hexdigest()}" if root and isinstance(data, bytes) else None,
        "kind": "files" if checkpoint.is_files else "tree",
        "layout": "files"
        if checkpoint.is_files
        else format_layout(checkpoint.layout.name, checkpoint.tree, None if root else checkpoint.origin.writer),
        "bases": [base.path for base in root.references.bases] if root else [],
        "totals": {
            "arrays": outline.arrays[0],
            "values": sum(not isinstance(record, ArrayRecord) for record in checkpoint.tree.leaves),
            "parameters": outline.parameters[0],
            "nbytes": outline.nbytes[0],
        },
        "summary": summary_of("", checkpoint.tree, inside=location.rstrip("/").rpartition("/")[2]),
        "files": _files(checkpoint),
        **_problems(files.problems),
        "timeline": _timeline([] if timeline is None else readable_events(timeline)),
    }


def _origin(origin: Origin | CheckpointMetadata, location: str) -> dict[str, JSON]:
    return {
        "location": redacted_location(location),
        "writer": origin.writer,
        "created": origin.created,
        "custom": json.dumps(dict(origin.custom), ensure_ascii=False, indent=2) if origin.custom else None,
        "metrics": {name: number_to_json(value) for name, value in origin.metrics.items()},
    }


def _problems(problems: Sequence[Problem]) -> dict[str, JSON]:
    shown = [[problem.key, redacted(problem.message)] for problem in problems[:_MAX_PROBLEMS]]
    return {"problem_count": len(problems), "problems": shown}


def _files(checkpoint: Checkpoint) -> JSON:
    """Return the largest files, the number of all files, and their total size.

    A checkpoint of other software has no records of its files, so the result has its first files by name, and no total
    size. Sizes are known only if the storage lists them, as object stores do, or if the checkpoint is one file.
    """
    records = sorted(checkpoint.objects.values(), key=lambda record: -record.size)
    if not records and checkpoint.root is None:
        sizes = _foreign_sizes(checkpoint)
        shown = sorted(sizes)[:_MAX_FILES]
        return {"count": len(sizes), "nbytes": None, "files": [[name, sizes[name], False] for name in shown]}
    return {
        "count": len(records),
        "nbytes": sum(record.size for record in records),
        "files": [[record.key, record.size, bool(record.checksums)] for record in records[:_MAX_FILES]],
    }


def _foreign_sizes(checkpoint: Checkpoint) -> Mapping[str, int | None]:
    """Return the files of a checkpoint of other software, with sizes in bytes, or None for unknown sizes."""
    location, version = checkpoint.location, checkpoint.version
    if version.is_object:
        # The checkpoint is one file. The store is its directory, which may contain other files.
        return {location.name: version.nbytes}
    return location.store.list_sizes() or dict.fromkeys(location.store.list())


def _timeline(events: Sequence[Event]) -> JSON:
    """Return the longest events, in the order in which they began. Times are in seconds."""
    longest = sorted(events, key=lambda event: -event.seconds)[:_MAX_EVENTS]
    first = min((event.began for event in events), default=0.0)
    return [
        {
            "phase": event.phase,
            "rank": event.rank,
            "began": event.began - first,
            "seconds": event.seconds,
            "nbytes": event.nbytes,
            "error": event.error,
        }
        for event in sorted(longest, key=lambda event: (event.began, -event.seconds, event.rank))
    ]


def _composite_checkpoint(composite: CompositeCheckpoint, metadata: CheckpointMetadata) -> Mapping[str, JSON]:
    directories = present_members(composite)
    return {
        **_origin(metadata, composite.location.display),
        "save_id": metadata.save_id,
        "digest": metadata.digest,
        "kind": "checkpointables",
        "checkpointables": [
            _checkpointable(name, part, metadata.checkpointables.processes.get(name), directories.get(name, ()))
            for name, part in metadata.checkpointables.items()
        ],
        "summary": merged_summary(
            [
                summary_of(name, part.tree, next(iter(directories.get(name, ())), ""))
                for name, part in metadata.checkpointables.items()
            ]
        ),
        "deleted": list(metadata.checkpointables.deleted),
        "unreadable": {name: redacted(reason) for name, reason in metadata.checkpointables.unreadable.items()},
        "timeline": _timeline(metadata.timeline),
    }


def _checkpointable(
    name: str, metadata: CheckpointMetadata, processes: int | None, directories: Sequence[str]
) -> Mapping[str, JSON]:
    tied = metadata.tree.aliases
    arrays = [
        record
        for leaf, record in enumerate(metadata.tree.leaves)
        if isinstance(record, ArrayRecord) and leaf not in tied
    ]
    return {
        "name": name,
        "places": list(directories[:_MAX_PLACES]),
        "processes": processes,
        "kind": "files" if metadata.is_files else "tree",
        "layout": format_layout(metadata.layout, metadata.tree, metadata.writer if metadata.save_id is None else None),
        "arrays": len(arrays),
        "parameters": sum(record.spec.size for record in arrays),
        "nbytes": metadata.nbytes,
    }


def tree_document(viewed: Viewed, request: Request) -> Mapping[str, JSON]:
    """Return the rows of a tree in columns. Parameter: ``at``, its place."""
    return viewed.read_current(request.text("at"), lambda open_tree: _tree(open_tree, request))


def _tree(open_tree: OpenTree, request: Request) -> Mapping[str, JSON]:
    outline, tree = open_tree.outline, open_tree.tree
    types: dict[str, int] = {}
    known: dict[int, int] = {}  # equal arrays share a record, so most types are found by identity
    column: list[int] = []
    values: dict[str, JSON] = {}
    for row, leaf in enumerate(request.each(outline.leaves)):
        if leaf < 0:
            kind = outline.kinds.get(row, "")
            column.append(types.setdefault(kind, len(types)))
            continue
        record = tree.leaves[leaf]
        number = known.get(id(record))
        if number is None:
            number = known[id(record)] = types.setdefault(format_leaf_type(record), len(types))
        column.append(number)
        if not isinstance(record, ArrayRecord):
            error = unreadable_error(record)
            values[str(row)] = column_summary(record) or _value_text(record.value if error is None else str(error))
    return {
        "version": open_tree.version,
        "names": list(outline.names),
        "depths": list(outline.depths),
        "stops": list(outline.stops),
        "leaves": list(outline.leaves),
        "arrays": list(outline.arrays),
        "parameters": list(outline.parameters),
        "nbytes": list(outline.nbytes),
        "types": list(types),
        "type": column,
        "values": values,
        "tied": {str(leaf): format_path(tree.paths[target]) for leaf, target in tree.aliases.items()},
    }


def _value_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 1]}…"
