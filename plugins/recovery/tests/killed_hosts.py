"""A launcher that starts a job on hosts, kills hosts, servers and processes at random moments, and starts it again."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from plugins.recovery.tests import numpy_hosts
from plugins.recovery.tests.networks import LoopbackNetwork
from plugins.recovery.tests.numpy_hosts import JOB, Moment, Process

_SECONDS: Final = 120.0
_MESSAGES: Final = {"start": 40, "loaded": 60}
"""A failure begins before one of so many messages of a process, by what they follow: the load, or some saves."""


@dataclass
class Host:
    """A host.

    Attributes:
        number: its number in the network.
        memory: the directory with its memory.
        is_known: True if it was in the last incarnation of the job.
    """

    number: int
    memory: Path
    is_known: bool = False


@dataclass
class Incarnation:
    """The processes of one start of the job.

    Attributes:
        hosts: the host of each rank.
        processes: the process of each rank.
        pipes: the events of each rank that were not received yet.
        loaded: the step that each rank has loaded.
        saved: the newest step that a rank reported as saved.
        has_moment: True once the moment for a failure has come.
        failures: the errors of ranks.
    """

    hosts: Sequence[Host]
    processes: Sequence[BaseProcess]
    pipes: dict[int, Pipe]
    loaded: dict[int, int] = field(default_factory=dict)
    saved: int = 0
    has_moment: bool = False
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """True once all ranks have loaded."""
        return len(self.loaded) == len(self.hosts)

    def receive(self, timeout: float | None) -> None:
        """Receive the events that have arrived, or wait for one.

        Args:
            timeout: the longest time to wait in seconds; None: a time that is a failure of the test.
        """
        ready = wait(list(self.pipes.values()), _SECONDS if timeout is None else timeout)
        assert ready or timeout is not None, f"nothing happens; {self}"
        for rank, pipe in list(self.pipes.items()):
            if pipe in ready:
                try:
                    self._receive(rank, *pipe.recv())
                except EOFError:
                    del self.pipes[rank]

    def _receive(self, rank: int, kind: str, value: object) -> None:
        if kind == "loaded":
            assert isinstance(value, int)
            self.loaded[rank] = value
        elif kind == "saved":
            assert isinstance(value, int)
            self.saved = max(self.saved, value)
        elif kind == "moment":
            self.has_moment = True
        elif kind == "failed":
            self.failures[rank] = str(value)

    def kill(self) -> None:
        """Kill all processes, and receive what they sent before."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        while self.pipes:
            self.receive(None)


class KilledHosts:
    """Jobs on hosts of this machine, by seed.

    Attributes:
        reported: the newest step that a process reported as saved.
        loaded: the step that each start of the job has loaded.
        counts: how often what was done.
    """

    def __init__(
        self,
        directory: Path,
        memory: Path,
        network: LoopbackNetwork,
        seed: int,
        *,
        sizes: Sequence[int],
        copies: int = 1,
        needed: int = 1,
    ) -> None:
        """Start nothing yet.

        Args:
            directory: a new directory for the run.
            memory: a new directory with a short name, in a memory file system.
            network: a network with `copies` hosts more than the largest size.
            seed: decides about everything that is random.
            sizes: the numbers of processes to choose from.
            copies: the copies of each step on other hosts, or the parity fragments; so many hosts are lost at most.
            needed: the fragments that are needed to read an object; 1 for copies.
        """
        self.reported = 0
        self.loaded: list[int] = []
        self.counts: Counter[str] = Counter()
        self._directory = directory
        self._memory = memory
        self._network = network
        self._random = random.Random(seed)
        self._sizes = sizes
        self._copies = copies
        self._needed = needed
        self._starts = 0
        self._spares = 0
        self._far = directory / "far"
        self._hosts = [self._new_host(number) for number in range(max(sizes) + copies)]
        self._away: list[Host] = []  # hosts that cannot be reached now, with their memory
        self._without_server: list[Host] = []
        self._can_lose = 0  # hosts that can be lost before the job has made its copies again
        self._old: Incarnation | None = None  # one that was not killed

    def _new_host(self, number: int) -> Host:
        self._spares += 1
        return Host(number, self._memory / f"host-{self._spares}")

    def run(self, kills: int) -> None:
        """Start the job and let a failure happen, so many times; and start it once more."""
        for _ in range(kills):
            self._run(is_last=False)
        self._run(is_last=True)

    def _run(self, *, is_last: bool) -> None:
        choose = self._random
        size = choose.choice(self._sizes)
        is_early = not is_last and self.loaded and choose.random() < 0.2
        lives_on = not is_early and self._network.can_cut and choose.random() < 0.3
        stops = not lives_on and choose.random() < 0.5
        moment = None
        if not is_last:
            after = "start" if is_early else "loaded"
            moment = Moment(choose.randint(1, _MESSAGES[after]), after, stops)
        job = self._start(self._choose_hosts(size), choose.randrange(size), moment)
        try:
            self._check(job, is_last=is_last)
            if is_last:
                pass
            elif job.is_ready and lives_on:
                self._live_on(job)
            else:
                self._fail(job, goes_on=job.is_ready and not stops)
        finally:
            if job is not self._old:
                job.kill()
        self.reported = max(self.reported, job.saved)
        for host in [*self._hosts, *self._away]:
            host.is_known = host in job.hosts if job.is_ready else host.is_known or host in job.hosts

    def _choose_hosts(self, size: int) -> Sequence[Host]:
        """Choose hosts, so that the job finds its memory: one of them was in the last incarnation."""
        choose = self._random
        hosts = [host for host in self._hosts if host in self._without_server]
        others = [host for host in self._hosts if host not in hosts]
        known = [host for host in others if host.is_known]
        if known and not any(host.is_known for host in hosts):
            hosts.append(choose.choice(known))
        old = [] if self._old is None else self._old.hosts
        if self._away and (outside := [host for host in others if host not in [*old, *hosts]]):
            # One process cannot reach hosts that others still reach. None of the old incarnation runs on its host.
            hosts.append(outside[0])
        hosts += choose.sample([host for host in others if host not in hosts], size - len(hosts))
        choose.shuffle(hosts)
        return hosts

    def _start(self, hosts: Sequence[Host], rank_of_moment: int, moment: Moment | None) -> Incarnation:
        self._starts += 1
        layout = self._random.choice(["safetensors", "zarr3"])
        clock_jumps = self._random.random() < 0.3
        self.counts["starts with clocks that jump"] += clock_jumps
        if self._old is not None:
            if self._far.exists():  # the old one owns it
                self._far.rename(self._directory / f"far-{self._starts}")
            if self._away:
                cut = next((host for host in hosts if host not in self._old.hosts), hosts[0])
                self._network.drop(cut.number, [host.number for host in self._away])
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([numpy_hosts.__name__])
        processes, pipes = [], {}
        for rank, host in enumerate(hosts):
            pipes[rank], events = context.Pipe(duplex=False)
            member = Process(
                control=self._memory / f"job-{self._starts}",
                far=self._far,
                memory=host.memory,
                namespace=self._network.namespace(host.number),
                address=self._network.address(host.number),
                rank=rank,
                size=len(hosts),
                layout=layout,
                copies=self._copies,
                needed=self._needed,
                latency=self._random.choice([0.0, 0.001, 0.005]),
                moment=moment if rank == rank_of_moment else None,
                seed=self._random.randrange(1 << 30),
                clock_jumps=clock_jumps,
            )
            process = context.Process(target=numpy_hosts.run, args=(member, events))
            process.start()
            events.close()
            processes.append(process)
        return Incarnation(hosts, processes, pipes)

    def _check(self, job: Incarnation, *, is_last: bool) -> None:
        """Wait until the job has loaded the newest step, or until the moment of the failure."""
        old = self._old
        while not job.is_ready and not job.has_moment:
            assert not job.failures, job.failures
            job.receive(None)
            if old is not None:
                old.receive(0)
        if job.is_ready:
            self._kill_old()  # it is fenced: all that it ever reported was loaded
            (step,) = set(job.loaded.values())
            assert step >= self.reported, f"step {self.reported} was reported as saved, and step {step} was loaded"
            self.loaded.append(step)
            self._can_lose = self._copies
            self._without_server.clear()
            self.counts[f"restarts with {len(job.hosts)} processes"] += 1
            self._network.heal()
            self._hosts.extend(self._away)
            self._away.clear()
        while not (job.saved > 0 if is_last else job.has_moment or job.failures):
            job.receive(None)
            assert not (is_last and job.failures), job.failures

    def _fail(self, job: Incarnation, *, goes_on: bool) -> None:
        """Fail servers, links and hosts; then kill all processes.

        Args:
            job: the job.
            goes_on: True if the job goes on for a while after the failure of a server or links.
        """
        choose = self._random
        self.counts["kills" if job.is_ready else "kills while joining"] += 1
        self._kill_old()
        if choose.random() < 0.3 and not self._without_server:
            host = choose.choice(job.hosts)  # it lives, with its memory, and the next job starts its server again
            self._kill_server(host)
            self._without_server.append(host)
            self.counts["servers killed"] += 1
        if self._network.can_cut and choose.random() < 0.4:
            for host in choose.sample(job.hosts, choose.randint(1, len(job.hosts) // 2)):
                self._network.cut(host.number)
                self.counts["links cut"] += 1
        if goes_on and choose.random() < 0.5:
            time.sleep(choose.uniform(0.0, 0.3))  # a random moment; nothing waits for it
            self._network.heal()
            before = job.saved
            while job.saved < before + 2 and not job.failures:
                job.receive(None)
            self.counts["jobs that failed by themselves" if job.failures else "jobs that went on"] += 1
        victims = choose.sample(job.hosts, choose.randint(0, min(self._can_lose, len(job.hosts) - 1)))
        for host in victims:
            self._fail_host(job, host)
        time.sleep(choose.choice([0.0, choose.uniform(0.0, 0.3)]))  # a random moment; nothing waits for it
        job.kill()
        self._network.heal()
        for host in self._away:
            self._network.cut(host.number)

    def _kill_old(self) -> None:
        """Kill the incarnation that lived on."""
        if self._old is not None:
            self._old.kill()
            self.reported = max(self.reported, self._old.saved)
            self._old = None

    def _fail_host(self, job: Incarnation, host: Host) -> None:
        """Kill a host: its process and its server. Its memory is lost, or cannot be reached for a while."""
        job.processes[job.hosts.index(host)].kill()
        self._hosts.remove(host)
        self._can_lose -= 1
        if self._network.can_cut and self._random.random() < 0.3:
            self.counts["hosts cut"] += 1
            self._network.cut(host.number)
            self._away.append(host)
            return
        self.counts["hosts lost"] += 1
        self._kill_server(host)
        shutil.rmtree(host.memory, ignore_errors=True)
        self._hosts.append(self._new_host(host.number))

    def _live_on(self, job: Incarnation) -> None:
        """Leave all processes running: the launcher does not reach some hosts, and starts the job without them."""
        self.counts["incarnations that lived on"] += 1
        self._kill_old()
        self._old = job
        for host in self._random.sample(job.hosts, self._random.randint(0, self._can_lose)):
            self._hosts.remove(host)
            self._away.append(host)
            self._can_lose -= 1
            self.counts["hosts that lived on, cut from one host"] += 1

    def _kill_server(self, host: Host) -> None:
        described = host.memory / JOB / "server.json"
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(json.loads(described.read_bytes())["pid"], signal.SIGKILL)

    def close(self) -> None:
        """Kill all processes and servers."""
        self._kill_old()
        self._network.heal()
        for path in self._memory.glob(f"*/{JOB}/server.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(path.read_bytes())["pid"], signal.SIGKILL)
