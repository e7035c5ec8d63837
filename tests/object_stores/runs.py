"""Random programs that save, replace, load and delete through a faulty proxy. The results are checked without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ckptcore_testing import (
    CutContent,
    FaultProxy,
    InterruptBefore,
    ProxiedRequest,
    RequestFault,
    SeededFaults,
    StaleList,
    StoreDialect,
)

import ckptcore
from ckptcore.commit.location import open_directory
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CommitUnknownError,
    DirectoryInUseError,
)
from ckptcore.policies import LatestN
from ckptcore.runtime import runtime_of
from tests.crashes.states import SMALL, make_state, version_at, version_of
from tests.object_stores.histories import History
from tests.object_stores.stores import LAYOUTS, ObjectStore, may_come_late

_PARTS: Final = 6 << 20
"""Elements of an array that is uploaded in parts."""

_OWNER: Final = ".ckptcore/owner.json"


class Outage:
    """A network that fails permanently from some request on."""

    def __init__(self, begins: int) -> None:
        """Break every request from number `begins` on."""
        self._begins = begins

    def faults(self, request: ProxiedRequest, dialect: StoreDialect) -> Sequence[RequestFault]:
        """See `RequestPlan`."""
        return (InterruptBefore(lambda: None),) if request.number >= self._begins else ()


@dataclass
class Run:
    """State of a run of a random program.

    Attributes:
        seed: the seed of the program and the faults.
        store: the object store.
        proxy: the faulty proxy.
        draw: the random numbers of the program.
        context: connects through the proxy.
        direct: connects without the proxy.
        place: the directory of the run.
        next_version: the version of the next state to save.
        histories: the history of each location.
    """

    seed: int
    store: ObjectStore
    proxy: FaultProxy
    place: str
    draw: random.Random
    context: ckptcore.Context
    direct: ckptcore.Context
    next_version: int = 1
    histories: dict[str, History] = field(default_factory=dict)

    def version(self) -> int:
        """Return the version of a new state."""
        version, self.next_version = self.next_version, self.next_version + 1
        return version

    def history(self, location: str) -> History:
        """Return the history of a location."""
        return self.histories.setdefault(location, History(location))


def run(seed: int, store: ObjectStore) -> Run:
    """Run the program of a seed, and check it. Return the run if all checks pass.

    Raises:
        AssertionError: something was lost, torn or wrong, or an error was unclear. The notes describe the run.
    """
    draw = random.Random(seed)
    plan = SeededFaults(
        seed,
        rate=draw.choice((0.03, 0.1, 0.25)),
        most=draw.choice((3, 15, 40)),
        may_repeat=may_come_late,
        latest=3,  # a late request must arrive before a failed save has removed its objects
    )
    with FaultProxy(store.upstream, plan, dialect=store.dialect) as proxy:
        going = Run(
            seed, store, proxy, store.new_place(f"run-{seed}"), draw,
            ckptcore.Context(io=ckptcore.context.IOOptions(threads=draw.choice((1, 4))),
            storage=store.options(proxy.url)), store.direct,
        )  # fmt: skip
        try:
            _program(going)
            proxy.settle()
            _judge(going)
        except BaseException as error:
            error.add_note(f"seed {seed} on {store.scheme}, with faults:")
            for logged in proxy.log:
                if logged.faults or logged.request.changes:
                    error.add_note(f"  {logged}")
            for history in going.histories.values():
                error.add_note(str(history))
            raise
    return going


def _program(run: Run) -> None:
    steps: Sequence[Callable[[Run, str], None]] = (_save, _replace, _replace, _load, _load, _delete, _die)
    for _ in range(run.draw.randrange(3, 7)):
        run.draw.choice(steps)(run, f"{run.place}/checkpoint_{run.draw.randrange(2)}")
    if run.draw.random() < 0.4:
        _train(run, f"{run.place}/steps")


def _state(run: Run, version: int) -> Mapping[str, object]:
    return make_state(version, _PARTS if run.draw.random() < 0.04 else SMALL)


def _save(run: Run, location: str) -> None:
    history, version = run.history(location), run.version()
    state, layout = _state(run, version), run.draw.choice(LAYOUTS)
    try:
        ckptcore.save(location, state, layout=layout, context=run.context)
    except CheckpointError as error:
        misread = any(CutContent in map(type, logged.faults) for logged in run.proxy.log)
        history.not_saved(version, error, replacing=False, misread=misread)
    else:
        history.saved_first(version)


def _replace(run: Run, location: str) -> None:
    history, version = run.history(location), run.version()
    state, layout = _state(run, version), run.draw.choice(LAYOUTS)
    try:
        ckptcore.save(location, state, layout=layout, overwrite="non-atomic", context=run.context)
    except CheckpointError as error:
        history.not_saved(version, error, replacing=True)
    else:
        history.saved(version)


def _load(run: Run, location: str) -> None:
    history = run.history(location)
    try:
        loaded = ckptcore.load(location, context=run.context)
    except CheckpointError as error:
        history.not_loaded(error)
    else:
        history.loaded(version_of(loaded))


def _delete(run: Run, location: str) -> None:
    history = run.history(location)
    try:
        ckptcore.delete(location, context=run.context)
    except CheckpointError as error:
        history.not_deleted(error)
    else:
        history.deleted()


def _die(run: Run, location: str) -> None:
    """Save over a network that fails permanently during the save, so that the save cannot remove its objects."""
    history, version = run.history(location), run.version()
    proxy, plan = run.proxy, run.proxy.plan
    number = proxy.log[-1].request.number + 1 if proxy.log else 0
    proxy.plan = Outage(number + run.draw.randrange(12))
    try:
        ckptcore.save(
            location, make_state(version), overwrite="non-atomic", layout=run.draw.choice(LAYOUTS), context=run.context
        )
    except CheckpointError as error:
        history.not_saved(version, error, replacing=True)
    else:
        history.saved(version)
    finally:
        proxy.plan = plan


def release_directory(store: ObjectStore, directory: str) -> None:
    """Delete the lease of the owner of a run, in place of waiting until it expires."""
    storage = open_directory(directory, runtime_of(store.direct).storages, to_write=True)
    storage.delete([_OWNER])


def _train(run: Run, directory: str) -> None:
    """Save steps and resume, in two jobs through the proxy. Then check the steps without the proxy."""
    saved: dict[int, set[int | None]] = {}
    last = 0
    layout = run.draw.choice(LAYOUTS)
    for _ in range(2):
        try:
            with ckptcore.Checkpointer(
                directory, preservation_policy=LatestN(2), layout=layout, context=run.context
            ) as checkpointer:
                newest = checkpointer.latest
                # A job knows only the steps of the listing at its start, which may be stale.
                old = any(StaleList in map(type, logged.faults) for logged in run.proxy.log)
                assert old or (newest or 0) >= last, (
                    f"step {last} was saved, the newest is said to be {newest}: {saved}"
                )
                if newest is not None:
                    loaded = version_of(checkpointer.load(newest))
                    assert loaded in saved[newest], f"step {newest} is {loaded}, of {saved}"
                for step in range((newest or 0) + 1, (newest or 0) + 1 + run.draw.randrange(1, 4)):
                    version = run.version()
                    try:
                        checkpointer.save_blocking(step, make_state(version))
                    except CommitUnknownError:
                        saved.setdefault(step, {None}).add(version)
                    except CheckpointError:
                        saved.setdefault(step, {None})
                    else:
                        saved[step] = {version}
                        last = step
        except DirectoryInUseError:
            release_directory(run.store, directory)
        except CheckpointError as error:
            run.history(directory).not_loaded(error) if not isinstance(error, CheckpointNotFoundError) else None
            release_directory(run.store, directory)
    run.proxy.settle()
    release_directory(run.store, directory)
    with ckptcore.Checkpointer(directory, layout=layout, context=run.direct) as checkpointer:
        newest = checkpointer.latest
        assert (newest or 0) >= last, f"step {last} was saved, and the newest is {newest}: {saved}"
        for step in checkpointer.steps:
            loaded = version_of(checkpointer.load(step))
            assert loaded in saved[step], f"step {step} is {loaded}, of {saved}"
        version = run.version()
        checkpointer.save_blocking((newest or 0) + 1, make_state(version))
        assert version_of(checkpointer.load()) == version


def _judge(run: Run) -> None:
    """Check every location without faults. Committed checkpoints are complete, and the next save removes remains."""
    for location, history in run.histories.items():
        if location.endswith("/steps"):
            continue
        history.found(version_at(location, context=run.direct))
        version = run.version()
        ckptcore.save(location, make_state(version), overwrite="non-atomic", context=run.direct)
        history.saved(version)
        history.found(version_at(location, context=run.direct))
        expect_nothing_else(run.store, location)
        assert run.store.list_uploads(location) == [], f"unfinished uploads are left at {location}"


def expect_nothing_else(store: ObjectStore, location: str) -> None:
    """Check that a location contains only objects that its checkpoint lists."""
    storage = open_directory(location, runtime_of(store.direct).storages, to_write=True)
    listed = set(ckptcore.metadata(location, context=store.direct).objects)
    extra = {key for key in storage.list() if key not in listed and not key.startswith("checkpoint.")}
    assert not extra, f"{location} holds objects that it does not list: {sorted(extra)}"
