"""Saves whose storage, layout or job fails at the worst moment."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks

import ckptcore
from ckptcore.builtin.host_leaves import HostArrayHandler
from ckptcore.builtin.local import LocalStorage
from ckptcore.errors import (
    CheckpointError,
    CommitUnknownError,
    InvalidLocationError,
    PluginError,
    RankFailedError,
    StorageError,
    StorageFullError,
)
from ckptcore.model import Box, Shard
from ckptcore.protocols import Coordinator
from ckptcore.saving.requests import OneTree, SaveDestination, SaveNotes, SaveRequest
from ckptcore.saving.save import perform_save


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_sync_that_fails_after_the_commit_deletes_nothing(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = tmp_path / "c"
    if overwrite:
        ckptcore.save(location, {"w": np.zeros(3)})

    change = LocalStorage.exchange if overwrite else LocalStorage.rename

    def fail(self: LocalStorage, first: str, second: str) -> None:
        change(self, first, second)
        if not first.endswith((".exchange-1", ".exchange-2")):
            raise StorageError("the disk does not answer")

    monkeypatch.setattr(LocalStorage, change.__name__, fail)
    with pytest.raises(CommitUnknownError, match="does not answer"):
        ckptcore.save(location, {"w": np.ones(3)}, overwrite=overwrite)
    assert ckptcore.load(location)["w"].tolist() == [1, 1, 1]
    hidden = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert len(hidden) == int(overwrite)  # the old checkpoint is kept: a power loss may undo the commit
    monkeypatch.undo()
    ckptcore.save(location, {"w": np.full(3, 2.0)}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failed_cleanup_does_not_hide_the_error_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: LocalStorage, key: str, data: bytes, **options: Any) -> str:
        raise StorageFullError(errno.ENOSPC, "no room for the root")

    def delete(self: LocalStorage, key: str) -> None:
        raise StorageError("cannot delete")

    monkeypatch.setattr(LocalStorage, "put", put)
    monkeypatch.setattr(LocalStorage, "delete_directory", delete)
    with pytest.raises(StorageFullError, match="no room") as caught:
        ckptcore.save(tmp_path / "c", {"w": np.ones(3)})
    assert any("cannot delete" in note for note in caught.value.__notes__)


class OneRankEach(HostArrayHandler):
    """A handler of arrays that one rank holds. The first element of an array is the number of this rank."""

    def shards(self, leaf: Any, rank: int, size: int) -> Sequence[Shard]:
        return (Shard(Box.whole(leaf.shape)),) if leaf[0] == rank else ()


def job_context(coordinator: Coordinator, **options: Any) -> ckptcore.Context:
    return ckptcore.Context(job=ckptcore.context.JobOptions(coordinator=coordinator), **options)


def test_a_rank_that_is_not_the_leader_may_hold_all_arrays(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> None:
        ckptcore.save(tmp_path / "c", {"a": np.ones(2), "b": np.ones(3)}, context=context)

    run_ranks(3, job, timeout_seconds=30, plugins=ckptcore.context.PluginOptions(handlers={np.ndarray: OneRankEach()}))
    assert ckptcore.load(tmp_path / "c")["b"].tolist() == [1, 1, 1]
    assert ckptcore.verify(tmp_path / "c").ok


class BadReceipts(ckptcore.SafetensorsLayout):
    def write(self, snapshot: Any, store: Any) -> Any:
        state = super().write(snapshot, store)
        return {"not": object()} if snapshot.plan.rank == 1 else state


def test_a_receipt_that_is_not_json_fails_the_save_everywhere(tmp_path: Path) -> None:
    def job(rank: int, context: ckptcore.Context) -> type[BaseException]:
        with pytest.raises((PluginError, RankFailedError), match="not JSON") as caught:
            ckptcore.save(tmp_path / "c", {"a": np.zeros(2)}, layout=BadReceipts(), context=context)
        return caught.type

    assert run_ranks(2, job, timeout_seconds=30) == [RankFailedError, PluginError]
    assert list(tmp_path.iterdir()) == []


def test_a_layout_that_writes_one_object_twice_is_refused(tmp_path: Path) -> None:
    class Twice(ckptcore.SafetensorsLayout):
        def finish(self, tree: Any, receipts: Any, store: Any) -> Any:
            store.put("model.safetensors", b"again")
            return super().finish(tree, receipts, store)

    with pytest.raises(CheckpointError, match=r"model\.safetensors twice"):
        ckptcore.save(tmp_path / "c", {"a": np.zeros(2)}, layout=Twice())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("location", ["memory://failures/convert", "local"])
def test_a_checkpoint_cannot_be_converted_in_place(location: str, tmp_path: Path) -> None:
    where = str(tmp_path / "c") if location == "local" else location
    ckptcore.save(where, {"a": np.ones(2)})
    other = os.path.join(str(tmp_path), ".", "c") if location == "local" else location + "/"
    with pytest.raises(InvalidLocationError, match="both source and destination"):
        ckptcore.copy(where, other, layout="safetensors", overwrite="non-atomic")
    assert ckptcore.load(where)["a"].tolist() == [1, 1]


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_saves_too(tmp_path: Path) -> None:
    context = ckptcore.Context()
    ckptcore.save_async(tmp_path / "parent", {"w": np.ones(300_000)}, context=context).result()
    child = os.fork()
    if child == 0:
        try:
            ckptcore.save_async(tmp_path / "child", {"w": np.ones(300_000)}, context=context).result(60)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001  # told by the exit status
            print(repr(error), file=sys.stderr)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ckptcore.verify(tmp_path / "child").ok


@pytest.mark.parametrize("number", [1.5, 2.0, True, "3", 2**63])
@pytest.mark.parametrize("name", ["step", "epoch"])
def test_a_step_or_epoch_that_could_not_be_loaded_is_refused(name: str, number: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"step": 1, "epoch": 1, name: number}
    request = SaveRequest(
        destination=SaveDestination(tmp_path / "c"),
        values=OneTree({"a": 1}),
        layout="safetensors",
        strategy=ckptcore.PlainSave(),
        notes=SaveNotes(**given),
    )
    with pytest.raises((TypeError, ValueError), match=rf"{name}=.*\. Nothing was written"):
        perform_save(request, ckptcore.Context())
    assert os.listdir(tmp_path) == []


def test_steps_and_epochs_can_be_numpy_integers(tmp_path: Path) -> None:
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(np.int64(3), {"a": 1}, epoch=np.int32(2))  # type: ignore[arg-type]  # as a training loop may
    with ckptcore.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load() == {"a": 1}
        assert checkpointer.steps == (3,) and checkpointer.should_save(4)
    assert b'"progress":{"step":3,"epoch":2}' in (tmp_path / "3" / "checkpoint.json").read_bytes()
