"""Saves with spare copies. Either every object is in both storages, or nothing is committed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from toyattic.storage import Attic
from toyspare import SpareCopies

import ckptcore
from ckptcore.context import Context
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError, StorageFullError
from ckptcore.protocols import ObjectWriter, SaveStrategy

STATE: Mapping[str, Any] = {"w": np.arange(600_000.0), "b": np.ones(5, "int8"), "n": 3}


class FullAttic(Attic):
    """A storage that is full: it refuses objects in pieces."""

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        raise StorageFullError(f"the attic has no room for {key}")


@pytest.fixture
def attic(tmp_path: Path) -> Attic:
    return Attic(tmp_path / "attic.sqlite", "spare", durable=False)


@pytest.fixture(params=["local", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "c") if request.param == "local" else f"memory://{tmp_path.name}/c"


def _load(location: str) -> None:
    loaded = ckptcore.load(location)
    np.testing.assert_array_equal(loaded["w"], STATE["w"])
    assert ckptcore.verify(location).ok


def test_spare_copies_are_a_save_strategy(attic: Attic) -> None:
    strategy: SaveStrategy[Any, Any] = SpareCopies(attic)
    assert strategy.begin is not ckptcore.PlainSave.begin


def test_every_object_is_copied(location: str, attic: Attic) -> None:
    ckptcore.save(location, STATE, strategy=SpareCopies(attic))
    _load(location)
    assert list(attic.list()) == ["model.safetensors"]
    assert attic.size("model.safetensors") > STATE["w"].nbytes


def test_copies_equal_their_sources(tmp_path: Path, attic: Attic) -> None:
    ckptcore.save(tmp_path / "c", STATE, strategy=SpareCopies(attic))
    assert attic.get("model.safetensors") == (tmp_path / "c" / "model.safetensors").read_bytes()


def test_a_background_save_copies_every_object(location: str, attic: Attic) -> None:
    ckptcore.save_async(location, STATE, strategy=SpareCopies(attic)).result()
    _load(location)
    assert list(attic.list()) == ["model.safetensors"]


def test_a_full_second_storage_fails_the_save(location: str, tmp_path: Path) -> None:
    full = FullAttic(tmp_path / "attic.sqlite", "spare", durable=False)
    with pytest.raises(StorageFullError, match="no room for model.safetensors"):
        ckptcore.save(location, STATE, strategy=SpareCopies(full))
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(location)
    ckptcore.save(location, STATE)
    _load(location)


def test_a_full_second_storage_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    full = FullAttic(tmp_path / "attic.sqlite", "spare", durable=False)
    ckptcore.save(tmp_path / "c", STATE)
    with pytest.raises(StorageFullError):
        ckptcore.save(tmp_path / "c", {"w": np.zeros(3)}, overwrite=True, strategy=SpareCopies(full))
    _load(str(tmp_path / "c"))


def test_a_failed_commit_leaves_no_copies(tmp_path: Path, attic: Attic) -> None:
    class Late(SpareCopies):
        """A strategy in which another save commits between the copies and the commit of this save."""

        def begin(self, save: Any) -> Any:
            commit = super().begin(save)
            copies = commit.commit

            def commit_late(payloads: Any) -> None:
                (tmp_path / "c").mkdir()
                (tmp_path / "c" / "other").write_bytes(b"another program")
                copies(payloads)

            commit.commit = commit_late  # type: ignore[method-assign]
            return commit

    with pytest.raises(CheckpointExistsError):
        ckptcore.save(tmp_path / "c", STATE, strategy=Late(attic))
    assert list(attic.list()) == []
    assert (tmp_path / "c" / "other").read_bytes() == b"another program"


def test_objects_of_all_ranks_are_copied_once(tmp_path: Path, attic: Attic) -> None:
    def save(rank: int, context: Context) -> None:
        ckptcore.save_checkpointables(
            tmp_path / "c", {"a": STATE, "b": {"v": np.ones(4)}}, strategy=SpareCopies(attic), context=context
        )

    run_ranks(2, save, timeout_seconds=60)
    copied = {key: attic.get(key) for key in attic.list()}
    assert {key.partition("/")[0] for key in copied} == {"a", "b"}
    for key, data in copied.items():
        assert data == (tmp_path / "c" / key).read_bytes()


def test_steps_of_a_run_are_copied(tmp_path: Path, attic: Attic) -> None:
    class Steps:
        """A strategy that copies each step to a directory with its name."""

        layouts = ()

        def check(self, steps: object) -> None:
            pass

        def for_step(self, step: int, name: str, strategy: object) -> SpareCopies:
            return SpareCopies(Attic(tmp_path / "attic.sqlite", name, durable=False))

    with ckptcore.Checkpointer(tmp_path / "run", strategy=Steps()) as run:
        for step in (1, 2):
            run.save(step, STATE)
            run.wait()
    for step in (1, 2):
        copied = Attic(tmp_path / "attic.sqlite", str(step), durable=False)
        assert list(copied.list()) == ["model.safetensors"]
