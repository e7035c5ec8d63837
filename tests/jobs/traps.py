"""Traps: points of saves, loads and runs at which a process raises, is killed or pauses."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from ckptcore_testing.faults import FaultPlan, Step
from ckptcore_testing.faulty_storage import with_faults

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.builtin.local import open_local
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.events import Event
from ckptcore.hookspecs import hookimpl
from ckptcore.model import JSON, Box, HostArray, LeafRecord, Pending, Receipt, TreeMetadata
from ckptcore.protocols import Coordinator, Snapshot, StorageBackend, StorageOpener, StorageOptions, WriteStore

SCHEME: Final = "trapped"
"""The scheme of directories whose storage has traps."""

Action: TypeAlias = Literal["raise", "kill", "hang"]
"""The effect of a trap on a process."""


class TrappedError(RuntimeError):
    """The error that a trap raises."""


class Trap:
    """A trap that raises, kills this process or pauses it, the first time that it reaches a point.

    Points: ``describe``, ``copy``, ``build`` of a NumPy leaf; ``write``, ``written`` and ``finish`` of the layout;
    ``export``, the ``write`` of an export's layout; the methods of storage; ``notice``; and ``after PHASE NUMBER``,
    which cannot raise.
    """

    def __init__(self, point: str, action: Action) -> None:
        """Create a trap that is not armed."""
        self._point = point
        self._action = action
        self._armed = False
        self._phases: dict[str, int] = {}

    def arm(self) -> None:
        """Arm the trap for the next time that the process reaches the point."""
        self._armed = True
        self._phases.clear()

    def reach(self, point: str) -> None:
        """Trigger the trap if it is armed for this point."""
        if not self._armed or point != self._point:
            return
        self._armed = False
        if self._action == "raise":
            raise TrappedError(f"trapped at {point!r}")
        os.kill(os.getpid(), signal.SIGKILL if self._action == "kill" else signal.SIGSTOP)

    def observe(self, event: Event) -> None:
        """Reach the point of a completed phase."""
        number = self._phases[event.phase] = self._phases.get(event.phase, 0) + 1
        self.reach(f"after {event.phase} {number}")

    def notice(self, step: int) -> bool:
        """Reach the point ``notice``. Return that there is no preemption."""
        self.reach("notice")
        return False


class _Leaves(HostArrayHandler):
    def __init__(self, trap: Trap) -> None:
        self._trap = trap

    def describe(self, leaf: Any) -> LeafRecord:
        self._trap.reach("describe")
        return super().describe(leaf)

    def copy_to_host(self, leaf: Any, boxes: Sequence[Box], memory: Any) -> Sequence[Pending[HostArray]]:
        self._trap.reach("copy")
        return super().copy_to_host(leaf, boxes, memory)

    def build(self, *arguments: Any) -> Any:
        self._trap.reach("build")
        return super().build(*arguments)


class TrappedLayout(SafetensorsLayout):
    """The layout safetensors with traps."""

    def __init__(self, trap: Trap, *points: str) -> None:
        """Create a layout. The names of its points `write`, `written` and `finish` are given in this order."""
        super().__init__()
        object.__setattr__(self, "_trap", trap)
        object.__setattr__(self, "_points", points)

    def _reach(self, number: int) -> None:
        points: Sequence[str] = getattr(self, "_points", ())
        if number < len(points):
            getattr(self, "_trap").reach(points[number])  # noqa: B009  # the base class is frozen

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """See `Layout`."""
        self._reach(0)
        state = super().write(snapshot, store)
        self._reach(1)
        return state

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """See `Layout`."""
        self._reach(2)
        return super().finish(tree, receipts, store)


class _Plan(FaultPlan):
    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self._trap = trap

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        self._trap.reach(name)
        return super().begin(name, keys, offset, nbytes)


class _Storages:
    def __init__(self, trap: Trap) -> None:
        self._plan = _Plan(trap)

    def _open(self, url: str, options: StorageOptions) -> StorageBackend:
        return with_faults(open_local(url.replace(SCHEME, "file", 1), options), self._plan)

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {SCHEME: self._open}


def trapped_context(trap: Trap, coordinator: Coordinator) -> ckptcore.Context:
    """Return a Context with a trap at every point, except those of layouts. Its storage has the scheme `SCHEME`."""
    return ckptcore.Context(
        job=ckptcore.context.JobOptions(coordinator=coordinator),
        durability="none",
        io=ckptcore.context.IOOptions(threads=1),
        plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: _Leaves(trap)}, extra=(_Storages(trap),)),
        observers=(trap.observe,),
    )
