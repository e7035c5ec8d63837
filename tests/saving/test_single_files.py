"""Saves to a single safetensors file, and refused locations: names of files that ckptcore does not write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from ckptcore_testing import run_ranks
from ckptcore_testing.faults import CrashAt, FaultPlan, SimulatedCrash
from ckptcore_testing.locations import InterruptedPlan, faulty_context, new_place, store_at, through
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.builtin.local import LocalStorage
from ckptcore.commit.rename import RenameMethod
from ckptcore.errors import CheckpointExistsError, InvalidLocationError, SaveLostError, StorageError

_STATE: Final[dict[str, Any]] = {
    "a.weight": np.arange(6.0).reshape(2, 3),
    "b/c": np.ones(3, ml_dtypes.bfloat16),
    "empty": np.zeros((0, 2), np.int8),
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_flat_dict_of_arrays_is_one_file(asynchronous: bool, top: str) -> None:
    place = f"{top}/model.safetensors"
    if asynchronous:
        state = {name: array.copy() for name, array in _STATE.items()}
        handle = ckptcore.save_async(place, state, metadata={"lr": "0.1"})
        state["a.weight"][:] = -1  # after the call, so it is not saved
        handle.result()
    else:
        ckptcore.save(place, _STATE, metadata={"lr": "0.1"})
    assert list(store_at(top).list()) == ["model.safetensors"]
    assert same_value({name: ckptcore.load(place)[name] for name in _STATE}, _STATE)
    data = store_at(top).get("model.safetensors")
    loaded = safetensors.torch.load(data)
    assert loaded["b/c"].dtype is torch.bfloat16 and loaded["a.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ckptcore.metadata(place).custom == {"format": "pt", "lr": "0.1"}
    with pytest.raises(CheckpointExistsError, match=r"model.safetensors exists; .*pass overwrite=True"):
        ckptcore.save(place, {"x": np.ones(2)})
    assert store_at(top).get("model.safetensors") == data
    ckptcore.save(place, {"x": np.ones(2)}, overwrite=True)
    assert ckptcore.load(place)["x"].tolist() == [1, 1]
    assert list(store_at(top).list()) == ["model.safetensors"]


def test_modules_and_tensors_in_a_single_file(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3))
    for number, state in enumerate((module, module.state_dict())):
        ckptcore.save(tmp_path / f"{number}.safetensors", state)
        loaded = safetensors.torch.load_file(tmp_path / f"{number}.safetensors")
        assert all(torch.equal(loaded[name], value) for name, value in module.state_dict().items())
        ckptcore.load_into(tmp_path / f"{number}.safetensors", module)


_NO_FILES: Final[dict[str, tuple[Any, str]]] = {
    "nested": ({"a": {"b": np.ones(2)}}, "a/b is not an entry of a flat dict"),
    "list": ([np.ones(2)], "is not an entry of a flat dict"),
    "array": (np.ones(2), "is not an entry of a flat dict"),
    "keys": ({1: np.ones(2)}, "is not an entry of a flat dict"),
    "value": ({"a": np.ones(2), "step": 3}, "step is no array"),
    "scalar": ({"a": np.float32(3)}, "a is a numpy.scalar"),
    "dtype": ({"a": np.ones(2, complex)}, "a is of dtype complex128, which safetensors lacks"),
    "reserved": ({"__metadata__": np.ones(2)}, "safetensors reserves"),
}


@pytest.mark.parametrize("case", _NO_FILES)
def test_other_states_are_refused_and_the_error_names_two_remedies(case: str, tmp_path: Path) -> None:
    state, reason = _NO_FILES[case]
    with pytest.raises(InvalidLocationError) as raised:
        ckptcore.save(tmp_path / "m.safetensors", state)
    assert reason in str(raised.value) and "safetensors.torch.save_file" in str(raised.value)
    assert not list(tmp_path.iterdir())
    way = str(raised.value).partition("Save to a directory, such as '")[2].partition("'")[0]
    ckptcore.save(way, state)
    assert way == str(tmp_path / "m")
    way = str(raised.value).partition("ends in '/', such as '")[2].partition("'")[0]
    ckptcore.save(way, state)
    assert (tmp_path / "m.safetensors/checkpoint.json").exists()
    if case == "scalar":
        assert "numpy.asarray" in str(raised.value)
        ckptcore.save(tmp_path / "s.safetensors", {"a": np.asarray(state["a"])})


@pytest.mark.parametrize(
    "save",
    [
        lambda place: ckptcore.save_checkpointables(place, {"a": _STATE}),
        lambda place: ckptcore.save(place, _STATE, layout="dcp"),
        lambda place: ckptcore.save(place, _STATE, metadata={"step": 3}),
        lambda place: ckptcore.save(place, _STATE, strategy=ckptcore.WithExports([])),
        lambda place: ckptcore.partial(place).save(_STATE),
        lambda place: ckptcore.Checkpointer(place),
        lambda place: ckptcore.copy(place.parent / "source", place),
        lambda place: ckptcore.copy(place.parent / "source", place, layout="dcp"),
        lambda place: ckptcore.copy(place.parent / "source", place, subtree=()),
        lambda place: ckptcore.save(
            place.parent / "n", _STATE, strategy=ckptcore.WithExports([ckptcore.Export(location=place)])
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_functions_that_write_a_directory_refuse_the_name_of_a_file(
    save: Callable[[Path], object], suffix: str, tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "source", _STATE)
    with pytest.raises(InvalidLocationError, match="Save to a directory, such as"):
        save(tmp_path / f"x{suffix}")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["x.pt", "x.PTH", "x.bin", "a.b.ckpt", "x.npz", "x.h5", "x.msgpack", "x.gguf"])
def test_files_of_other_libraries_are_not_written_as_directories(name: str, tmp_path: Path) -> None:
    for save in (ckptcore.save, ckptcore.save_async):
        with pytest.raises(InvalidLocationError, match="write the file with"):
            save(tmp_path / name, _STATE)
    assert not list(tmp_path.iterdir())
    ckptcore.save(f"{tmp_path}/{name}/", _STATE)  # the slash requests a directory
    assert ckptcore.load(tmp_path / name).keys() == _STATE.keys()


def test_a_job_refuses_to_write_a_single_file(tmp_path: Path) -> None:
    def work(rank: int, context: ckptcore.Context) -> str:
        with pytest.raises(ckptcore.CheckpointError) as raised:
            ckptcore.save(tmp_path / "m.safetensors", _STATE, context=context)
        return str(raised.value)

    assert all("2 processes save together" in text for text in run_ranks(2, work, timeout_seconds=60))
    assert not list(tmp_path.iterdir())


def test_a_directory_is_not_replaced_by_a_file(top: str) -> None:
    ckptcore.save(f"{top}/m.safetensors/", {"n": 1})
    with pytest.raises(CheckpointExistsError, match="is a directory"):
        ckptcore.save(f"{top}/m.safetensors", _STATE, overwrite=True)
    assert ckptcore.load(f"{top}/m.safetensors") == {"n": 1}


def test_an_empty_directory_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").mkdir()
    with pytest.raises(CheckpointExistsError, match="m.safetensors is an empty directory.* remove it"):
        ckptcore.save(tmp_path / "m.safetensors", _STATE, overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["m.safetensors"]


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_kill_leaves_the_old_file_or_the_new_one(replaces: bool, scheme: str, tmp_path: Path) -> None:
    outcomes: list[float | None] = []
    crashed = True
    while crashed:
        top = new_place(scheme, tmp_path / str(len(outcomes)))
        place = f"{top}/m.safetensors"
        if replaces:
            ckptcore.save(place, {"a": np.zeros(3)})
        plan = FaultPlan(CrashAt(len(outcomes)))
        with suppress(SimulatedCrash):
            ckptcore.save(through(place), {"a": np.ones(3)}, overwrite=replaces, context=faulty_context(place, plan))
        crashed = plan.crashed
        names = [name for name in store_at(top).list_names() if not name.startswith(".")]
        outcomes.append(float(ckptcore.load(place)["a"][0]) if names else None)
        ckptcore.save(place, {"a": np.full(3, 2.0)}, overwrite=True)
        assert ckptcore.load(place)["a"][0] == 2
        assert list(store_at(top).list_names()) == ["m.safetensors"]  # no hidden directory
    old = 0.0 if replaces else None
    assert outcomes[0] == old and outcomes[-1] == 1.0
    assert set(outcomes) == {old, 1.0} and outcomes == sorted(outcomes, key=lambda outcome: outcome == 1.0)


def test_a_file_that_appears_after_the_check_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = RenameMethod.lock_hidden

    def appear(method: RenameMethod, *args: Any, **options: Any) -> Any:
        (tmp_path / "a.safetensors").write_bytes(b"other")
        return lock(method, *args, **options)

    monkeypatch.setattr(RenameMethod, "lock_hidden", appear)
    with pytest.raises(CheckpointExistsError, match="another process has written it meanwhile"):
        ckptcore.save(tmp_path / "a.safetensors", _STATE)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"other"]


def test_a_save_of_a_file_that_fails_to_begin_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a.safetensors"
    ckptcore.save(place, _STATE)

    def fail(storage: LocalStorage, keys: Sequence[str]) -> dict[str, str]:
        raise StorageError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "stamps", fail)
        with pytest.raises(StorageError, match="is gone"):
            ckptcore.save(place, _STATE, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]  # no hidden directory


@pytest.mark.parametrize("replaces", [False, True])
def test_a_file_of_another_process_stays(replaces: bool, tmp_path: Path) -> None:
    """Other software writes the file between the checks and the commit."""
    place = f"file://{tmp_path}/m.safetensors"

    def save(plan: FaultPlan) -> None:
        if replaces:
            safetensors.numpy.save_file({"a": np.zeros(3)}, tmp_path / "m.safetensors")
        ckptcore.save(through(place), {"a": np.ones(3)}, overwrite=replaces, context=faulty_context(place, plan))

    def write_other() -> None:
        safetensors.numpy.save_file({"a": np.full(3, 7.0)}, tmp_path / "other")
        (tmp_path / "other").rename(tmp_path / "m.safetensors")

    plan = FaultPlan()
    save(plan)
    (tmp_path / "m.safetensors").unlink()
    commit = next(number for number, operation in enumerate(plan.operations) if operation.name == "replace")
    with pytest.raises(SaveLostError if replaces else CheckpointExistsError):
        save(InterruptedPlan(commit, write_other))
    assert ckptcore.load(tmp_path / "m.safetensors")["a"][0] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
