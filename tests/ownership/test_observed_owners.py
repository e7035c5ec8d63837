"""Observation of the owner of a directory of steps, without taking the directory."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptcore.commit.leases import new_holder
from ckptcore.commit.location import commit_method, open_directory
from ckptcore.context import Context
from ckptcore.errors import DirectoryInUseError
from ckptcore.protocols import AtomicDirectories, StorageBackend
from ckptcore.runtime import runtime_of

Open = Callable[[], StorageBackend]


@pytest.fixture(params=["locks", "leases"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Return a function that opens the directory, on a storage with or without locks."""
    place = str(tmp_path) if request.param == "locks" else f"memory://{uuid.uuid4()}/run"
    return lambda: open_directory(place, runtime_of(Context()).storages)


def test_an_observer_sees_the_owner_until_it_closes(directory: Open) -> None:
    assert commit_method(directory()).locks().owner() is None
    with commit_method(directory()).locks("run").own() as owned:
        seen = commit_method(directory()).locks().owner()
        assert seen is not None
        assert seen.holder is not None
        assert seen.holder.pid == new_holder().pid
        assert seen.is_alive is (True if isinstance(directory(), AtomicDirectories) else None)
        assert "this process, " in seen.describe()
        owned.check()  # the observer has not taken the directory
        with pytest.raises(DirectoryInUseError):
            commit_method(directory()).locks("run").own()
    assert commit_method(directory()).locks().owner() is None
    commit_method(directory()).locks("run").own().close()


def test_an_observer_writes_nothing(directory: Open) -> None:
    commit_method(directory()).locks().owner()
    assert list(directory().list()) == []
    commit_method(directory()).locks("run").own().close()
    before = {key: directory().get(key) for key in directory().list()}
    assert before
    commit_method(directory()).locks().owner()
    assert {key: directory().get(key) for key in directory().list()} == before


@pytest.mark.parametrize("record", [b"", b"no JSON", b"{}", b"[" * 100_000])
def test_an_owner_with_an_unreadable_record_is_seen(directory: Open, record: bytes) -> None:
    with commit_method(directory()).locks("run").own():
        (key,) = directory().list()
        directory().put(key, record)
        seen = commit_method(directory()).locks().owner()
        assert seen is not None
        assert seen.holder is None
        assert seen.describe().startswith("a process whose record cannot be read, ")
