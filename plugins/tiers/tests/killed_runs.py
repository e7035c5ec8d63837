"""A run with two tiers in its own process, which is killed before a given storage operation."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ckptcore_testing.faults import FaultPlan, Step
from ckptcore_testing.faulty_storage import with_faults
from ckptcore_tiers import NearTier, TieredDirectory

import ckptcore
from ckptcore.builtin.local import open_local
from ckptcore.hookspecs import hookimpl
from ckptcore.policies import LatestN
from ckptcore.protocols import StorageBackend, StorageOpener, StorageOptions
from tests.checkpointer.runs import tree

STEPS: Final = (3, 4)
"""Steps that the process saves, after steps 1 and 2."""

_SECONDS: Final = 120


class _Killing(FaultPlan):
    """Counts the operations of both tiers, and kills this process before one of them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        step = super().begin(name, keys, offset, nbytes)
        if step.operation.number == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step


class _Storages:
    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        return {"watched": functools.partial(_open, self._plan)}


def _open(plan: FaultPlan, url: str, options: StorageOptions) -> StorageBackend:
    return with_faults(open_local("/" + url.partition("://")[2], options), plan)


def watched_tiers(near: Path, far: Path) -> TieredDirectory:
    """Return the two directories, which a storage with faults opens."""
    return TieredDirectory(NearTier(f"watched:/{near}", preservation_policy=LatestN(1)), f"watched:/{far}")


def open_far(tiers: TieredDirectory, plan: FaultPlan) -> ckptcore.Checkpointer:
    """Open a run with one I/O thread, so that operations mostly have the same order each time."""
    context = ckptcore.Context(
        plugins=ckptcore.context.PluginOptions(extra=(_Storages(plan),)),
        io=ckptcore.context.IOOptions(threads=1),
        durability="none",
    )
    return ckptcore.Checkpointer(tiers, preservation_policy=LatestN(2), context=context)


def _run(near: Path, far: Path, at: int, told: Path) -> None:
    plan = _Killing(at)
    tiers = watched_tiers(near, far)
    with open_far(tiers, plan) as run:
        for step in STEPS:
            run.save(step, tree(step))
            tiers.wait_for_uploads(_SECONDS)
    told.write_text(json.dumps(len(plan.operations)))


def kill_at(near: Path, far: Path, at: int, told: Path) -> int | None:
    """Run the process, kill it before the operation with this number, and return its exit status."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(near, far, at, told))
    process.start()
    process.join(_SECONDS)
    if process.is_alive():
        process.kill()
    return process.exitcode


def count_requests(near: Path, far: Path, told: Path) -> int:
    """Run the process without a kill, and return the number of operations."""
    assert kill_at(near, far, -1, told) == 0
    count: int = json.loads(told.read_text())
    return count
