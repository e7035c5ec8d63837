"""One process of a job with a failure: its actions, for any framework."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.protocols import Coordinator
from tests.jobs.traps import SCHEME, Action, Trap, TrappedLayout, trapped_context

DEADLINE_SECONDS: Final = 6.0
"""Seconds that a rank waits for another one if a rank is missing on purpose."""

PATIENCE_SECONDS: Final = 120.0
"""Seconds that a rank waits for another rank if all take part."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A failure: its rank and its point.

    Attributes:
        operation: the operation of the job, a key of `OPERATIONS`.
        point: the point in the operation; see `Trap`.
        action: the kind of the failure.
        victim: the rank that fails.
    """

    operation: str
    point: str = ""
    action: Action = "raise"
    victim: int = -1


class Job(Protocol):
    """A process of a job of some framework."""

    rank: int

    def coordinator(self, timeout_seconds: float) -> Coordinator:
        """Return the coordinator of the process."""
        ...

    def state(self, number: int) -> dict[str, Any]:
        """Return a state that is sharded over the processes. All elements are the number."""
        ...

    def expect(self, state: Mapping[str, Any], number: int) -> None:
        """Fail unless each leaf of a state has the number."""
        ...


class _Operation(Protocol):
    def prepare(self) -> None: ...
    def attempt(self) -> None: ...
    def again(self) -> None: ...


class _Save:
    """A save in the background, after a first save of the job."""

    def __init__(self, cell: Cell, job: Job, trap: Trap, place: Path) -> None:
        self._cell, self._job, self._trap = cell, job, trap
        self._above = f"{SCHEME}://{place}"
        self._layout = TrappedLayout(trap, "write", "written", "finish")
        self._patient = trapped_context(trap, job.coordinator(PATIENCE_SECONDS))
        self._hasty = trapped_context(trap, job.coordinator(_deadline(cell)))

    def prepare(self) -> None:
        self._save("before", 1, self._patient)

    def attempt(self) -> None:
        exports = []
        if self._cell.point == "export":
            exports = [ckptcore.Export(location=f"{self._above}/exported", layout=TrappedLayout(self._trap, "export"))]
        self._save("broken", 2, self._hasty, strategy=ckptcore.WithExports(exports))

    def again(self) -> None:
        name = "broken" if self._cell.point != "export" else "next"
        self._save(name, 3, self._hasty)
        loaded = ckptcore.load(f"{self._above}/{name}", self._job.state(0), context=self._hasty)
        self._job.expect(loaded, 3)

    def _save(self, name: str, number: int, context: ckptcore.Context, **options: Any) -> None:
        state = self._job.state(number)
        ckptcore.save_async(f"{self._above}/{name}", state, layout=self._layout, context=context, **options).result()


class _Run:
    """A run of steps, which fails while it opens, decides, loads or deletes."""

    def __init__(self, cell: Cell, job: Job, trap: Trap, place: Path) -> None:
        self._cell, self._job, self._trap = cell, job, trap
        self._directory = f"{SCHEME}://{place}/run"
        self._patient = trapped_context(trap, job.coordinator(PATIENCE_SECONDS))
        self._hasty = trapped_context(trap, job.coordinator(_deadline(cell)))
        self._run: ckptcore.Checkpointer | None = None

    def prepare(self) -> None:
        with ckptcore.Checkpointer(f"{self._directory}", context=self._patient) as run:
            for step in (1, 2, 3):
                run.save(step, self._job.state(step))
        # Create all states now, because sharding a tensor uses collectives of the framework, with other timeouts.
        self._states = {step: self._job.state(step) for step in (0, 4, 5)}
        if self._cell.operation != "open":
            self._run = self._open()

    def _open(self) -> ckptcore.Checkpointer:
        return ckptcore.Checkpointer(self._directory, context=self._hasty, preemption_notice=self._trap.notice)

    def attempt(self) -> None:
        if self._run is None:
            self._run = self._open()
        if self._cell.operation == "load":
            self._job.expect(self._run.load(None, self._states[0]), 3)
        elif self._cell.operation == "decide":
            self._run.save(4, self._states[4])
        elif self._cell.operation == "delete":
            self._run.delete(1)
        self._run.wait()
        self._run.save(5, self._states[5])
        self._run.wait()

    def again(self) -> None:
        if self._run is None:
            self._run = self._open()
        self._run.save(6, self._job.state(6))
        self._run.wait()
        self._job.expect(self._run.load(None, self._job.state(0)), 6)
        self._run.close()


class _Resume:
    """The next job, in the directory of the failed job. It has another number of processes."""

    def __init__(self, cell: Cell, job: Job, trap: Trap, place: Path) -> None:
        self._job, self._place = job, place
        self._context = ckptcore.Context(
            job=ckptcore.context.JobOptions(coordinator=job.coordinator(PATIENCE_SECONDS)),
            durability="none",
            io=ckptcore.context.IOOptions(threads=1),
        )

    def prepare(self) -> None:
        pass

    def attempt(self) -> None:
        if (self._place / "before").exists():
            self._job.expect(ckptcore.load(self._place / "before", self._job.state(0), context=self._context), 1)
            state = self._job.state(7)
            ckptcore.save(self._place / "broken", state, overwrite=True, context=self._context)
            self._job.expect(ckptcore.load(self._place / "broken", self._job.state(0), context=self._context), 7)
            return
        with ckptcore.Checkpointer(self._place / "run", context=self._context) as run:
            loaded = run.load(None, self._job.state(0))
            assert run.restored_step is not None
            self._job.expect(loaded, run.restored_step)
            run.save(7, self._job.state(7))
            run.wait()
            self._job.expect(run.load(None, self._job.state(0)), 7)

    def again(self) -> None:
        pass


_OPERATIONS: Final[Mapping[str, Callable[[Cell, Job, Trap, Path], _Operation]]] = {
    "save": _Save, "open": _Run, "load": _Run, "decide": _Run, "delete": _Run, "resume": _Resume,
}  # fmt: skip


def _deadline(cell: Cell) -> float:
    return PATIENCE_SECONDS if cell.action == "raise" else DEADLINE_SECONDS


def take_part(cell: Cell, job: Job, place: Path) -> None:
    """Run the operation, and write the result to `told_file`."""
    is_victim = job.rank == cell.victim
    trap = Trap(cell.point if is_victim else "", cell.action)
    operation = _OPERATIONS[cell.operation](cell, job, trap, place)
    operation.prepare()
    job.coordinator(PATIENCE_SECONDS).broadcast("prepared", b"" if job.rank == 0 else None)
    trap.arm()
    began = time.monotonic()
    told: dict[str, Any] = {"error": None}
    try:
        operation.attempt()
    except Exception as error:  # noqa: BLE001  # the test judges it
        ours = isinstance(error, CheckpointError)
        told = {"error": type(error).__name__, "ours": ours, "text": str(error)}
    told["seconds"] = time.monotonic() - began
    if cell.action == "raise":
        operation.again()
    _write(place, job.rank, told)


def told_file(place: Path, rank: int) -> Path:
    """Return the file in which a rank writes its result."""
    return place.with_name(f"{place.name}.told") / str(rank)


def _write(place: Path, rank: int, told: Mapping[str, Any]) -> None:
    file = told_file(place, rank)
    file.parent.mkdir(exist_ok=True)
    unfinished = file.with_name(f".{rank}")
    unfinished.write_text(json.dumps(told))
    unfinished.rename(file)
