"""Arrays whose elements differ between ranks. Saves refuse them, and `PerProcess` keeps the array of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_testing import ThreadJob

import ckptcore
from ckptcore import ArrayShard, Context, Export, PerProcess, ShardedArray, Update, WithExports
from ckptcore.context import JobOptions, ReplicaOptions
from ckptcore.errors import CheckpointError
from ckptcore.model import Box
from ckptcore.protocols import Coordinator

SHARING = ["dcp", "zarr3", "ocdbt", "zarr"]
"""The layouts in which each rank writes some of the arrays that all have."""

LARGE = 200_000
"""Elements of an array that is compared by a sample."""


def run(work: Callable[[int, Context], Any], size: int = 3) -> Sequence[Any]:
    def of_rank(coordinator: Coordinator) -> Any:
        options = JobOptions(coordinator=coordinator, replicas=ReplicaOptions(piece_bytes=1 << 16))
        return work(coordinator.rank, Context(job=options, durability="none"))

    return ThreadJob(size, timeout_seconds=60).run(of_rank)


def refusal(path: Path, state_of: Callable[[int], Any], layout: str = "dcp", size: int = 3) -> str:
    """Return the message with which all ranks refuse to save."""

    def save(rank: int, context: Context) -> str:
        with pytest.raises(CheckpointError) as caught:
            ckptcore.save(path, state_of(rank), layout=layout, context=context)
        return str(caught.value)

    messages = run(save, size)
    assert not path.exists()
    assert all(messages[0] in message for message in messages), "every rank reports what the leader found"
    return str(messages[0])


def generator_state(rank: int) -> torch.Tensor:
    return torch.Generator().manual_seed(rank).get_state()


def half_and_half(rank: int) -> torch.Tensor:
    return torch.full((LARGE,), float(rank))


DIFFERENT: dict[str, Callable[[int], Any]] = {
    "generator": generator_state,
    "position": lambda rank: np.array(100 + rank),
    "numpy_scalar": lambda rank: np.int64(rank),
    "large": half_and_half,
    "strided": lambda rank: torch.full((LARGE, 2), float(rank)).t(),
    "bfloat16": lambda rank: torch.full((LARGE,), float(rank), dtype=torch.bfloat16),
    "long_text": lambda rank: str(rank) * 20_000,
    "longer_text": lambda rank: str(rank) * 400_000,
    "long_bytes": lambda rank: bytes([rank]) * 400_000,
    "big_endian": lambda rank: np.arange(6, dtype=">f8") + rank,
}


@pytest.mark.parametrize("layout", SHARING)
@pytest.mark.parametrize("kind", ["generator", "position", "large"])
@pytest.mark.brings("arrays that differ between ranks", "torch", "refused")
def test_an_error_names_the_array_the_ranks_and_the_remedy(tmp_path: Path, layout: str, kind: str) -> None:
    message = refusal(tmp_path / "x", lambda rank: {"same": np.arange(9), "own": DIFFERENT[kind](rank)}, layout)
    assert "own: different on rank 0; rank 1; rank 2" in message
    assert "PerProcess" in message and "same" not in message.partition("\n")[2].partition("\n")[0]


@pytest.mark.parametrize("kind", DIFFERENT)
def test_every_kind_of_array_is_compared(tmp_path: Path, kind: str) -> None:
    message = refusal(tmp_path / "x", lambda rank: {"own": DIFFERENT[kind](int(rank == 1))})
    assert "own: different on ranks 0, 2; rank 1" in message


@pytest.mark.parametrize("layout", SHARING)
@pytest.mark.parametrize("kind", DIFFERENT)
@pytest.mark.brings("arrays that differ between ranks, in `PerProcess`", "torch", "same")
def test_the_remedy_keeps_the_array_of_every_rank(tmp_path: Path, layout: str, kind: str) -> None:
    make = DIFFERENT[kind]

    def save(rank: int, context: Context) -> None:
        ckptcore.save(tmp_path / "x", {"own": PerProcess(make(rank))}, layout=layout, context=context)
        loaded = ckptcore.load(tmp_path / "x", {"own": PerProcess(make(7))}, context=context)["own"].value
        assert type(loaded) is type(make(rank))
        assert torch.equal(loaded, make(rank)) if isinstance(loaded, torch.Tensor) else np.all(loaded == make(rank))

    run(save)


@pytest.mark.parametrize("save", [ckptcore.save, ckptcore.save_async])
def test_an_asynchronous_save_raises_the_error_at_the_call(tmp_path: Path, save: Callable[..., Any]) -> None:
    def work(rank: int, context: Context) -> None:
        with pytest.raises(CheckpointError, match="own: different on rank 0; rank 1"):
            save(tmp_path / "x", {"own": generator_state(rank)}, layout="dcp", context=context)
        # The next save of the same job succeeds, because the failed save left nothing.
        handle = save(tmp_path / "x", {"own": generator_state(0)}, layout="dcp", context=context)
        if handle is not None:
            handle.result()

    run(work, 2)
    assert np.array_equal(ckptcore.load(tmp_path / "x")["own"], generator_state(0).numpy())


@pytest.mark.parametrize("run_of_elements", [1024, 2000])
def test_a_difference_in_one_row_of_a_large_array_is_found_anywhere(tmp_path: Path, run_of_elements: int) -> None:
    """A run of 4 KiB differs, such as a row of an embedding."""
    base = np.zeros(LARGE, np.float32)
    for start in (0, 1, 1000, LARGE // 2 + 3, LARGE - run_of_elements):

        def state(rank: int, start: int = start) -> dict[str, Any]:
            own = base.copy()
            own[start : start + run_of_elements] += rank
            return {"own": own}

        assert "own: different" in refusal(tmp_path / "x", state, size=2)


@pytest.mark.parametrize("layout", SHARING)
def test_arrays_with_equal_elements_are_equal(tmp_path: Path, layout: str) -> None:
    """Strides, byte order and the array class do not matter. NaN equals NaN."""
    elements = np.random.default_rng(0).standard_normal((400, 500))
    elements[3, 5] = np.nan

    def form(rank: int) -> Any:
        forms = [elements, np.asfortranarray(elements), elements.astype(">f8"), torch.from_numpy(elements.copy())]
        return forms[rank]

    def save(rank: int, context: Context) -> None:
        ckptcore.save(tmp_path / "x", {"own": form(rank)}, layout=layout, context=context)

    run(save, 4)
    assert np.array_equal(ckptcore.load(tmp_path / "x")["own"], elements, equal_nan=True)


def test_arrays_of_ranks_with_other_trees_are_compared(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"shared": half_and_half(int(rank == 2)), "equal": np.ones(3), f"stage{rank}": np.full(5, rank)}

    assert "shared: different on ranks 0-1; rank 2" in refusal(tmp_path / "x", state)

    def save(rank: int, context: Context) -> None:
        ckptcore.save(tmp_path / "x", {**state(rank), "shared": np.ones(4)}, layout="dcp", context=context)

    run(save)
    assert sorted(ckptcore.load(tmp_path / "x")) == ["equal", "shared", "stage0", "stage1", "stage2"]


def test_the_error_names_one_of_several_checkpointables(tmp_path: Path) -> None:
    def save(rank: int, context: Context) -> str:
        with pytest.raises(CheckpointError) as caught:
            state = {"model": {"w": np.ones(3)}, "data": {"position": np.array(rank)}}
            ckptcore.save_checkpointables(tmp_path / "x", state, layout="dcp", context=context)
        return str(caught.value)

    assert "in 'data': " in run(save)[0] and "position: different on rank 0; rank 1; rank 2" in run(save)[0]

    def wrapped(rank: int, context: Context) -> int:
        state = {"model": {"w": np.ones(3)}, "data": PerProcess({"position": np.array(rank)})}
        ckptcore.save_checkpointables(tmp_path / "x", state, layout="dcp", context=context)
        state["data"] = PerProcess({"position": np.array(-1)})
        return int(ckptcore.load_checkpointables(tmp_path / "x", state, context=context)["data"]["position"])

    assert run(wrapped) == [0, 1, 2]


def test_many_ranks_that_all_differ(tmp_path: Path) -> None:
    message = refusal(tmp_path / "x", lambda rank: {"own": np.array(rank)}, size=40)
    assert "own: different on rank 0; rank 1; " in message


def test_arrays_with_known_replicas_are_not_compared(tmp_path: Path) -> None:
    def save(rank: int, context: Context) -> None:
        shard = ArrayShard(Box((0,), (4,)), np.full(4, rank), rank, 3)
        ckptcore.save(tmp_path / "x", {"own": ShardedArray((4,), "int64", [shard])}, layout="dcp", context=context)

    run(save)


def test_safetensors_stores_the_array_of_the_lowest_rank(tmp_path: Path) -> None:
    """One rank writes the whole array, so elements of ranks are not mixed. Errors of other layouts name this remedy."""
    state = {"own": half_and_half, "small": generator_state}

    def save(rank: int, context: Context) -> None:
        ckptcore.save(tmp_path / "x", {name: make(rank) for name, make in state.items()}, context=context)

    run(save)
    loaded = ckptcore.load(tmp_path / "x")
    assert all(torch.equal(torch.from_numpy(loaded[name]), make(0)) for name, make in state.items())


def _partial(path: Path, state: Any, context: Context) -> None:
    session = ckptcore.partial(path, layout="dcp", context=context)
    session.save(state)
    session.finalize()


def _update(path: Path, state: Any, context: Context) -> None:
    strategy = Update(base=path.parent / "base")
    ckptcore.save(path, {"w": ckptcore.PLACEHOLDER, **state}, layout="dcp", strategy=strategy, context=context)


def _step(path: Path, state: Any, context: Context) -> None:
    with ckptcore.Checkpointer(path, layout="dcp", context=context) as checkpointer:
        checkpointer.save(1, state)


SAVES: dict[str, Callable[[Path, Any, Context], None]] = {"partial": _partial, "update": _update, "step": _step}


@pytest.mark.parametrize("kind", SAVES)
def test_every_kind_of_save_compares_arrays(tmp_path: Path, kind: str) -> None:
    ckptcore.save(tmp_path / "base", {"w": np.ones(3), "own": np.zeros((), int)}, layout="dcp")

    def save(rank: int, context: Context) -> None:
        with pytest.raises(CheckpointError, match="own: different on rank 0; rank 1"):
            SAVES[kind](tmp_path / "refused", {"own": np.array(rank)}, context)
        SAVES[kind](tmp_path / "saved", {"own": np.array(7)}, context)

    run(save, 2)


def test_an_export_that_one_rank_writes(tmp_path: Path) -> None:
    """With an export to safetensors the lowest rank writes the whole array in every layout, so nothing is mixed."""

    def save(rank: int, context: Context) -> None:
        export = WithExports([Export(location=tmp_path / "export", layout="safetensors")])
        state = {"own": half_and_half(rank), "small": np.array(rank)}
        ckptcore.save(tmp_path / "x", state, layout="dcp", strategy=export, context=context)

    run(save, 2)
    for name in ("x", "export"):
        loaded = ckptcore.load(tmp_path / name)
        assert not loaded["own"].any() and loaded["small"] == 0
