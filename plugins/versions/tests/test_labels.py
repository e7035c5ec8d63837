"""Labels of versions: run, number, step, the digest of the root, and digests of arrays."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ckptcore_testing.locations import new_place, store_at
from ckptcore_testing.thread_coordinator import ThreadJob
from ckptcore_versions import labels
from ckptcore_versions.version_directory import VERSION_NAMES

import ckptcore
from ckptcore.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UncommittedCheckpointError,
    UnsupportedLeafError,
)
from ckptcore.protocols import Coordinator
from plugins.versions.tests.published import CONTEXT, in_job, location, present, publisher, weights


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new directory of versions."""
    return new_place(request.param, tmp_path)


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(array.astype(array.dtype.newbyteorder("<")).tobytes("C")).hexdigest()


def test_a_version_has_its_run_number_step_and_digest(place: str) -> None:
    with publisher(place, run="nightly") as versions:
        versions.publish(7, weights(7), step=1200)
        versions.publish(8, weights(8))
    first, second = (labels(location(place, number), context=CONTEXT) for number in (7, 8))
    root = store_at(location(place, 7)).get("checkpoint.json")
    assert (first.run, first.number, first.step, first.tensors) == ("nightly", 7, 1200, {})
    assert first.digest == hashlib.sha256(root).hexdigest()
    assert (second.run, second.number, second.step) == ("nightly", 8, None)
    metadata = ckptcore.metadata(location(place, 7), context=CONTEXT)
    assert metadata.custom["version"] == {"run": "nightly", "number": 7, "step": 1200}
    assert ckptcore.CheckpointReader(place, step_names=VERSION_NAMES).steps == (7, 8)


def test_a_restarted_trainer_keeps_the_name_of_the_run(place: str) -> None:
    with publisher(place) as versions:
        versions.publish(1, weights(1))
    with publisher(place) as versions:
        versions.publish(2, weights(2))
    with publisher(place, run="other") as versions:
        versions.publish(3, weights(3))
    names = [labels(location(place, number), context=CONTEXT).run for number in (1, 2, 3)]
    assert names[0] == names[1] != names[2] == "other"
    assert len(names[0]) >= 16


def test_digests_are_of_the_elements_in_row_major_order(place: str) -> None:
    state: dict[str, Any] = {
        "plain": np.arange(12.0).reshape(3, 4),
        "transposed": np.arange(12, dtype=np.int16).reshape(3, 4).T,
        "big endian": np.arange(5, dtype=">f4"),
        "layers": [{"w": np.arange(600_000, dtype=np.float32).astype(ml_dtypes.bfloat16)}],
        "number": np.float32(2.5),
        "empty": np.zeros((0, 3)),
    }
    state["tied"] = state["plain"]
    with publisher(place, digests=True) as versions:
        versions.publish(1, state)
        state["plain"] = state["tied"] = state["plain"] + 1
        versions.publish(2, state)
    tensors = labels(location(place, 2), context=CONTEXT).tensors
    expected = {name: _sha256(np.asarray(array)) for name, array in state.items() if name != "layers"}
    expected["layers.0.w"] = hashlib.sha256(state["layers"][0]["w"].tobytes()).hexdigest()
    assert tensors == expected
    stored: Any = ckptcore.metadata(location(place, 2), context=CONTEXT).custom["version"]
    assert stored["sha256"] == tensors


def test_digests_of_a_job_are_those_of_whole_arrays(place: str) -> None:
    """Replicas of an array may write parts of it, but not if a digest needs all elements of it."""
    big = np.arange(8 << 20, dtype=np.float32)  # large enough that replicas would divide it
    state = {"big": big, **{f"small{number}": np.arange(100.0) + number for number in range(10)}}

    def publish(coordinator: Coordinator) -> None:
        with publisher(place, digests=True, context=in_job(coordinator)) as versions:
            versions.publish(1, state)

    ThreadJob(2).run(publish)
    tensors = labels(location(place, 1), context=CONTEXT).tensors
    assert tensors == {name: _sha256(array) for name, array in state.items()}


def test_a_digest_of_a_sharded_array_is_refused_by_its_name(place: str) -> None:
    def publish(coordinator: Coordinator) -> None:
        rows = np.arange(4.0)
        sharded = ckptcore.ShardedArray.part(rows, (4 * coordinator.rank,), (8,))
        with publisher(place, digests=True, context=in_job(coordinator)) as versions:
            versions.publish(1, {"whole": np.arange(3), "layers": [sharded]})

    with pytest.raises(ExceptionGroup) as caught:
        ThreadJob(2).run(publish)
    assert any(isinstance(error, UnsupportedLeafError) for error in caught.value.exceptions)
    assert all("layers.0: no process holds all of the array" in str(error) for error in caught.value.exceptions)
    assert present(place) == []


def test_other_checkpoints_have_no_labels(place: str) -> None:
    ckptcore.save(f"{place}/1", {"w": np.zeros(3)}, metadata={"version": 3})
    with pytest.raises(CorruptCheckpointError, match="without the labels of a version"):
        labels(f"{place}/1")
    with pytest.raises(CheckpointNotFoundError):
        labels(f"{place}/2")
    store_at(f"{place}/3").put("checkpoint.json", b"{}")
    with pytest.raises((CorruptCheckpointError, UncommittedCheckpointError)):
        labels(f"{place}/3")
