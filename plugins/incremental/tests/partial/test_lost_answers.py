"""Sessions, finalizations and deletions on a storage that loses, delays or repeats requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Final, get_args

import numpy as np
import pytest
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, CommitUnknownError, TreeMismatchError
from tests.crashes.answers import SCHEME, Answers, Mishap, Storages, quietly

pytestmark = pytest.mark.system

_PLACE: Final = f"{SCHEME}://bucket/run/step_1"
_LAYOUTS: Final = ["safetensors", "zarr3"]

_Task = Callable[[Storages, Answers | None], None]


def _state(number: int) -> dict[str, object]:
    """Return a small array, which is written by one put, and a large one, which is written in pieces."""
    return {f"small {number}": np.full(50, number), f"large {number}": np.full(140_000, number, np.float64)}


def _session(number: int, layout: str) -> _Task:
    def save(storages: Storages, answers: Answers | None) -> None:
        ckptcore.partial(_PLACE, layout=layout, context=storages.context(answers)).save(_state(number))

    return save


def _finalize(storages: Storages, answers: Answers | None) -> None:
    ckptcore.partial(_PLACE, context=storages.context(answers)).finalize()


def _delete(storages: Storages, answers: Answers | None) -> None:
    ckptcore.delete(_PLACE, context=storages.context(answers))


def _prepared(sessions: int, layout: str) -> Storages:
    """Return storages with complete sessions, followed by a session that failed."""
    storages = Storages()
    for number in range(sessions):
        _session(number, layout)(storages, None)

    class _DeadError(BaseException):
        """Ends the simulated process."""

    def die(number: int, name: str, keys: object) -> None:
        if ".session-" in str(keys) or dead:
            dead.append(True)
            raise _DeadError

    dead: list[bool] = []
    with pytest.raises(_DeadError):
        _session(9, layout)(storages, Answers(before=die))
    return storages


def _expect_whole(storages: Storages, sessions: int) -> None:
    context = storages.context()
    expected = {name: array for number in range(sessions) for name, array in _state(number).items()}
    assert same_value(ckptcore.load(_PLACE, context=context), expected)
    assert ckptcore.verify(_PLACE, context=context).ok
    known = {f"run/step_1/{key}" for key in ("checkpoint.json", *ckptcore.metadata(_PLACE, context=context).objects)}
    assert set(storages.open().list()) == known, "something is left"


_TASKS: Final = {"first session": 0, "further session": 1, "finalize": 2}


def _task(name: str, layout: str) -> _Task:
    return _finalize if name == "finalize" else _session(_TASKS[name], layout)


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("name", list(_TASKS))
def test_lost_and_late_answers_lose_no_session(name: str, layout: str) -> None:
    """A session that reported success is kept. Any other session can be saved again."""
    sessions = _TASKS[name]
    counted = Answers()
    _task(name, layout)(_prepared(sessions, layout), counted)
    numbers = range(len(counted.changes))
    several: list[dict[int, Mishap]] = [{number: mishap} for number in numbers for mishap in get_args(Mishap)]
    several += [{number: "never sent", number + 1: "never sent"} for number in numbers]
    several += [{number: "lost", number + 1: "late"} for number in numbers]
    for mishaps in several:
        storages = _prepared(sessions, layout)
        error: CheckpointError | None = None
        try:
            _task(name, layout)(storages, Answers(mishaps))
        except CheckpointError as failure:
            error = failure
        try:
            if name != "finalize" and error is not None:
                try:
                    _session(sessions, layout)(storages, None)
                except TreeMismatchError as there:
                    assert "already" in str(there) and isinstance(error, CommitUnknownError), error
            try:
                _finalize(storages, None)
            except CheckpointNotFoundError:
                assert name == "finalize"
            _expect_whole(storages, sessions if name == "finalize" else sessions + 1)
        except BaseException as wrong:
            wrong.add_note(f"{mishaps} of {counted.changes}; the error was {error!r}")
            raise


@pytest.mark.parametrize("name", list(_TASKS))
def test_a_change_repeated_after_the_end_has_no_effect(name: str) -> None:
    """Deletions are not repeated, because they have no condition."""
    sessions = _TASKS[name]
    for number in itertools.count():
        storages, answers = _prepared(sessions, "safetensors"), Answers()
        _task(name, "safetensors")(storages, answers)
        if name != "finalize":
            _finalize(storages, None)
        if number == len(answers.changes):
            break
        if answers.changes[number][0] != "delete":
            quietly(answers.replays[number])
            context = storages.context()
            whole = range(sessions if name == "finalize" else sessions + 1)
            expected = {key: array for session in whole for key, array in _state(session).items()}
            assert same_value(ckptcore.load(_PLACE, context=context), expected), answers.changes[number]
            assert ckptcore.verify(_PLACE, context=context).ok


def test_a_deletion_with_lost_answers_can_be_repeated() -> None:
    counted = Answers()
    _delete(_prepared(1, "safetensors"), counted)
    for number, mishap in itertools.product(range(len(counted.changes)), get_args(Mishap)):
        storages = _prepared(1, "safetensors")
        try:
            _delete(storages, Answers({number: mishap}))
        except CheckpointError:
            with suppress(CheckpointNotFoundError):
                _delete(storages, None)
        assert list(storages.open().list()) == [], f"{mishap} at {counted.changes[number]}"
