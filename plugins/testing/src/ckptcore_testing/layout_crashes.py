"""Conformance tests of saves that crash or fail at any operation."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pytest

import ckptcore
from ckptcore.commit.location import commit_method
from ckptcore.errors import CheckpointError, CheckpointNotFoundError, StorageError, StorageFullError
from ckptcore.model import ArraySpec, HostArray
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import Layout, StorageBackend, StorageOptions
from ckptcore_testing.arrays import assert_same_bits, bit_patterns
from ckptcore_testing.builtin_samples import FILE, MEMORY
from ckptcore_testing.faults import CrashAt, FailAt, FaultPlan, FullAfter, Operation, SimulatedCrash
from ckptcore_testing.faulty_storage import with_faults, with_storage
from ckptcore_testing.samples import StorageSample

_Fault = TypeVar("_Fault")

_MOMENTS: Final[tuple[Literal["before", "midway"], ...]] = ("before", "midway")
"""Times of crashes. A crash after an operation has the same effect as a crash before the next one."""


@dataclass(frozen=True)
class _TrialLocation:
    """A new location for one checkpoint."""

    scheme: str
    directory: str

    @property
    def location(self) -> str:
        return f"{self.scheme}://{self.directory}/checkpoint"

    @property
    def replaces_atomically(self) -> bool:
        return commit_method(self.storage()).replaces_atomically

    def storage(self) -> StorageBackend:
        """Open the parent directory of the checkpoint."""
        return installed_plugins().storage(self.scheme)(f"{self.scheme}://{self.directory}", StorageOptions())


class LayoutCrashTests:
    """Tests that a failed save leaves the old or the new checkpoint. Subclass it and define `layout`.

    On a local file system, the save replaces a checkpoint. In memory, which behaves like an object store, the save is
    the first one to its location. "Old" then means that the location has no checkpoint.

    Attributes:
        faults: approximate number of faults per test, including the first and the last. None: all.
    """

    faults: int | None = None

    def layout(self) -> Layout:
        """Return the layout, with options for several objects if possible."""
        raise NotImplementedError("define the method `layout`")

    def storages(self) -> Mapping[str, StorageSample]:
        """Return the storages, by their names in test ids."""
        return {"file": FILE, "memory": MEMORY}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise tests with the storages."""
        if "storage" in metafunc.fixturenames:
            storages = self.storages()
            metafunc.parametrize("storage", list(storages.values()), ids=list(storages))

    @pytest.fixture
    def trials(self, storage: StorageSample, tmp_path: Path) -> Iterator[Iterator[_TrialLocation]]:
        """Return an endless iterator of new locations."""
        with storage.open(tmp_path) as location:
            scheme, separator, rest = location.rpartition("://")
            yield _trials(scheme if separator else "file", rest.rpartition("/")[0])

    def test_a_crash_at_any_operation_leaves_the_old_or_the_new_checkpoint(
        self, trials: Iterator[_TrialLocation]
    ) -> None:
        operations = self._operations(next(trials))
        crashes = [
            CrashAt(operation.number, moment) for operation in operations if operation.changes for moment in _MOMENTS
        ]
        crashes.append(CrashAt(len(operations) - 1, "after"))
        outcomes = set()
        for crash in self._chosen(crashes):
            trial = next(trials)
            self._prepare(trial)
            with pytest.raises(SimulatedCrash):
                self._save(trial, _new_state(), FaultPlan(crash))
            outcomes.add(self._assert_old_or_new(trial, f"{crash} of {operations[crash.operation]}"))
            self._assert_next_save_cleans_up(trial)
        assert outcomes == {"old", "new"}, "the crashes did not come before and after the commit"

    def test_an_error_at_any_operation_leaves_the_old_or_the_new_checkpoint(
        self, trials: Iterator[_TrialLocation]
    ) -> None:
        for operation in self._chosen(self._operations(next(trials))):
            trial = next(trials)
            self._prepare(trial)
            where = f"{operation} failed"
            fault = FailAt(operation.number, StorageError("an injected failure"))
            try:
                self._save(trial, _new_state(), FaultPlan(fault))
            except CheckpointError:
                assert self._assert_old_or_new(trial, where) in ("old", "new")
            else:
                assert self._assert_old_or_new(trial, where) == "new", (
                    f"{where}, but the save succeeded without a checkpoint"
                )
            self._assert_next_save_cleans_up(trial)

    def test_a_full_storage_leaves_the_old_checkpoint(self, trials: Iterator[_TrialLocation]) -> None:
        plan = FaultPlan()
        trial = next(trials)
        self._prepare(trial)
        self._save(trial, _new_state(), plan)
        # Leave some room, because the size of a root, which contains times and names, varies by some bytes.
        for room in self._chosen(range(0, plan.bytes_written - 64, max(1, plan.bytes_written // 12))):
            trial = next(trials)
            self._prepare(trial)
            with pytest.raises(StorageFullError):
                self._save(trial, _new_state(), FaultPlan(FullAfter(room)))
            assert self._assert_old_or_new(trial, f"full after {room} bytes") == "old"
            self._assert_nothing_else(trial)
            self._assert_next_save_cleans_up(trial)

    # --- one save

    def _chosen(self, faults: Sequence[_Fault]) -> Sequence[_Fault]:
        if self.faults is None or len(faults) <= self.faults:
            return faults
        return [*faults[:: -(-len(faults) // self.faults)], faults[-1]]

    def _prepare(self, trial: _TrialLocation) -> None:
        if trial.replaces_atomically:
            self._save(trial, _old_state(), None)

    def _operations(self, trial: _TrialLocation) -> Sequence[Operation]:
        """Return the operations of a save."""
        self._prepare(trial)
        plan = FaultPlan()
        self._save(trial, _new_state(), plan)
        assert plan.operations, "the save did not use the faulty storage"
        return plan.operations

    def _save(self, trial: _TrialLocation, state: object, plan: FaultPlan | None) -> None:
        location = trial.location
        # One thread, so that operations always have the same order. A new Context simulates a new process. Power loss
        # is not tested here: written data is never lost.
        context = ckptcore.Context(io=ckptcore.context.IOOptions(threads=1), durability="none")
        if plan is not None:
            location = location.replace(trial.scheme, "faulty", 1)
            context = with_storage(context, "faulty", partial(_open_with_faults, trial.scheme, plan))
        ckptcore.save(location, state, layout=self.layout(), overwrite=trial.replaces_atomically, context=context)

    # --- the result

    def _assert_old_or_new(self, trial: _TrialLocation, where: str) -> str:
        try:
            loaded = ckptcore.load(trial.location)
        except CheckpointNotFoundError:
            assert not trial.replaces_atomically, f"{where}: neither the old nor the new checkpoint exists"
            return "old"
        outcome = "new" if loaded["step"] == _new_state()["step"] else "old"
        expected = _new_state() if outcome == "new" else _old_state()
        assert trial.replaces_atomically or outcome == "new", f"{where}: an unexpected checkpoint"
        assert list(loaded) == list(expected), f"{where}: a mix of old and new"
        for name, value in expected.items():
            if isinstance(value, int):
                assert loaded[name] == value, where
            else:
                assert_same_bits(loaded[name], value, f"{where}: {name}")
        report = ckptcore.verify(trial.location)
        assert report.ok, f"{where}: {report.problems}"
        return outcome

    def _assert_next_save_cleans_up(self, trial: _TrialLocation) -> None:
        if not trial.replaces_atomically and self._is_committed(trial):
            ckptcore.delete(trial.location)
        self._save(trial, _next_state(), None)
        assert ckptcore.load(trial.location)["step"] == _next_state()["step"]
        self._assert_nothing_else(trial)

    def _is_committed(self, trial: _TrialLocation) -> bool:
        try:
            ckptcore.metadata(trial.location)
        except CheckpointNotFoundError:
            return False
        return True

    def _assert_nothing_else(self, trial: _TrialLocation) -> None:
        """Fail if the directory contains anything but the checkpoint, or if the checkpoint has unlisted objects."""
        storage = trial.storage()
        assert set(storage.list_names()) <= {"checkpoint/"}, "leftovers next to the checkpoint"
        if not self._is_committed(trial):
            assert list(storage.list()) == [], "leftovers of a failed save"
            return
        known = {f"checkpoint/{key}" for key in ckptcore.metadata(trial.location).objects}
        extra = {key for key in storage.list() if key not in known and not key.startswith("checkpoint/checkpoint.")}
        assert not extra, f"the checkpoint contains unlisted objects: {sorted(extra)}"


def _open_with_faults(scheme: str, plan: FaultPlan, url: str, options: StorageOptions) -> StorageBackend:
    return with_faults(installed_plugins().storage(scheme)(url.replace("faulty", scheme, 1), options), plan)


def _trials(scheme: str, directory: str) -> Iterator[_TrialLocation]:
    while True:
        name = uuid.uuid4().hex
        if scheme == "file":
            Path(directory, name).mkdir()
        yield _TrialLocation(scheme, f"{directory}/{name}")


def _state(step: int) -> dict[str, Any]:
    def array(shape: tuple[int, ...], dtype: str) -> HostArray:
        return bit_patterns(ArraySpec(shape, dtype), step)

    return {
        "weight": array((16, 5), "float32"),
        "bias": array((33,), "bfloat16"),
        f"only in step {step}": array((3,), "int64"),
        "empty": array((0, 2), "float16"),
        "step": step,
    }


def _old_state() -> Mapping[str, Any]:
    return _state(1)


def _new_state() -> Mapping[str, Any]:
    return _state(2)


def _next_state() -> Mapping[str, Any]:
    return _state(3)
