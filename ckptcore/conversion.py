"""Converting a checkpoint to another layout, with few arrays in memory at a time."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence

from ckptcore.agreement import Agreement
from ckptcore.background import SaveHandle
from ckptcore.builtin.single_process import SingleProcess
from ckptcore.commit import Overwrite, refuse_to_replace
from ckptcore.context import Context
from ckptcore.engine.memory import allocate
from ckptcore.errors import InvalidLocationError
from ckptcore.locations import LocationLike, resolve_location
from ckptcore.model.arrays import Box, HostArray, Shard
from ckptcore.model.metadata import ArrayRecord
from ckptcore.model.transfer import WritePlan
from ckptcore.opening import Opened, while_unchanged
from ckptcore.planning import plan_read, plan_write
from ckptcore.protocols import Layout
from ckptcore.root import new_save_id
from ckptcore.saving import Described, persist
from ckptcore.verification import ProgressCallback

__all__ = ["convert_checkpoint"]


class _ReadSnapshot:
    """Arrays that are read from the source as the writer asks for them."""

    def __init__(self, opened: Opened, plan: WritePlan) -> None:
        self.plan = plan
        self._opened = opened
        self._arrays: dict[int, HostArray] = {}
        self._lock = threading.Lock()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`."""
        with self._lock:
            if item not in self._arrays:
                self._arrays[item] = self._read(item)
            return [self._arrays[item]]

    def _read(self, item: int) -> HostArray:
        wanted = self.plan.items[item]
        buffer = allocate(wanted.spec)
        plan = plan_read(self._opened.tree, self._opened.state, [(wanted.leaf, wanted.boxes)])
        for _ in self._opened.layout.read(plan, [buffer], self._opened.store):
            pass
        return buffer

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._lock:
            self._arrays.pop(item, None)


class _Reporting(SaveHandle):
    """A handle that tells its progress to a callback."""

    def __init__(self, location: str, total: int, callback: ProgressCallback) -> None:
        super().__init__(location, total)
        self._callback = callback

    def count(self, nbytes: int) -> None:
        """Say that so many more bytes are in the storage."""
        super().count(nbytes)
        progress = self.progress
        self._callback(min(progress.written, progress.total), progress.total)


def convert_checkpoint(
    source: LocationLike,
    destination: LocationLike,
    layout: str | Layout,
    overwrite: Overwrite,
    progress: ProgressCallback | None,
    context: Context,
) -> None:
    """See `ckptcore.convert`."""
    chosen = context.registry.layout(layout)
    durable = context.durability == "full"
    resolved = resolve_location(destination, context.registry, durable=durable, config=context.storage)
    read_from = resolve_location(source, context.registry, durable=False, config=context.storage)
    if read_from.identity == resolved.identity:
        raise InvalidLocationError(
            f"{source} cannot be converted into itself; convert it to another location, then delete it"
        )
    refuse_to_replace(resolved, overwrite)

    replaces = overwrite

    def attempt(opened: Opened) -> None:
        nonlocal replaces
        tree = opened.tree
        chosen.check(tree, 1)
        shards = {
            leaf: (Shard(Box.whole(record.spec.shape)),)
            for leaf, record in enumerate(tree.leaves)
            if isinstance(record, ArrayRecord)
        }
        plan = plan_write(tree, shards, rank=0, size=1, save_id=new_save_id())
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        agreement = Agreement(SingleProcess(), "convert")
        described = Described(resolved, chosen, replaces, opened.custom, plan, created, agreement)
        handle = _Reporting(resolved.display, tree.nbytes, progress) if progress is not None else None
        persist(described, _ReadSnapshot(opened, plan), context, handle)
        if not overwrite:
            replaces = True  # if the source was replaced meanwhile, what was just written is written again

    while_unchanged(source, context, attempt)
