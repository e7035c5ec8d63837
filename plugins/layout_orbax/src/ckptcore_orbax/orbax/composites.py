"""Orbax checkpoints of several items: their members, and the default tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from ckptcore.model import JSON
from ckptcore.protocols import ReadStore
from ckptcore_orbax.orbax.items import (
    TEMPORARY,
    ItemKind,
    expect_commit,
    item_kind,
    kind_of_handler,
    names_in,
    random_key_form,
    without_other_file,
)
from ckptcore_orbax.orbax.json_files import expect_object, expect_type, parse_json
from ckptcore_orbax.orbax.markers import (
    DELETION_FILE,
    INDICATOR_FILE,
    METADATA_FILE,
    CheckpointFile,
    parse_checkpoint_file,
)

_METRICS: Final = "metrics"
_PREFERRED: Final = ("state", "default", "pytree", "params")
"""Names of the default tree, by priority. Orbax version 1 uses the first one, `CheckpointManager` the second."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A checkpoint of several items.

    Attributes:
        members: kind of each member by its name, which is its directory; ``other`` if only the software
            that saved it can read it. Sorted. Includes members that `_CHECKPOINT_METADATA` names but whose directory
            is missing.
        default_tree: the member that a load of one tree uses: the only tree, the only member, or the first tree that
            `_PREFERRED` names. None if there is no such member.
        writer: name of the software that wrote it.
        custom: the user's metadata. Metrics that are not numbers are here too, under ``metrics``.
        metrics: the user's metrics that are numbers.
        created: start time of the save, ISO 8601 in UTC, or None.
        lost: the members whose directory is missing or empty.
    """

    members: Mapping[str, ItemKind | Literal["other"]]
    default_tree: str | None
    writer: str
    custom: Mapping[str, JSON] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    created: str | None = None
    lost: Collection[str] = ()


def find_composite(store: ReadStore) -> Composite | None:
    """Return the composite in the store's directory; None if it is a single item or not an Orbax checkpoint.

    Everything may be hostile. A directory of steps is not a composite. A directory is a member if
    it contains Orbax files or if `_CHECKPOINT_METADATA` names it. Temporary directories, hidden directories and members
    whose deletion has begun are ignored, as in Orbax. At the end of a deletion, Orbax removes the name from
    `_CHECKPOINT_METADATA`, so a missing member that is still named was lost.

    Raises:
        CorruptCheckpointError: a metadata file is invalid.
        UncommittedCheckpointError: the save did not finish.
    """
    names = names_in(store, "")
    if item_kind(names) is not None or random_key_form(store, "", names) is not None:
        return None
    checkpoint_file = CheckpointFile()
    if METADATA_FILE in names:
        checkpoint_file = parse_checkpoint_file(store.get(METADATA_FILE), METADATA_FILE)
        if isinstance(checkpoint_file.handlers, str):
            return None
    marked = METADATA_FILE in names or INDICATOR_FILE in names
    deleted = _deleted(store) if DELETION_FILE in names else None
    handlers = checkpoint_file.handlers if isinstance(checkpoint_file.handlers, Mapping) else {}
    members: dict[str, ItemKind | Literal["other"]] = {}
    for name in sorted(name.removesuffix("/") for name in names if name.endswith("/")):
        if name == deleted or TEMPORARY in name or name.startswith("."):
            continue
        inside = without_other_file(store, name, frozenset(store.list_names(name)))
        if not marked and (METADATA_FILE in inside or name.isdigit()):
            return None  # a directory of steps
        kind, said = item_kind(inside), kind_of_handler(handlers.get(name, ""))
        if not inside:
            continue
        if kind is not None:
            members[name] = "array" if said == "array" else kind
        elif name in handlers:
            # The handler is needed to recognise a document whose name the program chose.
            members[name] = said if said in ("tree", "random key") else "other"
    lost = {name: kind_of_handler(handlers[name]) or "other" for name in handlers if name not in members}
    lost.pop(deleted or "", None)
    members = dict(sorted({**members, **lost}.items()))
    if not members or (not marked and "tree" not in members.values()):
        return None
    expect_commit(store, names)
    metrics, custom = dict(checkpoint_file.metrics), dict(checkpoint_file.custom)
    if members.get(_METRICS) == "json" and _METRICS in store.list_names(_METRICS):
        key = f"{_METRICS}/{_METRICS}"
        metrics.update(expect_object(parse_json(store.get(key), key), key, "metrics"))
        del members[_METRICS]
    other = {name: value for name, value in metrics.items() if not _is_number(value)}
    if other:
        custom.setdefault(_METRICS, other)
    return Composite(
        members,
        _default_tree(members),
        "Orbax" if INDICATOR_FILE in names else "Orbax (version 0)",
        custom,
        {name: value for name, value in metrics.items() if isinstance(value, int | float) and _is_number(value)},
        checkpoint_file.created,
        lost.keys(),
    )


def _is_number(value: JSON) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 1 << 63)


def _default_tree(members: Mapping[str, ItemKind | Literal["other"]]) -> str | None:
    trees = [name for name, kind in members.items() if kind == "tree"]
    if not trees and len(members) == 1:
        trees = [name for name, kind in members.items() if kind != "other"]
    if len(trees) == 1:
        return trees[0]
    return next((name for name in _PREFERRED if name in trees), None)


def _deleted(store: ReadStore) -> str:
    record = expect_object(parse_json(store.get(DELETION_FILE), DELETION_FILE), DELETION_FILE, "the file")
    return expect_type(record.get("checkpointable_name"), str, DELETION_FILE, "checkpointable_name")
