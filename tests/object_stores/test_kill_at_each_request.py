"""``kill -9`` of the client at each request of a save. The old or the new checkpoint exists. The next save succeeds.

An object store cannot replace a checkpoint atomically, so the replacement must be requested as "non-atomic". For it,
the tests only require that no load returns wrong data.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pytest
from ckptcore_testing import FaultProxy, InterruptAfter, InterruptBefore, RequestsFailing

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.commit.root import ROOT_KEY, Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.runtime import runtime_of
from tests.crashes.states import SMALL, make_state, version_at, version_of
from tests.object_stores.clients import Client, Program, Task
from tests.object_stores.runs import expect_nothing_else, release_directory
from tests.object_stores.stores import LAYOUTS, STORES, ObjectStore

_OLD: Final = 1
_NEW: Final = 2
_NEXT: Final = 3

_SAMPLE: Final = 4

_FIXED_NAMES: Final = ("model.safetensors", ".metadata", "__0_0.distcp", "manifest.ocdbt", "zarr.json", ".zgroup")
"""Fixed names of formats. A failed save may leave objects with these names, and the next save uses them again."""

Moment = Literal["before", "after"]


def _nothing(store: ObjectStore, place: str) -> None:
    """Create no checkpoint."""


def _dead_claim(store: ObjectStore, place: str) -> None:
    """Create the remains of a save that failed early: a claim, objects, and an unfinished upload."""
    storage = open_directory(place, runtime_of(store.direct).storages, to_write=True)
    storage.put(ROOT_KEY, encode_claim(Claim("0123456789abcdef", "2026-01-01T00:00:00.000+00:00")))
    for name in _FIXED_NAMES:
        storage.put(name, b"of a dead save")
    store.begin_upload(f"{place}/model.safetensors")


def _old(store: ObjectStore, place: str) -> None:
    ckptcore.save(place, make_state(_OLD), context=store.direct)


def _first_step(store: ObjectStore, place: str) -> None:
    with ckptcore.Checkpointer(place, context=store.direct) as checkpointer:
        checkpointer.save_blocking(_OLD, make_state(_OLD))


@dataclass(frozen=True)
class Scenario:
    """A task to kill, and the states that may exist afterwards.

    Attributes:
        program: the task of the client.
        prepare: creates the initial state.
        allowed: the allowed states afterwards; None for no checkpoint.
        elements: number of elements of an array of the state.
    """

    program: Program
    prepare: Callable[[ObjectStore, str], None]
    allowed: frozenset[int | None]
    elements: int = SMALL


SCENARIOS: Final = {
    "first save": Scenario("save", _nothing, frozenset({None, _NEW})),
    "save over a dead claim": Scenario("save", _dead_claim, frozenset({None, _NEW})),
    "non-atomic overwrite": Scenario("overwrite", _old, frozenset({_OLD, None, _NEW})),
    "a step of a Checkpointer": Scenario("step", _first_step, frozenset({_OLD, _NEW})),
}

_IN_PARTS: Final = Scenario("save", _dead_claim, frozenset({None, _NEW}), 11 << 20)


def _task(store: ObjectStore, scenario: Scenario, layout: str, place: str, url: str) -> Task:
    return Task(scenario.program, place, _NEW, layout, store.options(url), scenario.elements)


def _requests(store: ObjectStore, scenario: Scenario, layout: str, warm: Client) -> int:
    """Return the number of requests of a scenario."""
    place = store.new_place("counted")
    scenario.prepare(store, place)
    with FaultProxy(store.upstream, dialect=store.dialect) as proxy:
        warm.start(_task(store, scenario, layout, place, proxy.url))
        assert warm.end() == 0, f"{layout}: the program failed"
        return len(proxy.log)


def _try(store: ObjectStore, scenario: Scenario, layout: str, warm: Client, number: int, moment: Moment) -> bool:
    """Kill a program at a request and check the result. Return True if the request was reached."""
    place = store.new_place("killed")
    scenario.prepare(store, place)
    client: list[int] = []

    def kill() -> None:
        os.kill(client[0], signal.SIGKILL)

    plan = RequestsFailing({number: InterruptBefore(kill) if moment == "before" else InterruptAfter(kill)})
    with FaultProxy(store.upstream, plan, dialect=store.dialect) as proxy:
        client.append(warm.start(_task(store, scenario, layout, place, proxy.url)))
        status = warm.end()
        proxy.settle()
        log = proxy.log
    assert status in (0, -signal.SIGKILL), f"the program ended with {status}"
    try:
        version = _found(store, scenario, place)
        assert version in scenario.allowed, f"found {version}"
        assert status != 0 or version == _NEW, "a program that ended is not done"
        _save_next(store, scenario, layout, place)
        assert store.list_uploads(place) == [], "an upload of the dead is left"
    except BaseException as error:
        error.add_note(f"killed {moment} request {number} of:")
        for logged in log:
            error.add_note(f"  {logged}")
        raise
    return status != 0


def _found(store: ObjectStore, scenario: Scenario, place: str) -> int | None:
    if scenario.program != "step":
        return version_at(place, context=store.direct)
    reader = ckptcore.CheckpointReader(place, context=store.direct)
    return None if reader.latest is None else version_of(reader.load())


def _save_next(store: ObjectStore, scenario: Scenario, layout: str, place: str) -> None:
    """Check that the next save succeeds, and removes all remains of the failed one."""
    state = make_state(_NEXT)
    if scenario.program == "step":
        release_directory(store, place)
        with ckptcore.Checkpointer(place, layout=layout, context=store.direct) as checkpointer:
            checkpointer.save_blocking(_NEXT, state)
            assert version_of(checkpointer.load()) == _NEXT
            steps = checkpointer.steps
        assert set(steps) in ({_OLD, _NEXT}, {_OLD, _NEW, _NEXT})
        storage = open_directory(place, runtime_of(store.direct).storages, to_write=True)
        directories = [name for name in storage.list_names() if not name.startswith(".")]
        assert len(directories) == len(steps), f"remains of a failed save: {directories}"
        return
    ckptcore.save(place, state, layout=layout, overwrite="non-atomic", context=store.direct)
    assert version_at(place, context=store.direct) == _NEXT
    expect_nothing_else(store, place)


def _points(requests: int) -> Sequence[tuple[int, Moment]]:
    return [(number, moment) for number in range(requests) for moment in ("before", "after")]


@pytest.mark.parametrize("turn", range(len(SCENARIOS) // 2))
def test_a_sample_of_kills(turn: int, object_store: ObjectStore, warm: Client) -> None:
    # Each scenario runs on one store, and in another layout than the other scenarios.
    number = 2 * turn + sorted(STORES).index(object_store.scheme) % 2
    scenario, layout = SCENARIOS[list(SCENARIOS)[number]], LAYOUTS[-1 - number]
    points = _points(_requests(object_store, scenario, layout, warm))
    for request, moment in points[-1 :: -max(1, len(points) // _SAMPLE)]:
        assert _try(object_store, scenario, layout, warm, request, moment), f"request {request} was not reached"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_at_every_request(name: str, layout: str, full: bool, object_store: ObjectStore, warm: Client) -> None:
    _kill_at_each_request(SCENARIOS[name], layout, full, object_store, warm)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kill_at_every_request_of_multipart_uploads(
    layout: str, full: bool, object_store: ObjectStore, warm: Client
) -> None:
    _kill_at_each_request(_IN_PARTS, layout, full, object_store, warm)


def _kill_at_each_request(scenario: Scenario, layout: str, full: bool, store: ObjectStore, warm: Client) -> None:
    points = _points(_requests(store, scenario, layout, warm))[:: 1 if full else 5]
    reached = sum(_try(store, scenario, layout, warm, number, moment) for number, moment in points)
    assert reached >= 0.8 * len(points), f"only {reached} of {len(points)} points were reached"
