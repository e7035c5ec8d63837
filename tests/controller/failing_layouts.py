"""Layouts that fail on a worker."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from ckptcore import SafetensorsLayout
from ckptcore.model import JSON
from ckptcore.protocols import Snapshot, WriteStore


@dataclass(frozen=True)
class RaisingLayout(SafetensorsLayout):
    """Safetensors, that one rank cannot write.

    Attributes:
        failing: the rank; the controller is 0.
    """

    failing: int = 0

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write something, and fail on the rank that is to."""
        store.put(f"half-{snapshot.plan.rank}", b"half")
        if snapshot.plan.rank == self.failing:
            self.fail()
        return super().write(snapshot, store)

    def fail(self) -> None:
        """Fail."""
        raise ValueError("this rank is unwell")


@dataclass(frozen=True)
class EndingLayout(RaisingLayout):
    """Safetensors, whose writer ends the process on one rank."""

    def fail(self) -> None:
        """Die at once."""
        os._exit(1)


@dataclass(frozen=True)
class SlowRaisingLayout(RaisingLayout):
    """Safetensors, that rank 1 writes slowly and another cannot."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write what there is after a while, where it is not to fail."""
        if snapshot.plan.rank == 1:
            time.sleep(0.5)
        return super().write(snapshot, store)


@dataclass(frozen=True)
class OneNameLayout(SafetensorsLayout):
    """Safetensors, in addition to which every rank writes an object of one name."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write as the only rank."""
        store.put("notes", str(snapshot.plan.rank).encode())
        return super().write(snapshot, store)
