"""Objects with a state in a tree that all ranks save together, as in torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore import ArrayShard, Context, ShardedArray
from ckptcore.context import JobOptions, ReplicaOptions
from ckptcore.errors import CheckpointError, RankFailedError, TreeMismatchError, UnsupportedLeafError
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of

SIZE = 3


class Stateful:
    """An object with the protocol `Stateful` of `torch.distributed.checkpoint`."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def run(work: Callable[[Context], Any], *, size: int = SIZE, **replicas: Any) -> list[Any]:
    options = ReplicaOptions(piece_bytes=64, **replicas)
    job = ThreadJob(size, timeout_seconds=60)
    return list(
        job.run(
            lambda coordinator: work(
                Context(job=JobOptions(coordinator=coordinator, replicas=options), durability="none")
            )
        )
    )


def tree(job: Coordinator) -> dict[str, Any]:
    rank = job.rank
    rows = np.arange(12.0).reshape(6, 2)
    part = ArrayShard(Box((2 * rank, 0), (2 * rank + 2, 2)), rows[2 * rank : 2 * rank + 2])
    return {
        "model": Stateful({"sharded": ShardedArray((6, 2), "float64", [part], cuts=[(2, 4), ()])}),
        "data": Stateful({f"rank_{rank}": bytes([rank]) * 3, "world": SIZE}),
        "progress": Stateful(
            {
                "number": rank,
                "large": np.full(100, float(rank)),
                "text": str(rank) * (10 + 20_000 * rank),
                "length": np.arange(4 - rank),
                "sort": np.ones(2) if rank == 0 else None,
            }
        ),
        "shared": np.arange(50.0),
    }


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3", "ocdbt"])
def test_shards_of_all_ranks_and_other_values_of_the_lowest_rank_are_stored(tmp_path: Path, layout: str) -> None:
    run(
        lambda context: ckptcore.save(tmp_path / "x", tree(runtime_of(context).job()), context=context, layout=layout),
        objects="lowest_rank",
    )
    loaded = ckptcore.load(tmp_path / "x")
    assert loaded["model"]["sharded"].tolist() == np.arange(12.0).reshape(6, 2).tolist()
    assert loaded["data"] == {"rank_0": b"\0\0\0", "rank_1": b"\1\1\1", "rank_2": b"\2\2\2", "world": SIZE}
    progress = loaded["progress"]
    assert (progress["number"], progress["text"]) == (0, "0" * 10)
    assert [progress[name].tolist() for name in ("large", "length", "sort")] == [[0.0] * 100, [0, 1, 2, 3], [1.0, 1.0]]
    assert loaded["shared"].tolist() == list(range(50))
    assert ckptcore.verify(tmp_path / "x").ok


def test_the_state_is_loaded_by_jobs_of_other_sizes(tmp_path: Path) -> None:
    run(
        lambda context: ckptcore.save(tmp_path / "x", tree(runtime_of(context).job()), context=context),
        objects="lowest_rank",
    )

    def load(context: Context) -> Any:
        target: dict[str, Any] = {name: Stateful({}) for name in ("data", "progress", "model")}
        ckptcore.load_into(tmp_path / "x", {**target, "shared": np.zeros(50)}, context=context)
        assert target["model"].state["sharded"].tolist() == np.arange(12.0).reshape(6, 2).tolist()
        return target["progress"].state["number"], sorted(target["data"].state)

    assert run(load, size=2) == [(0, ["rank_0", "rank_1", "rank_2", "world"])] * 2


def test_arrays_with_other_elements_on_each_rank_are_those_of_the_lowest_rank(tmp_path: Path) -> None:
    def save(context: Context) -> None:
        state = {name: np.full(500, float(runtime_of(context).job().rank)) for name in "abcdef"}
        ckptcore.save(tmp_path / "x", {"rng": Stateful(state)}, context=context, layout="zarr3")

    run(save, objects="lowest_rank")
    assert {value for array in ckptcore.load(tmp_path / "x")["rng"].values() for value in array.tolist()} == {0.0}


def test_the_error_names_the_option(tmp_path: Path) -> None:
    def save(context: Context) -> None:
        expected = r"data is a .*Stateful.*save_checkpointables.*ReplicaOptions\(objects=\"lowest_rank\"\)"
        with pytest.raises(UnsupportedLeafError, match=expected):
            ckptcore.save(tmp_path / "x", {"data": Stateful({"n": 1})}, context=context)

    run(save)
    assert not (tmp_path / "x").exists()


def test_values_outside_of_objects_must_still_be_equal(tmp_path: Path) -> None:
    def save(context: Context) -> None:
        with pytest.raises((TreeMismatchError, RankFailedError), match="step: int 0 on rank 0; int 1 on rank 1"):
            ckptcore.save(
                tmp_path / "x", {"data": Stateful({}), "step": runtime_of(context).job().rank}, context=context
            )

    run(save, objects="lowest_rank")


def test_containers_of_another_length_are_refused(tmp_path: Path) -> None:
    def save(context: Context) -> None:
        with pytest.raises(CheckpointError, match=r"data/list: list of 0 on rank 0; list of 1 on rank 1"):
            state = {"list": [1] * runtime_of(context).job().rank}
            ckptcore.save(tmp_path / "x", {"data": Stateful(state)}, context=context)

    run(save, objects="lowest_rank", size=2)


def test_an_unknown_value_of_the_option_is_refused() -> None:
    with pytest.raises(ValueError, match="'refuse' or 'lowest_rank'"):
        ReplicaOptions(objects="any")  # type: ignore[arg-type]  # wrong on purpose
