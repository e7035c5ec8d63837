"""Interleavings of an update and a deletion of its base. No interleaving leaves an update without its base."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.locations import faulty_context, new_place, through

import ckptcore
from ckptcore.commit.leases import Clock
from ckptcore.commit.location import commit_method
from ckptcore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReferredError,
    SaveLostError,
    StepPinnedError,
)
from ckptcore.step_names import StepNames
from ckptcore.training.deletion import StepDeleter
from ckptcore.training.steps import StepDirectory
from tests.ownership.interleavings import Actor, Turns

pytestmark = pytest.mark.system

_Delete = Callable[[str, ckptcore.Context], None]


class _Schedule:
    """Schedules two threads: switches between them after the given numbers of turns."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """Begin with the first actor, and stay with one actor after the last switch."""
        turns = [[number % 2] * length for number, length in enumerate(lengths)]
        self._turns = itertools.chain(*turns, itertools.repeat(len(lengths) % 2))

    def choose(self, count: int) -> int:
        """See `Choices`."""
        return next(self._turns) % count


def _sleep(clock: Clock, seconds: float) -> None:
    actor = Actor.current()
    assert actor is not None
    actor.sleep(seconds)  # the other actor runs first


def _by_hand(run: str, context: ckptcore.Context) -> None:
    ckptcore.delete(f"{run}/1", context=context)


def _as_owner(run: str, context: ckptcore.Context) -> None:
    """Delete a step like a `Checkpointer`, which owns the directory."""
    steps = StepDirectory(run, StepNames(), context)
    steps.replace(steps.list_names())
    store = steps.open_to_write()
    with commit_method(store).locks(run).own(if_in_use="error") as owned:
        deleter = StepDeleter(steps, store, owned, context)
        deleter.begin(1, under_way=frozenset, elsewhere=lambda: True).perform()


def _schedules(deletion: int, update: int, most: int) -> Sequence[Sequence[int]]:
    """Return random schedules.

    In each, part of the deletion runs first, then the update up to about its commit, then more of the deletion, and
    then the rest of the update.
    """
    schedules = [
        (first, second, third)
        for first, second, third in itertools.product(range(deletion), range(update - 8, update), range(1, deletion))
        if first + third < deletion
    ]
    return random.Random(0).sample(schedules, most)


def _saved_without_base(run: str, schedule: Sequence[int], delete: _Delete) -> tuple[bool, int, int]:
    """Run a schedule. Return whether it left an update without its base, and the numbers of turns of both."""
    ckptcore.save(f"{run}/1", {"a": np.ones(4), "n": 1})
    deleting, updating = Actor("delete"), Actor("update")

    def begin_deletion() -> None:
        with suppress(CheckpointReferredError, StepPinnedError):
            delete(through(run), faulty_context(run, deleting))

    def begin_update() -> None:
        context = faulty_context(run, updating)
        with suppress(CheckpointNotFoundError, SaveLostError):
            ckptcore.save(through(f"{run}/2"), {"n": 2}, strategy=ckptcore.Update(through(f"{run}/1")), context=context)

    deleting.start(begin_deletion)
    updating.start(begin_update)
    Turns(_Schedule(schedule), [deleting, updating]).run()
    try:
        lost = ckptcore.load(f"{run}/2")["n"] != 2
    except CheckpointNotFoundError:
        lost = False
    except CheckpointError:
        lost = True
    return lost, len(deleting.operations), len(updating.operations)


@pytest.mark.parametrize(
    ("scheme", "delete", "most"),
    [("file", _by_hand, 120), ("memory", _by_hand, 40), ("file", _as_owner, 40), ("memory", _as_owner, 40)],
)
def test_no_interleaving_leaves_an_update_without_its_base(
    scheme: str, delete: _Delete, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "sleep", _sleep)
    run = new_place(scheme, tmp_path)
    _, deletion, _ = _saved_without_base(f"{run}/deleted", (1000,), delete)
    _, _, update = _saved_without_base(f"{run}/saved", (0, 1000), delete)
    lost = [
        schedule
        for number, schedule in enumerate(_schedules(deletion, update, most))
        if _saved_without_base(f"{run}/{number}", schedule, delete)[0]
    ]
    assert not lost


def _kill_a_deletion(run: str, begun: int, before: int, after: int) -> tuple[bool, bool]:
    """Kill the deletion of a base, before or after the update that refers to the base ends.

    Loads the update after each operation that follows its commit, and again after other programs cleaned up.

    Args:
        run: the directory of both checkpoints.
        begun: number of operations of the update that come first.
        before: number of operations of the deletion that come next.
        after: number of operations of the deletion between the end of the update and the kill.

    Returns:
        Whether the deletion had ended, or waited for the update, before the update ended. And whether the deletion
        ended before it could be killed.
    """
    ckptcore.save(f"{run}/1", {"a": np.ones(4), "n": 1})
    deleting, updating = Actor("delete"), Actor("update")

    def begin_deletion() -> None:
        with suppress(CheckpointReferredError):
            _by_hand(through(run), faulty_context(run, deleting))

    def begin_update() -> None:
        with suppress(CheckpointNotFoundError, SaveLostError):
            context = faulty_context(run, updating)
            ckptcore.save(through(f"{run}/2"), {"n": 2}, strategy=ckptcore.Update(through(f"{run}/1")), context=context)
            committed.append(run)

    def check() -> None:
        if committed:
            assert ckptcore.load(f"{run}/2")["a"].sum() == 4

    def delete_on() -> None:
        if deleting.state != "done":
            deleting.go_on()

    committed: list[str] = []
    updating.start(begin_update)
    for _ in range(begun):
        if updating.state != "done":
            updating.go_on()
    deleting.start(begin_deletion)
    for _ in range(before):
        delete_on()
    ended_before = deleting.state != "ready"
    while updating.state != "done":
        if updating.state == "waiting":
            delete_on()
        updating.go_on()
    for _ in range(after):
        check()
        delete_on()
    ended = deleting.state == "done"
    if not ended:
        deleting.die()
    for actor in (deleting, updating):
        if actor.error is not None:
            raise actor.error
    check()
    ckptcore.Checkpointer(run).close()
    with suppress(CheckpointExistsError):
        ckptcore.save(f"{run}/1", {"n": 3}, context=ckptcore.Context(durability="none"))
    if committed:
        check()
        with pytest.raises(CheckpointReferredError):
            ckptcore.delete(f"{run}/1")
    return ended_before, ended


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_killed_or_refused_deletion_keeps_the_base_of_an_update(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "sleep", _sleep)
    top = new_place(scheme, tmp_path)
    _, _, update = _saved_without_base(f"{top}/saved", (0, 1000), _by_hand)
    for begun in (0, update - 4, update):
        ended_before, before, kills = False, 0, 0
        while not ended_before:
            ended, after = False, 0
            while not ended:
                ended_before, ended = _kill_a_deletion(f"{top}/{begun}-{before}-{after}", begun, before, after)
                after += 1
                kills += not ended
            before += 1
        assert before > 5 and kills >= 5, (begun, before, kills)
