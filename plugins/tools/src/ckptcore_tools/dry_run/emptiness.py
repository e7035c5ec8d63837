"""A snapshot in which there is nothing: it is told what would be taken and given back, and sums up the memory of that."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ckptcore.io.snapshot import ViewedSnapshot
from ckptcore.model.arrays import HostArray
from ckptcore.model.transfer import Pending, WritePlan
from ckptcore.protocols import HostBytes

__all__ = ["EmptySnapshot", "NothingThereError"]


class NothingThereError(Exception):
    """Elements were asked for in a rehearsal, where there are none."""


class EmptySnapshot:
    """A `ckptcore.protocols.Snapshot` without elements. Any thread.

    Attributes:
        plan: what would be written.
        held_by_writer: the most bytes of copies that are taken and not given back yet, at a time.
        viewed_peak: the most bytes that a save that blocks has on the host at a time, as far ahead as that goes.
    """

    def __init__(self, plan: WritePlan, host_bytes: Sequence[HostBytes]) -> None:
        """`host_bytes` tells what each item of the plan takes."""
        self.plan = plan
        self.held_by_writer = 0
        self.viewed_peak = 0
        self._host_bytes = host_bytes
        self._views = ViewedSnapshot(plan, self._start)
        self._viewed: set[int] = set()
        self._taken: set[int] = set()
        self._viewed_bytes = 0
        self._taken_bytes = 0
        self._lock = threading.RLock()

    def _start(self, item: int) -> Sequence[Pending[HostArray]]:
        self._viewed.add(item)
        self._viewed_bytes += self._host_bytes[item].viewed
        self.viewed_peak = max(self.viewed_peak, self._viewed_bytes)
        return ()

    def take(self, item: int) -> Sequence[HostArray]:
        """See `Snapshot`; counts the item and raises `NothingThereError`."""
        with self._lock:
            self._views.take(item)
            if item not in self._taken:
                self._taken.add(item)
                self._taken_bytes += self._host_bytes[item].copied
                self.held_by_writer = max(self.held_by_writer, self._taken_bytes)
        raise NothingThereError(f"item {item} of a rehearsal has no elements")

    def release(self, item: int) -> None:
        """See `Snapshot`."""
        with self._lock:
            self._views.release(item)
            if item in self._viewed:
                self._viewed.discard(item)
                self._viewed_bytes -= self._host_bytes[item].viewed
            if item in self._taken:
                self._taken.discard(item)
                self._taken_bytes -= self._host_bytes[item].copied
