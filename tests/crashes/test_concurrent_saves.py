"""Processes and threads that share a location: concurrent saves, and loads during saves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

import ckptcore
from ckptcore.builtin.local import LocalStorage
from ckptcore.commit.stored_root import read_root
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError, SaveLostError
from ckptcore.protocols import StorageBackend
from tests.crashes.saver import LOST, OLD
from tests.crashes.states import make_state, version_at, version_of
from tests.crashes.tracing import Saver

_FAST: Final = ckptcore.Context(durability="none")
_ONE, _OTHER, _NEXT = 11, 12, 13


def _race(warm: Saver, other: Saver, task: str, location: Path) -> tuple[int, int]:
    warm.start(task, str(location), _ONE)
    other.start(task, str(location), _OTHER)
    warm.begin()
    other.begin()
    return warm.end(), other.end()


def _assert_next_save_cleans_up(location: Path) -> None:
    ckptcore.save(location, make_state(_NEXT), overwrite=True, context=_FAST)
    assert version_at(str(location)) == _NEXT
    assert [path.name for path in location.parent.iterdir()] == [location.name]


def _race_first_saves(warm: Saver, other: Saver, directory: Path, rounds: int) -> None:
    for number in range(rounds):
        location = directory / str(number) / "step_1"
        statuses = _race(warm, other, "save-new", location)
        assert sorted(statuses) == [0, LOST], "not exactly one of two first saves committed"
        assert version_at(str(location)) == (_ONE if statuses[0] == 0 else _OTHER)
        _assert_next_save_cleans_up(location)


def _race_overwrites(warm: Saver, other: Saver, directory: Path, rounds: int) -> None:
    for number in range(rounds):
        location = directory / str(number) / "step_1"
        ckptcore.save(location, make_state(OLD), context=_FAST)
        statuses = _race(warm, other, "save", location)
        assert set(statuses) <= {0, LOST} and 0 in statuses
        committed = {version for version, status in zip((_ONE, _OTHER), statuses, strict=True) if status == 0}
        assert version_at(str(location)) in committed
        _assert_next_save_cleans_up(location)


def test_two_processes_save_for_the_first_time(warm: Saver, other: Saver, tmp_path: Path) -> None:
    _race_first_saves(warm, other, tmp_path, 20)


def test_two_processes_overwrite(warm: Saver, other: Saver, tmp_path: Path) -> None:
    _race_overwrites(warm, other, tmp_path, 20)


@pytest.mark.slow
def test_two_processes_save_for_the_first_time_often(full: bool, warm: Saver, other: Saver, tmp_path: Path) -> None:
    _race_first_saves(warm, other, tmp_path, 500 if full else 100)


@pytest.mark.slow
def test_two_processes_overwrite_often(full: bool, warm: Saver, other: Saver, tmp_path: Path) -> None:
    _race_overwrites(warm, other, tmp_path, 500 if full else 100)


@pytest.mark.parametrize("scheme", ["file", "memory"])
@pytest.mark.parametrize("overwrite", [False, "non-atomic"])
def test_threads_can_save_at_once(scheme: str, overwrite: Any, tmp_path: Path) -> None:
    start = threading.Barrier(3)

    def save(location: str, version: int) -> bool:
        context = ckptcore.Context(durability="none")
        start.wait()
        try:
            ckptcore.save(location, make_state(version), overwrite=overwrite, context=context)
        except (CheckpointExistsError, SaveLostError):
            return False
        return True

    with ThreadPoolExecutor(3) as threads:
        for number in range(30):
            above = f"file://{tmp_path}" if scheme == "file" else f"memory://{tmp_path.name}"
            location = f"{above}/{number}"
            committed = list(threads.map(save, [location] * 3, range(3)))
            if scheme == "memory" and not any(committed):
                continue  # on object stores, each save may take over the claim of another
            assert any(committed), "no save committed"
            assert sum(committed) == 1 or overwrite
            assert version_at(location) in [version for version in range(3) if committed[version]]


def test_a_reader_gets_one_complete_state(warm: Saver, tmp_path: Path) -> None:
    _read_while_replaced(warm, tmp_path, 150)


@pytest.mark.slow
def test_a_reader_often_gets_one_complete_state(full: bool, warm: Saver, tmp_path: Path) -> None:
    _read_while_replaced(warm, tmp_path, 1500 if full else 500)


def _read_while_replaced(warm: Saver, directory: Path, rounds: int) -> None:
    location = directory / "step_1"
    ckptcore.save(location, make_state(0), context=_FAST)
    relaxed = ckptcore.Context(io=ckptcore.context.IOOptions(verify=False))
    target = make_state(0)
    versions: Counter[int] = Counter()
    warm.start("replace-often", str(location), rounds)
    warm.begin()
    ended: list[int] = []
    waiting = threading.Thread(target=lambda: ended.append(warm.end()))
    waiting.start()
    reads = 0
    while not ended:
        match reads % 5:
            case 0:
                versions[version_of(ckptcore.load(location))] += 1
            case 1:
                versions[version_of(ckptcore.load(location, context=relaxed))] += 1
            case 2:
                versions[version_of(ckptcore.load_into(location, target))] += 1
            case 3:
                versions[version_of(ckptcore.load(location, ckptcore.metadata(location).abstract))] += 1
            case _:
                report = ckptcore.verify(location)
                assert report.ok, report.problems
        reads += 1
    waiting.join()
    assert ended == [0]
    assert version_at(str(location)) == rounds
    assert len(versions) > 5, f"the reader did not meet the writer: {versions}"


@pytest.mark.parametrize("task", ["save", "save-large", "save-several-files"])
def test_kills_at_random_times(task: str, warm: Saver, tmp_path: Path) -> None:
    """Kill a save after a random time, without tracing it."""
    location = tmp_path / "run" / "step_1"
    choices = random.Random(0)
    ckptcore.save(location, make_state(OLD), context=_FAST)
    expected = {OLD}
    for number in range(100, 120):
        child = os.pidfd_open(warm.start(task, str(location), number))
        warm.begin()
        time.sleep(choices.random() * 0.02)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        status = warm.end()
        assert status in (0, -signal.SIGKILL)
        expected = {number} if status == 0 else {*expected, number}
        version = version_at(str(location))
        assert version in expected
        expected = {version}
    _assert_next_save_cleans_up(location)


@pytest.mark.parametrize("call", ["exchange", "rename"])
def test_a_save_succeeds_if_the_old_checkpoint_is_deleted_during_its_commit(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = tmp_path / "saved"
    ckptcore.save(location, make_state(_ONE), context=_FAST)
    unpatched: Any = getattr(LocalStorage, call)
    deleted: list[str] = []

    def meet_a_deletion(storage: LocalStorage, first: str, second: str) -> None:
        if second != location.name or deleted:
            unpatched(storage, first, second)
            return
        try:
            if call == "rename":  # this first rename fails, because the old checkpoint still exists
                unpatched(storage, first, second)
        finally:
            deleted.append(second)
            ckptcore.delete(location, context=_FAST)
        unpatched(storage, first, second)

    monkeypatch.setattr(LocalStorage, call, meet_a_deletion)
    ckptcore.save(location, make_state(_OTHER), overwrite=True, context=_FAST)
    assert deleted
    assert version_at(str(location)) == _OTHER
    assert [path.name for path in tmp_path.iterdir()] == [location.name]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_deletion_removes_a_save_that_commits_while_it_reads_the_root(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = str(tmp_path / "saved") if scheme == "file" else f"memory://{uuid.uuid4().hex}/saved"
    looks: list[object] = []

    def look_before_a_save(store: StorageBackend) -> object:
        root = read_root(store)
        if not looks:
            ckptcore.save(location, make_state(_ONE), context=_FAST)
        looks.append(root)
        return root

    monkeypatch.setattr("ckptcore.commit.delete.read_root", look_before_a_save)
    ckptcore.delete(location, context=_FAST)
    assert looks[0] is None and len(looks) == 2
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(location)
