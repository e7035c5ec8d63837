"""Roots of checkpoints: what the leader makes of the receipts of all processes, with the metadata files of layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

from ckptcore.builtin.files import FilesLayout
from ckptcore.commit.root import ROOT_KEY, Composite, Root, this_writer
from ckptcore.commit.root_json import encode_root
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import PluginError
from ckptcore.events import Recording, timeline_to_json
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.model.objects import ObjectRecord
from ckptcore.model.transfer import Receipt, Segment
from ckptcore.planning import check_coverage
from ckptcore.protocols import CheckpointInfo, Layout, StorageAddress, StorageBackend, WriteStore
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import SavePart
from ckptcore.saving.requests import CommitInfo

__all__ = [
    "Recorder",
    "build_root",
    "complete_tree",
    "finish_part",
    "merge_objects",
    "put_root",
    "recorder_of",
]


class _MetadataStore:
    """A `WriteStore` that refuses metadata files of a layout that it may not write, before they are written."""

    def __init__(self, layout: str, recorder: ObjectRecorder, taken: Mapping[str, object]) -> None:
        self._layout = layout
        self._recorder = recorder
        self._taken = taken

    @property
    def address(self) -> StorageAddress | None:
        """See `WriteStore`."""
        return self._recorder.address

    def put(self, key: str, data: bytes) -> None:
        """See `WriteStore`."""
        self._recorder.put(self._checked(key), data)

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        """See `WriteStore`."""
        self._recorder.write(self._checked(key), segments)

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        """See `WriteStore`."""
        self._recorder.write_many((self._checked(key), segments) for key, segments in objects)

    def _checked(self, key: str) -> str:
        above = key.partition("/")[0]
        if above.startswith("checkpoint.") or key in self._taken or above in self._taken:
            raise PluginError(
                f"the layout {self._layout} may not write the metadata file {key}: it must be a new object outside "
                "the directories of checkpointables, and names that begin with 'checkpoint.' are reserved. The save "
                "is not committed"
            )
        return key


def _write_composite_files(
    layouts: Iterable[Layout], info: CheckpointInfo, store: StorageBackend, context: Context
) -> None:
    """Write the metadata files of each layout that has trees in a checkpoint, beside their directories.

    The root of several checkpointables does not list them, because ckptcore does not need them.
    """
    by_name = {layout.name: layout for layout in layouts if layout.name != FilesLayout.name}
    taken: dict[str, object] = dict(info.members)
    for name, layout in by_name.items():
        recorder = recorder_of(store, context)
        layout.write_metadata_files(info, _MetadataStore(name, recorder, taken))
        taken.update({record.key: record for record in recorder.objects})


class Recorder(WriteStore, Protocol):
    """A store that records the objects that a layout wrote."""

    @property
    def objects(self) -> Sequence[ObjectRecord]:
        """The objects that are complete."""
        ...


def recorder_of(store: StorageBackend, context: Context) -> ObjectRecorder:
    """Return a recorder over a storage."""
    return ObjectRecorder(store, runtime_of(context).io_threads, checksums=context.io.checksums)


def put_root(store: StorageBackend, root: Root) -> None:
    """Put the root of a part that is one of several checkpointables."""
    data, tables = encode_root(root)
    for key, table in tables.items():
        store.put(key, table)
    store.put(ROOT_KEY, data)


def finish_part(info: CommitInfo, part: SavePart, recorder: Recorder) -> Root:
    """Let the layout of a part finish what the receipts say was written; return its root.

    Raises:
        CorruptCheckpointError: if what the processes wrote does not make up the arrays.
        PluginError: if two processes wrote one object.
    """
    tree = part.plan.tree
    check_coverage(tree, part.receipts)
    state = part.layout.finish(tree, part.receipts, recorder)
    return Root(
        save_id=info.save_id,
        created=info.created,
        writer=this_writer(),
        layout=part.layout.name,
        state=state,
        tree=tree,
        objects=merge_objects(part.layout.name, part.receipts, recorder.objects),
        role=info.role if info.members is None else "member",
    )


def merge_objects(
    layout: str, receipts: Sequence[Receipt], finished: Sequence[ObjectRecord]
) -> dict[str, ObjectRecord]:
    """Return all objects of a tree by key.

    Args:
        layout: the name of the layout that wrote them.
        receipts: of the processes.
        finished: what the leader wrote when all had written.

    Raises:
        PluginError: two are one object.
    """
    objects: dict[str, ObjectRecord] = {}
    for record in chain(*[receipt.objects for receipt in receipts], finished):
        if objects.setdefault(record.key, record) is not record:
            raise PluginError(
                f"the layout {layout} wrote {record.key} twice, perhaps from several processes; the save is not "
                "committed"
            )
    return objects


def build_root(
    info: CommitInfo, parts: Sequence[SavePart], store: StorageBackend, context: Context, recording: Recording
) -> Root | Composite:
    """Finish every part that the processes wrote together, and return the root of the checkpoint. On the leader.

    Args:
        info: what the root says.
        parts: of the checkpoint, with the receipts of all ranks.
        store: the storage of the claim.
        context: options.
        recording: gives the timeline.
    """
    for part in parts:
        if part.own:
            continue
        inside = subdirectory(store, part.directory)
        root = finish_part(info, part, recorder_of(inside, context))
        if info.members is None:
            return complete_tree(info, part.layout, root, store, context, recording)
        put_root(inside, root)
    described = info.checkpoint_info
    layouts = [part.layout for part in parts if part.directory in described.members]
    _write_composite_files(layouts, described, store, context)
    return Composite(
        save_id=info.save_id,
        created=info.created,
        writer=this_writer(),
        members=info.members or {},
        custom=info.custom,
        metrics=info.metrics,
        timeline=timeline_to_json(recording.events),
        progress=info.progress,
    )


def complete_tree(
    info: CommitInfo, layout: Layout, root: Root, store: StorageBackend, context: Context, recording: Recording
) -> Root:
    """Write the metadata files of a checkpoint that is one tree; return its root with all that it says."""
    recorder = recorder_of(store, context)
    layout.write_metadata_files(info.checkpoint_info, _MetadataStore(layout.name, recorder, root.objects))
    objects = {**root.objects, **{record.key: record for record in recorder.objects}}
    timeline = timeline_to_json(recording.events)
    return replace(
        root,
        objects=objects,
        custom=info.custom,
        metrics=info.metrics,
        timeline=timeline,
        progress=info.progress,
    )
