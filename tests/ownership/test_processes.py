"""Locks and leases of real processes, which are killed, fork, or end without closing them."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest

from ckptcore.commit.leases import SYSTEM_CLOCK
from ckptcore.commit.location import commit_method
from ckptcore.errors import DirectoryInUseError
from tests.ownership.lockable_storages import files_without_locks, local, memory

pytestmark = pytest.mark.system

ROOT: Final = Path(__file__).parents[2]
START: Final = """
import os, sys, threading
from pathlib import Path
from ckptcore.errors import *
from ckptcore.commit.location import commit_method
from tests.ownership.lockable_storages import files_without_locks, local
path = Path(sys.argv[1])
"""


def start(path: Path, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START + code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def say(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


HOLD_ALL = """
store = {place}(path)
owner = commit_method(store).locks("run", lease_seconds=0.5).own()
holds = commit_method(store).locks("run", lease_seconds=0.5)
pin = holds.pin("1")
intent = holds.intend_deletion("2")
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_locks_of_a_killed_process_are_free_at_once(tmp_path: Path) -> None:
    store = local(tmp_path)
    holds = commit_method(store).locks("run")
    process = start(tmp_path, HOLD_ALL.format(place="local"))
    pid = say(process)
    with pytest.raises(DirectoryInUseError, match=f"process {pid} on .* is alive"):
        commit_method(store).locks("run").own()
    with pytest.raises(DirectoryInUseError, match=f"process {pid} on .* is alive"):
        commit_method(store).locks("run").own(if_in_use="take over")
    assert holds.pinned() == {"1"}
    assert holds.intend_deletion("1") is None
    kill(process)
    with commit_method(store).locks("run").own() as owner:
        owner.check()
        assert holds.pinned() == frozenset()
        holds.pin("2").close()
        holds.sweep()
    assert [*store.list_names(".ckptcore/pins"), *store.list_names(".ckptcore/deleting")] == []


def test_leases_of_a_killed_process_expire(tmp_path: Path) -> None:
    store = files_without_locks(tmp_path)
    process = start(tmp_path, HOLD_ALL.format(place="files_without_locks"))
    pid = say(process)
    kill(process)
    with pytest.raises(DirectoryInUseError, match=f"process {pid} on"):
        commit_method(store).locks("run").own()
    holds = commit_method(store).locks("run")
    with commit_method(store).locks("run").own(if_in_use="take over") as owner:
        owner.check()
        while holds.pinned():
            SYSTEM_CLOCK.sleep(0.2)
        holds.pin("2").close()


def test_a_process_releases_its_leases_at_exit(tmp_path: Path) -> None:
    process = start(tmp_path, HOLD_ALL.format(place="files_without_locks"))
    say(process)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    store = files_without_locks(tmp_path)
    commit_method(store).locks("run").own().close()
    assert list(store.list(".ckptcore/pins")) == list(store.list(".ckptcore/deleting")) == []


def test_a_process_can_end_while_its_storage_hangs(tmp_path: Path) -> None:
    code = """
from ckptcore.commit.subdirectory import Subdirectory
class Hanging(Subdirectory):
    hangs = False
    def put(self, key, data, *, condition=None):
        while self.hangs:
            threading.Event().wait()
        return super().put(key, data, condition=condition)
store = Hanging(local(path), "objects")
owner = commit_method(store).locks("run").own()
store.hangs = True
"""
    process = start(tmp_path, code)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


FORK = """
store = {place}(path)
owner = commit_method(store).locks("run", lease_seconds=0.5).own()
pin = commit_method(store).locks("run", lease_seconds=0.5).pin("1")
child = os.fork()
if child == 0:
    for hold in (owner, pin):
        try:
            hold.check()
        except SaveLostError as error:
            assert "forked" in str(error), error
        else:
            os._exit(1)
        hold.close()
    del owner, pin, hold
    try:
        commit_method(store).locks("run").own()
    except DirectoryInUseError:
        pass
    else:
        os._exit(2)
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
owner.check()
pin.check()
print("checked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("place", [local, files_without_locks])
def test_a_forked_child_releases_no_lease(place: object, tmp_path: Path) -> None:
    store = local(tmp_path) if place is local else files_without_locks(tmp_path)
    process = start(tmp_path, FORK.format(place=getattr(place, "__name__", "")))
    assert say(process) == "checked", process.communicate()[1]
    assert commit_method(store).locks("run").pinned() == {"1"}
    with pytest.raises(DirectoryInUseError):
        commit_method(store).locks("run").own()
    kill(process)


CHILD_LIVES_ON = """
store = {place}(path)
owner = commit_method(store).locks("run", lease_seconds=0.5).own()
child = os.fork()
if child == 0:
    sys.stdin.read()
    sys.exit(0)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("place", [local, files_without_locks])
def test_a_forked_child_keeps_no_lease_alive(place: object, tmp_path: Path) -> None:
    store = local(tmp_path) if place is local else files_without_locks(tmp_path)
    process = start(tmp_path, CHILD_LIVES_ON.format(place=getattr(place, "__name__", "")))
    assert int(say(process)) > 0
    process.wait()
    commit_method(store).locks("run").own(if_in_use="take over").close()
    process.communicate()


def test_dropped_objects_release_their_leases(tmp_path: Path) -> None:
    for store in (memory(tmp_path), local(tmp_path)):
        owner = commit_method(store).locks("run").own()
        del owner
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "ckptcore-lease":
                thread.join(60)
        commit_method(store).locks("run").own().close()


def test_the_system_clock_repeats_and_ends_once(tmp_path: Path) -> None:
    twice, ended = threading.Semaphore(0), threading.Semaphore(0)

    def fail() -> None:
        twice.release()
        raise ValueError("one failure does not end it")

    stop = SYSTEM_CLOCK.repeat(0.001, fail, ended.release)
    assert twice.acquire(timeout=60) and twice.acquire(timeout=60)
    stop()
    stop()
    assert ended.acquire(timeout=60)
    assert not ended.acquire(blocking=False)


def test_a_lease_is_renewed_while_its_process_is_alive(tmp_path: Path) -> None:
    """This uses the real clock. A process that waits for the lease to expire sees a renewal."""
    store = memory(tmp_path)
    with commit_method(store).locks("run", lease_seconds=3).own() as owner:
        with pytest.raises(DirectoryInUseError, match="it renewed its lease"):
            commit_method(store).locks("run").own(if_in_use="take over")
        owner.check()
