"""Readers that poll a location during random changes by a writer. Each result must be a state of that time."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import ckptcore
from ckptcore.model import JSON
from tests.consistent_reads.readers import READERS, Outcome, outcome_of
from tests.consistent_reads.states import Place, state_of
from tests.consistent_reads.writer import NOTHING, Log, State, write
from tests.object_stores.stores import STORES

pytestmark = pytest.mark.system

_SEED: Final = 17
_NAMES: Final = tuple(READERS)
_CLAIMS: Final = (State("claim", 1, "safetensors"), State("claim of several", 1, "safetensors"))


@dataclass(frozen=True, slots=True)
class _Writing:
    """A running writer.

    Attributes:
        location: the location that the writer changes.
        log: the log of the changes.
        context: the Context for reads.
        has_claims: True if readers can see the claim of a save before the commit.
        expect_alive: fails if the writer has ended.
    """

    location: str
    log: Log
    context: ckptcore.Context
    has_claims: bool
    expect_alive: Callable[[], None]


@contextmanager
def _in_process(location: str, directory: Path, storage: Mapping[str, Mapping[str, JSON]]) -> Iterator[_Writing]:
    """Run a writer in a separate process."""
    path, errors = directory / "log", directory / "errors"
    path.touch()
    command = [
        sys.executable,
        "-m",
        "tests.consistent_reads.writer",
        str(_SEED),
        location,
        str(path),
        json.dumps(storage),
    ]
    with errors.open("wb") as output, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=output) as process:
        assert process.stdin is not None

        def expect_alive() -> None:
            assert process.poll() is None, errors.read_text()

        context = ckptcore.Context(storage=storage, io=ckptcore.context.IOOptions(threads=2))
        yield _Writing(location, Log(path), context, not location.startswith("file:"), expect_alive)
        expect_alive()
        process.stdin.close()
        assert process.wait() == 0, errors.read_text()


@contextmanager
def _in_thread(directory: Path) -> Iterator[_Writing]:
    """Run a writer in a thread, for storage in the memory of this process."""
    path = directory / "log"
    path.touch()
    location = f"memory://polled-{directory.name}/run/3"
    stopped = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            write(
                _SEED, location, Log(path), ckptcore.Context(io=ckptcore.context.IOOptions(threads=2)), stopped.is_set
            )
        except BaseException as error:  # noqa: BLE001  # raised by the test
            failed.append(error)

    def expect_alive() -> None:
        for error in failed:
            raise error

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield _Writing(
            location, Log(path), ckptcore.Context(io=ckptcore.context.IOOptions(threads=2)), True, expect_alive
        )
    finally:
        stopped.set()
        thread.join()
    expect_alive()


@functools.cache
def _undisturbed(reader: str, state: State) -> Outcome:
    """Return the outcome of a read of a location that stays in a state."""
    place = Place("memory", Path(), state_of(state.kind, state.layout or "safetensors", "memory", state.version))
    return outcome_of(READERS[reader], place.location, ckptcore.Context(io=ckptcore.context.IOOptions(threads=2)))


class _Judge:
    """The possible states of a location during a read, from the log of the writer."""

    def __init__(self, writing: _Writing) -> None:
        self._writing = writing
        self._possible = [NOTHING]
        self._busy = False

    def wait(self) -> None:
        """Wait for the first change."""
        while not self._follow():
            self._writing.expect_alive()
            time.sleep(0.01)

    def begin(self) -> None:
        """Forget states that ended before now."""
        self._follow()
        self._possible = self._possible[-2:] if self._busy else self._possible[-1:]

    def _follow(self) -> bool:
        """Read new entries of the log. Return True if the writer was changing the location since the last call."""
        was_busy = self._busy
        for state in self._writing.log.news():
            self._busy = state is not None
            if state is not None:
                was_busy = True
                self._possible.append(state)
        return was_busy

    def end(self, reader: str, outcome: Outcome) -> tuple[set[Outcome], bool]:
        """Return the valid outcomes of a read since `begin`, and True if the location changed meanwhile."""
        changed = self._follow()
        allowed = {_undisturbed(reader, state) for state in self._possible}
        if changed:
            allowed.add("replaced")
            if self._writing.has_claims:
                allowed.update(_undisturbed(reader, claim) for claim in _CLAIMS)
        return allowed, changed


def _poll(writing: _Writing, rounds: int) -> Counter[str]:
    """Read repeatedly. Return the number of reads with each outcome."""
    draw = random.Random(_SEED)
    judge = _Judge(writing)
    judge.wait()
    met: Counter[str] = Counter()
    wrong = []
    changes = 0
    number = 0
    # If the writer gets little CPU time, read more often.
    while number < rounds or changes < rounds // 4:
        number += 1
        name = draw.choice(_NAMES)
        writing.expect_alive()
        judge.begin()
        outcome = outcome_of(READERS[name], writing.location, writing.context)
        allowed, changed = judge.end(name, outcome)
        changes += changed
        met[outcome if outcome.endswith("Error") or outcome == "replaced" else "value"] += 1
        if outcome not in allowed:
            wrong.append(f"{number}: {name} gave {outcome}, not one of {allowed}")
    assert not wrong, f"{len(wrong)} of {number} reads went wrong: {met}\n" + "\n".join(wrong[:10])
    assert met["value"] > 0
    return met


def _begin(scheme: str, directory: Path) -> AbstractContextManager[_Writing]:
    if scheme == "memory":
        return _in_thread(directory)
    if scheme == "file":
        return _in_process(f"file://{directory}/run/3", directory, {})
    return _in_bucket(scheme, directory)


@contextmanager
def _in_bucket(scheme: str, directory: Path) -> Iterator[_Writing]:
    with STORES[scheme](directory) as store:
        location = f"{store.new_place('polled')}/run/3"
        with _in_process(location, directory, store.direct.storage) as writing:
            yield writing


@pytest.mark.parametrize("scheme", ["file", "memory", "s3"])
def test_reads_during_changes(scheme: str, tmp_path: Path) -> None:
    with _begin(scheme, tmp_path) as writing:
        _poll(writing, 200)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["file", "memory", "s3"])
def test_thousands_of_reads_during_changes(scheme: str, full: bool, tmp_path: Path) -> None:
    with _begin(scheme, tmp_path) as writing:
        met = _poll(writing, 10_000 if full else 2_000)
    print(scheme, sum(met.values()), dict(met))  # the outcomes of the run
