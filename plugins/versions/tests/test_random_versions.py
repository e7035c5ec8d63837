"""Random sequences of versions: shardings, dtypes, ties, new and removed arrays, restarts, publishes that fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing.thread_coordinator import ThreadJob
from ckptcore_testing.trees import same_value
from ckptcore_versions import Version, follow
from ckptcore_versions.publishing import version_saves

import ckptcore
from ckptcore.builtin.sharded_arrays import ArrayShard
from ckptcore.errors import CheckpointError, StorageError
from ckptcore.model import Box
from ckptcore.protocols import Coordinator
from plugins.versions.tests.published import CONTEXT, in_job, load, publisher

ROWS, COLUMNS = 37, 19
State = dict[str, Any]

_FAILS = 666
"""The training step of versions whose publish fails."""


@pytest.fixture(autouse=True)
def failing_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the last step of commits: versions of the step `_FAILS` fail, after everything was written."""
    complete = version_saves._VersionCommit._completed

    def completed(commit: Any, root: Any) -> Any:
        if commit._request.step == _FAILS:
            raise StorageError("the storage failed before the commit")
        return complete(commit, root)

    monkeypatch.setattr(version_saves._VersionCommit, "_completed", completed)


def next_state(state: State, rng: np.random.Generator) -> State:
    """Return the next state: elements of some arrays change, and sometimes the tree."""
    state = dict(state)
    change = rng.integers(9)
    added = [name for name in state if name.startswith("added")]
    if change == 0:
        state["matrix"] = state["matrix"].astype("f4" if state["matrix"].dtype == "f8" else "f8")
    elif change == 1:
        state[f"added{rng.integers(3)}"] = rng.normal(size=(rng.integers(5), 3))
    elif change == 2 and added:
        del state[added[0]]
    elif change == 3:
        state["tied"] = state["vector"]
    elif change == 4:
        state.pop("tied", None)
    elif change == 5:
        state = dict(reversed(state.items()))
    elif change == 6 and "tied" in state:
        state["tied"] = state["vector"] + rng.integers(2)
    state["matrix"] = state["matrix"].copy()
    state["matrix"][rng.integers(ROWS)] += 1
    if rng.random() < 0.3:
        is_tied = state.get("tied") is state["vector"]
        state["vector"] = state["vector"] + 1
        if is_tied:
            state["tied"] = state["vector"]
    return state


def publish(place: str, number: int, states: list[State], bounds: list[int]) -> None:
    """Publish the last state in a job whose processes have rows of the matrix. The publishes of the others fail."""

    def of_process(coordinator: Coordinator) -> None:
        first, last = bounds[coordinator.rank : coordinator.rank + 2]
        with publisher(place, context=in_job(coordinator), full_every=7) as versions:
            for state in states:
                matrix, box = state["matrix"], Box((first, 0), (last, COLUMNS))
                shards = [ArrayShard(box, matrix[first:last])] if first < last else []
                sharded = {**state, "matrix": ckptcore.ShardedArray(matrix.shape, matrix.dtype, shards)}
                if state is states[-1]:
                    versions.publish(number, sharded)
                else:
                    with pytest.raises(CheckpointError):
                        versions.publish(number, sharded, step=_FAILS)

    ThreadJob(len(bounds) - 1).run(of_process)


def expect_followed(version: Version | None, number: int, state: State, before: Mapping[str, Any]) -> State:
    """Expect the arrays of a state, and that `changed` has every element that differs. Return the arrays."""
    assert version is not None and version.number == number
    arrays = {name: array for name, array in state.items() if name != "number"}
    assert set(version.arrays) == set(arrays)
    for name, array in arrays.items():
        assert same_value(np.asarray(version.arrays[name]), array), name
        old = before.get(name)
        if old is not None and old.shape == array.shape and old.dtype == array.dtype:
            listed = np.zeros(array.shape, bool)
            for box in version.changed.get(name, ()):
                listed[box.slices] = True
            assert (listed | (old == array)).all(), name
    return arrays


@pytest.mark.parametrize("seed", [1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20)]])
def test_random_versions_come_back_in_loads_and_followers(seed: int, tmp_path: Path) -> None:
    rng, place, cache = np.random.default_rng(seed), str(tmp_path / "weights"), tmp_path / "cache"
    state: State = {"matrix": rng.normal(size=(ROWS, COLUMNS)), "vector": rng.normal(size=64), "number": 3}
    served: State = {}
    followed: Mapping[str, Any] = {}
    number = 0
    follower = follow(place, cache=cache, context=CONTEXT)
    for _ in range(20 if seed == 1 else 60):
        state, number = next_state(state, rng), number + int(rng.integers(1, 3))
        failed = [next_state({**state, "vector": state["vector"] + 7}, rng) for _ in range(rng.random() < 0.2)]
        cuts = sorted(rng.integers(ROWS + 1, size=rng.integers(3)).tolist())
        publish(place, number, [*failed, state], [0, *cuts, ROWS])
        assert same_value(load(place, number), state)
        if rng.random() < 0.3:
            continue  # the follower is late
        if rng.random() < 0.2:
            follower.close()
            follower, followed = follow(place, cache=cache, context=CONTEXT), {}
        version = follower.next_version(0)
        followed = expect_followed(version, number, state, followed)
        assert version is not None
        shapes = {name: (array.shape, array.dtype) for name, array in followed.items()}
        if {name: (array.shape, array.dtype) for name, array in served.items() if name != "number"} != shapes:
            served = {name: np.zeros_like(array) for name, array in followed.items()} | {"number": 0}
        version.load_into(served)
        assert all(same_value(served[name], array) for name, array in followed.items())
    follower.close()
