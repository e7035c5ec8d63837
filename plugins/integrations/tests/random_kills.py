"""A program that kills jobs at random moments of saves, and checks the remaining files.

Run it as ``random_kills.py JOB DIRECTORY SEED KILLS``.

``JOB`` is ``module:class``, where the class implements `Job`. The program imports the libraries of the job once. It
forks the processes of each job, and a process for each check of the files. It fails with a `LostError` if a checkpoint
is lost or damaged. Its last line of output is a summary in JSON.

A job saves once, checks that no files of killed jobs are left, and continues to save until it is killed. The kill
happens at the n-th call of the operating system by one of its processes, or at a random time after the first save. It
hits the leader, another process or all processes. The other processes are killed a little later, as launchers do it, or
get some time to end.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

_CALLS: Final = ("open", "os.", "fcntl.", "shutil.")
"""Prefixes of the names of audit events that are calls of the operating system."""

_SECONDS: Final = 240
"""Time limit of a process. A process that takes longer is considered hung."""

_GRACE_SECONDS: Final = 1.0
"""Longest time that the other processes of a job may run after a kill."""

_OWNED: Final = frozenset((".ckptcore", ".metadata", ".validate_storage_marker"))
"""Hidden names that do not belong to killed saves: the directory of a run's owner, and files of PyTorch and Ray."""

PR_SET_CHILD_SUBREAPER: Final = 36
"""Option of prctl: this process inherits the children of processes that end, and can wait for them."""


class LostError(Exception):
    """A saved checkpoint is lost or damaged, or files of a killed save are left."""


class Job(Protocol):
    """A job that saves.

    Attributes:
        size: the number of processes.
        keeps: the number of newest checkpoints that must exist at any moment.
        has_savers: True if the job's processes start other processes, which save.
    """

    size: int
    keeps: int
    has_savers: bool

    def run(self, directory: Path, process: Process) -> None:
        """Continue from the newest checkpoint, save, call `Process.settled`, save again, and end.

        Runs in each process of the job.
        """

    def found(self, directory: Path) -> Mapping[int, str]:
        """Load all checkpoints with all readers. Return their digests by step."""


@dataclass(slots=True)
class Ledger:
    """Records of the saves of a job.

    Attributes:
        saved: the steps whose saves have returned, and after a check the steps of the existing checkpoints.
        reported: the last step whose save has returned.
        digests: the possible digests of each step. Only one is possible after its save has returned.
    """

    saved: set[int] = field(default_factory=set)
    reported: int = -1
    digests: dict[int, list[str]] = field(default_factory=dict)

    def read(self, line: str) -> None:
        """Record a line of output: ``begin STEP DIGEST`` or ``saved STEP``. Other lines are ignored."""
        what, *words = line.split()
        if what == "begin" and words[1] not in self.digests.setdefault(int(words[0]), []):
            self.digests[int(words[0])].append(words[1])
        elif what == "saved":
            self.saved.add(int(words[0]))
            self.reported = max(self.reported, int(words[0]))
            del self.digests[int(words[0])][:-1]

    def check(self, existing: Mapping[int, str], keeps: int) -> None:
        """Compare with the digests of the existing checkpoints, and forget saves that were not committed.

        Raises:
            LostError: a checkpoint is lost, or its content was never saved.
        """
        for step in sorted(self.saved | existing.keys())[-keeps:]:
            if step not in existing:
                raise LostError(f"step {step} was saved and is lost; found {sorted(existing)}")
        if keeps == 1 and min(existing) < self.reported:
            raise LostError(f"step {self.reported} was saved, and a reader finds step {min(existing)}")
        for step, content in existing.items():
            if content not in self.digests.get(step, ()):
                raise LostError(f"step {step} holds {content}, expected one of {self.digests.get(step)}")
        self.digests = {step: [content] for step, content in existing.items()}
        self.saved = set(existing)


@dataclass(slots=True)
class Process:
    """One process of a job, with the methods that the job calls.

    Attributes:
        rank: the rank of the process.
        attempt: the number of the job, from which each job derives other contents.
        listener: the descriptor of a bound socket, for the store of the job.
        output: the descriptor of a pipe, to which the process writes its records.
        moment: the number of the call at which the process is killed, or None.
        saves: the directory that must not contain files of killed jobs.
    """

    rank: int
    attempt: int
    listener: int
    output: int
    moment: int | None
    saves: Path
    _calls: int = 0

    def begin(self, step: int, content: str) -> None:
        """Record that a save begins, and the digest of its arrays."""
        self._say(f"begin {step} {content}")

    def saved(self, step: int) -> None:
        """Record that a save has returned."""
        self._say(f"saved {step}")

    def settled(self) -> None:
        """Check that no files of killed jobs are left. From now on the process may be killed."""
        if self.rank == 0 and (left := leftovers(self.saves)):
            raise LostError(f"after a save there are still {left}")
        sys.addaudithook(self._count)
        self._say("settled")

    def ended(self) -> None:
        """Record the number of calls after the first save."""
        self._say(f"calls {self.rank} {self._calls}")

    def _say(self, line: str) -> None:
        os.write(self.output, f"{line}\n".encode())

    def _count(self, name: str, _: tuple[Any, ...]) -> None:
        """Count calls of the operating system, and kill this process at `moment`. Used as an audit hook."""
        if name.startswith(_CALLS):
            self._calls += 1
            if self._calls == self.moment:
                os.kill(os.getpid(), signal.SIGKILL)


def digest(arrays: Mapping[str, Any]) -> str:
    """Return a digest of named NumPy arrays."""
    state = hashlib.blake2b(digest_size=8)
    for name, array in sorted(arrays.items()):
        state.update(name.encode() + array.tobytes())
    return state.hexdigest()


def leftovers(root: Path) -> list[str]:
    """Return hidden directories and files of killed saves, and files that still hold a step."""
    left = []
    for directory, below, files in os.walk(root):
        if Path(directory).name == ".ckptcore":
            below[:] = [name for name in below if name != "owner"]
        elif ".ckptcore" in Path(directory).parts:
            left += [os.path.join(directory, name) for name in files]
        left += [os.path.join(directory, name) for name in (*below, *files) if name[0] == "." and name not in _OWNED]
    return left


@dataclass(frozen=True, slots=True)
class Fate:
    """When and how a job is killed.

    Attributes:
        victims: the ranks to kill. Empty: the job is not killed.
        calls: by rank, the number of the call that kills it. Empty: `seconds` decides.
        seconds: the time from the first save to the kill.
        spares: True to kill only the processes that the victims have started.
        grace: the time in seconds that the other processes may continue.
    """

    victims: tuple[int, ...] = ()
    calls: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    spares: bool = False
    grace: float = 0.0

    @classmethod
    def drawn(cls, chance: random.Random, job: Job, calls: Mapping[int, int], seconds: float) -> Fate:
        """Draw a random fate.

        Args:
            chance: the source of random numbers.
            job: the job.
            calls: by rank, the number of calls after the first save.
            seconds: the time that a job takes after its first save if it is not killed.
        """
        everyone = tuple(range(job.size))
        victims = chance.choice([(0,), (chance.randrange(job.size),), everyone])
        grace = chance.choice([0.0, chance.uniform(0.0, 0.05), _GRACE_SECONDS])
        if job.has_savers or chance.random() < 0.5:
            spares = job.has_savers and chance.random() < 0.5
            return cls(victims, {}, chance.uniform(0.0, seconds), spares, grace)
        return cls(victims, {rank: chance.randint(1, calls[rank]) for rank in victims}, grace=grace)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job.

    Attributes:
        killed: True if the job was killed.
        lines: the records of the job's processes.
        seconds: the time from the first save to the end.
    """

    killed: bool
    lines: list[str]
    seconds: float

    def calls(self) -> dict[int, int]:
        """Return by rank the number of calls after the first save."""
        words = [line.split() for line in self.lines if line.startswith("calls ")]
        return {int(rank): int(calls) for _, rank, calls in words}


def run_job(job: Job, directory: Path, attempt: int, fate: Fate) -> Outcome:
    """Run a job, kill it, and wait until all of its processes have ended.

    Raises:
        RuntimeError: the job failed before it was killed.
    """
    reading, writing = os.pipe()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))

        def run(process: Process) -> None:
            job.run(directory, process)
            process.ended()
            Path("modules").write_text("\n".join(sys.modules))

        ranks = [
            forked(
                functools.partial(
                    run, Process(rank, attempt, listener.fileno(), writing, fate.calls.get(rank), directory.parent)
                ),
                Path(f"errors-{rank}"),
            )
            for rank in range(job.size)
        ]
    os.close(writing)
    try:
        said = _read_until_settled(reading, job.size)
        began = time.monotonic()
        if fate.victims and not fate.calls:
            time.sleep(fate.seconds)
            _kill([ranks[rank] for rank in fate.victims], spares=fate.spares)
        statuses = _wait_for_failure(set(ranks))
        seconds = time.monotonic() - began
        _wait_for_the_others(fate.grace)
        end_all()
        while more := os.read(reading, 1 << 16):
            said += more
    finally:
        os.close(reading)
    lines = said.decode().splitlines()
    failed = any(statuses.values())
    was_killed = bool(fate.victims) and (fate.spares or signal.SIGKILL in statuses.values())
    if (failed and not was_killed) or lines.count("settled") < job.size:
        errors = "\n".join(Path(f"errors-{rank}").read_text()[-3000:] for rank in range(job.size))
        raise RuntimeError(f"the job failed by itself: {statuses}\n{errors}")
    return Outcome(failed, lines, seconds)


def forked(work: Callable[[], None], errors: Path, seconds: int = _SECONDS) -> int:
    """Call a function in a forked process, which writes its errors to a file. Return the id of the process."""
    child = os.fork()
    if not child:
        signal.alarm(seconds)
        try:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            work()
        except BaseException:  # noqa: BLE001  # ends the forked process
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return child


def _read_until_settled(reading: int, size: int) -> bytes:
    """Read the records of a job until all of its processes have saved once, or one has ended."""
    said = b""
    while said.count(b"settled\n") < size:
        if select.select([reading], [], [], 0.05)[0]:
            more = os.read(reading, 1 << 16)
            if not more:
                break
            said += more
        elif os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
    return said


def _kill(processes: list[int], *, spares: bool) -> None:
    if spares:
        processes = [child for parent in processes for child in filter(_is_saver, descendants(parent))]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def descendants(parent: int) -> list[int]:
    """Return all direct and indirect children of a process."""
    children_ids = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children_ids += [int(child) for child in children.read_text().split()]
    return [*children_ids, *(below for child in children_ids for below in descendants(child))]


def _is_saver(process: int) -> bool:
    """Return False for the resource tracker, which multiprocessing starts for its own use."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return b"resource_tracker" not in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def _wait_for_failure(ranks: set[int]) -> dict[int, int]:
    """Wait until a rank was killed or failed, or all ranks have ended. Return the statuses of the ended ranks."""
    statuses: dict[int, int] = {}
    options = 0
    with contextlib.suppress(ChildProcessError):
        while statuses.keys() < ranks:
            process, status = os.waitpid(-1, options)
            if not process:
                break
            if process in ranks:
                statuses[process] = status
            if status:
                options = os.WNOHANG  # the killed rank may be reported after a rank that failed because of the kill
    return statuses


def _wait_for_the_others(grace: float) -> None:
    """Wait until all direct and indirect children have ended, but no longer than the grace time."""
    deadline = time.monotonic() + grace
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.002)


def end_all() -> None:
    """Kill all direct and indirect children of this process, and wait for them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for process in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)


def look(job: Job, directory: Path) -> dict[int, str]:
    """Return the result of `Job.found`, which runs in a forked process.

    Raises:
        LostError: `Job.found` failed.
    """
    result, errors = Path("found"), Path("errors")

    def work() -> None:
        result.write_text(json.dumps(dict(job.found(directory))))

    process = forked(work, errors)
    if os.waitpid(process, 0)[1]:
        raise LostError(f"what was saved cannot be loaded: {errors.read_text()[-6000:]}")
    return {int(step): content for step, content in json.loads(result.read_text()).items()}


def kill_often(job: Job, directory: Path, seed: int, kills: int) -> dict[str, int]:
    """Run jobs until a number of them were killed, and then run one without a kill.

    Returns:
        Counts: "kills", "ended" (jobs that ended before their kill) and "new" (kills after a commit that the job had
        not reported yet).

    Raises:
        LostError: a checkpoint is lost or damaged.
        RuntimeError: a job failed without a kill.
    """
    chance, ledger = random.Random(seed), Ledger()
    counts = {"kills": 0, "ended": 0, "new": 0}
    calls: Mapping[int, int] = {}
    seconds, attempt = 0.0, 0
    while True:
        is_last = counts["kills"] >= kills
        fate = Fate() if attempt < 2 or is_last else Fate.drawn(chance, job, calls, seconds)
        try:
            outcome = run_job(job, directory, attempt, fate)
            for line in outcome.lines:
                ledger.read(line)
            reported = max(ledger.saved)
            existing = look(job, directory)
            ledger.check(existing, job.keeps)
        except Exception as error:
            error.add_note(f"seed {seed}, job {attempt}, {fate}")
            raise
        if is_last:
            return counts
        if attempt == 0:
            import_what_was_imported(Path("modules"))
        if outcome.killed:
            counts["kills"] += 1
            counts["new"] += max(existing) > reported
        else:
            calls, seconds = outcome.calls(), outcome.seconds
            counts["ended"] += 1
        attempt += 1


def import_what_was_imported(names: Path) -> None:
    """Import the modules that a job imported late, so that the next jobs need not import them."""
    for name in set(names.read_text().split()) - sys.modules.keys():
        with contextlib.suppress(ImportError):  # some libraries create modules that cannot be imported
            importlib.import_module(name)


def main() -> None:
    """Kill jobs as the command line says, and print the counts."""
    warnings.simplefilter("ignore")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # inherit the children of killed processes
    name, directory, seed, kills = sys.argv[1:]
    os.chdir(directory)  # this program writes its own files to the current directory
    Path("saves").mkdir()
    module, _, kind = name.partition(":")
    job: Job = getattr(importlib.import_module(module), kind)()
    print(f"seed {seed}", flush=True)
    began = time.monotonic()
    counts = kill_often(job, Path("saves/run").absolute(), int(seed), int(kills))
    print(json.dumps({"job": name, **counts, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main()
