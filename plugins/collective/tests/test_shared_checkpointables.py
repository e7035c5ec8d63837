"""Shared loads of several checkpointables, and of the steps of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork, assert_same_tree

import ckptcore
from ckptcore import Checkpointer, Context, PerProcess
from ckptcore.context import JobOptions
from ckptcore.errors import CheckpointNotFoundError, RankFailedError
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of

MODEL = {"w": np.arange(600.0).reshape(20, 30), "step": 4}
EXTRA = {"e": np.arange(200)}


class Counter:
    """A checkpointable with one array."""

    def __init__(self) -> None:
        self.state = np.zeros(50)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def _run(size: int, work: Callable[[Context], Any]) -> tuple[list[Any], ThreadNetwork]:
    network = ThreadNetwork(size, timeout_seconds=20)

    def run(coordinator: Coordinator) -> Any:
        collectives = network.collectives(coordinator.rank)
        return work(Context(job=JobOptions(coordinator=coordinator, collectives=collectives, reads="broadcast")))

    return list(ThreadJob(size, timeout_seconds=20).run(run)), network


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def save(context: Context) -> None:
        counter = Counter()
        counter.state = np.arange(50.0)
        own = PerProcess({"rank": runtime_of(context).job().rank})
        ckptcore.save_checkpointables(
            tmp_path / "saved", {"model": MODEL, "extra": EXTRA, "counter": counter, "own": own}, context=context
        )

    _run(2, save)
    return tmp_path / "saved"


def test_checkpointables_of_all_kinds(saved: Path) -> None:
    def load(context: Context) -> None:
        counter = Counter()
        wanted = {"extra": None, "own": PerProcess(None), "model": None}
        loaded = ckptcore.load_checkpointables(saved, wanted, into={"counter": counter}, context=context)
        assert list(loaded) == [*wanted, "counter"]
        assert_same_tree(loaded["model"], MODEL)
        assert_same_tree(loaded["extra"], EXTRA)
        assert np.array_equal(counter.state, np.arange(50.0))

    _, network = _run(2, load)
    assert {members for _, members, _ in network.sent} == {(0, 1)}


def test_ranks_may_request_different_names(saved: Path) -> None:
    """Rank 1 first requests a checkpointable that rank 0 does not request."""

    def load(context: Context) -> dict[str, Any]:
        names = ["extra", "model"] if runtime_of(context).job().rank else ["model"]
        return ckptcore.load_checkpointables(saved, names, context=context)

    (first, second), network = _run(2, load)
    assert list(first) == ["model"] and list(second) == ["extra", "model"]
    assert_same_tree(second["extra"], EXTRA)
    assert_same_tree(first["model"], second["model"])
    assert len(network.sent) == 1, "only one rank requests extra"


def test_a_wrong_name_on_one_rank_fails_all_ranks(saved: Path) -> None:
    def load(context: Context) -> Exception:
        with pytest.raises((CheckpointNotFoundError, RankFailedError)) as caught:
            ckptcore.load_checkpointables(
                saved, ["model" if runtime_of(context).job().rank else "modell"], context=context
            )
        return caught.value

    first, second = _run(2, load)[0]
    assert "modell" in str(first) and "modell" in str(second)


def test_an_object_that_rejects_its_state_fails_all_ranks(saved: Path) -> None:
    """The other ranks also raise the error: none waits for the next message of the failed rank."""

    class Refusing(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not like this")

    def load(context: Context) -> str:
        counter = Refusing() if runtime_of(context).job().rank == 1 else Counter()
        with pytest.raises(Exception, match="not like this") as caught:
            ckptcore.load_checkpointables(saved, {"model": None}, into={"counter": counter}, context=context)
        return type(caught.value).__name__

    assert _run(2, load)[0][1] == "TreeMismatchError"


def test_all_ranks_fall_back_to_an_older_step(tmp_path: Path) -> None:
    """Only one rank reads the damaged part of the newest step."""

    def save(context: Context) -> None:
        with Checkpointer(tmp_path, context=context) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, {"w": np.full(1000, float(step))})

    _run(2, save)
    (file,) = next(path for path in tmp_path.iterdir() if path.is_dir() and "2" in path.name).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)

    def load(context: Context) -> tuple[float, int | None]:
        with Checkpointer(tmp_path, context=context) as checkpointer:
            loaded = checkpointer.load()
            return float(loaded["w"][0]), checkpointer.restored_step

    assert _run(2, load)[0] == [(1.0, 1), (1.0, 1)]


def test_a_missing_step_fails_on_all_ranks(tmp_path: Path) -> None:
    def load(context: Context) -> None:
        with Checkpointer(tmp_path, context=context) as checkpointer:
            checkpointer.save(1, {"w": np.ones(10)})
            checkpointer.wait()
            with pytest.raises(CheckpointNotFoundError):
                checkpointer.load(7)
            assert float(checkpointer.load(1)["w"][0]) == 1

    _run(2, load)
