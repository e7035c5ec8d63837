"""Signal handlers that call ckptcore during another call of ckptcore in the same thread."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore import Checkpointer, Context
from ckptcore.errors import CheckpointError
from ckptcore.events import Event
from tests.crashes import interrupted_calls

STATE = {"w": np.arange(8.0)}


@pytest.mark.parametrize(
    ("call", "nested"),
    [
        ("save", "save"),
        ("load", "save"),
        ("step", "step"),
        pytest.param("save_async", "save_async", marks=pytest.mark.slow),
        pytest.param("checkpointer", "save", marks=pytest.mark.slow),
        pytest.param("save", "load", marks=pytest.mark.slow),
        pytest.param("load", "policies", marks=pytest.mark.slow),
        pytest.param("save_checkpointables", "checkpointer", marks=pytest.mark.slow),
    ],
)
def test_the_first_call_of_a_process_is_interrupted(tmp_path: Path, call: str, nested: str) -> None:
    """The nested call raises an error with a remedy, and the interrupted call succeeds.

    The nested call must not use an incomplete module, or wait for a lock of the interrupted call.
    """
    ckptcore.save(tmp_path / "there", interrupted_calls.STATE)
    command = [sys.executable, interrupted_calls.__file__, str(tmp_path), call, nested]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    runs = [json.loads(line) for line in result.stdout.splitlines()]
    others = {
        text
        for run in runs
        for text in run["outcomes"]
        if not re.fullmatch(
            "(Checkpoint|Import)Error: .*called by a signal handler that interrupted another call.*", text
        )
    }
    assert others <= {"done"}
    assert sum(len(run["outcomes"]) for run in runs) >= len(runs), "the handler was called"
    if call.startswith("save"):
        assert all(ckptcore.verify(directory / "first").ok for directory in tmp_path.glob("at-*"))


def _function(nested: Callable[[], Any]) -> Callable[..., Any]:
    return lambda number, frame: nested()


def _any_arguments(nested: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *arguments: nested()


def _partial(nested: Callable[[], Any]) -> Callable[..., Any]:
    return partial(lambda run, number, frame: run(), nested)


def _object(nested: Callable[[], Any]) -> Callable[..., Any]:
    class Handlers:
        """A callable object, as in Lightning, which calls several handlers."""

        def __call__(self, signum: int, frame: object) -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            nested()

    return Handlers()


HANDLERS = {"function": _function, "any arguments": _any_arguments, "partial": _partial, "object": _object}


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", HANDLERS)
def test_the_error_ends_the_interrupted_save_too(tmp_path: Path, kind: str) -> None:
    """This happens if the handler does not catch the error. Nothing is committed, and the next save succeeds."""

    class Interrupts:
        """An object that gets a signal while a save asks for its state."""

        def state_dict(self) -> dict[str, Any]:
            signal.raise_signal(signal.SIGUSR1)
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    signal.signal(signal.SIGUSR1, HANDLERS[kind](lambda: ckptcore.save(tmp_path / "nested", STATE)))
    with pytest.raises(CheckpointError, match=r"nested: called by a signal handler.*PreemptionCheckpointing\(\)"):
        ckptcore.save(tmp_path / "first", {"object": Interrupts()})
    assert list(tmp_path.iterdir()) == []
    ckptcore.save(tmp_path / "first", STATE)
    ckptcore.save(tmp_path / "nested", STATE)


def test_a_handler_that_interrupts_the_program_saves(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: ckptcore.save(tmp_path / "x", STATE))
    signal.raise_signal(signal.SIGUSR1)
    assert ckptcore.verify(tmp_path / "x").ok


def test_nested_calls_outside_of_signal_handlers_succeed(tmp_path: Path) -> None:
    """The calls come from an object that saves itself with ckptcore, and from an observer that loads."""

    class Own:
        def save(self, directory: Path) -> None:
            ckptcore.save(directory / "inner", STATE)

        def load(self, directory: Path) -> None:
            raise AssertionError

    seen = []

    def observe(event: Event) -> None:
        if event.phase == "commit":
            seen.append(ckptcore.load(tmp_path / "there")["w"].tolist())

    ckptcore.save(tmp_path / "there", STATE)
    ckptcore.save_checkpointables(tmp_path / "x", {"own": Own()}, context=Context(observers=[observe]))
    assert seen == [STATE["w"].tolist()]


def test_the_remedy_in_the_error_works(tmp_path: Path) -> None:
    """With the policy from the error, a signal during a save makes the Checkpointer save the next step."""
    from ckptcore.policies import AnySave, FixedInterval, PreemptionCheckpointing

    def observe(event: Event) -> None:
        if event.phase == "describe" and event.step == 10:
            signal.raise_signal(signal.SIGTERM)

    policy = AnySave([FixedInterval(10), PreemptionCheckpointing()])
    with Checkpointer(tmp_path, save_policy=policy, context=Context(observers=[observe])) as checkpointer:
        saved = [step for step in range(10, 14) if checkpointer.save(step, STATE) is not None]
        assert checkpointer.preempted
    assert saved[:2] == [10, 11]
    assert ckptcore.CheckpointReader(tmp_path).steps[:2] == (10, 11)
