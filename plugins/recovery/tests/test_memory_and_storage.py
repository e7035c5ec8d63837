"""A run with steps in memory and in a directory: the newest one is loaded; a memory file system that is full."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ckptcore_recovery.peers import PeerMemory
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE
from ckptcore_tiers.uploader import Uploader

from ckptcore import Checkpointer, CheckpointReader
from ckptcore.errors import DirectoryInUseError, StorageError, StorageFullError
from ckptcore.policies import SpecificSteps

pytestmark = pytest.mark.system

JOB = "memory-and-storage"
ELEMENTS = 1 << 19


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory of the memory of this host. Its server is killed at the end."""
    path = tmp_path / "memory"
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(path))
    yield path
    kill_server(path)


def kill_server(memory: Path) -> None:
    """Kill the memory server. Its files stay."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(json.loads((memory / JOB / "server.json").read_bytes())["pid"], signal.SIGKILL)


def state(step: int) -> dict[str, object]:
    """Return the state of a step."""
    return {"w": np.full(ELEMENTS, step, np.float32), "step": step}


def open_run(far: Path, *uploaded: int) -> Checkpointer:
    """Open the run. Some steps are uploaded to the directory."""
    memory = PeerMemory(far, job=JOB, memory_bytes=1 << 28, copies=0, upload_policy=SpecificSteps(uploaded))
    return Checkpointer(memory)


def expect(run: Checkpointer, step: int) -> None:
    """Check that the newest step is loaded."""
    assert run.latest == step
    loaded = run.load()
    assert loaded["step"] == step
    np.testing.assert_array_equal(loaded["w"], step)


def test_a_step_that_is_newer_in_memory_is_loaded(tmp_path: Path, memory: Path) -> None:
    with open_run(tmp_path / "far", 1) as run:
        for step in (1, 2):
            run.save(step, state(step))
    with Checkpointer(tmp_path / "far") as directory:
        expect(directory, 1)
    kill_server(memory)
    with open_run(tmp_path / "far") as run:
        expect(run, 2)


def test_a_step_that_is_newer_in_the_directory_is_loaded(tmp_path: Path, memory: Path) -> None:
    with open_run(tmp_path / "far", 1) as run:
        for step in (1, 2):
            run.save(step, state(step))
    with Checkpointer(tmp_path / "far") as directory:  # the job ran for a while without the memory of its hosts
        directory.save(5, state(5))
    with open_run(tmp_path / "far") as run:
        expect(run, 5)
        run.save(6, state(6))
    with open_run(tmp_path / "far") as run:
        expect(run, 6)


@pytest.mark.parametrize("uploaded", [1, 2])
def test_a_last_step_that_is_in_memory_alone_is_named(
    uploaded: int, tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ckptcore.recovery"), open_run(tmp_path / "far", uploaded) as run:
        for step in (1, 2):
            run.save(step, state(step))
    named = [message for message in caplog.messages if "upload_policy" in message and f"{tmp_path}/far" in message]
    assert [message.partition(" is in")[0] for message in named] == ([] if uploaded == 2 else ["step 2"])


def test_a_second_start_by_mistake_does_not_end_the_first(tmp_path: Path, memory: Path) -> None:
    with open_run(tmp_path / "far") as run:
        run.save(1, state(1))
        run.wait()
        with pytest.raises(DirectoryInUseError):
            open_run(tmp_path / "far")
        run.save(2, state(2))
        run.wait()
        expect(run, 2)


def test_a_program_that_ends_without_close_uploads_its_last_step(tmp_path: Path, memory: Path) -> None:
    """The save is completed in the background at exit, and so is the upload."""
    program = [sys.executable, "-m", "plugins.recovery.tests.saving_program", str(tmp_path), JOB, "1", "leave"]
    ended = subprocess.run(program, capture_output=True, text=True, check=True, timeout=600)
    assert (ended.stdout, ended.stderr) == ("0\n", "")
    assert CheckpointReader(tmp_path / "far").steps == (1,)
    kill_server(memory)
    with open_run(tmp_path / "far") as run:  # the memory still has it, too
        assert run.latest == 1


def test_a_run_does_not_load_steps_of_another_run_with_the_same_name_of_a_job(tmp_path: Path, memory: Path) -> None:
    with open_run(tmp_path / "far") as run:
        run.save(1, state(1))
        run.wait()
        for _ in range(2):  # a start that was refused changes nothing
            with pytest.raises(StorageError, match=f"steps of the run in {tmp_path}/far, .* pass another job="):
                open_run(tmp_path / "other")
        run.save(2, state(2))
        run.wait()
    server = json.loads((memory / JOB / "server.json").read_bytes())["pid"]
    with pytest.raises(StorageError, match=rf"end their memory server \(process {server}\), and remove") as refused:
        open_run(tmp_path / "other")
    kill_server(memory)
    shutil.rmtree(str(refused.value).partition(" has ")[0])
    with open_run(tmp_path / "other") as run:
        assert run.latest is None


def test_a_run_that_was_moved_keeps_its_steps_in_memory(tmp_path: Path, memory: Path) -> None:
    with open_run(tmp_path / "far") as run:
        run.save(1, state(1))
    (tmp_path / "far").rename(tmp_path / "moved")
    with pytest.raises(StorageError, match="If that run was moved to here, remove (.*) on each host") as refused:
        open_run(tmp_path / "moved")
    Path(str(refused.value).partition("to here, remove ")[2].partition(" on each host")[0]).unlink()
    for _ in range(2):
        with open_run(tmp_path / "moved") as run:
            expect(run, 1)


def test_the_memory_of_a_run_that_ended_without_steps_is_free(tmp_path: Path, memory: Path) -> None:
    with open_run(tmp_path / "far"), pytest.raises(StorageError, match="of the run in"):  # it runs
        open_run(tmp_path / "other")
    with open_run(tmp_path / "other") as run:
        run.save(1, state(1))
    with pytest.raises(StorageError, match="of the run in"):
        open_run(tmp_path / "far")


def test_a_last_step_is_named_if_there_was_no_time_to_upload_it(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uploader, "_run", lambda uploader: None)  # it uploads nothing
    near = PeerMemory(
        tmp_path / "far", job=JOB, memory_bytes=1 << 28, copies=0, upload_policy=SpecificSteps([1]), close_seconds=0
    )
    with caplog.at_level(logging.WARNING, "ckptcore.recovery"), Checkpointer(near) as run:
        run.save(1, state(1))
    (named,) = caplog.messages
    assert "not uploaded within close_seconds" in named and "upload_policy" not in named


def test_a_last_step_that_was_deleted_is_not_named(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ckptcore.recovery"), open_run(tmp_path / "far", 1) as run:
        for step in (1, 2):
            run.save(step, state(step))
        run.wait()
        run.delete(2)
    assert not caplog.messages


@pytest.fixture
def small_memory(memory: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB in place of the directory of the memory."""
    memory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(memory)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a memory file system can only be mounted by root")
    yield memory
    kill_server(memory)
    subprocess.run(["umount", "-l", str(memory)], check=True)


def test_a_full_memory_file_system_refuses_a_step_and_keeps_the_older_one(tmp_path: Path, small_memory: Path) -> None:
    with open_run(tmp_path / "far") as run:
        for step in (1, 2):
            run.save(step, state(step))
            run.wait()
        fill(small_memory / "of another program")
        with pytest.raises(StorageFullError, match=str(small_memory)):
            run.save(3, state(3))
            run.wait()
        expect(run, 2)
    kill_server(small_memory)
    with open_run(tmp_path / "far") as run:  # it is still full
        expect(run, 2)
        (small_memory / "of another program").unlink()
        run.save(4, state(4))
        run.wait()
        expect(run, 4)


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # the loop ends here
