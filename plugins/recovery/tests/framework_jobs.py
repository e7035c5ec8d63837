"""Tasks of PyTorch and JAX jobs with steps in memory. Each process is a host; each framework loads steps of the other.

A host is a directory with the memory of its server, which survives the processes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_recovery.peers import PeerMemory
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE

from ckptcore import Checkpointer
from ckptcore.model import HostArray
from ckptcore.policies import SpecificSteps
from plugins.recovery.tests.host_directories import lose_host
from tests.jobs.processes import Place, run_job

JOB: Final = "programs"


@dataclass(frozen=True)
class Framework:
    """Operations of the processes of a framework.

    Attributes:
        state: returns the state of a step, with arrays on all processes.
        load: loads the newest step of a run.
        expect: compares the elements of this process with those of a step.
        wait: waits for all processes.
    """

    state: Callable[[int], dict[str, Any]]
    load: Callable[[Checkpointer], Mapping[str, Any]]
    expect: Callable[[Mapping[str, Any], int], None]
    wait: Callable[[], None]

    @property
    def tasks(self) -> Mapping[str, Callable[[Place], Any]]:
        """The tasks by name."""
        return {
            "save and die": partial(_save_and_die, self),
            "train": partial(_train, self),
            "load": partial(_load, self),
        }


def whole_array(step: int) -> HostArray:
    """Return the whole array of a step."""
    return np.arange(600_000, dtype=np.float32).reshape(1200, 500) + np.float32(step)


def open_run(directory: Path, host: str, layout: str = "safetensors") -> tuple[Checkpointer, PeerMemory]:
    """Open the run on a host. Only step 3 is uploaded."""
    os.environ[DIRECTORY_VARIABLE] = str(directory / host)
    memory = PeerMemory(directory / "far", job=JOB, memory_bytes=1 << 28, upload_policy=SpecificSteps([3]))
    return Checkpointer(memory, layout=layout, if_in_use="take over"), memory


def _open(place: Place) -> tuple[Checkpointer, PeerMemory]:
    path = place.directory / "hosts.json"
    hosts = json.loads(path.read_text()) if path.exists() else [f"host-{rank}" for rank in range(place.size)]
    return open_run(place.directory, hosts[place.rank], *place.layouts)


def _save(run: Checkpointer, framework: Framework, step: int) -> None:
    run.save(step, framework.state(step))
    run.wait()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(framework: Framework, place: Place) -> None:
    """Save four steps, of which one is uploaded, and be killed."""
    run, memory = _open(place)
    for step in (1, 2, 3, 4):
        _save(run, framework, step)
    memory.wait_for_uploads()
    framework.wait()
    _die()


def _train(framework: Framework, place: Place) -> None:
    """Load the newest step, and save more until a timer kills this process. Note what was loaded and reported.

    Timers begin while the job starts, after its load, or after its first save.
    """
    seed = (place.directory / "seed").read_text()
    begin = random.Random(seed).choice(["start", "load", "save", "save", "save"])
    timer = threading.Timer(random.Random(f"{seed} {place.rank}").uniform(0.0, 1.0), _die)
    if begin == "start":
        timer.start()
    run, _ = _open(place)
    step = 0
    if run.latest is not None:
        loaded = framework.load(run)
        step = run.restored_step or 0
        framework.expect(loaded, step)
    note = (place.directory / f"notes-{place.rank}").open("a", buffering=1)
    note.write(f"loaded {step}\n")
    framework.wait()
    if begin == "load":
        timer.start()
    for number in count(step + 1):
        _save(run, framework, number)
        note.write(f"saved {number}\n")
        if begin == "save" and number == step + 1:
            framework.wait()
            timer.start()


def _load(framework: Framework, place: Place) -> int:
    """Load the newest step, and save one more."""
    run, _ = _open(place)
    with run:
        loaded = framework.load(run)
        step = run.restored_step
        assert step is not None
        framework.expect(loaded, step)
        _save(run, framework, step + 10)
        return step


# --- in the process of the test --------------------------------------------------------------------------------------


def place_on(directory: Path, *hosts: str) -> None:
    """Choose the hosts of the next job."""
    (directory / "hosts.json").write_text(json.dumps(hosts))


def lose(directory: Path, *hosts: str) -> None:
    """Lose hosts with their memory."""
    for host in hosts:
        lose_host(directory / host, JOB)


def die(program: str, directory: Path, task: str, size: int, layouts: Sequence[str] = ()) -> None:
    """Run a job until its processes kill themselves, and so other ones that wait for them."""
    with pytest.raises(AssertionError, match=r"ended with \[.*-9"):
        run_job(program, task, directory, size=size, layouts=layouts)


def take_notes(directory: Path) -> tuple[set[int], int]:
    """Return the steps that processes loaded, and the newest one that they reported as saved. Remove the notes."""
    loaded, saved = set(), 0
    for path in directory.glob("notes-*"):
        for line in path.read_text().splitlines():
            kind, step = line.split()
            if kind == "loaded":
                loaded.add(int(step))
            else:
                saved = max(saved, int(step))
        path.unlink()
    return loaded, saved
