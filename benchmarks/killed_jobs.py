"""Jobs of which `benchmarks.recovery` kills a host, in the memory of this machine."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ckptcore_recovery.peers.starting import ensure_server
from ckptcore_testing.servers import free_port

from benchmarks import recovery_processes as processes
from benchmarks.limited_network import NetworkHost
from benchmarks.recovery_processes import IDLE_SECONDS, JOB, MEMORY_BYTES, Member

PHASES: Final = ("detection", "agreement", "transfer", "building")

PARTS: Final = ("fork", "process group", "agreement", "memory of the state", "load", "step", "servers")
"""Parts of the processor time: until each of the marks that `recovery_processes` measures, and that of servers."""

_SECONDS: Final = 120.0


class Forker:
    """Forks processes from one that has imported the libraries."""

    def __init__(self, host: NetworkHost | None = None) -> None:
        """Start it, in a network namespace if there is one."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if host is not None:
            environment["GLOO_SOCKET_IFNAME"] = host.device
        command = () if host is None else host.command
        self._imported: set[str] = {"__main__"}
        self._process = subprocess.Popen(
            [*command, sys.executable, "-W", "ignore", "-m", "benchmarks.recovery_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries report what they do
            text=True,
            env=environment,
            cwd=Path(__file__).parents[1],
        )

    def _ask(self, request: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(request, file=self._process.stdin, flush=True)
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError("the process that forks others has ended: run python -m benchmarks.recovery_processes")
        return int(answer)

    def fork(self, member: Member) -> int:
        """Fork a process. Return its id."""
        return self._ask(processes.request_of(member))

    def wait(self, ids: Sequence[int]) -> None:
        """Wait until processes have ended."""
        self._ask(json.dumps(["wait", list(ids)]))

    def imports(self, modules: Sequence[str]) -> None:
        """Import modules, so that processes which are forked later need not."""
        self._ask(json.dumps(["import", [name for name in modules if name not in self._imported]]))
        self._imported.update(modules)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@dataclass(frozen=True, slots=True)
class Recovery:
    """Measurements of one recovery.

    Attributes:
        seconds: by phase.
        cpu: processor time of all new processes, and of those that serve them, in seconds.
        parts: the parts of it, by `PARTS`.
        messages, nbytes: the requests to a memory server, and their bytes, of the server that had most of them.
    """

    seconds: Mapping[str, float]
    cpu: float
    parts: Mapping[str, float]
    messages: int
    nbytes: int

    @property
    def total(self) -> float:
        """The seconds from the kill to the first new step."""
        return sum(self.seconds.values())


@dataclass(slots=True)
class KilledJob:
    """A job of one contender. Its last host is lost again and again.

    Attributes:
        name: the contender.
        size: the number of processes.
        rows: see `Member`.
        forkers: that of each process, in turns.
        directory: an empty directory for files.
        memory: an empty directory in a memory file system.
        networks: the network of the host of each process; empty for that of this machine.
        results: one for each recovery.
    """

    name: str
    size: int
    rows: int
    forkers: Sequence[Forker]
    directory: Path
    memory: Path
    networks: Sequence[NetworkHost] = ()
    results: list[Recovery] = field(default_factory=list)
    _running: list[int] = field(default_factory=list)
    _holding: list[int] = field(default_factory=list)
    _spares: int = 0

    def _start(self, task: str, **options: Any) -> tuple[list[int], list[Member]]:
        hosts = [f"host-{rank}" for rank in range(self.size - 1)] + [f"spare-{self._spares}"]
        port = free_port()
        if self.networks:
            options["address"] = self.networks[0].address
        members = []
        for rank, host in enumerate(hosts):
            if self.networks:
                # A healthy replica is on the other host.
                options["interface"] = self.networks[0 if task == "hold" else rank].address
            member = Member(
                self.name, task, str(self.directory), str(self.memory / host), rank, self.size, port, self.rows,
                **options,
            )  # fmt: skip
            member.output.unlink(missing_ok=True)
            members.append(member)
        return [self._forker(rank, task).fork(member) for rank, member in enumerate(members)], members

    def _forker(self, rank: int, task: str = "") -> Forker:
        return self.forkers[0 if task == "hold" else rank % len(self.forkers)]

    def prepare(self) -> None:
        """Start the job, save a step, and start what the spare host runs before it is needed."""
        self.directory.mkdir(exist_ok=True)
        self.memory.mkdir(exist_ok=True)
        if self.name == processes.MEMORY and not self.networks:
            spare = str(self.memory / f"spare-{self._spares + 1}")
            _, server = ensure_server(
                JOB, limit=MEMORY_BYTES, interface="127.0.0.1", idle_seconds=IDLE_SECONDS, base=spare
            )
            server.close()
        if self.name in (processes.TORCHFT, processes.PLAIN):
            self._holding, members = self._start("hold")
            _results(members)
        self._running, members = self._start("prepare")
        _results(members)
        for path in self.directory.rglob("*"):
            if path.is_file():
                _drop_from_cache(path)

    def recover(self) -> Recovery:
        """Lose the last host, end the others, and start the job again."""
        served = self._cpu_of_servers()
        killed = time.monotonic()
        self._lose_host()
        others = signal.SIGTERM if self.name == processes.LM_RESILIENCY else signal.SIGKILL
        for process in self._running[:-1]:
            os.kill(process, others)
        self._wait(self._running)
        self._running, members = self._start("recover")
        results = _results(members)
        cpu = sum([seconds - served.get(process, 0) for process, seconds in self._cpu_of_servers().items()])
        for forker in self.forkers:
            forker.imports(results[0]["modules"])
        return _recovery(killed, cpu, results)

    def _cpu_of_servers(self) -> Mapping[int, float]:
        """Return the processor time of memory servers and healthy replicas so far, in seconds, by process."""
        servers = [json.loads(path.read_bytes())["pid"] for path in self.memory.glob(f"*/{JOB}/server.json")]
        seconds = {}
        for process in [*self._holding, *servers]:
            with suppress(FileNotFoundError, ProcessLookupError):  # it was killed
                fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                seconds[process] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds

    def train(self, **options: Any) -> Mapping[str, Any]:
        """Start the job, train, and end it. Return what rank 0 measured."""
        self.directory.mkdir(exist_ok=True)
        self.memory.mkdir(exist_ok=True)
        self._running, members = self._start("train", **options)
        result = _results(members)[0]
        self.close()
        return result

    def _lose_host(self) -> None:
        os.kill(self._running[-1], signal.SIGKILL)
        server = self.memory / f"spare-{self._spares}" / JOB / "server.json"
        if server.exists():
            os.kill(json.loads(server.read_bytes())["pid"], signal.SIGKILL)
        self._spares += 1

    def _wait(self, running: Sequence[int], task: str = "") -> None:
        for rank, process in enumerate(running):
            self._forker(rank, task).wait([process])

    def clear(self, result: Recovery) -> None:
        """Keep a result, and end all processes."""
        self.results.append(result)
        self._end()
        for lost in self.memory.glob("spare-*"):
            if lost.name != f"spare-{self._spares}":
                shutil.rmtree(lost)
        shutil.rmtree(self.memory / "files", ignore_errors=True)

    def _end(self) -> None:
        for process in [*self._running, *self._holding]:
            os.kill(process, signal.SIGKILL)
        self._wait(self._running)
        self._wait(self._holding, "hold")
        self._running, self._holding = [], []

    def close(self) -> None:
        """End all processes and servers, and remove all files."""
        self._end()
        for server in self.memory.glob(f"*/{JOB}/server.json"):
            os.kill(json.loads(server.read_bytes())["pid"], signal.SIGKILL)
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def note(self) -> str:
        """Return the medians of the phases, and of the processor time."""
        timed = self.results[1:]  # the first one is a warm-up
        medians = [statistics.median([result.seconds[phase] for result in timed]) for phase in PHASES]
        medians.append(statistics.median([result.cpu for result in timed]))
        names = (*PHASES, "processors")
        parts = ", ".join(
            [f"{part} {statistics.median([result.parts[part] for result in timed]):.3f}" for part in PARTS]
        )
        text = ", ".join([f"{name} {seconds:.3f} s" for name, seconds in zip(names, medians, strict=True)])
        return f"{text}: {parts}"


def _drop_from_cache(path: Path) -> None:
    """Remove a file from the page cache, so that it is read from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _results(members: Sequence[Member]) -> Sequence[Mapping[str, Any]]:
    """Wait for the results of processes.

    Raises:
        RuntimeError: a process failed.
    """
    results: list[Mapping[str, Any]] = []
    deadline = time.monotonic() + _SECONDS
    for member in members:
        while not member.output.exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{member} has no result after {_SECONDS:.0f} s")
            time.sleep(0.005)
        result = json.loads(member.output.read_text(encoding="utf-8"))
        if "error" in result:
            raise RuntimeError(f"{member}: {result['error']}")
        results.append(result)
    return results


def _recovery(killed: float, cpu: float, results: Sequence[Mapping[str, Any]]) -> Recovery:
    """Join what all processes measured: a phase ends when the last process has ended it.

    Args:
        killed: when the job was killed.
        cpu: the processor time of processes that served the new ones.
        results: those of the new processes.
    """
    marks = zip(*[result["marks"] for result in results], strict=True)
    first, agreed, built, loaded, stepped = [max(of_processes) for of_processes in marks]
    transfer = min(max(result["transfer"] for result in results), loaded - built)
    parts = (first - killed, agreed - first, transfer, stepped - agreed - transfer)
    seconds = dict(zip(PHASES, parts, strict=True))
    sums: dict[str, list[int]] = {}
    for result in results:
        for place, counts in result["messages"].items():
            sums[place] = [own + more for own, more in zip(sums.get(place, [0, 0]), counts, strict=True)]
    messages, nbytes = [max([counts[number] for counts in sums.values()], default=0) for number in (0, 1)]
    used = [sum(of_processes) for of_processes in zip(*[result["used"] for result in results], strict=True)]
    by_part = [later - earlier for earlier, later in itertools.pairwise([0.0, *used])]
    return Recovery(seconds, cpu + used[-1], dict(zip(PARTS, [*by_part, cpu], strict=True)), messages, nbytes)
