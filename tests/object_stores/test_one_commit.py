"""One commit for each save, whatever happens to a request, and one commit for two concurrent first saves."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import pytest
from ckptcore_testing import (
    DeliverLater,
    Duplicate,
    FaultProxy,
    LoseAnswer,
    ProxiedRequest,
    RepeatLater,
    RequestFault,
    RequestsFailing,
    ResetAnswer,
    ResetRequest,
    StoreDialect,
    Throttle,
    TruncateAnswer,
)

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointExistsError, CommitUnknownError, SaveLostError
from tests.crashes.states import make_state, version_at
from tests.object_stores.runs import expect_nothing_else
from tests.object_stores.stores import ObjectStore, may_come_late

_OLD: Final = 1
_NEW: Final = 2
_NEXT: Final = 3

_FAULTS: Final[Sequence[RequestFault]] = (
    LoseAnswer(),
    Duplicate("first"),
    Duplicate("second"),
    RepeatLater(0),
    RepeatLater(3),
    DeliverLater(0),
    DeliverLater(3),
    ResetRequest(0.5),
    ResetAnswer(0.5),
    TruncateAnswer(0.5),
    Throttle(),
)
"""Faults that a client with retries survives."""


def _first_save(place: str, context: ckptcore.Context) -> None:
    ckptcore.save(place, make_state(_NEW), context=context)


def _overwrite(place: str, context: ckptcore.Context) -> None:
    ckptcore.save(place, make_state(_NEW), overwrite="non-atomic", layout="dcp", context=context)


_Program = Callable[[str, ckptcore.Context], None]

_PROGRAMS: Final[Sequence[_Program]] = (_first_save, _overwrite)


def _prepare(store: ObjectStore, program: _Program) -> str:
    place = store.new_place("one-commit")
    if program is _overwrite:
        ckptcore.save(place, make_state(_OLD), layout="dcp", context=store.direct)
    return place


def _through(store: ObjectStore, proxy: FaultProxy) -> ckptcore.Context:
    return ckptcore.Context(io=ckptcore.context.IOOptions(threads=1), storage=store.options(proxy.url))


def _requests(store: ObjectStore, program: _Program) -> Sequence[ProxiedRequest]:
    place = _prepare(store, program)
    with FaultProxy(store.upstream, dialect=store.dialect) as proxy:
        program(place, _through(store, proxy))
        return [logged.request for logged in proxy.log]


def _try_each_request(store: ObjectStore, program: _Program, faults: Sequence[RequestFault], *, every: int = 1) -> None:
    requests = _requests(store, program)[::every]
    for fault in faults:
        for request in requests:
            if isinstance(fault, RepeatLater | DeliverLater) and not may_come_late(request):
                continue
            place = _prepare(store, program)
            with FaultProxy(store.upstream, RequestsFailing({request.number: fault}), dialect=store.dialect) as proxy:
                try:
                    program(place, _through(store, proxy))
                    proxy.settle()
                    assert version_at(place, context=store.direct) == _NEW
                    expect_nothing_else(store, place)
                except BaseException as error:
                    error.add_note(f"{fault} at {request}, of:")
                    for logged in proxy.log:
                        error.add_note(f"  {logged}")
                    raise


@pytest.mark.lives(
    "S3",
    "ministack, behind a proxy that loses answers",
    "one commit for each save; the loser of two gets `SaveLostError`",
    "no atomic replacement: `overwrite=True` is refused",
)
@pytest.mark.lives(
    "GCS",
    "the strict server of ckptcore_testing, behind a proxy that loses answers",
    "one commit for each save; the loser of two gets `SaveLostError`",
    "no atomic replacement: `overwrite=True` is refused",
)
def test_a_lost_answer_at_each_request(object_store: ObjectStore) -> None:
    _try_each_request(object_store, _first_save, [LoseAnswer()])


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS, ids=repr)
@pytest.mark.parametrize("program", _PROGRAMS)
def test_each_fault_at_each_request(
    program: _Program, fault: RequestFault, full: bool, object_store: ObjectStore
) -> None:
    _try_each_request(object_store, program, [fault], every=1 if full else 3)


# --- two savers


class _HeldAt:
    """A plan that holds one request until another action is done."""

    def __init__(self, number: int, meanwhile: Callable[[], object]) -> None:
        self._number = number
        self._meanwhile = meanwhile

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        if request.number == self._number:
            self._meanwhile()
        return ()


def _hold_at_each_request(store: ObjectStore, program: _Program) -> None:
    for request in _requests(store, program):
        place = _prepare(store, program)

        def save_other(place: str = place) -> None:
            ckptcore.save(place, make_state(_NEXT), overwrite="non-atomic", context=store.direct)

        with FaultProxy(store.upstream, _HeldAt(request.number, save_other), dialect=store.dialect) as proxy:
            try:
                with pytest.raises((SaveLostError, CheckpointExistsError)) if program is _first_save else _either():
                    program(place, _through(store, proxy))
                proxy.settle()
                expected = {_NEXT} if program is _first_save else {_NEW, _NEXT}
                assert version_at(place, context=store.direct) in expected
            except BaseException as error:
                error.add_note(f"held at {request}, of:")
                for logged in proxy.log:
                    error.add_note(f"  {logged}")
                raise


@contextmanager
def _either() -> Iterator[None]:
    """Accept both results of a save that may replace the checkpoint of another save: success, or `SaveLostError`."""
    with suppress(SaveLostError):
        yield


def test_a_save_loses_if_another_save_commits_while_it_is_held(object_store: ObjectStore) -> None:
    _hold_at_each_request(object_store, _first_save)


@pytest.mark.slow
def test_an_overwrite_is_complete_or_loses_if_another_save_commits_while_it_is_held(object_store: ObjectStore) -> None:
    _hold_at_each_request(object_store, _overwrite)


class _LosesAnswers:
    """A plan that loses some answers to changes, and sends some changes twice."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._lock = threading.Lock()

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        with self._lock:
            if not request.changes or self._draw.random() < 0.5:
                return ()
            return (self._draw.choice((LoseAnswer(), Duplicate("first"), Duplicate("second"))),)


def _race(store: ObjectStore, seed: int) -> None:
    place = store.new_place("race")
    outcomes: dict[int, CheckpointError | None] = {}
    with FaultProxy(store.upstream, _LosesAnswers(seed), dialect=store.dialect) as proxy:
        begin = threading.Barrier(2)

        def save(version: int) -> None:
            context = _through(store, proxy)
            begin.wait()
            try:
                ckptcore.save(place, make_state(version), context=context)
            except CheckpointError as error:
                outcomes[version] = error
            else:
                outcomes[version] = None

        savers = [threading.Thread(target=save, args=(version,)) for version in (_OLD, _NEW)]
        for saver in savers:
            saver.start()
        for saver in savers:
            saver.join()
        proxy.settle()
        try:
            _judge_race(store, place, outcomes)
        except BaseException as error:
            error.add_note(f"seed {seed}, outcomes {outcomes}:")
            for logged in proxy.log:
                error.add_note(f"  {logged}")
            raise


def _judge_race(store: ObjectStore, place: str, outcomes: dict[int, CheckpointError | None]) -> None:
    assert set(outcomes) == {_OLD, _NEW}, "a saver ended with another error"
    won = [version for version, error in outcomes.items() if error is None]
    unknown = [version for version, error in outcomes.items() if isinstance(error, CommitUnknownError)]
    for error in outcomes.values():
        assert error is None or isinstance(error, SaveLostError | CheckpointExistsError | CommitUnknownError)
    committed = version_at(place, context=store.direct)
    assert len(won) <= 1
    possible: set[int | None] = {*won} if won else {None, *unknown}
    assert committed in possible
    assert won or unknown, "both savers lost"
    ckptcore.save(place, make_state(_NEXT), overwrite="non-atomic", context=store.direct)
    assert version_at(place, context=store.direct) == _NEXT
    expect_nothing_else(store, place)


@pytest.mark.parametrize("seed", range(2))
def test_one_of_two_savers_commits(seed: int, object_store: ObjectStore) -> None:
    _race(object_store, seed)


@pytest.mark.slow
def test_one_of_two_savers_commits_often(full: bool, object_store: ObjectStore) -> None:
    for seed in range(200 if full else 50):
        _race(object_store, seed)
