"""Sessions of a partial save give the same checkpoint as one save. It exists only after `finalize`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from ckptcore_orbax import Zarr3Layout
from ckptcore_testing.locations import new_place, objects_at, store_at
from ckptcore_testing.trees import same_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

import ckptcore
from ckptcore.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    NameCollisionError,
    TreeMismatchError,
    UncommittedCheckpointError,
)

_LAYOUTS = ["safetensors", "dcp", "ocdbt", "zarr3", "zarr"]


@pytest.fixture(params=["file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return new_place(request.param, tmp_path)


def _beside(place: str) -> dict[str, bytes]:
    """Return every object in the parent directory, because on file systems sessions write next to the location."""
    return objects_at(place.rpartition("/")[0])


def _save(location: str, state: object, **options: Any) -> None:
    ckptcore.partial(location, **options).save(state)


def _save_async(location: str, state: object, **options: Any) -> None:
    ckptcore.partial(location, **options).save_async(state).result()


@pytest.mark.parametrize("save", [_save, _save_async])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_sessions_give_the_checkpoint_of_one_save(layout: str, save: Callable[..., None], place: str) -> None:
    tied = np.arange(300.0).reshape(3, 100)
    sessions: list[dict[str, Any]] = [
        {"model": {"w": np.arange(12, dtype=np.int16)}, "step": 3, "layers": [np.ones(2), (1, "x")]},
        {"optimizer": {"m": np.full((2, 2), 0.5, np.float16)}, "step": 3},
        {"model": {"head": tied, "embed": tied}, "empty": np.zeros((0, 3))},
    ]
    for session in sessions:
        save(place, session, layout=layout)
    ckptcore.partial(place).finalize(metadata={"run": 7})
    expected: dict[str, Any] = {
        "model": {"w": sessions[0]["model"]["w"], "head": tied, "embed": tied},
        "step": 3,
        "layers": sessions[0]["layers"],
        "optimizer": sessions[1]["optimizer"],
        "empty": np.zeros((0, 3)),
    }
    assert same_value(ckptcore.load(place), expected)
    assert ckptcore.verify(place).ok
    metadata = ckptcore.metadata(place)
    assert metadata.custom == {"run": 7} and metadata.layout == layout
    assert set(objects_at(place)) == {"checkpoint.json", *metadata.objects}, "sessions left something"
    # A load cannot tell that sessions wrote the checkpoint: it requires every leaf.
    with pytest.raises(TreeMismatchError, match="optimizer"):
        ckptcore.load(place, {name: value for name, value in expected.items() if name != "optimizer"})


@st.composite
def _trees(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw sessions: nested dicts with separate arrays, each of which is in one session."""
    sessions: list[dict[str, Any]] = [{} for _ in range(draw(st.integers(1, 4)))]
    for number, path in enumerate(draw(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), max_size=8))):
        inner = sessions[draw(st.integers(0, len(sessions) - 1))]
        for key in path[:-1]:
            inner = inner.setdefault(f"in {key}", {})
        inner[f"{path[-1]} {number}"] = np.full(draw(st.integers(0, 5)), number, draw(st.sampled_from(["f4", "i8"])))
    return sessions


def _merge(into: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value
    return into


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(sessions=_trees(), layout=st.sampled_from(["safetensors", "dcp", "ocdbt", "zarr3"]))
def test_any_split_of_a_tree_comes_back(sessions: list[dict[str, Any]], layout: str, tmp_path: Path) -> None:
    place = new_place("memory", tmp_path)
    whole: dict[str, Any] = {}
    for session in sessions:
        ckptcore.partial(place, layout=layout).save(session)
        _merge(whole, session)
    ckptcore.partial(place).finalize()
    assert same_value(ckptcore.load(place), whole)


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_several_sessions_save_boxes_of_an_array(layout: str, place: str) -> None:
    whole = np.arange(60.0).reshape(10, 6)
    cuts = ((3, 5, 8), ())

    def part(first: int, stop: int) -> dict[str, Any]:
        return {"w": ckptcore.ShardedArray.part(whole[first:stop], (first, 0), (10, 6), cuts=cuts)}

    ckptcore.partial(place, layout=layout).save(part(0, 3))
    ckptcore.partial(place, layout=layout).save(part(5, 8))
    before = _beside(place)
    with pytest.raises(TreeMismatchError, match=r"w, elements \[6, 0\] to \[8, 6\]"):
        ckptcore.partial(place, layout=layout).save(part(6, 10))
    assert _beside(place) == before, "something was written"
    ckptcore.partial(place, layout=layout).save(part(3, 5))
    with pytest.raises(TreeMismatchError, match=r"w \(float64\[10, 6\]\) has 48 of its 60 elements"):
        ckptcore.partial(place).finalize()
    ckptcore.partial(place, layout=layout).save(part(8, 10))
    with pytest.raises(TreeMismatchError, match=r"already saved w \(float64\[10, 6\]\)"):
        ckptcore.partial(place, layout=layout).save(part(0, 3))
    ckptcore.partial(place).finalize()
    assert same_value(ckptcore.load(place), {"w": whole})


def test_nothing_is_loaded_before_it_is_finalized(place: str) -> None:
    ckptcore.partial(place).save({"a": np.ones(3), "b": np.ones(4)})
    ckptcore.partial(place).save({"c": np.ones(3)})
    for look in (ckptcore.load, ckptcore.metadata, ckptcore.verify, ckptcore.open, ckptcore.load_checkpointables):
        with pytest.raises(
            UncommittedCheckpointError,
            match=r"2 complete sessions .*2 arrays.*1 array\).*ckptcore\.partial\(\.\.\.\)\.finalize",
        ):
            look(place)
    with pytest.raises(UncommittedCheckpointError, match="finalize"):
        ckptcore.copy(place, f"{place}-copy")
    ckptcore.partial(place).finalize()
    assert sorted(ckptcore.load(place)) == ["a", "b", "c"]


def test_saving_an_array_again_is_refused(place: str) -> None:
    ckptcore.partial(place).save({"params": {"w": np.ones(3), "b": np.ones(2)}, "step": 1})
    before = _beside(place)
    with pytest.raises(
        TreeMismatchError, match=r"already saved params/w \(float64\[3\]\): save only what is still mis"
    ):
        ckptcore.partial(place).save({"params": {"w": np.zeros(3)}, "new": np.ones(9)})
    with pytest.raises(TreeMismatchError, match="step: int 1 on session 0; int 2 on session 1"):
        ckptcore.partial(place).save({"step": 2})
    with pytest.raises(TreeMismatchError, match="params"):
        ckptcore.partial(place).save({"params": [1]})
    assert _beside(place) == before
    ckptcore.partial(place).save({"new": np.ones(9)})
    ckptcore.partial(place).finalize()
    loaded = ckptcore.load(place)
    assert loaded["params"]["w"].tolist() == [1] * 3 and loaded["new"].tolist() == [1] * 9 and loaded["step"] == 1


def test_stored_names_that_collide_between_sessions_are_refused(place: str) -> None:
    """Each session stores the names of its arrays in the form that other readers expect. These names must differ."""
    for layout, refused in (("safetensors", True), ("zarr", True), ("dcp", False), ("ocdbt", False)):
        location = f"{place}-{layout}"
        ckptcore.partial(location, layout=layout).save({"a.b": np.ones(2)})
        second = {"a": {"b": np.zeros(3)}}
        if refused:
            with pytest.raises(NameCollisionError, match=r"a\.b"):
                ckptcore.partial(location, layout=layout).save(second)
        else:
            ckptcore.partial(location, layout=layout).save(second)
        ckptcore.partial(location).finalize()
        assert ckptcore.verify(location).ok


def test_sessions_have_one_layout_with_one_set_of_options(place: str) -> None:
    layout = Zarr3Layout(chunk_bytes=64)
    ckptcore.partial(place, layout=layout).save({"a": np.arange(64.0)})
    for other in ("safetensors", "zarr3", Zarr3Layout(chunk_bytes=128)):
        with pytest.raises(CheckpointError, match="have the layout zarr3 .*pass the layout of the sessions"):
            ckptcore.partial(place, layout=other).save({"b": np.ones(2)})
    ckptcore.partial(place, layout=Zarr3Layout(chunk_bytes=64)).save({"b": np.arange(64.0)})
    with pytest.raises(CheckpointError, match="pass the layout of the sessions"):
        ckptcore.partial(place).finalize()
    ckptcore.partial(place, layout=layout).finalize()
    assert same_value(ckptcore.load(place), {"a": np.arange(64.0), "b": np.arange(64.0)})


def test_layouts_without_support_for_sessions_are_refused(place: str) -> None:
    with pytest.raises(CheckpointError, match="torch"):
        ckptcore.partial(place, layout="torch").save({"a": 1})


def test_a_partial_save_replaces_nothing_and_is_not_replaced(place: str) -> None:
    ckptcore.save(place, {"a": 1})
    with pytest.raises(CheckpointExistsError):
        ckptcore.partial(place).save({"b": 1})
    with pytest.raises(CheckpointNotFoundError, match="no partial save"):
        ckptcore.partial(place).finalize()
    ckptcore.delete(place)
    ckptcore.partial(place).save({"b": 1})
    other = f"{place}-other"
    ckptcore.save(other, {"c": 1})
    for replace in (
        lambda: ckptcore.save(place, {"a": 2}, overwrite="non-atomic"),
        lambda: ckptcore.copy(other, place, layout="safetensors", overwrite="non-atomic"),
        lambda: ckptcore.copy(other, place, overwrite="non-atomic"),
    ):
        with pytest.raises(CheckpointExistsError, match="not finalized"):
            replace()
    ckptcore.partial(place).finalize()
    assert ckptcore.load(place) == {"b": 1}


def test_delete_removes_an_unfinalized_partial_save(place: str) -> None:
    ckptcore.partial(place).save({"a": np.ones(3)})
    ckptcore.delete(place)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(place)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.delete(place)
    assert objects_at(place.rpartition("/")[0]) == {}
    ckptcore.save(place, {"b": 2})
    assert ckptcore.load(place) == {"b": 2}


def test_the_error_lists_the_latest_of_many_sessions(place: str) -> None:
    for number in range(9):
        ckptcore.partial(place).save({f"a{number}": np.ones(2)})
    with pytest.raises(UncommittedCheckpointError, match=r"9 complete sessions \(1 earlier, one at .* with 1 array"):
        ckptcore.load(place)


def test_a_partial_save_does_not_replace_other_files(place: str) -> None:
    """It does not even replace a checkpoint of other software. A save with `overwrite` would replace that."""
    store_at(place).put("model.safetensors", safetensors.numpy.save({"w": np.ones(3)}))
    before = objects_at(place)
    with pytest.raises(CheckpointExistsError, match=r"model\.safetensors"):
        ckptcore.partial(place).save({"b": 1})
    assert objects_at(place) == before


def test_a_checkpointer_keeps_an_unfinalized_partial_save(place: str) -> None:
    """For the `Checkpointer` it is neither a step nor the remains of a failed save."""
    run = place.rpartition("/")[0]
    ckptcore.partial(f"{run}/7").save({"a": np.ones(3)})
    for number in (5, 9):
        with ckptcore.Checkpointer(run, preservation_policy=ckptcore.policies.LatestN(1)) as checkpointer:
            assert 7 not in checkpointer.steps
            checkpointer.save(number, {"a": np.zeros(3)})
    with ckptcore.Checkpointer(run) as checkpointer, pytest.raises(CheckpointExistsError, match="not finalized"):
        checkpointer.save(7, {"a": np.zeros(3)}, overwrite=True)
        checkpointer.wait()
    ckptcore.partial(f"{run}/7").finalize()
    assert ckptcore.CheckpointReader(run).steps == (7, 9)
    assert same_value(ckptcore.CheckpointReader(run).load(7), {"a": np.ones(3)})


def test_a_checkpoint_in_a_subdirectory_is_kept(tmp_path: Path) -> None:
    """On object stores, `finalize` removes files that belong to no session, but not those of other checkpoints."""
    place = new_place("memory", tmp_path)
    below = f"{place}/tokenizer/1"

    class Broken(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            raise RuntimeError("the test lets it fail")

    ckptcore.partial(place).save({"a": np.ones(3)})
    ckptcore.save(below, {"t": np.ones(4)})
    with pytest.raises(RuntimeError, match="lets it fail"):
        ckptcore.partial(place, layout=Broken()).save({"b": np.ones(3)})
    ckptcore.partial(place).finalize()
    assert same_value(ckptcore.load(place), {"a": np.ones(3)})
    with pytest.raises(CheckpointExistsError, match="tokenizer/1"):
        ckptcore.delete(place)
    assert same_value(ckptcore.load(below), {"t": np.ones(4)})


def test_a_failed_session_does_not_count(place: str) -> None:
    class Broken(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            super().write(snapshot, store)
            raise RuntimeError("the test lets it fail")

    with pytest.raises(RuntimeError, match="lets it fail"):
        ckptcore.partial(place, layout=Broken()).save({"a": np.ones(3)})
    assert objects_at(place.rpartition("/")[0]) == {}, "a first session that fails leaves nothing"
    ckptcore.partial(place).save({"a": np.ones(3)})
    before = objects_at(place.rpartition("/")[0])
    with pytest.raises(RuntimeError, match="lets it fail"):
        ckptcore.partial(place, layout=Broken()).save({"b": np.ones(3)})
    after = objects_at(place.rpartition("/")[0])
    assert set(after) == set(before), "a session that fails leaves nothing"
    ckptcore.partial(place).save({"b": np.zeros(3)})
    ckptcore.partial(place).finalize()
    assert same_value(ckptcore.load(place), {"a": np.ones(3), "b": np.zeros(3)})


def test_a_partial_save_without_a_session_is_not_finalized(place: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no partial save"):
        ckptcore.partial(place).finalize()


def test_safetensors_and_torch_load_a_partial_save(tmp_path: Path) -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, np.int64)
    for layout in ("safetensors", "dcp"):
        ckptcore.partial(tmp_path / layout, layout=layout).save({"model": {"w": first}})
        ckptcore.partial(tmp_path / layout, layout=layout).save({"model": {"b": second}, "step": 5})
        ckptcore.partial(tmp_path / layout).finalize()
    index = json.loads((tmp_path / "safetensors" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == first.nbytes + second.nbytes
    arrays = {
        name: safetensors.numpy.load_file(tmp_path / "safetensors" / key)[name]
        for name, key in index["weight_map"].items()
    }
    assert same_value(arrays, {"model.w": first, "model.b": second})
    state = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int64)}, "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is a single process
        load_dcp(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state["step"] == 5
    assert np.array_equal(state["model"]["w"].numpy(), first) and np.array_equal(state["model"]["b"].numpy(), second)  # type: ignore[index]
    # Without our root, readers of these formats still find all arrays.
    for layout in ("safetensors", "dcp"):
        (tmp_path / layout / "checkpoint.json").unlink()
    assert ckptcore.metadata(tmp_path / "safetensors" / "model.safetensors.index.json").abstract is not None
    assert ckptcore.metadata(tmp_path / "dcp").abstract is not None


def test_no_element_is_written_twice(tmp_path: Path) -> None:
    """`finalize` does not rewrite the arrays of sessions."""
    place = new_place("memory", tmp_path)
    for number in range(3):
        ckptcore.partial(place).save({f"a{number}": np.ones(100_000)})
    before = objects_at(place)
    ckptcore.partial(place).finalize()
    after = objects_at(place)
    arrays = {key: data for key, data in before.items() if key.endswith(".safetensors")}
    assert len(arrays) == 3 and {key: after[key] for key in arrays} == arrays
    assert sum(len(data) for key, data in after.items() if key not in arrays) < 10_000


def test_leaving_the_block_waits_for_sessions_but_does_not_finalize(place: str) -> None:
    with ckptcore.partial(place) as session:
        session.save_async({"a": np.ones(3)})
    with pytest.raises(UncommittedCheckpointError, match="1 complete session"):
        ckptcore.load(place)
    with ckptcore.partial(place) as session:
        session.save_async({"b": np.ones(3)})
        session.finalize(metadata={"n": 1})
    assert sorted(ckptcore.load(place)) == ["a", "b"]


def test_a_session_waits_for_those_that_began_before_it(place: str) -> None:
    with ckptcore.partial(place) as session:
        session.save_async({"a": np.ones(3)})
        session.save({"b": np.zeros(2)})
        session.save_async({"c": np.ones(4)})
        session.save_async({"d": np.ones(5)})
        session.finalize()
    assert sorted(ckptcore.load(place)) == ["a", "b", "c", "d"]


def test_leaving_the_block_raises_unread_errors(place: str) -> None:
    class Broken(ckptcore.SafetensorsLayout):
        def write(self, snapshot: Any, store: Any) -> Any:
            raise OSError("the layout is broken")

    with pytest.raises(OSError, match="is broken"), ckptcore.partial(place, layout=Broken()) as session:
        session.save_async({"a": np.ones(3)})
    with pytest.raises(OSError, match="is broken"), ckptcore.partial(place, layout=Broken()) as session:
        handle = session.save_async({"a": np.ones(3)})
        handle.result()
    with pytest.raises(KeyError) as caught, ckptcore.partial(place, layout=Broken()) as session:
        session.save_async({"a": np.ones(3)})
        raise KeyError("the body")
    assert any("is broken" in note for note in caught.value.__notes__)
