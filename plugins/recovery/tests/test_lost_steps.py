"""A job that lost more hosts than its memory survives: the newest whole step is loaded, or the start is refused."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_recovery.peers import ErasureCode, PeerMemory
from ckptcore_recovery.peers.starting import DIRECTORY_VARIABLE

from ckptcore import Checkpointer, Context, ShardedArray
from ckptcore.commit.conditional_put import ConditionalPutTransaction
from ckptcore.context import JobOptions
from ckptcore.errors import StorageError
from ckptcore.policies import SpecificSteps
from ckptcore.protocols import Coordinator
from plugins.recovery.tests.host_directories import server_pid
from plugins.recovery.tests.socket_job import join_job, serve_job

pytestmark = pytest.mark.system

JOB: Final = "lost-steps"
ELEMENTS: Final = 300_000
"""Of each process. They are in a blob, and not in an entry."""


def memory(
    job: Path,
    name: str = JOB,
    uploaded: Sequence[int] = (),
    code: ErasureCode | None = None,
    domain: str | None = None,
) -> PeerMemory:
    """Return the memory of a job in front of a directory that gets some steps."""
    policy = SpecificSteps(uploaded)
    return PeerMemory(
        job / "far", job=name, memory_bytes=1 << 26, erasure_code=code, domain=domain, upload_policy=policy
    )


def state(step: int, rank: int, size: int) -> dict[str, object]:
    """Return the state of a process."""
    part = np.full(ELEMENTS, step, np.int64)
    cuts = [[ELEMENTS * other for other in range(1, size)]]
    return {"w": ShardedArray.part(part, (ELEMENTS * rank,), (ELEMENTS * size,), cuts=cuts), "step": step}


def _die(*arguments: object, **named: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(job: Path, control: Path, host: str, rank: int, size: int, steps: Sequence[int], options: Any) -> None:
    """Save steps as one process of a job, and be killed."""
    os.environ[DIRECTORY_VARIABLE] = str(job / host)
    if options.pop("dies_at_commit", False):
        ConditionalPutTransaction.commit = _die  # type: ignore[method-assign]
    near = memory(job, **options)
    with Checkpointer(near, context=context(control, rank, size)) as run:
        for step in steps:
            run.save(step, state(step, rank, size))
            run.wait()
        near.wait_for_uploads()
        run.load()  # all processes have saved
        os.kill(os.getpid(), signal.SIGKILL)


def context(control: Path, rank: int, size: int) -> Context:
    """Return the context of a process."""
    while rank and not control.exists():
        time.sleep(0.01)
    coordinator: Coordinator = serve_job(control, size) if rank == 0 else join_job(control, rank, size)
    return Context(job=JobOptions(coordinator=coordinator))


def save(job: Path, hosts: str, steps: Sequence[int], **options: Any) -> None:
    """Run a job with a process on each host, which saves steps and is killed."""
    spawning = multiprocessing.get_context("spawn")
    control = job / f"control-{hosts}-{steps[0]}"
    processes = [
        spawning.Process(target=save_and_die, args=(job, control, host, rank, len(hosts), steps, options))
        for rank, host in enumerate(hosts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert -signal.SIGKILL in [process.exitcode for process in processes]


def lose(job: Path, hosts: str) -> None:
    """Lose hosts with their memory."""
    for host in hosts:
        os.kill(server_pid(job / host, JOB), signal.SIGKILL)
        (job / host).rename(job / f"lost {host}")


def expect(run: Checkpointer, step: int, size: int) -> None:
    """Check that a step is loaded, with all elements."""
    loaded = run.load()
    assert run.restored_step == loaded["step"] == step
    np.testing.assert_array_equal(loaded["w"], np.full(ELEMENTS * size, step))


@pytest.fixture
def on_host_c(job: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the process of this test a host."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(job / "c"))
    return job


@pytest.mark.parametrize("code", [None, ErasureCode(2, 1)], ids=str)
def test_a_job_without_a_whole_step_is_refused_until_its_hosts_are_back(
    on_host_c: Path, code: ErasureCode | None
) -> None:
    if code is not None:
        pytest.importorskip("pyeclib")
    job = on_host_c
    save(job, "abcd", [1, 2], code=code)
    lose(job, "ab")
    for _ in range(2):  # a start that was refused changes nothing
        with pytest.raises(StorageError) as refused:
            Checkpointer(memory(job))
        message = str(refused.value)
        assert f"memory of job {JOB}, and {job}/far has none. Lost: step 2, step 1" in message
        assert "2 of the 4 memory servers of its last start answer, in 2 of 4 failure domains" in message
        assert "survive the loss of any 1 of them. Nothing was changed" in message and "pass another job=" in message
    for host in "ab":
        (job / f"lost {host}").rename(job / host)
    save(job, "abcd", [3])
    with Checkpointer(memory(job)) as run:
        expect(run, 3, 4)
        assert run.steps == (2, 3)


def test_a_job_whose_memory_is_gone_starts_from_the_beginning_with_another_name(on_host_c: Path) -> None:
    job = on_host_c
    save(job, "abc", [1])
    lose(job, "ab")
    with pytest.raises(StorageError, match="If it is gone, pass another job= to PeerMemory"):
        Checkpointer(memory(job))
    with Checkpointer(memory(job, "again")) as run:
        assert run.latest is None
        run.save(1, state(1, 0, 1))
    with Checkpointer(memory(job, "again")) as run:
        expect(run, 1, 1)


def test_an_older_step_in_the_directory_is_loaded_and_the_lost_ones_are_named(
    on_host_c: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = on_host_c
    save(job, "abcd", [1, 2], uploaded=[1])
    lose(job, "ab")
    with caplog.at_level(logging.WARNING, "ckptcore.recovery"), Checkpointer(memory(job)) as run:
        expect(run, 1, 4)
    (named,) = [message for message in caplog.messages if "has lost" in message]
    assert "has lost step 2, step 1" in named and f"whole in memory: None; the newest one in {job}/far: 1" in named


def test_an_older_step_in_memory_is_loaded_and_the_lost_one_is_named(
    on_host_c: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = on_host_c
    save(job, "cd", [1])
    save(job, "abcd", [2])
    lose(job, "ab")
    with caplog.at_level(logging.WARNING, "ckptcore.recovery"), Checkpointer(memory(job)) as run:
        expect(run, 1, 2)
    (named,) = [message for message in caplog.messages if "has lost" in message]
    assert "has lost step 2 and perhaps" in named and f"whole in memory: 1; the newest one in {job}/far: None" in named


def test_steps_whose_roots_are_lost_are_no_reason_to_start_from_the_beginning(on_host_c: Path) -> None:
    """Hosts a and b have the roots of steps 3 and 11, which look like saves that were not committed."""
    job = on_host_c
    save(job, "abcd", [3, 11])
    lose(job, "ab")
    with pytest.raises(StorageError, match="has none. Lost: step 11, step 3 and perhaps"):
        Checkpointer(memory(job))


def test_a_loss_in_the_only_failure_domain_is_a_loss(on_host_c: Path) -> None:
    job = on_host_c
    save(job, "cd", [1], domain="rack")
    lose(job, "d")
    with pytest.raises(StorageError, match="has none. Lost: step 1 and .* survive the loss of any 0 of them"):
        Checkpointer(memory(job, domain="rack"))


def test_a_save_that_was_not_committed_is_not_named(on_host_c: Path) -> None:
    job = on_host_c
    save(job, "abcd", [1], dies_at_commit=True)
    lose(job, "ab")
    with pytest.raises(StorageError, match="has none. Lost: perhaps steps whose names are lost, too"):
        Checkpointer(memory(job))


def test_hosts_that_hold_nothing_for_each_other_can_be_lost(on_host_c: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = on_host_c
    save(job, "abcd", [1])
    lose(job, "bd")
    with caplog.at_level(logging.WARNING, "ckptcore.recovery"), Checkpointer(memory(job)) as run:
        expect(run, 1, 4)
    assert not [message for message in caplog.messages if "has lost" in message]
