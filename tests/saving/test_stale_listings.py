"""Stale listings: failed saves and deletions leave nothing that looks like a checkpoint."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

import ckptcore
from ckptcore.builtin.memory import MemoryStorage
from ckptcore.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UncommittedCheckpointError
from ckptcore.saving import writing


@pytest.fixture
def location() -> str:
    return f"memory://{uuid.uuid4().hex}/step_1"


def _let_the_next_lists_be_empty(patch: pytest.MonkeyPatch, count: int = 1) -> None:
    real = MemoryStorage.list
    old: list[list[str]] = [[] for _ in range(count)]

    def list_keys(storage: MemoryStorage, prefix: str = "") -> Iterator[str]:
        return iter(old.pop()) if old else real(storage, prefix)

    patch.setattr(MemoryStorage, "list", list_keys)


def _expect_nothing(location: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="does not exist or is empty"):
        ckptcore.load(location)
    ckptcore.save(location, {"w": np.ones(3)})
    assert ckptcore.verify(location).ok


@pytest.mark.parametrize("layout", ["safetensors", "ocdbt", "dcp"])
def test_a_failed_save_leaves_nothing(layout: str, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        _let_the_next_lists_be_empty(monkeypatch)
        raise CorruptCheckpointError("the test lets the save fail when all is written")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "timeline_to_json", fail)
        with pytest.raises(CorruptCheckpointError, match="the test lets"):
            ckptcore.save(location, {"w": np.zeros(3)}, layout=layout)
    _expect_nothing(location)


def test_a_deletion_leaves_nothing(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save(location, {"w": np.zeros(3)}, layout="ocdbt")
    _let_the_next_lists_be_empty(monkeypatch)
    ckptcore.delete(location)
    _expect_nothing(location)


def test_a_deletion_leaves_a_claim_if_listings_stay_stale(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save(location, {"w": np.zeros(3)}, layout="ocdbt")
    with monkeypatch.context() as patch:
        _let_the_next_lists_be_empty(patch, 100)
        with pytest.raises(StorageError, match="A claim stays there"):
            ckptcore.delete(location)
    with pytest.raises(UncommittedCheckpointError):
        ckptcore.load(location)
    ckptcore.delete(location)
    _expect_nothing(location)
