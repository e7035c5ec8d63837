"""A strategy of a save that knows public modules only: it writes every object to a second storage before the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore.errors import CheckpointNotFoundError, RankFailedError, StorageError
from ckptcore.protocols import Coordinator, SaveCommit, StorageBackend


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


class FailsToBegin(ckptcore.PlainSave):
    """A strategy that fails on one rank before it claims."""

    def begin(self, save: Any) -> SaveCommit:
        if save.agreement.rank == 1:
            raise StorageError("the second storage cannot be opened")
        return super().begin(save)


def test_a_strategy_that_fails_to_begin_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    def save(coordinator: Coordinator) -> None:
        context = ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator))
        with pytest.raises((StorageError, RankFailedError), match="cannot be opened"):
            ckptcore.save(tmp_path / "c", {"w": np.ones(3)}, strategy=FailsToBegin(), context=context)

    ThreadJob(2, timeout_seconds=30).run(save)
    assert list(tmp_path.iterdir()) == []


def test_exports_are_of_one_strategy(tmp_path: Path) -> None:
    inner = ckptcore.WithExports([ckptcore.Export(location=tmp_path / "a")])
    with pytest.raises(ValueError, match="give all exports to one WithExports"):
        ckptcore.WithExports([ckptcore.Export(location=tmp_path / "b")], inner)


def test_a_strategy_of_another_kind_is_refused(tmp_path: Path) -> None:
    exports: Any = ckptcore.WithExports([ckptcore.Export(location=tmp_path / "a")])
    with pytest.raises(TypeError, match="expected a StepStrategy"):
        ckptcore.Checkpointer(tmp_path / "run", strategy=exports)
    steps: Any = ckptcore.StepExports([ckptcore.StepExport(directory=tmp_path / "a")])
    with pytest.raises(TypeError, match="expected a SaveStrategy"):
        ckptcore.save(tmp_path / "c", {"w": np.ones(3)}, strategy=steps)


def test_a_run_refuses_updates_of_several_objects(tmp_path: Path) -> None:
    class Updates(ckptcore.StepExports):
        def for_step(self, step: int, name: str, strategy: Any) -> Any:
            return ckptcore.Update(base=tmp_path / "base")

    ckptcore.save(tmp_path / "base", {"w": np.ones(3)})
    with (
        ckptcore.Checkpointer(tmp_path / "run", strategy=Updates([])) as run,
        pytest.raises(ValueError, match="is for one tree"),
    ):
        run.save_checkpointables(1, {"a": {"w": np.ones(3)}, "b": {"w": np.ones(3)}})
