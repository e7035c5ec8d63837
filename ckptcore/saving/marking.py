"""Marking a checkpoint: what a layout writes for foreign readers beside the arrays, once these are whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptcore.builtin.files import FilesLayout
from ckptcore.commit.root import Root
from ckptcore.context import Context
from ckptcore.errors import PluginError
from ckptcore.io.object_writes import ObjectRecorder
from ckptcore.model.transfer import Segment
from ckptcore.protocols import About, Layout, MarksCheckpoints, StorageAddress, StorageBackend
from ckptcore.runtime import runtime_of

__all__ = ["mark_composite", "mark_tree"]


class _MarkStore:
    """A `WriteStore` that refuses what marks of a layout may not be, before it is written."""

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
                f"the layout {self._layout} marks the checkpoint with {key}, and may not: a mark is a new object beside the arrays "
                "or the directories of several checkpointables, and names that begin with 'checkpoint.' are the core's. The save "
                "is not committed"
            )
        return key


def mark_tree(layout: Layout, root: Root, about: About, store: StorageBackend, context: Context) -> Root:
    """Let the layout of a checkpoint that is one tree write what foreign readers look for; the root with that."""
    if not isinstance(layout, MarksCheckpoints):
        return root
    recorder = ObjectRecorder(store, runtime_of(context).io_threads, checksums=context.io.checksums)
    layout.mark(about, _MarkStore(layout.name, recorder, root.objects))
    return replace(root, objects={**root.objects, **{record.key: record for record in recorder.objects}})


def mark_composite(layouts: Iterable[Layout], about: About, store: StorageBackend, context: Context) -> None:
    """Let each layout that has trees in a checkpoint write what foreign readers look for beside their directories.

    The root of several checkpointables lists no objects: what is written here can be lost without harm to what ckptcore reads.
    """
    by_name = {layout.name: layout for layout in layouts if layout.name != FilesLayout.name}
    taken: dict[str, object] = dict(about.members)
    for name, layout in by_name.items():
        if isinstance(layout, MarksCheckpoints):
            recorder = ObjectRecorder(store, runtime_of(context).io_threads, checksums=context.io.checksums)
            layout.mark(about, _MarkStore(name, recorder, taken))
            taken.update({record.key: record for record in recorder.objects})
