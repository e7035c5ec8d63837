"""Steps in memory as the commands and the viewer show them, on hosts with and without a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_recovery.peers import joined_jobs
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE
from ckptcore_recovery.peers.storage import PeerStorage, open_storage
from ckptcore_view.documents.request import Request
from ckptcore_view.documents.run import run_document
from ckptcore_view.viewed import Viewed

import ckptcore
from ckptcore.errors import CheckpointError
from ckptcore.protocols import StorageOptions
from plugins.recovery.tests.host_directories import kill_servers, server_pid
from plugins.recovery.tests.job_hosts import Hosts

pytestmark = pytest.mark.system

JOB: Final = "shown"
STEPS: Final = f"peers://{JOB}/steps"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the directory of a job that saved steps 1 to 5, of which it keeps three. It is this host's job."""
    directory = tmp_path_factory.mktemp("shown")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY_VARIABLE, str(directory / "host"))
        save(directory, 5)
        yield directory
    kill_servers(directory)


def save(directory: Path, steps: int) -> None:
    """Save steps in a program that is killed."""
    command = [sys.executable, "-m", "plugins.recovery.tests.saving_program", str(directory), JOB, str(steps), "die"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def run(*arguments: str | Path, code: int = 0) -> str:
    """Run the command. Return what it printed."""
    command = [sys.executable, "-m", "ckptcore", *map(str, arguments)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stderr if code else ended.stdout


def test_commands_show_steps_in_memory(directory: Path) -> None:
    shown: Any = json.loads(run("steps", STEPS, "--verify", "--json"))
    assert [(step["step"], step["state"], step["sound"]) for step in shown["steps"]] == [
        (number, "committed", True) for number in (3, 4, 5)
    ]
    assert "float32[300, 700]" in run("inspect", f"{STEPS}/5")
    assert "3 steps, the newest is 5" in run("ls", f"peers://{JOB}")


def test_the_directory_of_the_run_names_the_memory(directory: Path) -> None:
    shown = json.loads(run("steps", directory / "far", "--json"))
    assert [step["step"] for step in shown["steps"]] == [1]
    assert shown["near"] == STEPS
    assert STEPS in run("steps", directory / "far")
    assert run_document(Viewed(str(directory / "far"), ckptcore.Context()), Request({}))["near"] == STEPS


def test_the_viewer_shows_steps_in_memory_and_follows_a_job_that_starts_again(directory: Path) -> None:
    viewed = Viewed(STEPS, ckptcore.Context())
    shown: Any = run_document(viewed, Request({}))
    newest = shown["steps"][-1]["step"]
    assert [step["state"] for step in shown["steps"]] == ["committed"] * 3
    save(directory, 2)  # another incarnation
    again: Any = run_document(viewed, Request({}))
    assert [step["step"] for step in again["steps"]] == [newest, newest + 1, newest + 2]


def test_a_reader_follows_a_job_to_other_hosts(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = hosts.join("a", "b", "reader")
    PeerStorage(first.job, "", first).put("before", b"")
    monkeypatch.setattr(joined_jobs, "JOINED", joined_jobs.JoinedJobs())  # this process belongs to no job
    monkeypatch.setenv(DIRECTORY_VARIABLE, hosts.base("reader"))
    storage = open_storage(f"peers://{hosts.job}", StorageOptions())
    assert list(storage.list()) == ["before"]
    second, *_ = hosts.join("c", "d", "reader")
    elsewhere = next(key for key in map(str, count()) if hosts.member("reader") not in second.view.home(key))
    PeerStorage(second.job, "", second).put(elsewhere, b"2")
    monkeypatch.setattr(joined_jobs, "JOINED", joined_jobs.JoinedJobs())
    assert list(storage.list()) == [elsewhere, "before"]
    assert storage.get(elsewhere) == b"2"


def test_the_report_has_steps_in_memory(directory: Path, tmp_path: Path) -> None:
    run("view", f"{STEPS}/5", "--out", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_a_host_without_a_server_says_where_to_look(directory: Path) -> None:
    assert "has no memory server of job other" in run("steps", "peers://other/steps", code=6)


def test_a_server_that_has_ended_is_named_and_goes_on_by_hand(directory: Path) -> None:
    os.kill(server_pid(directory / "host", JOB), signal.SIGKILL)
    message = run("steps", STEPS, code=6)
    assert f"the memory server of job {JOB}" in message and "python -m ckptcore_recovery.peers.server" in message
    with pytest.raises(CheckpointError, match="has ended"):
        ckptcore.load(f"{STEPS}/5")
    command = [sys.executable, "-m", "ckptcore_recovery.peers.server", str(directory / "host" / JOB)]
    with subprocess.Popen([*command, "--limit", str(1 << 26)], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        np.testing.assert_array_equal(ckptcore.load(f"{STEPS}/5")["w"], np.full((300, 700), 5, np.float32))
        server.terminate()
        assert server.wait(60) == 0
