"""Saves to a storage without directories: lost, repeated and late requests, and concurrent saves."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.builtin.memory import MemoryStorage
from ckptcore.builtin.safetensors import SafetensorsLayout
from ckptcore.commit.put_conditions import find_object
from ckptcore.commit.root import ROOT_KEY
from ckptcore.commit.root_json import is_claim
from ckptcore.errors import (
    AtomicityError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    CorruptCheckpointError,
    SaveLostError,
    StorageError,
)
from ckptcore.policies import LatestN
from tests.crashes.answers import SCHEME, Answers, Kept, Mishap, Storages, quietly

LOCATION = f"{SCHEME}://bucket/run/step_1"
_ROOT = f"step_1/{ROOT_KEY}"


def _state(version: int) -> dict[str, Any]:
    """Return a state with two small files, and a file that is written in pieces."""
    return {
        "large": np.full(140_000, version, np.float64),
        "small": np.full(50, version, np.int64),
        "other": np.full(60, version, np.int64),
        "version": version,
    }


def _save(storages: Storages, version: int, answers: Answers | None = None, **options: Any) -> Answers:
    answers = answers or Answers()
    overwrite = options.pop("overwrite", False)
    ckptcore.save(
        LOCATION,
        _state(version),
        layout=SafetensorsLayout(max_file_bytes=1000),
        overwrite=overwrite,
        context=storages.context(answers, **options),
    )
    return answers


def _version(storages: Storages) -> int:
    """Return the version of the checkpoint. Assert that the checkpoint is complete."""
    loaded = ckptcore.load(LOCATION, context=storages.context())
    for name, value in _state(loaded["version"]).items():
        np.testing.assert_array_equal(loaded[name], value)
    assert ckptcore.verify(LOCATION, context=storages.context()).ok
    return int(loaded["version"])


def _nothing_but_the_checkpoint(storages: Storages) -> None:
    known = ckptcore.metadata(LOCATION, context=storages.context()).objects
    extra = {key.removeprefix("run/step_1/") for key in storages.open().list()} - set(known)
    assert {key for key in extra if not key.startswith("checkpoint.")} == set()


def _changes(**options: Any) -> Sequence[tuple[str, tuple[str, ...]]]:
    """Return the changes of a save over the objects of a failed save."""
    storages = Storages()
    _leave_dead_save(storages)
    return _save(storages, 2, **options).changes


def _leave_dead_save(storages: Storages) -> None:
    class _DeadError(BaseException):
        """The simulated end of the process."""

    dead = False

    def die(number: int, name: str, keys: Sequence[str]) -> None:
        nonlocal dead
        dead = dead or (number > 3 and keys == (_ROOT,))
        if dead:
            raise _DeadError

    with pytest.raises(_DeadError):
        _save(storages, 1, Answers(before=die))


@pytest.mark.parametrize("mishap", ["lost", "retried"])
def test_a_change_with_a_lost_response_is_recognised(mishap: Mishap) -> None:
    """The save succeeds, unless the lost response is to a deletion or to a test of the conditions."""
    changes = _changes()
    for number, (name, keys) in enumerate(changes):
        storages = Storages()
        _leave_dead_save(storages)
        try:
            _save(storages, 2, Answers({number: mishap}))
        except StorageError:
            assert name in ("delete", "abort_uploads") or (mishap == "lost" and _probes(changes, number)), (name, keys)
            assert not _is_there(storages)
            _save(storages, 2)
        assert _version(storages) == 2, f"{mishap}: {name} of {keys}"
        _nothing_but_the_checkpoint(storages)


def _probes(changes: Sequence[tuple[str, tuple[str, ...]]], number: int) -> bool:
    """Return True for a change that tests the conditions of a storage."""
    return changes[number][1] == (_ROOT,) and number < 2


def _is_there(storages: Storages) -> bool:
    try:
        ckptcore.metadata(LOCATION, context=storages.context())
    except CheckpointNotFoundError:
        return False
    return True


def test_a_change_that_was_not_executed_leaves_no_or_a_complete_checkpoint() -> None:
    for number, (name, keys) in enumerate(_changes()):
        storages = Storages()
        _leave_dead_save(storages)
        try:
            _save(storages, 2, Answers({number: "never sent"}))
        except CheckpointError:
            assert not _is_there(storages), (name, keys)
            _save(storages, 3)
            assert _version(storages) == 3
        else:
            assert _version(storages) == 2


def test_a_late_commit_is_refused() -> None:
    """The commit may arrive at any time. Objects are removed only after a change that makes the late commit fail."""
    changes = _changes()
    commit = len(changes) - 1
    assert changes[commit] == ("put", (_ROOT,))
    storages = Storages()
    _leave_dead_save(storages)
    _save(storages, 2, Answers({commit: "late"}))  # the late commit was executed before the change that would refuse it
    assert _version(storages) == 2

    storages = Storages()
    _leave_dead_save(storages)
    answers = Answers({commit: "never sent"})
    with pytest.raises(StorageError, match="lost the answer"):
        _save(storages, 2, answers)
    quietly(answers.replays[commit])
    assert not _is_there(storages)
    assert list(storages.open().list()) == []


def test_an_unknown_outcome_is_reported_and_no_object_is_removed() -> None:
    commit = len(_changes()) - 1
    storages = Storages()
    _leave_dead_save(storages)
    mishaps: dict[int, Mishap] = {commit: "never sent", commit + 1: "never sent"}
    with pytest.raises(CommitUnknownError, match="Check the location"):
        _save(storages, 2, Answers(mishaps))
    assert len(storages.open().list_names("run/step_1")) > 3


def test_any_change_can_be_repeated_after_the_commit() -> None:
    """A repeated deletion may do harm, because it is the only change without a condition. The damage is detected."""
    for number, (name, keys) in enumerate(_changes()):
        storages = Storages()
        _leave_dead_save(storages)
        answers = _save(storages, 2)
        quietly(answers.replays[number])
        if name == "delete":
            _never_wrong(storages, 2)
        else:
            assert _version(storages) == 2, f"{name} of {keys}"
            _nothing_but_the_checkpoint(storages)


def test_any_change_can_be_repeated_after_another_commit() -> None:
    for number, (name, keys) in enumerate(_changes()):
        storages = Storages()
        _leave_dead_save(storages)
        answers = _save(storages, 2)
        _save(storages, 3, overwrite="non-atomic")
        quietly(answers.replays[number])
        if name == "delete":
            _never_wrong(storages, 3)
        else:
            assert _version(storages) == 3, f"{name} of {keys}"


def test_a_save_that_continues_late_changes_no_object_of_a_later_checkpoint() -> None:
    """A save pauses right before a change, and continues after another save has committed."""
    outcomes = set()
    for number, (name, keys) in enumerate(_changes()):
        storages = Storages()
        _leave_dead_save(storages)
        stood: list[dict[str, bytes]] = []

        def stand_still(
            at: int,
            name: str,
            keys: Sequence[str],
            number: int = number,
            storages: Storages = storages,
            stood: Any = stood,
        ) -> None:
            if at == number:
                _save(storages, 3)
                stood.append(_objects(storages))

        try:
            _save(storages, 2, Answers(before=stand_still))
        except (SaveLostError, CheckpointExistsError) as error:
            outcomes.add(type(error).__name__)
        else:
            pytest.fail(f"both saves committed; one stood still before {name} of {keys}")
        if name == "delete":
            _never_wrong(storages, 3)
        else:
            objects = _objects(storages)
            assert {key: objects.get(key) for key in stood[0]} == stood[0], f"{name} of {keys}"
            assert _version(storages) == 3
    assert "SaveLostError" in outcomes


def _objects(storages: Storages) -> dict[str, bytes]:
    storage = storages.open()
    return {key: storage.get(key) for key in storage.list()}


def _never_wrong(storages: Storages, version: int) -> None:
    try:
        assert _version(storages) == version
    except CorruptCheckpointError:
        assert not ckptcore.verify(LOCATION, context=storages.context()).ok


def test_a_takeover_aborts_the_uploads_of_the_failed_save() -> None:
    storages = Storages()
    held = []

    def other_saves(number: int, name: str, keys: Sequence[str]) -> None:
        if name == "finish":
            held.append(storages.open().abort_uploads("nowhere"))
            _save(storages, 3)

    with pytest.raises(SaveLostError):
        _save(storages, 2, Answers(before=other_saves))
    assert held
    assert _version(storages) == 3
    _nothing_but_the_checkpoint(storages)


def test_an_upload_started_after_another_commit_replaces_no_object() -> None:
    """The upload is not aborted, and the claim was checked recently. Only the condition refuses the upload."""
    storages = Storages()
    stood: list[dict[str, bytes]] = []

    def stand_still(key: str) -> None:
        if not stood:
            _save(storages, 3)
            stood.append(_objects(storages))

    with pytest.raises(SaveLostError):
        _save(storages, 2, Answers(opening=stand_still))
    assert _objects(storages) == stood[0]
    assert _version(storages) == 3


@pytest.mark.parametrize("left", [b"", b"of a dead save", "the same"])
def test_unlisted_objects_are_replaced_under_the_claim(left: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Storages()
    _save(expected, 2)
    written = {key: data for key, data in _objects(expected).items() if "safetensors" in key}
    assert len(written) > 2
    storages = Storages()
    for key, data in written.items():
        storages.open().put(key, data if left == "the same" else left)
    with monkeypatch.context() as patch:
        patch.setattr("ckptcore.builtin.memory.MemoryStorage.list_names", lambda storage, prefix="": [])
        patch.setattr("ckptcore.builtin.memory.MemoryStorage.list", lambda storage, prefix="": iter([]))
        _save(storages, 2)
    assert _version(storages) == 2
    _nothing_but_the_checkpoint(storages)


def test_a_failed_save_removes_its_unlisted_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listings show only the claim. If objects stayed without a root, they would later look like a checkpoint."""
    commit = len(_save(Storages(), 2).changes) - 1
    storages = Storages()
    real = MemoryStorage.list
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStorage, "list", lambda *where: iter([key for key in real(*where) if ROOT_KEY in key]))
        with pytest.raises(StorageError, match="lost the answer"):
            _save(storages, 2, Answers({commit: "never sent"}))
    assert list(storages.open().list()) == []


@pytest.mark.parametrize("kept", ["ignored", "unknown"])
def test_a_storage_without_conditions_is_refused(kept: Kept) -> None:
    storages = Storages()
    with pytest.raises(AtomicityError, match="without_conditions='marker'"):
        _save(storages, 2, Answers(kept=kept))
    assert list(storages.open().list()) == []


@pytest.mark.lives(
    "stores that accept If-Match for a missing object",
    "a store in memory",
    "a save that a deletion overtakes is lost",
    "each commit lists its objects",
)
@pytest.mark.parametrize("kept", ["kept", "kept if it exists"])
def test_a_save_next_to_a_deletion_is_lost(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    """The claim is deleted before the root is put. Some services accept the tag of a missing object in conditions."""
    storages, deleted = Storages(), list[int]()

    def delete(number: int, name: str, keys: Sequence[str]) -> None:
        is_commit = name == "put" and keys == (_ROOT,) and any(key.endswith(".safetensors") for key in _keys(storages))
        if is_commit and not deleted:
            deleted.append(number)
            ckptcore.delete(LOCATION, context=storages.context())

    with pytest.raises(SaveLostError):
        _save(storages, 1, Answers(kept=kept, before=delete))
    assert deleted and _keys(storages) == []
    assert ("If-Match" in caplog.text) == (kept != "kept")
    _save(storages, 2, Answers(kept=kept))
    assert _version(storages) == 2


@pytest.mark.parametrize("shown", ["nothing", "only the root", "an error", "an error for each object"])
def test_a_stale_listing_does_not_undo_a_commit(
    shown: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    storages, current, asked = Storages(), MemoryStorage.list, list[str]()

    def list_some(store: MemoryStorage, prefix: str = "") -> Iterator[str]:
        stored = find_object(storages.open(), f"run/{_ROOT}")
        if stored is None or is_claim(stored[0]):
            return current(store, prefix)
        asked.append("list")
        if shown == "an error":
            raise StorageError("the test refuses this listing")
        return iter([ROOT_KEY] if shown == "only the root" else [])

    def size(store: MemoryStorage, key: str) -> int:
        if asked and shown == "an error for each object":
            raise StorageError("the test refuses this request")
        return real_size(store, key)

    real_size = MemoryStorage.size
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStorage, "list", list_some)
        patched.setattr(MemoryStorage, "size", size)
        _save(storages, 1, Answers(kept="kept if it exists"))
    assert asked and _version(storages) == 1
    assert caplog.text.count("it is unknown whether another process deleted it") == ("error" in shown)


def _keys(storages: Storages) -> list[str]:
    return list(storages.open().list())


@pytest.mark.parametrize("kept", ["ignored", "unknown"])
def test_a_refused_replacement_keeps_the_checkpoint(kept: Kept) -> None:
    storages = Storages()
    _save(storages, 1)
    with pytest.raises(AtomicityError, match="without_conditions='marker'"):
        _save(storages, 2, Answers(kept=kept), overwrite="non-atomic")
    assert _version(storages) == 1


def test_conditions_are_probed_once() -> None:
    storages = Storages()
    answers = Answers()
    context = storages.context(answers)
    puts = []
    for step in range(3):
        before = len(answers.changes)
        ckptcore.save(f"{SCHEME}://bucket/run/step_{step}", {"a": np.ones(3)}, context=context)
        puts.append(len(answers.changes) - before)
    assert puts == [puts[1] + 2, puts[1], puts[1]]


@pytest.mark.parametrize("kept", ["ignored", "unknown"])
def test_markers_suffice_for_one_process_at_a_time(kept: Kept) -> None:
    storages = Storages()
    _leave_dead_save(storages)
    _save(storages, 2, Answers(kept=kept), without_conditions="marker")
    assert _version(storages) == 2
    _nothing_but_the_checkpoint(storages)
    with pytest.raises(CheckpointExistsError):
        _save(storages, 3, Answers(kept=kept), without_conditions="marker")
    _save(storages, 3, Answers(kept=kept), without_conditions="marker", overwrite="non-atomic")
    assert _version(storages) == 3
    ckptcore.delete(LOCATION, context=storages.context(Answers(kept=kept), without_conditions="marker"))
    assert list(storages.open().list()) == []


@pytest.mark.parametrize("kept", ["ignored", "unknown"])
def test_a_failed_save_with_markers_leaves_no_or_a_complete_checkpoint(kept: Kept) -> None:
    changes = len(_changes(without_conditions="marker"))
    for number in range(changes + 10):
        storages = Storages()
        try:
            _save(storages, 2, Answers({number: "never sent"}, kept=kept), without_conditions="marker")
        except CheckpointError:
            assert not _is_there(storages)
            _save(storages, 3, Answers(kept=kept), without_conditions="marker")
            assert _version(storages) == 3
        else:
            assert _version(storages) == 2


@pytest.mark.parametrize("kept", ["ignored", "unknown"])
def test_a_lost_save_with_markers_is_reported(kept: Kept) -> None:
    """With markers, a save reads and then puts. Harm is possible only if a process pauses between the two."""
    storages = Storages()
    number = [name for name, _ in _changes()].index("finish")
    save_other = functools.partial(_save, storages, 3, Answers(kept=kept), without_conditions="marker")

    def stand_still(at: int, name: str, keys: Sequence[str]) -> None:
        if name == "finish" and at >= 1 and not _is_there(storages):
            save_other()

    assert number
    with pytest.raises(SaveLostError):
        _save(storages, 2, Answers(before=stand_still, kept=kept), without_conditions="marker")


@pytest.mark.parametrize("kept", ["ignored", "unknown"])
def test_a_run_continues_with_markers(kept: Kept) -> None:
    storages = Storages()
    for newest in (2, 4):
        context = storages.context(Answers(kept=kept), without_conditions="marker")
        policy = LatestN(2)
        with ckptcore.Checkpointer(f"{SCHEME}://bucket/run", preservation_policy=policy, context=context) as run:
            for step in (newest - 1, newest):
                run.save(step, _state(step))
            run.wait()
            assert run.latest == newest
            assert run.load()["version"] == newest
    assert {key.split("/")[1] for key in storages.open().list("run")} - {".ckptcore"} == {"3", "4"}


def test_a_run_without_conditions_is_refused_and_can_be_read() -> None:
    storages = Storages()
    with ckptcore.Checkpointer(f"{SCHEME}://bucket/run", context=storages.context()) as run:
        run.save(1, _state(1))
    context = storages.context(Answers(kept="unknown"))
    with pytest.raises(AtomicityError):
        ckptcore.Checkpointer(f"{SCHEME}://bucket/run", context=context)
    with ckptcore.CheckpointReader(f"{SCHEME}://bucket/run", context=context) as reader:
        assert reader.load()["version"] == 1


def test_an_unknown_option_for_missing_conditions_is_refused() -> None:
    with pytest.raises(ValueError, match="without_conditions='ignore'.: expected one of 'refuse', 'marker'"):
        ckptcore.Context(io=ckptcore.context.IOOptions(without_conditions="ignore"))  # type: ignore[arg-type]  # on purpose
