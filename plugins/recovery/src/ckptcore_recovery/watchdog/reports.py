"""Reports of stalls: one for each stalled process, in the directory of the run, and what they say together."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from ckptcore.commit.location import LocationLike, open_directory
from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.context import Context, default_context
from ckptcore.errors import ObjectNotFoundError
from ckptcore.io.threads import map_ordered, requests_of
from ckptcore.protocols import StorageBackend
from ckptcore.runtime import runtime_of
from ckptcore.training.path_directory import as_run_directory
from ckptcore.training.run_directory import RunDirectory
from ckptcore_recovery.watchdog.detection import Stall
from ckptcore_recovery.watchdog.utilisation import Utilisation

ProcessState: TypeAlias = Literal["running", "blocked", "stopped"]
"""State of a process. "running": Python code runs, at least in other threads. "blocked": none runs, because a call
holds the interpreter lock. "stopped": by a signal."""

REPORT_DIRECTORY: Final = f"{INTERNAL_DIRECTORY}/stalls"

_MAX_REPORTS: Final = 10_000
_MAX_BYTES: Final = 1 << 18
_MAX_FRAMES: Final = 100
_MAX_TEXT: Final = 1000

_COLLECTIVES: Final = ("/torch/distributed/", "/jax/experimental/multihost_utils.py", "/ckptcore/job/", "/mpi4py/")
"""Parts of the paths of sources in which a process waits for other processes."""

_INTERNAL: Final = re.compile(r"/lib/python3\.\d+/(?!site-packages/)|/jax/_src/|/jaxlib/")
"""In paths of the standard library and of the internals of JAX. They do not tell what a process waits for."""

_STATES: Final[Mapping[ProcessState, str]] = {
    "running": "",
    "blocked": "no Python code runs in the process, because a call holds the interpreter lock",
    "stopped": "the process was stopped by a signal",
}


@dataclass(frozen=True, slots=True)
class StallReport:
    """A stall of one process.

    Attributes:
        stall: what takes too long.
        rank: the rank of the process.
        host: the name of its host.
        pid: its number there.
        state: the state of the process.
        frames: the innermost frames of the stalled thread, innermost first; none if they are unknown.
        utilisation: utilisation since the stall began.
    """

    stall: Stall
    rank: int
    host: str
    pid: int
    state: ProcessState
    frames: tuple[str, ...]
    utilisation: Utilisation

    @property
    def frame(self) -> str:
        """The innermost frame outside of the standard library and of the internals of JAX; empty if unknown."""
        return next((frame for frame in self.frames if _INTERNAL.search(frame) is None), "".join(self.frames[:1]))

    @property
    def is_wait(self) -> bool:
        """True if the process waits for other processes, as far as its phase and its `frame` show it."""
        return self.stall.is_wait or any(part in self.frame for part in _COLLECTIVES)

    @property
    def name(self) -> str:
        """The stalled step, operation or pause of the rank, as text."""
        stall = self.stall
        names = {"step": f"step {stall.step}", "pause": f"the pause {stall.phase!r}"}
        of_step = "" if stall.step is None else f" of step {stall.step}"
        return f"rank {self.rank} (process {self.pid} on {self.host}): {names.get(stall.what, stall.what + of_step)}"

    def __str__(self) -> str:
        """Describe the stall in one line."""
        stall = self.stall
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(stall.began))
        parts = [f"{self.name} takes longer than {stall.bound:.4g} s, since {since} UTC"]
        if stall.what not in ("step", "pause"):
            parts.append(f"its phase is {stall.phase}")
        if self.is_wait:
            parts.append("it waits for other processes")
        if self.frame:
            parts.append(f"in {self.frame}")
        if self.state != "running":
            parts.append(_STATES[self.state])
        if self.utilisation.idle:
            parts.append(f"the {' and '.join(self.utilisation.idle)} of the host are idle")
        return "; ".join(parts)


class Incident(NamedTuple):
    """Reports of different ranks about the same step, operation or pause.

    Attributes:
        reports: in the order of the ranks.
    """

    reports: Sequence[StallReport]

    @property
    def suspects(self) -> Sequence[int]:
        """The ranks that seem to hold up the others: those that do not wait, in the frame that fewest ranks are in.

        Empty if all ranks wait: then a rank without a report may be the cause.
        """
        counts = Counter([_place(report) for report in self.reports if not report.is_wait])
        fewest = min(counts.values(), default=0)
        return [report.rank for report in self.reports if not report.is_wait and counts[_place(report)] == fewest]


def _place(report: StallReport) -> tuple[str, str]:
    """Return the source and the function in which a process is. Without frames, what it does."""
    if not report.frames:
        return report.stall.what, report.stall.phase
    path, _, line = report.frame.rpartition(":")
    return path, line.partition(" in ")[2]


def write_report(store: StorageBackend, report: StallReport, stacks: str) -> str:
    """Write a report and the stacks of its process. Return the key of the stacks.

    Args:
        store: the storage, opened at the directory of the run.
        report: the report.
        stacks: the stacks of all threads, as text.

    Raises:
        StorageError
    """
    name = f"{REPORT_DIRECTORY}/{round(time.time() * 1000):013d}-rank-{report.rank}-{os.urandom(4).hex()}"
    store.put(f"{name}.txt", f"{report}\n\n{stacks}".encode("utf-8", "replace"))
    store.put(f"{name}.json", json.dumps(dataclasses.asdict(report)).encode())
    return f"{name}.txt"


def read_incidents(directory: LocationLike | RunDirectory, context: Context | None = None) -> Sequence[Incident]:
    """Return the stalls of a run, oldest first. Invalid reports are passed over.

    Args:
        directory: the directory of the run.
        context: options.

    Raises:
        StorageError: they cannot be read.
    """
    runtime = runtime_of(context or default_context())
    store = open_directory(as_run_directory(directory).location, runtime.storages)
    keys = [key for key in store.list(REPORT_DIRECTORY) if key.endswith(".json")][-_MAX_REPORTS:]
    read = map_ordered(
        runtime.io_threads, keys, lambda key: _read(store, key), parallelism=requests_of(store).concurrency
    )
    incidents: list[list[StallReport]] = []
    open_incidents: dict[tuple[str, int | None], list[StallReport]] = {}
    for report in filter(None, read):
        reports = open_incidents.get((report.stall.what, report.stall.step))
        # A rank that reports again has run into the same step after a restart.
        if reports is None or any(other.rank == report.rank for other in reports):
            reports = open_incidents[report.stall.what, report.stall.step] = []
            incidents.append(reports)
        reports.append(report)
    return [Incident(sorted(reports, key=lambda report: report.rank)) for reports in incidents]


def _read(store: StorageBackend, key: str) -> StallReport | None:
    try:
        document = json.loads(store.get(key, 0, _MAX_BYTES))
        return _report(document)
    except (ObjectNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _report(document: Any) -> StallReport:
    """Return the report of a JSON document.

    Raises:
        ValueError, TypeError, KeyError: it is not valid.
    """
    stall, used = document["stall"], document["utilisation"]
    if document["state"] not in get_args(ProcessState) or not isinstance(document["frames"], list):
        raise ValueError
    return StallReport(
        stall=Stall(
            what=_text(stall["what"]),
            phase=_text(stall["phase"]),
            step=None if stall["step"] is None else _whole(stall["step"]),
            location=_text(stall["location"]),
            began=_number(stall["began"]),
            seconds=_number(stall["seconds"]),
            bound=_number(stall["bound"]),
            thread=_whole(stall["thread"]),
        ),
        rank=_whole(document["rank"]),
        host=_text(document["host"]),
        pid=_whole(document["pid"]),
        state=document["state"],
        frames=tuple([_text(frame) for frame in document["frames"][:_MAX_FRAMES]]),
        utilisation=Utilisation(
            **{name: None if used[name] is None else _number(used[name]) for name in ("processors", "process", "gpus")}
        ),
    )


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError
    characters = [c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in value[:_MAX_TEXT]]
    return "".join(characters)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1 << 40:
        raise ValueError
    return float(value)
