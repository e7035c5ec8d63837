"""Sessions of whole jobs, whose sizes differ. In some sessions the trees differ by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_testing.locations import new_place, objects_at
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import RankFailedError, TreeMismatchError

_LAYOUTS = ["safetensors", "dcp", "ocdbt", "zarr3"]


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_place(request.param, tmp_path)


def _run(size: int, job: Callable[[int, ckptcore.Context], Any]) -> Sequence[Any]:
    return run_ranks(size, job, timeout_seconds=30, io=ckptcore.context.IOOptions(threads=1), durability="none")


def _rows(whole: Any, rank: int, size: int, **options: Any) -> ckptcore.ShardedArray:
    step = len(whole) // size
    return ckptcore.ShardedArray.part(
        whole[rank * step : (rank + 1) * step],
        (rank * step, *[0] * (whole.ndim - 1)),
        whole.shape,
        cuts=(tuple(range(step, len(whole), step)), *[()] * (whole.ndim - 1)),
        **options,
    )


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_jobs_of_different_sizes_fill_one_checkpoint(layout: str, place: str) -> None:
    first, second = np.arange(48.0).reshape(12, 4), np.arange(24, dtype=np.int32)

    def save_first(rank: int, context: ckptcore.Context) -> None:
        state = {"model": {"w": _rows(first, rank, 4)}, "shared": np.ones(5), "step": 3}
        ckptcore.partial(place, layout=layout, context=context).save(state)

    def save_stages(rank: int, context: ckptcore.Context) -> None:
        state = {"model": {f"stage {rank}": np.full(3, rank)}, "optimizer": {"m": _rows(second, rank, 3)}}
        ckptcore.partial(place, layout=layout, context=context).save_async(state).result()

    def end(rank: int, context: ckptcore.Context) -> Any:
        ckptcore.partial(place, context=context).finalize(metadata={"from": "a job"})
        return ckptcore.metadata(place, context=context).custom

    _run(4, save_first)
    _run(3, save_stages)
    ckptcore.partial(place, layout=layout).save({"alone": np.arange(7)})
    assert _run(2, end) == [{"from": "a job"}] * 2
    whole = ckptcore.load(place)
    assert same_value(whole["model"].pop("w"), first) and same_value(whole["optimizer"]["m"], second)
    assert [whole["model"][f"stage {rank}"][0] for rank in range(3)] == [0, 1, 2]
    assert same_value(whole["alone"], np.arange(7)) and whole["step"] == 3
    assert ckptcore.verify(place).ok and ckptcore.metadata(place).custom == {"from": "a job"}
    # A load may omit leaves that only some ranks of a session saved, but no others.
    asked = {
        "model": {"w": np.zeros((12, 4)), "stage 1": np.zeros(3, np.int64)},
        "shared": np.zeros(5),
        "step": 0,
        "optimizer": {"m": np.zeros(24, np.int32)},
        "alone": np.zeros(7, np.int64),
    }
    assert same_value(ckptcore.load(place, asked)["model"]["stage 1"], np.full(3, 1))
    with pytest.raises(TreeMismatchError, match="alone"):
        ckptcore.load(place, {name: value for name, value in asked.items() if name != "alone"})


def test_every_rank_knows_which_arrays_are_saved(place: str) -> None:
    """All ranks raise an error, even if only one of them passes an array that is already saved."""
    whole = np.arange(8.0)
    ckptcore.partial(place, layout="dcp").save({"w": _rows(whole, 1, 4)})
    before = objects_at(place)

    def save(rank: int, context: ckptcore.Context) -> str:
        state = {"w": _rows(whole, rank, 4)}
        with pytest.raises((TreeMismatchError, RankFailedError)) as raised:
            ckptcore.partial(place, layout="dcp", context=context).save(state)
        return f"{type(raised.value).__name__}: {raised.value}"

    told = _run(4, save)
    assert told[1].startswith("TreeMismatchError") and all("w, elements [2] to [4]" in text for text in told)
    after = objects_at(place)
    assert {**after, "checkpoint.json": b""} == {**before, "checkpoint.json": b""}, "something was written but a claim"


def test_an_error_of_one_rank_ends_the_session_on_all_ranks(place: str) -> None:
    ckptcore.partial(place, layout="dcp").save({"a": np.ones(2)})

    class Broken(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            state = super().write(snapshot, store)
            if snapshot.plan.rank == snapshot.plan.session + 1:
                raise RuntimeError("this rank fails")
            return state

    other = f"{place}-other"
    ckptcore.partial(other).save({"a": np.ones(2)})

    def save(rank: int, context: ckptcore.Context) -> None:
        with pytest.raises((RuntimeError, RankFailedError), match="this rank fails"):
            ckptcore.partial(other, layout=Broken(), context=context).save({"b": _rows(np.arange(6.0), rank, 3)})

    _run(3, save)
    _run(3, lambda rank, context: ckptcore.partial(other, context=context).save({"b": _rows(np.ones(6), rank, 3)}))
    ckptcore.partial(other).finalize()
    assert same_value(ckptcore.load(other), {"a": np.ones(2), "b": np.ones(6)})
    assert set(objects_at(other)) == {"checkpoint.json", *ckptcore.metadata(other).objects}


def test_a_failed_session_that_one_rank_noticed_fails_finalize_on_all_ranks(place: str) -> None:
    ckptcore.partial(place).save({"a": np.ones(2)})

    class Broken(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            raise RuntimeError("this session fails")

    def save(rank: int, context: ckptcore.Context) -> None:
        session = ckptcore.partial(place, layout=Broken(), context=context)
        handle = session.save_async({"b": _rows(np.arange(6.0), rank, 2)})
        if rank == 0:
            handle.exception()
        with pytest.raises((RuntimeError, RankFailedError), match="this session fails"):
            session.finalize()
        session.finalize()

    _run(2, save)
    assert same_value(ckptcore.load(place), {"a": np.ones(2)})
