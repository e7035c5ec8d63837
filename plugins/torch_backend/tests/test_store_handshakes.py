"""Handshakes through a store that several runs use: coordinators ignore keys of earlier runs. A store
that fails or hangs raises an error.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import torch.distributed as dist
from ckptcore_torch import store_coordinator
from ckptcore_torch.store_coordinator import StoreCoordinator
from ckptcore_torch.store_handshakes import StoreHandshake, WatchedStore, pause_after

from ckptcore.errors import CoordinationTimeoutError, PluginError, RankFailedError

pytestmark = pytest.mark.system


def life(store: dist.HashStore, size: int, *, timeout_seconds: float = 30.0) -> list[StoreCoordinator]:
    """Create the coordinators of a run over a store that earlier runs may have used."""
    make: Any = dist.PrefixStore
    return [StoreCoordinator(make("job", store), rank, size, timeout_seconds=timeout_seconds) for rank in range(size)]


def together(*work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as threads:
        return [future.result() for future in [threads.submit(call) for call in work]]


def wait_for_keys(store: dist.HashStore, count: int) -> None:
    """Wait until a store has this number of keys. Stores have no event for this, so poll."""
    deadline = time.monotonic() + 30
    while store.num_keys() != count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.num_keys() == count


def meet(job: list[StoreCoordinator]) -> None:
    leader, *others = job
    together(lambda: leader.gather("met", b""), *[lambda rank=rank: rank.gather("met", b"") for rank in others])


def test_keys_of_an_earlier_run_are_ignored() -> None:
    store = dist.HashStore()
    former = life(store, 2)
    meet(former)
    wait_for_keys(store, 0)  # a separate thread of the leader deletes the hellos
    former[0].broadcast("choose", b"step 10")  # rank 1 fails before it receives this
    former[1].gather("describe", b"old")  # rank 1 sets its payload and fails before the leader reads it
    leader, other = life(store, 2)

    def lead() -> Any:
        wait_for_keys(store, 3)  # two old keys, and the hello of the other process, which asks first
        leader.broadcast("choose", b"step 20")
        return leader.gather("describe", b"leader")

    def follow() -> bytes:
        chosen = other.broadcast("choose", None)
        other.gather("describe", b"new")
        return chosen

    gathered, chosen = together(lead, follow)
    assert chosen == b"step 20" and gathered == [b"leader", b"new"]


def test_a_new_run_starts_after_the_handshake_of_an_earlier_run_failed() -> None:
    """The leader first answers the old hello of a failed process, and then the hello of the new process."""
    store = dist.HashStore()
    failed = life(store, 3, timeout_seconds=0.1)
    for rank in (1, 2):
        with pytest.raises(CoordinationTimeoutError) as caught:
            failed[rank].gather("describe", b"old")
        assert caught.value.missing == (0,)
    leader, *others = life(store, 3)

    def follow() -> None:
        wait_for_keys(store, 4)  # two old hellos, and the answers of the leader to them
        together(*[lambda rank=rank: rank.gather("describe", b"%d" % rank.rank) for rank in others])

    gathered, _ = together(lambda: leader.gather("describe", b"0"), follow)
    assert gathered == [b"0", b"1", b"2"]


def test_a_process_restarted_alone_and_its_old_job_raise_errors() -> None:
    store = dist.HashStore()
    job = life(store, 2, timeout_seconds=0.5)
    meet(job)
    again = life(store, 2, timeout_seconds=0.5)[1]
    with pytest.raises(CoordinationTimeoutError, match=r"rank 1.*restarted alone") as late:
        again.gather("met", b"")
    assert late.value.missing == (0,)
    with pytest.raises(CoordinationTimeoutError) as left:
        job[0].gather("next", b"")
    assert left.value.missing == (1,)


def test_coordinators_over_one_store_share_a_handshake() -> None:
    store = dist.HashStore()
    meet([StoreCoordinator(store, rank, 2) for rank in range(2)])
    leader, other = (StoreCoordinator(store, rank, 2) for rank in range(2))
    leader.broadcast("later", b"told")
    assert other.broadcast("later", None) == b"told"


_ENDS: Final = """
import atexit, threading

@atexit.register  # registered first, so called last
def tell():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("ckptcore")])

import torch.distributed as dist
from ckptcore_torch.store_coordinator import StoreCoordinator
from ckptcore_torch.store_handshakes import pause_after

store = dist.HashStore()
StoreCoordinator(store, 0, 2, timeout_seconds=0.05).broadcast("told", b"to one that does not come")
assert any(thread.name == "ckptcore-handshake" for thread in threading.enumerate())
"""


def test_a_leader_that_exits_leaves_no_thread_in_the_store() -> None:
    """A thread inside the store at interpreter exit can abort the process."""
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


def test_a_handshake_ends_with_its_store() -> None:
    """Rank 1 sends no hello, so the thread of the leader waits for it until the store is deleted."""
    store: Any = dist.HashStore()
    make: Any = dist.PrefixStore
    first = make("job", store)
    before = set(threading.enumerate())
    StoreCoordinator(first, 0, 2, timeout_seconds=0.05).broadcast("told", b"")
    (answering,) = [thread for thread in set(threading.enumerate()) - before if thread.name == "ckptcore-handshake"]
    del first
    gc.collect()
    assert not answering.is_alive()


def test_no_keys_remain_after_complete_exchanges() -> None:
    store = dist.HashStore()
    job = life(store, 3)
    meet(job)
    job[0].broadcast("told", b"x")
    assert [rank.broadcast("told", None) for rank in job[1:]] == [b"x", b"x"]
    wait_for_keys(store, 0)  # a separate thread of the leader deletes the hellos


def told(job: list[StoreCoordinator], key: str, payload: bytes) -> list[bytes]:
    """Broadcast a payload. The leader begins when all others wait for it."""
    leader, *others = job

    def lead() -> bytes:
        while not all(rank.awaited(key) for rank in others):
            time.sleep(0.001)
        return leader.broadcast(key, payload)

    received: list[bytes] = together(lead, *[lambda rank=rank: rank.broadcast(key, None) for rank in others])
    return received


def test_a_wait_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes."""
    store = dist.HashStore()
    job = life(store, 3)
    meet(job)
    wait_for_keys(store, 0)  # the leader's thread sends no more requests
    told(job, "first", b"")  # each process has its connection from now on
    names: list[str] = []
    request = WatchedStore._request

    def counted(store: WatchedStore, send: Callable[[], Any]) -> Any:
        names.append(send.__qualname__.split(".")[1])
        return request(store, send)

    monkeypatch.setattr(WatchedStore, "_request", counted)
    assert together(*[lambda rank=rank: rank.gather("key", b"x") for rank in job])[0] == [b"x"] * 3
    assert sorted(names) == ["get_all", "remove", "remove", "set", "set", "wait"]
    names.clear()
    assert told(job, "key", b"x") == [b"x"] * 3
    assert sorted(set(names) - {"has"}) == ["get", "remove", "set_all", "wait"]  # `has` is of `awaited`
    assert [names.count(name) for name in ("get", "remove", "set_all", "wait")] == [2, 2, 1, 2]


def test_a_large_payload_is_stored_once() -> None:
    store = dist.HashStore()
    job = life(store, 3)
    meet(job)
    wait_for_keys(store, 0)
    payload = bytes(1 << 20)
    job[0].broadcast("told", payload)
    assert store.num_keys() == 3  # the payload, and a name of each other rank
    assert [rank.broadcast("told", None) for rank in job[1:]] == [payload] * 2
    wait_for_keys(store, 0)


class _Python(dist.Store):
    """A store that cannot be cloned, as those of torch before 2.8."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = bytes(value)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._values[key] = b"%d" % (int(self._values.get(key, b"0")) + amount)
        return int(self._values[key])

    def deleteKey(self, key: str) -> bool:
        return self._values.pop(key, None) is not None


def test_a_store_without_further_connections_is_polled() -> None:
    store: Any = _Python()
    job = life(store, 3)
    assert together(*[lambda rank=rank: rank.gather("key", b"x") for rank in job])[0] == [b"x"] * 3
    assert told(job, "told", b"y") == [b"y"] * 3
    with pytest.raises(CoordinationTimeoutError) as caught:
        StoreCoordinator(store, 0, 2, timeout_seconds=0.05).gather("late", b"")
    assert caught.value.missing == (1,)


def test_a_file_store_is_polled_and_keeps_its_file(tmp_path: Path) -> None:
    """A clone of it would remove the file, and fails before the time of a wait is over."""
    path = tmp_path / "store"
    make: Any = dist
    job = [StoreCoordinator(make.FileStore(str(path), 2), rank, 2, timeout_seconds=30) for rank in range(2)]
    assert together(*[lambda rank=rank: rank.gather("key", b"x") for rank in job])[0] == [b"x"] * 2
    assert told(job, "told", b"y") == [b"y"] * 2
    store = make.PrefixStore("job", make.FileStore(str(path), 2))
    with pytest.raises(CoordinationTimeoutError) as caught:
        StoreCoordinator(store, 0, 2, timeout_seconds=0.05).gather("late", b"")
    assert caught.value.missing == (1,)
    assert path.exists()


class _Refusing:
    """A store that takes no further connection."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.clones = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> Any:
        self.clones += 1
        raise dist.DistNetworkError("Connection reset by peer")


def test_a_server_that_refused_a_connection_is_not_asked_for_another(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = dist.HashStore()
    stores = [_Refusing(store) for _ in range(2)]
    handshakes = [StoreHandshake(refusing, rank, 2) for rank, refusing in enumerate(stores)]
    job = [StoreCoordinator(store, rank, 2, handshake=handshake) for rank, handshake in enumerate(handshakes)]
    with caplog.at_level("INFO", "ckptcore"):
        for key in ("first", "second"):
            assert together(*[lambda rank=rank: rank.gather(key, b"x") for rank in job])[0] == [b"x"] * 2  # noqa: B023
            assert told(job, f"told-{key}", b"y") == [b"y"] * 2
    assert [refusing.clones for refusing in stores] == [1, 1]
    assert [record.levelname for record in caplog.records if "reset by peer" in record.message] == ["INFO"] * 2


def test_a_report_of_awaited_ranks_does_not_wait_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_coordinator, "_REPORT_SECONDS", 0.05)
    goes_on = threading.Event()

    def hang() -> None:
        goes_on.wait()
        raise dist.DistNetworkError("Connection reset by peer")

    coordinator = StoreCoordinator(_Broken(hang), 0, 2, timeout_seconds=30)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(coordinator.gather, "key", b"")
        while not coordinator._awaited:
            time.sleep(0.001)
        assert coordinator.awaited("key") == ()
        goes_on.set()
        with pytest.raises(RankFailedError):
            waiting.result()


_INTERRUPTED: Final = """
import os, signal, sys, threading, time
import torch.distributed as dist
from ckptcore_torch.store_coordinator import StoreCoordinator

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs with SIGINT ignored
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
other = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
job = [StoreCoordinator(store, 0, 2), StoreCoordinator(other, 1, 2)]
threads = [threading.Thread(target=rank.gather, args=("met", b"")) for rank in job]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
rank = int(sys.argv[1])

def interrupt():
    while not job[rank].awaited("key"):
        time.sleep(0.001)
    time.sleep(0.05)  # it waits in the store
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    job[0].gather("key", b"") if rank == 0 else job[1].broadcast("key", None)
except KeyboardInterrupt:
    deadline = time.monotonic() + 30  # a separate thread of the leader deletes the hellos
    while store.num_keys() and time.monotonic() < deadline:
        time.sleep(0.01)
    print("interrupted", store.num_keys())
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupted_exchange_leaves_no_thread_and_no_key_in_the_store(rank: int) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, str(rank)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "interrupted 0"), ended.stderr


class _Broken(dist.Store):
    """A store whose requests fail or hang."""

    def __init__(self, request: Callable[[], Any]) -> None:
        super().__init__()
        self._request = request

    def set(self, *_: Any) -> Any:
        return self._request()

    get = add = check = deleteKey = set  # the requests of a PrefixStore


@pytest.mark.parametrize(("rank", "missing"), [(0, ()), (1, (0,))])
def test_a_store_that_does_not_answer_raises_a_timeout(rank: int, missing: tuple[int, ...]) -> None:
    goes_on = threading.Event()

    def hang() -> None:
        goes_on.wait()
        raise dist.DistNetworkError("Connection reset by peer")

    coordinator = StoreCoordinator(_Broken(hang), rank, 2, timeout_seconds=0.3)
    with pytest.raises(CoordinationTimeoutError, match="store of the job did not answer for 0.3 s") as caught:
        coordinator.gather("describe", b"")
    goes_on.set()
    assert caught.value.missing == missing


def test_a_store_that_fails_raises_an_error_that_names_the_exchange() -> None:
    def fail() -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(RankFailedError, match=r"'describe'.*Connection reset by peer.*rank 0"):
        StoreCoordinator(_Broken(fail), 1, 2).gather("describe", b"")


def test_of_job_needs_a_process_group() -> None:
    with pytest.raises(PluginError, match="init_process_group"):
        StoreCoordinator.of_job()


def test_a_wait_sees_an_answer_soon_and_sends_few_requests() -> None:
    waited, looks = 0.0, 0
    while waited < 1.0:
        pause = pause_after(waited)
        assert pause <= max(waited / 5, 0.001)
        waited, looks = waited + pause, looks + 1
    assert looks < 60
    assert pause_after(600.0) == 0.05
