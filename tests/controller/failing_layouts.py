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
    """A safetensors layout that fails on one rank.

    Attributes:
        failing: the rank that fails. The controller has rank 0.
    """

    failing: int = 0

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write an object, then fail on the chosen rank."""
        store.put(f"half-{snapshot.plan.rank}", b"half")
        if snapshot.plan.rank == self.failing:
            self.fail()
        return super().write(snapshot, store)

    def fail(self) -> None:
        """Raise an error."""
        raise ValueError("this rank is unwell")


@dataclass(frozen=True)
class EndingLayout(RaisingLayout):
    """A safetensors layout that ends the process of one rank."""

    def fail(self) -> None:
        """End the process immediately."""
        os._exit(1)


@dataclass(frozen=True)
class SlowRaisingLayout(RaisingLayout):
    """A safetensors layout that fails on one rank while rank 1 still writes."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write after a delay on rank 1, and fail on the chosen rank."""
        if snapshot.plan.rank == 1:
            time.sleep(0.5)
        return super().write(snapshot, store)


@dataclass(frozen=True)
class OneNameLayout(SafetensorsLayout):
    """A safetensors layout in which every rank also writes an object with the same name."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write an object with a fixed name, then the arrays."""
        store.put("notes", str(snapshot.plan.rank).encode())
        return super().write(snapshot, store)
