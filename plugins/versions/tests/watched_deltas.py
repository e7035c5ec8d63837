"""The layout `deltas`, which tells a test before it takes an array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ckptcore_versions.deltas.layout import DeltaLayout
from ckptcore_versions.held_version import HeldVersion
from ckptcore_versions.tensor_names import tensor_names

from ckptcore.model import JSON, HostArray
from ckptcore.protocols import Snapshot, WriteStore


@dataclass(frozen=True, slots=True)
class WatchedDeltas(DeltaLayout):
    """The layout.

    Attributes:
        taking: called with the name of each array before it is taken from the snapshot.
    """

    taking: Callable[[str], object] = str

    def against(self, held: HeldVersion | None) -> WatchedDeltas:
        """See `VersionLayout`."""
        return replace(self, held=held)

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """See `Layout`."""
        return DeltaLayout.write(self, _WatchedSnapshot(snapshot, self.taking), store)


class _WatchedSnapshot:
    def __init__(self, snapshot: Snapshot, taking: Callable[[str], object]) -> None:
        self.plan = snapshot.plan
        self.release = snapshot.release
        self._take = snapshot.take
        self._taking = taking

    def take(self, item: int) -> Sequence[HostArray]:
        self._taking(tensor_names(self.plan.tree)[self.plan.items[item].leaf])
        return self._take(item)
