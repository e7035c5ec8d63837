"""A power loss at each system call of a save to a local disk. The old or the new checkpoint survives, complete."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

import ckptcore
from ckptcore.errors import CheckpointError, CorruptCheckpointError
from tests.crashes.disk import CALLS, Call, Disk, calls_in
from tests.crashes.saver import NEW, OLD
from tests.crashes.states import make_state, version_at
from tests.crashes.test_kill_at_each_call import SCENARIOS, Scenario
from tests.crashes.tracing import Saver, needs_strace

_NEXT: Final = 3
_FAST: Final = ckptcore.Context(durability="none", io=ckptcore.context.IOOptions(threads=1))
_DURABLE: Final = [name for name in SCENARIOS if "without durability" not in name and "large" not in name]


class _Trial:
    """The system calls of one save, and the state of the disk before the save."""

    def __init__(self, scenario: Scenario, warm: Saver, directory: Path) -> None:
        needs_strace()
        self._root = directory / "disk"
        self._location = self._root / "run" / "step_1"
        self._crashed = directory / "crashed"
        self._root.mkdir()
        scenario.prepare(self._location)
        before = directory / "before"
        shutil.copytree(self._root, before)
        log = directory / "trace"
        options = ("-y", "-xx", "-s", "100000000", "-e", f"trace={','.join(CALLS)}")
        assert warm.traced(scenario.task, str(self._location), log, *options) == 0
        self.calls: Sequence[Call] = list(calls_in(log))
        shutil.rmtree(self._root)
        before.rename(self._root)

    def outcomes(self, calls: Sequence[Call], tries: int) -> list[int | str | None]:
        """Return the results of many power losses: a version, None, or the error of the load."""
        results: list[int | str | None] = []
        disk = Disk(self._root)
        choices = random.Random(0)
        for done in range(len(calls) + 1):
            losses: list[Callable[[], bool]] = [lambda: False, lambda: True]
            losses += [lambda: choices.random() < 0.5] * tries
            for keep in losses:
                results.append(self._lose_power(disk, keep, choices))
            if done < len(calls):
                disk.perform(calls[done])
        results.append(self._lose_power(disk, lambda: False, choices))
        return results

    def _lose_power(self, disk: Disk, keep: Callable[[], bool], choices: random.Random) -> int | str | None:
        self._crashed.mkdir()
        disk.after_power_loss(self._crashed, keep, choices)
        location = self._crashed / "run" / "step_1"
        try:
            result: int | str | None = self._look(location)
        except CheckpointError as error:
            result = str(error)
            shutil.rmtree(location)
        ckptcore.save(location, make_state(_NEXT), overwrite=True, context=_FAST)
        assert version_at(str(location)) == _NEXT
        assert [path.name for path in location.parent.iterdir()] == [location.name], "leftovers"
        shutil.rmtree(self._crashed)
        return result

    def _look(self, location: Path) -> int | None:
        if location.exists() and not (location / "checkpoint.json").exists():
            # The remaining files may look like a checkpoint of other software.
            raise CorruptCheckpointError("the root is lost")
        return version_at(str(location))


def _check(name: str, warm: Saver, directory: Path, tries: int) -> None:
    scenario = SCENARIOS[name]
    trial = _Trial(scenario, warm, directory)
    outcomes = trial.outcomes(trial.calls, tries)
    assert set(outcomes) == scenario.allowed
    assert outcomes[-1] == (None if name.startswith("delete") else NEW), "what was committed is not durable"


@pytest.mark.parametrize("name", ["first save", "overwrite"])
def test_unsynced_writes_can_be_lost(name: str, warm: Saver, tmp_path: Path) -> None:
    _check(name, warm, tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", _DURABLE)
def test_any_part_of_unsynced_writes_can_be_lost(name: str, full: bool, warm: Saver, tmp_path: Path) -> None:
    _check(name, warm, tmp_path, 8 if full else 2)


def test_a_save_without_syncs_is_detected(warm: Saver, tmp_path: Path) -> None:
    trial = _Trial(SCENARIOS["overwrite"], warm, tmp_path)
    outcomes = trial.outcomes([call for call in trial.calls if "sync" not in call.name], 2)
    assert not set(outcomes) <= {OLD, NEW}


@pytest.mark.parametrize(
    "left_out", ["parent", *[pytest.param(name, marks=pytest.mark.slow) for name in ("data", "directory")]]
)
@pytest.mark.slow
def test_a_save_with_a_missing_sync_is_detected(left_out: str, warm: Saver, tmp_path: Path) -> None:
    trial = _Trial(SCENARIOS["overwrite"], warm, tmp_path)
    wrong = {"data": ".safetensors", "directory": ".ckptcore", "parent": "run"}[left_out]
    calls = [call for call in trial.calls if "sync" not in call.name or not call.paths[0].endswith(wrong)]
    assert len(calls) < len(trial.calls)
    outcomes = trial.outcomes(calls, 6)
    assert not set(outcomes) <= {OLD, NEW} or outcomes[-1] != NEW


@pytest.mark.slow
def test_a_power_loss_without_durability_is_detected(warm: Saver, tmp_path: Path) -> None:
    trial = _Trial(SCENARIOS["overwrite without durability"], warm, tmp_path)
    assert not [call for call in trial.calls if "sync" in call.name]
    outcomes = trial.outcomes(trial.calls, 12)
    assert {OLD, NEW} < set(outcomes)
