"""`PeerMemory` as a run directory, against the conformance kit."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_recovery.peers import PeerMemory
from ckptcore_recovery.peers.connections import ServerConnections
from ckptcore_recovery.peers.messages import Header
from ckptcore_recovery.peers.session import Session
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE
from ckptcore_recovery.peers.views import Member
from ckptcore_testing import RunDirectoryTests
from ckptcore_testing.thread_coordinator import run_ranks

from ckptcore import Checkpointer, Context
from ckptcore.policies import FixedInterval, SpecificSteps
from ckptcore.training import RunDirectory
from plugins.recovery.tests.host_directories import kill_servers, server_pid

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    "arguments",
    [{"copies": -1}, {"memory_bytes": 0}, {"bytes_per_second": 0.0}, {"bytes_per_second": -1.0}, {"interface": "::"}],
    ids=str,
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}=.*expected"):
        PeerMemory("run", **{"memory_bytes": 1, "upload_policy": FixedInterval(1), **arguments})


@pytest.mark.parametrize("again", ["s3://bucket/run/", "file:///data/run"])
def test_a_directory_is_one_job_however_it_is_spelled(again: str) -> None:
    directory = "s3://bucket/run" if again.startswith("s3") else "/data/run"
    first, second = (PeerMemory(one, memory_bytes=1, upload_policy=FixedInterval(1)) for one in (directory, again))
    assert first.job == second.job, "a restart finds its steps in memory"


@pytest.fixture(autouse=True)
def use_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the memory of a host of its own."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "host"))
    yield
    kill_servers(tmp_path)


def test_a_state_is_copied_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []
    begin = Session.begin_blob

    def record(self: Session, member: Member, name: str, key: str, size: int) -> str:
        phases.append("begin")
        return begin(self, member, name, key, size)

    monkeypatch.setattr(Session, "begin_blob", record)
    memory = PeerMemory(tmp_path / "run", memory_bytes=1 << 26, copies=0, upload_policy=FixedInterval(2))
    context = Context(observers=[lambda event: phases.append(event.phase)])
    with Checkpointer(memory, context=context) as opened:
        opened.save(1, {"w": np.ones(1 << 22)})
    assert phases.index("copy") < phases.index("begin"), "the training waits for the copy alone"


def test_a_save_blocks_for_one_copy_and_five_small_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests find out, before anything is copied, that the step may be saved. Bytes do not add to them."""
    requests: list[str] = []
    copied: list[int] = []
    caller = threading.get_ident()
    call, copy = ServerConnections.call, np.copyto

    def count_request(self: ServerConnections, header: Header, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == caller:
            requests.append(header["op"])
        return call(self, header, *arguments, **options)

    def count_copy(target: Any, source: Any, *arguments: Any, **options: Any) -> None:
        copied.append(target.nbytes)
        copy(target, source, *arguments, **options)

    memory = PeerMemory(tmp_path / "run", memory_bytes=1 << 28, copies=0, upload_policy=FixedInterval(1 << 30))
    with Checkpointer(memory) as opened:
        opened.save_blocking(1, {"w": np.ones(1)})
        monkeypatch.setattr(ServerConnections, "call", count_request)
        begin = Session.begin_blob
        may_write = threading.Event()

        def wait_to_write(*arguments: Any) -> str:
            assert may_write.wait(60)
            return begin(*arguments)

        monkeypatch.setattr(Session, "begin_blob", wait_to_write)
        for step, elements in ((2, 1 << 17), (3, 1 << 22)):
            may_write.clear()
            requests.clear()
            monkeypatch.setattr(np, "copyto", count_copy)
            copied.clear()
            opened.save(step, {"w": np.ones(elements)})
            assert sum(copied) == 8 * elements, "each byte is copied once before the save returns"
            monkeypatch.setattr(np, "copyto", copy)
            assert Counter(requests) == {"status": 1, "find": 3, "spread": 1}
            may_write.set()
            opened.wait()


def test_a_server_that_was_killed_on_any_host_is_started_again_for_the_next_save(tmp_path: Path) -> None:
    has_killed = threading.Barrier(2)

    def run(rank: int, context: Context) -> int | None:
        host = tmp_path / f"host-{rank}"
        memory = PeerMemory(tmp_path / "run", job=f"kept-{rank}", memory_bytes=1 << 26, upload_policy=SpecificSteps([]))
        memory._options = replace(memory._options, base=str(host))  # the variable is that of all threads
        with Checkpointer(memory, context=context) as opened:
            for step in (1, 2, 3):
                opened.save(step, {"step": step})
                opened.wait()
                if rank == step - 1:
                    os.kill(server_pid(host, f"kept-{rank}"), signal.SIGKILL)
                has_killed.wait(60)
            return opened.latest

    assert run_ranks(2, run) == [3, 3]


class TestPeerMemory(RunDirectoryTests):
    """A job on one host, in front of a directory that gets every second step."""

    def directory(self, path: Path) -> RunDirectory:
        """Return the memory in front of a directory."""
        return PeerMemory(path, memory_bytes=1 << 26, copies=0, upload_policy=FixedInterval(2))
