"""Exchanges of an incarnation: the ranks that wait, the result of each rank, and the removal of all state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest
from ckptcore_ray.exchanges import Delivered, EndedIncarnation, Exchanges, LostRank, MissingRanks
from ckptcore_ray.progress import JobProgress

LONG = 20.0


def progress(exchanges: Exchanges) -> JobProgress:
    return exchanges.progress("job", 1, frozenset())


async def begun(*exchanges: Coroutine[object, object, object]) -> list[asyncio.Task[object]]:
    """Start exchanges as tasks, and run each until it waits."""
    tasks = [asyncio.create_task(exchange) for exchange in exchanges]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of a coroutine: run it on a new event loop."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), LONG))  # type: ignore[arg-type]  # it is a coroutine

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@in_loop
async def test_gather_returns_all_payloads_to_the_leader_in_order() -> None:
    exchanges = Exchanges(3)
    (leader,) = await begun(exchanges.gather(0, "key", b"", LONG))
    assert await exchanges.gather(2, "key", b"two", LONG) == Delivered()
    assert not leader.done() and progress(exchanges).held_bytes == 3
    assert await exchanges.gather(1, "key", b"one", LONG) == Delivered()
    assert await leader == Delivered((b"one", b"two"))
    assert progress(exchanges).held_bytes == 0 and exchanges._open == {}


@in_loop
async def test_broadcast_payload_is_kept_until_the_last_rank_received_it() -> None:
    exchanges = Exchanges(3)
    (early,) = await begun(exchanges.broadcast(1, "key", None, LONG))
    assert await exchanges.broadcast(0, "key", b"told", LONG) == Delivered()
    assert await early == Delivered((b"told",))
    assert progress(exchanges).held_bytes == 4
    assert await exchanges.broadcast(2, "key", None, LONG) == Delivered((b"told",))
    assert progress(exchanges).held_bytes == 0 and exchanges._open == {}


@in_loop
async def test_second_use_of_a_key_is_another_exchange() -> None:
    exchanges = Exchanges(3)
    for payload in (b"first", b"second"):
        await exchanges.broadcast(0, "key", payload, LONG)
    for rank in (1, 2):
        assert await exchanges.broadcast(rank, "key", None, LONG) == Delivered((b"first",))
    assert await exchanges.broadcast(2, "key", None, LONG) == Delivered((b"second",))
    assert await exchanges.broadcast(1, "key", None, LONG) == Delivered((b"second",))
    assert exchanges._open == {}


@in_loop
async def test_rank_after_the_leaders_timeout_gets_an_error_and_its_payload_is_discarded() -> None:
    exchanges = Exchanges(3)
    assert await exchanges.gather(1, "key", b"old 1", LONG) == Delivered()
    assert await exchanges.gather(0, "key", b"", 0.01) == MissingRanks((2,))
    assert progress(exchanges).held_bytes == 0
    assert await exchanges.gather(2, "key", b"old 2", LONG) == MissingRanks((2,))
    assert exchanges._open == {}
    (leader,) = await begun(exchanges.gather(0, "key", b"", LONG))
    for rank in (1, 2):
        await exchanges.gather(rank, "key", b"new %d" % rank, LONG)
    assert await leader == Delivered((b"new 1", b"new 2"))


@in_loop
async def test_missing_leader_is_named() -> None:
    exchanges = Exchanges(2)
    assert await exchanges.broadcast(1, "key", None, 0.01) == MissingRanks((0,))
    assert await exchanges.broadcast(0, "key", b"late", LONG) == Delivered()
    assert progress(exchanges).held_bytes == 4, "rank 1 may repeat the broadcast"


@in_loop
async def test_rank_whose_wait_for_the_leader_timed_out_may_wait_again() -> None:
    exchanges = Exchanges(3)
    for _ in range(2):
        assert await exchanges.broadcast(1, "key", None, 0.01) == MissingRanks((0,))
    (waiting,) = await begun(exchanges.broadcast(1, "key", None, LONG))
    assert await exchanges.broadcast(0, "key", b"late", LONG) == Delivered()
    assert await waiting == Delivered((b"late",)) == await exchanges.broadcast(2, "key", None, LONG)
    assert exchanges._open == {}


@in_loop
async def test_failed_rank_fails_all_exchanges_that_depend_on_it() -> None:
    """Rank 1 waits for a decision of the leader, and the leader waits for the failed rank."""
    exchanges = Exchanges(3)
    waiting = await begun(exchanges.gather(0, "key", b"", LONG), exchanges.broadcast(1, "verdict", None, LONG))
    assert exchanges.awaited() == {0, 1, 2}
    exchanges.lose(2, "killed")
    assert [await task for task in waiting] == [LostRank(2, "killed")] * 2
    assert exchanges.is_over
    assert await exchanges.gather(1, "later", b"", LONG) == LostRank(2, "killed")


@in_loop
async def test_rank_that_failed_after_its_payload_fails_only_later_exchanges() -> None:
    exchanges = Exchanges(3)
    await exchanges.gather(2, "key", b"two", LONG)
    exchanges.lose(2, "killed")
    (leader,) = await begun(exchanges.gather(0, "key", b"", LONG))
    await exchanges.gather(1, "key", b"one", LONG)
    assert await leader == Delivered((b"one", b"two"))
    await exchanges.broadcast(0, "verdict", b"committed", LONG)
    assert await exchanges.broadcast(1, "verdict", None, LONG) == Delivered((b"committed",))
    assert await exchanges.gather(0, "next", b"", LONG) == LostRank(2, "killed")


@in_loop
async def test_payloads_sent_before_the_end_are_still_delivered() -> None:
    exchanges = Exchanges(2)
    await exchanges.broadcast(0, "verdict", b"committed", LONG)
    exchanges.end(EndedIncarnation(2, "rank 0 joined again"))
    assert await exchanges.broadcast(1, "verdict", None, LONG) == Delivered((b"committed",))
    assert await exchanges.broadcast(1, "next", None, LONG) == EndedIncarnation(2, "rank 0 joined again")


@in_loop
async def test_progress_shows_which_rank_waits_for_which() -> None:
    exchanges = Exchanges(3)
    tasks = await begun(
        exchanges.gather(0, "save/persisted", b"", LONG), exchanges.gather(1, "save/persisted", b"1", LONG)
    )
    shown = exchanges.progress("job", 7, frozenset({0, 1}))
    assert (shown.name, shown.incarnation, shown.held_bytes) == ("job", 7, 1)
    leader, first, second = shown.ranks
    assert [(waiting.key, waiting.for_ranks) for waiting in leader.waiting] == [("save/persisted", (2,))]
    assert (first.state, first.exchanges, first.last, first.waiting) == ("joined", 1, "save/persisted", ())
    assert (second.state, second.exchanges, second.last) == ("absent", 0, None)
    exchanges.lose(2, "killed")
    assert (progress(exchanges).ranks[2].state, progress(exchanges).ranks[2].reason) == ("failed", "killed")
    await asyncio.gather(*tasks)


def test_failures_on_the_event_loop_reach_the_test() -> None:
    async def fails() -> None:
        raise AssertionError("on the loop")

    with pytest.raises(AssertionError, match="on the loop"):
        in_loop(fails)()
