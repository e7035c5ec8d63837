"""Keys in a store that outlives a job: those of an earlier run are ignored, and a failed or hanging
store raises an error.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch.distributed as dist
from ckptcore_torch.store_coordinator import StoreCoordinator

from ckptcore.errors import CoordinationTimeoutError, PluginError, RankFailedError

pytestmark = pytest.mark.system


def life(store: dist.HashStore, size: int, *, timeout_seconds: float = 30.0) -> list[StoreCoordinator]:
    """Start coordinators over a store that may have been used before."""
    make: Any = dist.PrefixStore
    return [StoreCoordinator(make("job", store), rank, size, timeout_seconds=timeout_seconds) for rank in range(size)]


def together(*work: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(work)) as threads:
        return [future.result() for future in [threads.submit(one) for one in work]]


def meet(job: list[StoreCoordinator]) -> None:
    leader, *others = job
    together(lambda: leader.gather("met", b""), *[lambda rank=rank: rank.gather("met", b"") for rank in others])


def test_keys_of_an_earlier_run_are_ignored() -> None:
    store = dist.HashStore()
    former = life(store, 2)
    meet(former)
    former[0].broadcast("choose", b"step 10")  # rank 1 fails before it receives that
    former[1].gather("describe", b"old")  # the failed process had set the leader's payload before it was read
    leader, other = life(store, 2)
    heard = threading.Event()

    def lead() -> Any:
        heard.wait(0.2)  # the other process asks first, and would find the old key
        leader.broadcast("choose", b"step 20")
        return leader.gather("describe", b"leader")

    def follow() -> bytes:
        chosen = other.broadcast("choose", None)
        other.gather("describe", b"new")
        return chosen

    gathered, chosen = together(lead, follow)
    assert chosen == b"step 20" and gathered == [b"leader", b"new"]


def test_new_run_meets_after_an_earlier_one_failed_to() -> None:
    """The leader answers an old hello of a failed process, and then the hello of the new process."""
    store = dist.HashStore()
    failed = life(store, 3, timeout_seconds=0.1)
    for rank in (1, 2):
        with pytest.raises(CoordinationTimeoutError) as caught:
            failed[rank].gather("describe", b"old")
        assert caught.value.missing == (0,)
    leader, *others = life(store, 3)
    begun = threading.Event()

    def lead() -> Any:
        begun.set()
        return leader.gather("describe", b"0")

    def follow(rank: StoreCoordinator) -> None:
        begun.wait()
        time.sleep(0.2)
        rank.gather("describe", b"%d" % rank.rank)

    gathered, *_ = together(lead, lambda: follow(others[0]), lambda: follow(others[1]))
    assert gathered == [b"0", b"1", b"2"]


def test_process_restarted_alone_gets_an_error_and_its_job_names_the_missing_rank() -> None:
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

@atexit.register  # the first, so it is the last to be called
def tell():
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("ckptcore")])

import torch.distributed as dist
from ckptcore_torch.store_coordinator import StoreCoordinator

store = dist.HashStore()
StoreCoordinator(store, 0, 2, timeout_seconds=0.05).broadcast("told", b"to one that does not come")
assert any(thread.name == "ckptcore-handshake" for thread in threading.enumerate())
"""


def test_the_leader_that_ends_leaves_no_thread_in_the_store() -> None:
    """A thread inside the store at interpreter exit can abort the process."""
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


def test_a_group_that_was_ended_does_not_answer_for_the_next() -> None:
    """Rank 1 never met the first leader, which was still waiting to answer it."""
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
    deadline = time.monotonic() + 30
    while store.num_keys() and time.monotonic() < deadline:  # the leader forgets hellos on a thread of its own
        time.sleep(0.01)
    assert store.num_keys() == 0


class _Broken:
    """A store that fails or hangs."""

    def __init__(self, instead: Callable[[], Any]) -> None:
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self._instead()


@pytest.mark.parametrize(("rank", "missing"), [(0, ()), (1, (0,))])
def test_a_store_that_does_not_answer_is_left_at_the_deadline(
    rank: int, missing: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptcore_torch.store_coordinator._with_prefix", lambda store: store)
    goes_on = threading.Event()
    coordinator = StoreCoordinator(_Broken(goes_on.wait), rank, 2, timeout_seconds=0.3)
    with pytest.raises(CoordinationTimeoutError, match="store of the job did not answer for 0.3 s") as caught:
        coordinator.gather("describe", b"")
    goes_on.set()
    assert caught.value.missing == missing


def test_a_store_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore_torch.store_coordinator._with_prefix", lambda store: store)

    def fail() -> None:
        raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(RankFailedError, match=r"'describe'.*Connection reset by peer.*rank 0"):
        StoreCoordinator(_Broken(fail), 1, 2).gather("describe", b"")


def test_without_a_group_there_is_no_job() -> None:
    with pytest.raises(PluginError, match="init_process_group"):
        StoreCoordinator.of_job()
