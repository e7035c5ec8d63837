"""`PerProcess` anywhere in a tree: each process of a job saves and loads its own value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore import Checkpointer, Context, PerProcess
from ckptcore.context import IOOptions
from ckptcore.errors import CheckpointError, RankFailedError, TreeMismatchError, UnsupportedLeafError

LAYOUTS = ["safetensors", "ocdbt", "zarr3", "dcp"]


def run(job: Callable[[int, Context], Any], size: int = 2) -> Sequence[Any]:
    """Call a function on each rank of a job."""

    return run_ranks(size, job, timeout_seconds=30, io=IOOptions(threads=1), durability="none")


def tree_of(rank: int) -> dict[str, Any]:
    """Return a tree with wrappers in dicts and lists, around values, arrays of other shapes, and other keys."""
    own = {f"rank{rank}": np.full(rank + 1, float(rank)), "name": f"host-{rank}"}
    return {
        "w": np.arange(4.0),
        "seconds": PerProcess(0.5 + rank),
        "list": [np.ones(2), PerProcess(np.full((2, 2), rank))],
        "nested": {"own": PerProcess(own), "step": 7},
    }


def unwrapped(value: Any) -> Any:
    """Return a tree without wrappers."""
    if isinstance(value, PerProcess):
        return unwrapped(value.value)
    if isinstance(value, dict):
        return {key: unwrapped(child) for key, child in value.items()}
    return [unwrapped(child) for child in value] if isinstance(value, list) else value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("save", [ckptcore.save, ckptcore.save_async])
def test_each_process_gets_its_own_value(tmp_path: Path, layout: str, save: Callable[..., Any]) -> None:
    def job(rank: int, context: Context) -> None:
        handle = save(tmp_path / "x", tree_of(rank), layout=layout, context=context)
        if handle is not None:
            handle.result()
        assert same_value(ckptcore.load(tmp_path / "x", context=context), unwrapped(tree_of(rank)))
        assert same_value(ckptcore.load(tmp_path / "x", tree_of(rank), context=context), tree_of(rank))
        abstract = ckptcore.abstract(tree_of(rank))
        assert same_value(ckptcore.load(tmp_path / "x", abstract, context=context), tree_of(rank))
        filled = {**tree_of(rank), "list": [np.zeros(2), PerProcess(np.zeros((2, 2), int))], "seconds": PerProcess(9.0)}
        array = filled["list"][1].value
        ckptcore.load_into(tmp_path / "x", filled, context=context)
        assert same_value(filled, tree_of(rank))
        assert filled["list"][1].value is array
        selected = ckptcore.load(tmp_path / "x", select=ckptcore.select.names("seconds"), context=context)
        assert selected == {"seconds": 0.5 + rank}
        part = ckptcore.load(tmp_path / "x", select=ckptcore.select.glob("list/0"), context=context)
        assert same_value(part["list"], [np.ones(2), ckptcore.PLACEHOLDER])

    run(job)
    assert ckptcore.verify(tmp_path / "x").ok


def test_the_values_of_all_processes_are_visible(tmp_path: Path) -> None:
    run(lambda rank, context: ckptcore.save(tmp_path / "x", tree_of(rank), context=context))
    values = {0: 0.5, 1: 1.5}
    assert ckptcore.load(tmp_path / "x")["seconds"] == values
    assert ckptcore.metadata(tmp_path / "x").abstract["seconds"] == values
    with ckptcore.open(tmp_path / "x") as checkpoint:
        assert dict(checkpoint["seconds"]) == values
        assert checkpoint["list/1/1"][...].tolist() == [[1, 1], [1, 1]]
    assert ckptcore.load(tmp_path / "x", {"seconds": {1: 0.0}}, select=ckptcore.select.names("seconds")) == {
        "seconds": {1: 1.5}
    }


@pytest.mark.parametrize("size", [1, 3])
def test_a_job_of_another_size_loads_a_dict_of_the_values(tmp_path: Path, size: int) -> None:
    run(lambda rank, context: ckptcore.save(tmp_path / "x", tree_of(rank), context=context))

    def job(rank: int, context: Context) -> None:
        with pytest.raises((TreeMismatchError, RankFailedError), match=r"seconds.* for each of 2 processes, but.* has"):
            ckptcore.load(tmp_path / "x", tree_of(rank), context=context)
        loaded = ckptcore.load(tmp_path / "x", context=context)
        assert loaded["seconds"] == {0: 0.5, 1: 1.5}
        assert loaded["nested"]["own"][1]["name"] == "host-1"
        like = {"w": np.zeros(4), "seconds": {1: 0.0}}
        matching = ckptcore.Matching(unexpected="ignore")
        assert ckptcore.load(tmp_path / "x", like, matching=matching, context=context)["seconds"] == {1: 1.5}

    run(job, size)


@pytest.mark.parametrize("reads", ["all", "alone"])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_all_processes_of_a_job_of_another_size_refuse(tmp_path: Path, size: int, reads: Any) -> None:
    """The checkpoint has the values of three processes. A process refuses even if one of them is from its own rank."""
    run(lambda rank, context: ckptcore.save(tmp_path / "x", tree_of(rank), context=context), 3)

    def job(rank: int, context: Context) -> None:
        context = replace(context, job=replace(context.job, reads=reads))
        for load in (ckptcore.load, ckptcore.load_into):
            with pytest.raises(TreeMismatchError, match=f"seconds.* for each of 3 processes, but this job has {size}"):
                load(tmp_path / "x", tree_of(rank), context=context)
        assert ckptcore.load(tmp_path / "x", context=context)["seconds"] == {0: 0.5, 1: 1.5, 2: 2.5}

    run(job, size)


def test_the_whole_tree_and_checkpointables_can_be_wrapped(tmp_path: Path) -> None:
    def job(rank: int, context: Context) -> None:
        own = {"rank": rank, "data": np.full(3, rank)}
        ckptcore.save(tmp_path / "root", PerProcess(own), context=context)
        assert same_value(ckptcore.load(tmp_path / "root", context=context), own)
        assert same_value(ckptcore.load(tmp_path / "root", PerProcess(own), context=context), PerProcess(own))
        members = {"model": tree_of(rank), "own": PerProcess(own)}
        ckptcore.save_checkpointables(tmp_path / "several", members, context=context)
        loaded = ckptcore.load_checkpointables(tmp_path / "several", context=context)
        assert same_value(loaded, {"model": unwrapped(tree_of(rank)), "own": own})
        with Checkpointer(tmp_path / "run", context=context) as checkpointer:
            checkpointer.save_blocking(1, tree_of(rank))
            assert same_value(checkpointer.load(abstract=tree_of(rank)), tree_of(rank))

    run(job)


def test_objects_with_state_and_generators(tmp_path: Path) -> None:
    class Timer:
        """An object whose state differs between processes."""

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def state_dict(self) -> dict[str, Any]:
            return {"seconds": PerProcess(self.seconds), "version": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seconds = state["seconds"].value if isinstance(state["seconds"], PerProcess) else state["seconds"]

    def job(rank: int, context: Context) -> None:
        generator = np.random.default_rng(rank)
        state = {"timer": Timer(rank + 0.5), "random": PerProcess(generator), "own": PerProcess(Timer(rank + 0.25))}
        ckptcore.save(tmp_path / "x", state, context=context)
        expected = generator.random()
        other = {"timer": Timer(9.0), "random": PerProcess(np.random.default_rng(9)), "own": PerProcess(Timer(9.0))}
        ckptcore.load_into(tmp_path / "x", other, context=context)
        assert other["timer"].seconds == rank + 0.5  # type: ignore[attr-defined]
        assert other["own"].value.seconds == rank + 0.25  # type: ignore[attr-defined]
        assert other["random"].value.random() == expected  # type: ignore[attr-defined]

    run(job)


def test_the_remedies_in_the_errors_work(tmp_path: Path) -> None:
    def refused(rank: int, context: Context) -> list[str]:
        messages = []
        for state in ({"seconds": 0.5 + rank}, {"random": np.random.default_rng(rank)}):
            with pytest.raises(CheckpointError) as caught:
                ckptcore.save(tmp_path / "x", state, context=context)
            messages.append(str(caught.value))
        return messages

    for messages in run(refused):
        assert all(r"in PerProcess(...)" in message for message in messages)
    run(lambda rank, context: ckptcore.save(tmp_path / "x", {"seconds": PerProcess(0.5 + rank)}, context=context))
    run(
        lambda rank, context: ckptcore.save(
            tmp_path / "y", {"random": PerProcess(np.random.default_rng(rank))}, context=context
        )
    )

    def nested(rank: int, context: Context) -> None:
        with pytest.raises((UnsupportedLeafError, RankFailedError), match="'own': a: PerProcess.*remove this inner"):
            ckptcore.save_checkpointables(tmp_path / "z", {"own": PerProcess({"a": PerProcess(rank)})}, context=context)
        ckptcore.save_checkpointables(tmp_path / "z", {"own": PerProcess({"a": rank})}, context=context)

    run(nested)


def test_an_array_is_not_tied_to_the_same_array_in_a_wrapper(tmp_path: Path) -> None:
    def job(rank: int, context: Context) -> None:
        array = np.full(3, rank)
        ckptcore.save(tmp_path / "x", {"shared": array, "own": PerProcess(array)}, context=context)
        assert ckptcore.load(tmp_path / "x", context=context)["own"].tolist() == [rank] * 3

    run(job)


def test_a_single_process_stores_the_values_without_wrappers(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "x", tree_of(0))
    assert same_value(ckptcore.load(tmp_path / "x"), unwrapped(tree_of(0)))
    assert same_value(ckptcore.load(tmp_path / "x", tree_of(0)), tree_of(0))
