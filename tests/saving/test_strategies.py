"""A strategy of a save that knows public modules only: it writes every object to a second storage before the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, StorageError
from ckptcore.protocols import SaveCommit, StorageBackend


@dataclass(frozen=True)
class Mirrored(ckptcore.PlainSave):
    """Keep a second copy of every object that a save writes.

    Attributes:
        copies: takes them, by key.
        broken: whether taking them fails.
    """

    copies: dict[str, bytes] = field(default_factory=dict)
    broken: bool = False

    def begin(self, save: Any) -> SaveCommit:
        """Return the commit of a plain save, with the copies before it."""
        return MirroredCommit(ckptcore.PlainSave().begin(save), self)


class MirroredCommit:
    """Copies on every rank what it finds in the storage of the claim, then commits."""

    commit_meaning = "some copies may be missing"

    def __init__(self, plain: SaveCommit, strategy: Mirrored) -> None:
        self._plain = plain
        self._strategy = strategy

    @property
    def meaning(self) -> str:
        return self._plain.meaning

    @property
    def store(self) -> StorageBackend:
        return self._plain.store

    def claim(self) -> None:
        self._plain.claim()

    def commit(self, payloads: Sequence[object]) -> None:
        if self._strategy.broken:
            raise StorageError("the second storage is full")
        self._strategy.copies.update({key: self.store.get(key) for key in self.store.list()})
        self._plain.commit(payloads)

    def settle(self, error: Exception | None) -> None:
        self._plain.settle(error)

    def abort(self) -> None:
        self._plain.abort()


def _commit_of(strategy: Mirrored) -> SaveCommit:
    """Let the type checker compare the class with the protocol."""
    return MirroredCommit(MirroredCommit(strategy.begin(None), strategy), strategy)


def test_a_strategy_copies_every_object_before_the_commit(tmp_path: Path) -> None:
    strategy = Mirrored()
    ckptcore.save(tmp_path / "c", {"w": np.ones(3)}, strategy=strategy)
    ckptcore.save_async(tmp_path / "d", {"w": np.ones(3)}, strategy=strategy).result()
    assert set(strategy.copies) == {"model.safetensors"}
    assert strategy.copies["model.safetensors"] == (tmp_path / "c" / "model.safetensors").read_bytes()
    assert ckptcore.verify(tmp_path / "d").ok


def test_a_strategy_that_fails_commits_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="second storage"):
        ckptcore.save(tmp_path / "c", {"w": np.ones(3)}, strategy=Mirrored(broken=True))
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
