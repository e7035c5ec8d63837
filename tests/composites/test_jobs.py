"""Checkpoints of several checkpointables that a job of several processes saves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_testing.locations import store_at

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    PartialLoadError,
    RankFailedError,
    TreeMismatchError,
)
from tests.composites.objects import Counter, Files, Linear

SIZE = 3


def _run(job: Callable[[int, ckptcore.Context], Any], size: int = SIZE) -> list[Any]:
    return list(run_ranks(size, job, timeout_seconds=30))


def _objects(rank: int) -> dict[str, object]:
    return {
        "model": Linear(3),
        "data": Counter(10 * rank),
        "seed": ckptcore.PerProcess({"seed": np.full(2, rank), "name": f"rank {rank}"}),
        "files": Files({f"of {rank}": b"%d" % rank, "each": b"%d" % rank}),
        "params": {"w": np.arange(5)},
    }


def _save(location: str, size: int = SIZE, **options: Any) -> None:
    _run(
        lambda rank, context: ckptcore.save_checkpointables(location, _objects(rank), context=context, **options), size
    )


@pytest.mark.parametrize("background", [False, True])
def test_each_rank_restores_its_own_state(background: bool, place: str) -> None:
    def save(rank: int, context: ckptcore.Context) -> None:
        if background:
            ckptcore.save_checkpointables_async(place + "/c", _objects(rank), context=context).result()
        else:
            ckptcore.save_checkpointables(place + "/c", _objects(rank), context=context)

    def load(rank: int, context: ckptcore.Context) -> None:
        model, data, files = Linear(0), Counter(), Files()
        wanted = {"seed": ckptcore.PerProcess(None), "params": None}
        into = {"model": model, "data": data, "files": files}
        loaded = ckptcore.load_checkpointables(place + "/c", wanted, into=into, context=context)
        assert model.bias.tolist() == Linear(3).bias.tolist() and loaded["params"]["w"].tolist() == [0, 1, 2, 3, 4]
        assert next(data) == 10 * rank
        assert files.files == {f"of {rank}": b"%d" % rank, "each": b"%d" % rank}
        assert loaded["seed"]["name"] == f"rank {rank}" and loaded["seed"]["seed"].tolist() == [rank, rank]
        like = {"seed": ckptcore.PerProcess({"seed": np.zeros(2, int), "name": ""})}
        assert ckptcore.load_checkpointables(place + "/c", like, context=context)["seed"]["name"] == f"rank {rank}"
        everything = ckptcore.load_checkpointables(place + "/c", context=context)
        assert list(everything) == list(_objects(0)) and everything["data"]["position"] == 10 * rank

    _run(save)
    _run(load)
    assert ckptcore.verify(place + "/c").ok
    metadata = ckptcore.metadata(place + "/c")
    assert metadata.checkpointables.processes == {"data": SIZE, "seed": SIZE, "files": SIZE} and list(
        metadata.checkpointables
    ) == list(_objects(0))
    if "://" not in place:
        assert sorted(os.listdir(place + "/c")) == sorted(
            ["checkpoint.json", "model", "params"]
            + [f"{name}.rank_{rank}" for name in ("data", "seed", "files") for rank in range(SIZE)]
        )
    # The shared model was written once. Each state of a process is also a checkpoint.
    assert ckptcore.load(place + "/c/model")["bias"].tolist() == Linear(3).bias.tolist()
    assert ckptcore.load(place + "/c/data.rank_2")["position"] == 20


def test_another_number_of_processes_can_load(place: str) -> None:
    _save(place + "/c")

    def load(rank: int, context: ckptcore.Context) -> None:
        model = Linear(0)
        with pytest.raises(TreeMismatchError, match=r"each of 3 processes.*seed\.rank_0"):
            ckptcore.load_checkpointables(place + "/c", ["seed"], into={"model": model}, context=context)
        with pytest.raises(TreeMismatchError, match=r"each of 3 processes.*data\.rank_0"):
            ckptcore.load_checkpointables(place + "/c", into={"data": Counter()}, context=context)
        assert model.bias.tolist() == Linear(0).bias.tolist()
        ckptcore.load_checkpointables(place + "/c", into={"model": model}, context=context)
        assert model.bias.tolist() == Linear(3).bias.tolist()

    for size in (1, 2, 4):
        _run(load, size)


def test_states_of_another_number_of_processes_do_not_block_the_others(place: str) -> None:
    _save(place + "/c")

    def load(rank: int, context: ckptcore.Context) -> None:
        model, data, files = Linear(0), Counter(), Files()
        into = {"files": files, "model": model, "data": data}
        with pytest.raises(PartialLoadError, match="^model was loaded") as caught:
            ckptcore.load_checkpointables(place + "/c", into=into, context=context)
        assert sorted(caught.value.names) == ["data", "files"] and len(caught.value.differences) == 2
        assert model.bias.tolist() == Linear(3).bias.tolist()
        assert next(data) == 0 and not files.files

    for size in (1, 2, 4):
        _run(load, size)


def test_a_reader_of_a_run_reports_the_step_of_a_partial_load(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")

    def save(rank: int, context: ckptcore.Context) -> None:
        with ckptcore.Checkpointer(directory, context=context) as checkpointer:
            checkpointer.save_checkpointables(5, _objects(rank))

    def load(rank: int, context: ckptcore.Context) -> None:
        for step in (5, None):
            model = Linear(0)
            with ckptcore.Checkpointer(directory, context=context) as checkpointer:
                with pytest.raises(PartialLoadError) as caught:
                    checkpointer.load_checkpointables(step, into={"model": model, "data": Counter()})
                assert checkpointer.restored_step == 5 and caught.value.names == ("data",)
            assert model.bias.tolist() == Linear(3).bias.tolist()

    _run(save)
    _run(load, 2)


def test_a_job_of_one_process_has_no_rank_in_its_names(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", _objects(0))
    assert ckptcore.load(place + "/c/data")["position"] == 0
    assert ckptcore.load_checkpointables(place + "/c")["seed"]["name"] == "rank 0"


def test_errors_about_lost_states_name_the_directories_of_all_processes(place: str) -> None:
    """The test applies the remedy that the error suggests."""
    _save(place + "/c")
    store = store_at(place + "/c" if "://" in place else f"file://{place}/c")
    for rank in range(SIZE):
        store.delete(list(store.list(f"seed.rank_{rank}")))
    (problem,) = ckptcore.verify(place + "/c").problems
    lost = re.compile(r"ckptcore\.delete: (\S+/seed\.rank_0) to seed\.rank_2")
    with pytest.raises(CheckpointError, match=lost):
        ckptcore.copy(place + "/c", place + "/d", layout="safetensors")
    named = lost.search(problem.message)
    assert named is not None
    for rank in range(SIZE):
        ckptcore.delete(named[1].replace("rank_0", f"rank_{rank}"))
    assert ckptcore.verify(place + "/c").ok
    ckptcore.copy(place + "/c", place + "/d", layout="safetensors")


def test_a_missing_state_of_one_process_is_an_error(tmp_path: Path) -> None:
    _save(str(tmp_path / "c"))
    ckptcore.delete(tmp_path / "c" / "data.rank_1")

    def load(rank: int, context: ckptcore.Context) -> None:
        with pytest.raises(CheckpointNotFoundError, match=r"data\.rank_1"):
            ckptcore.load_checkpointables(tmp_path / "c", into={"data": Counter()}, context=context)
        assert ("data" in ckptcore.load_checkpointables(tmp_path / "c", context=context)) == (rank != 1)

    _run(load)
    (problem,) = ckptcore.verify(tmp_path / "c").problems
    assert "3 processes, but only 2" in problem.message
    with pytest.raises(
        CheckpointError,
        match=r"only 2 of them exist. Delete these too, by ckptcore.delete \(data.rank_0, data.rank_2\), or convert",
    ):
        ckptcore.copy(tmp_path / "c", tmp_path / "d", layout="safetensors")
    for rank in (0, 2):
        ckptcore.delete(tmp_path / "c" / f"data.rank_{rank}")
    assert ckptcore.verify(tmp_path / "c").ok
    ckptcore.copy(tmp_path / "c", tmp_path / "d", layout="safetensors")


def _fail_at_once(objects: dict[str, object]) -> None:
    broken = Files({"a": b""})
    broken.save_error = RuntimeError("this rank is broken")
    objects["files"] = broken


def _fail_late(objects: dict[str, object]) -> None:
    broken = Files({"a": b""})
    broken.late_error = RuntimeError("this rank is broken")
    objects["files"] = broken


def _fail_to_describe(objects: dict[str, object]) -> None:
    objects["params"] = {"w": object()}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank_that_fails", [0, 2])
@pytest.mark.parametrize("fail", [_fail_at_once, _fail_late, _fail_to_describe])
def test_an_error_on_one_rank_fails_all(
    fail: Callable[[dict[str, object]], None], rank_that_fails: int, background: bool, tmp_path: Path
) -> None:
    _save(str(tmp_path / "c"))

    def save(rank: int, context: ckptcore.Context) -> type[BaseException]:
        objects = _objects(rank)
        if rank == rank_that_fails:
            fail(objects)
        with pytest.raises(Exception, match="this rank is broken|object") as caught:
            if background:
                ckptcore.save_checkpointables_async(tmp_path / "c", objects, overwrite=True, context=context).result()
            else:
                ckptcore.save_checkpointables(tmp_path / "c", objects, overwrite=True, context=context)
        return caught.type

    kinds = _run(save)
    assert [kind is RankFailedError for kind in kinds] == [rank != rank_that_fails for rank in range(SIZE)]
    assert os.listdir(tmp_path) == ["c"]
    assert ckptcore.verify(tmp_path / "c").ok
    _save(str(tmp_path / "c"), overwrite=True)


def _other_name(objects: dict[str, object]) -> None:
    objects["extra"] = {"a": 1}


def _fewer(objects: dict[str, object]) -> None:
    del objects["files"]


def _other_kind(objects: dict[str, object]) -> None:
    objects["params"] = Files()


def _not_shared(objects: dict[str, object]) -> None:
    objects["params"] = ckptcore.PerProcess(objects["params"])


def _other_tree(objects: dict[str, object]) -> None:
    objects["params"] = {"w": np.arange(6)}


def _bad_name(objects: dict[str, object]) -> None:
    objects["a/b"] = {}


@pytest.mark.parametrize("rank_that_differs", [0, 1])
@pytest.mark.parametrize("change", [_other_name, _fewer, _other_kind, _not_shared, _other_tree, _bad_name])
def test_ranks_that_save_different_names_are_refused(
    change: Callable[[dict[str, object]], None], rank_that_differs: int, tmp_path: Path
) -> None:
    def save(rank: int, context: ckptcore.Context) -> None:
        objects = _objects(rank)
        if rank == rank_that_differs:
            change(objects)
        with pytest.raises(CheckpointError, match="different trees|rank 0|'a/b'"):
            ckptcore.save_checkpointables(tmp_path / "c", objects, context=context)

    _run(save)
    assert os.listdir(tmp_path) == []


def test_converting_keeps_every_state(place: str) -> None:
    _save(place + "/c", metadata={"note": "kept"})
    ckptcore.copy(place + "/c", place + "/d", layout="safetensors")

    def load(rank: int, context: ckptcore.Context) -> None:
        data, files = Counter(), Files()
        ckptcore.load_checkpointables(place + "/d", into={"data": data, "files": files}, context=context)
        assert next(data) == 10 * rank and files.files["each"] == b"%d" % rank

    _run(load)
    assert ckptcore.metadata(place + "/d").custom == {"note": "kept"}
