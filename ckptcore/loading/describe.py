"""What checkpoints say of themselves, without their arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptcore.commit.location import Place
from ckptcore.context import Context
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from ckptcore.events import Event
from ckptcore.loading.load import abstract_tree, is_files, transformed
from ckptcore.loading.members import is_deleted, open_member, present_members
from ckptcore.loading.opened import Opened, OpenedComposite
from ckptcore.loading.opening import open_either, open_names
from ckptcore.loading.tries import while_tree_unchanged, while_unchanged
from ckptcore.model.metadata import TreeMetadata
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.tree import JSON
from ckptcore.protocols import Transforms
from ckptcore.timelines import timeline_from_json

__all__ = [
    "CheckpointMetadata",
    "CheckpointablesMetadata",
    "describe_checkpoint",
    "describe_checkpointables",
    "describe_either",
]


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """What a checkpoint says of itself, without its arrays.

    Attributes:
        abstract: what can be passed to `load`, with no framework: a tree with `AbstractArray` for arrays, and small values themselves. None
            of files that an object wrote: they load as bytes.
        tree: the structure and a record of each leaf.
        layout: the name of its layout.
        created: when the save began, ISO 8601 in UTC; None where other software wrote it and does not say.
        writer: the software that wrote it.
        custom: metadata of the user's.
        save_id: which save wrote it; None where other software did.
        objects: its objects, by key.
        metrics: measurements that were given with it.
        timeline: what the save did until its commit; empty where other software wrote it.
        bases: the checkpoints that have arrays of it, as paths relative to the directory that it is in; empty where it has all itself.
    """

    abstract: Any
    tree: TreeMetadata
    layout: str
    created: str | None
    writer: str
    custom: Mapping[str, JSON]
    save_id: str | None
    objects: Mapping[str, ObjectRecord]
    metrics: Mapping[str, float] = field(default_factory=dict)
    timeline: Sequence[Event] = ()
    bases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, tied ones counted once."""
        return self.tree.nbytes


@dataclass(frozen=True, slots=True)
class CheckpointablesMetadata:
    """What a checkpoint of several checkpointables says of itself, without their arrays.

    Attributes:
        checkpointables: by name, what each says of itself; what was deleted since the save is left out. Where every process saved
            a state of its own, that of the first that is there.
        deleted: the names of what was deleted.
        processes: by name, how many processes saved a state of their own; names of what all saved together are left out.
        created, writer, custom, save_id, metrics, timeline: as of `CheckpointMetadata`.
        unreadable: by name, why nothing that is installed reads what other software wrote there. The others can be loaded by name.
    """

    checkpointables: Mapping[str, CheckpointMetadata]
    deleted: tuple[str, ...]
    processes: Mapping[str, int]
    created: str | None
    writer: str
    custom: Mapping[str, JSON]
    save_id: str | None
    metrics: Mapping[str, float]
    timeline: Sequence[Event]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and files of those that are there; of several processes, the first one's."""
        return sum(
            sum(record.size for record in found.objects.values()) if found.layout == "files" else found.nbytes
            for found in self.checkpointables.values()
        )


def describe_checkpoint(place: Place, context: Context, transforms: Transforms = ()) -> CheckpointMetadata:
    """See `ckptcore.metadata`."""

    def describe(opened: Opened) -> CheckpointMetadata:
        return _describe_opened(context, transformed(opened, transforms, context))

    return while_tree_unchanged(place, context, describe)


def _describe_opened(context: Context, opened: Opened) -> CheckpointMetadata:
    root = opened.root
    return CheckpointMetadata(
        abstract=None if is_files(opened) else abstract_tree(opened.tree, context.registry),
        tree=opened.tree,
        layout=opened.layout.name,
        created=opened.created,
        writer=opened.writer,
        custom=opened.custom,
        save_id=root.save_id if root else None,
        objects=opened.objects,
        metrics=opened.metrics,
        timeline=_timeline(root.timeline, opened.location.display) if root else (),
        bases=tuple(dict.fromkeys([base.path for base in root.references.bases])) if root else (),
    )


def _timeline(stored: JSON, location: str) -> Sequence[Event]:
    return () if stored is None else timeline_from_json(stored, location=location)


def describe_checkpointables(location: Place, context: Context) -> CheckpointablesMetadata:
    """See `ckptcore.checkpointables_metadata`."""
    return while_unchanged(
        location, context, lambda composite: _describe_composite(composite, location, context), open_names
    )


def describe_either(location: Place, context: Context) -> CheckpointMetadata | CheckpointablesMetadata:
    """What a checkpoint says of itself, be it one tree or several checkpointables.

    Of what other software wrote a plain load may give one of several: here all are told.

    Raises:
        What `describe_checkpoint` and `describe_checkpointables` do.
    """

    def describe(found: Opened | OpenedComposite) -> CheckpointMetadata | CheckpointablesMetadata:
        if isinstance(found, Opened):
            return _describe_opened(context, found)
        return _describe_composite(found, location, context)

    return while_unchanged(location, context, describe, open_either)


def _describe_composite(composite: OpenedComposite, location: Place, context: Context) -> CheckpointablesMetadata:
    root, members = composite.root, composite.members
    present = present_members(composite)
    found: dict[str, CheckpointMetadata] = {}
    unreadable: dict[str, str] = {}
    for name in members:
        try:
            told = _describe_first(composite, name, present.get(name, ()), location, context)
        except (CorruptCheckpointError, StorageError):
            raise
        except CheckpointError as error:
            if root is not None:
                raise
            unreadable[name] = str(error)
            continue
        if told is not None:
            found[name] = told
    return CheckpointablesMetadata(
        checkpointables=found,
        deleted=tuple([name for name in members if name not in found and name not in unreadable]),
        processes={name: member.processes for name, member in members.items() if member.processes is not None},
        created=composite.created,
        writer=composite.writer,
        custom=composite.custom,
        save_id=root.save_id if root else None,
        metrics=composite.metrics,
        timeline=_timeline(root.timeline, str(location)) if root else (),
        unreadable=unreadable,
    )


def _describe_first(
    composite: OpenedComposite, name: str, directories: Sequence[str], location: Place, context: Context
) -> CheckpointMetadata | None:
    """What the first of the directories that is still there says of itself; None if none is."""
    for directory in directories:
        if is_deleted(composite, directory):
            continue
        try:
            opened = open_member(composite, name, directory, location, context)
        except CheckpointNotFoundError:
            if is_deleted(composite, directory):  # since it was looked at
                continue
            raise
        return _describe_opened(context, opened)
    return None
