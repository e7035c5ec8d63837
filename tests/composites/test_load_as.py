"""`LoadAs`: selections, transforms and allowed differences for one of several checkpointables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ckptcore_testing import ThreadJob, ThreadNetwork
from ckptcore_transforms import Cast, Rename

import ckptcore
from ckptcore import PLACEHOLDER, AbstractArray, Checkpointer, Context, LoadAs, Matching, PerProcess, select
from ckptcore.context import JobOptions
from ckptcore.errors import TransformError, TreeMismatchError
from ckptcore.protocols import Coordinator
from ckptcore.results import LoadReport
from tests.composites.objects import Counter, Files, Linear

PARAMS: dict[str, Any] = {"w": np.arange(6.0), "b": np.ones(3), "step": 7}


@pytest.fixture
def location(place: str) -> str:
    objects = {"params": PARAMS, "model": Linear(3), "data": Counter(5), "files": Files({"a": b"one"})}
    ckptcore.save_checkpointables(place + "/c", objects)
    return place + "/c"


def test_each_checkpointable_has_its_own_options(location: str) -> None:
    report = LoadReport()
    wanted = {
        "params": LoadAs(
            {"weight": AbstractArray((6,), "float32"), "scale": np.full(2, 4.0)},
            transforms=[Rename("w", "weight")],
            select=select.names("w"),
            matching=Matching(missing="keep", cast="narrowing"),
            report=report,
        ),
    }
    loaded = ckptcore.load_checkpointables(location, wanted, into={"data": LoadAs(PerProcess(Counter()))})
    assert loaded["params"]["weight"].dtype == np.float32 and loaded["params"]["scale"].tolist() == [4, 4]
    assert loaded["data"].position == 5
    assert list(report.changed) == ["weight"] and report.defaulted == ["scale"] and report.bytes_read > 0
    only = ckptcore.load_checkpointables(location, {"params": LoadAs(None, select=~select.names("w"))})
    assert set(only["params"]) == {"b", "step"}
    assert ckptcore.load_checkpointables(location, {"params": LoadAs(PLACEHOLDER)}) == {}


def test_an_object_is_restored_from_transformed_arrays(place: str) -> None:
    stored = Linear(3)
    renamed = {f"old_{name}": value for name, value in stored.get_state_tree().items()}
    ckptcore.save_checkpointables(place + "/d", {"model": renamed})
    model = Linear(0)
    with pytest.raises(TreeMismatchError, match="old_"):
        ckptcore.load_checkpointables(place + "/d", into={"model": model})
    wanted = {"model": LoadAs(model, transforms=[Rename("old_{name}", "{name}")])}
    assert ckptcore.load_checkpointables(place + "/d", into=wanted)["model"] is model
    for name, value in model.get_state_tree().items():
        np.testing.assert_array_equal(value, stored.get_state_tree()[name])


def test_a_mismatch_changes_no_object(location: str) -> None:
    model, data = Linear(0), Counter()
    before = model.weight.tobytes()
    for wrong, error in (
        (LoadAs(data, transforms=[Rename("nothing", "x")]), TransformError),
        (LoadAs(data, matching=Matching(missing="placeholder")), ValueError),
        (LoadAs(data, select=select.names("positio")), TreeMismatchError),
    ):
        with pytest.raises(error):
            ckptcore.load_checkpointables(location, into={"model": model, "data": wrong})
        assert model.weight.tobytes() == before and data.position == 0


def test_files_cannot_be_loaded_as_a_tree(location: str) -> None:
    with pytest.raises(TreeMismatchError, match="request it without LoadAs"):
        ckptcore.load_checkpointables(location, into={"files": LoadAs(Files(), transforms=[Rename("a", "b")])})
    assert ckptcore.load_checkpointables(location, {"files": LoadAs(None)})["files"] == {"a": b"one"}


def test_processes_load_one_checkpointable_together(place: str) -> None:
    location = place + "/c"
    ckptcore.save_checkpointables(location, {"params": PARAMS})
    network = ThreadNetwork(2, timeout_seconds=120)

    def load(coordinator: Coordinator) -> None:
        collectives = network.collectives(coordinator.rank)
        context = Context(job=JobOptions(reads="broadcast", coordinator=coordinator, collectives=collectives))
        wanted = {"params": LoadAs(None, transforms=[Cast("w", "float32")])}
        loaded = ckptcore.load_checkpointables(location, wanted, context=context)["params"]
        assert loaded["w"].dtype == np.float32 and loaded["w"].tolist() == PARAMS["w"].tolist()

    ThreadJob(2, timeout_seconds=120).run(load)


def test_steps_are_loaded_with_transforms_and_selections(place: str) -> None:
    with Checkpointer(place + "/run") as run:
        for step in range(2):
            run.save(step, {**PARAMS, "step": step})
        run.wait()
        loaded = run.load(transforms=[Rename("w", "weight")], select=select.names("w", "step"))
        assert set(loaded) == {"weight", "step"} and loaded["step"] == 1
        target = {"weight": np.zeros(6), "b": np.zeros(3)}
        run.load_into(target, step=0, transforms=[Rename("w", "weight")], select=~select.names("step", "b"))
        assert target["weight"].tolist() == PARAMS["w"].tolist() and target["b"].tolist() == [0, 0, 0]
        with pytest.raises(TransformError):  # it would fail for every step, so no step is skipped
            run.load(transforms=[Rename("nothing", "x")])
        assert not run.skipped_steps
