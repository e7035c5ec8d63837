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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ckptcore_testing.servers import free_port

from plugins.recovery.tests import numpy_hosts
from plugins.recovery.tests.numpy_hosts import JOB, Process

_SECONDS: Final = 120.0


class KilledHosts:
    """Jobs on hosts of this machine, by seed.

    Attributes:
        reported: the newest step that a process reported as saved.
        loaded: the step that each start of the job has loaded.
    """

    def __init__(self, directory: Path, seed: int, *, sizes: Sequence[int], copies: int = 1) -> None:
        """Start nothing yet.

        Args:
            directory: a new directory.
            seed: decides about everything that is random.
            sizes: the numbers of hosts to choose from.
            copies: the copies of each step on other hosts; so many hosts are lost at most.
        """
        self.reported = 0
        self.loaded: list[int] = []
        self._directory = directory
        self._random = random.Random(seed)
        self._sizes = sizes
        self._copies = copies
        self._hosts = [f"host-{number}" for number in range(max(sizes))]
        self._spares = 0

    def run(self, starts: int) -> None:
        """Start the job some times. Each time load, save steps, and kill everything at a random moment."""
        for start in range(starts):
            size = self._random.choice(self._sizes)
            layout = self._random.choice(["safetensors", "dcp", "zarr3"])
            self._start(size, layout, is_last=start == starts - 1)

    def _start(self, size: int, layout: str, *, is_last: bool) -> None:
        while len(self._hosts) < size:
            self._spares += 1
            self._hosts.append(f"spare-{self._spares}")
        self._random.shuffle(self._hosts)
        hosts = self._hosts[:size]
        port = free_port()
        context = multiprocessing.get_context("forkserver")
        members = [
            Process(self._directory, host, rank, size, port, layout, self._copies) for rank, host in enumerate(hosts)
        ]
        running = [context.Process(target=numpy_hosts.run, args=(member,)) for member in members]
        try:
            for process in running:
                process.start()
            self._wait(members, lambda lines: bool(lines))
            loaded = {lines[0] for lines in map(_lines, members)}
            assert len(loaded) == 1, [_lines(member) for member in members]
            text = loaded.pop()
            assert text.startswith("loaded"), [_lines(member) for member in members]
            step = 0 if text == "loaded None" else int(text.split()[1])
            assert step >= self.reported, f"step {self.reported} was reported as saved, and step {step} was loaded"
            self.loaded.append(step)
            if not self.reported:
                self._wait(members, lambda lines: "saved 1" in lines)
            if is_last:
                return
            time.sleep(self._random.uniform(0.0, 0.5))  # the moment of the kill is random; nothing waits for it
            failed = self._random.sample(hosts, self._random.randint(0, min(self._copies, size - 1)))
            lost = [host for host in failed if self._random.random() < 0.7]  # the others keep their memory
            for host in failed:
                self._kill_server(host)
                running[hosts.index(host)].kill()
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.join()
        saved = [int(line.split()[1]) for member in members for line in _lines(member) if line.startswith("saved")]
        self.reported = max([self.reported, *saved])
        for host in lost:
            self._hosts.remove(host)
            shutil.rmtree(self._directory / host)

    def _wait(self, members: Sequence[Process], is_true: Callable[[list[str]], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not all(is_true(_lines(member)) for member in members):
            assert time.monotonic() < deadline, [_lines(member) for member in members]
            time.sleep(0.005)

    def _kill_server(self, host: str) -> None:
        described = self._directory / host / JOB / "server.json"
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(json.loads(described.read_bytes())["pid"], signal.SIGKILL)

    def close(self) -> None:
        """Kill all servers."""
        for directory in self._directory.iterdir():
            if directory.is_dir():
                self._kill_server(directory.name)


def _lines(member: Process) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [line.strip() for line in member.output.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return []
