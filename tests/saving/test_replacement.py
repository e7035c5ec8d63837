"""Replacement and deletion of checkpoints of any software.

A checkpoint is removed as a whole, and never together with another checkpoint inside it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import orbax.checkpoint  # type: ignore[import-untyped]  # it has no types
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint
from ckptcore_testing import run_ranks
from ckptcore_testing.faults import CrashAt, FaultPlan, SimulatedCrash
from ckptcore_testing.locations import faulty_context, new_place, store_at, through

import ckptcore
from ckptcore.commit.root import ROOT_KEY, Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.errors import (
    AtomicityError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidLocationError,
    UnsupportedLeafError,
)
from ckptcore.model import Box
from ckptcore.policies import LatestN
from ckptcore.results import SaveHandle

_Save = Callable[[str], object]
_KeepingSave = Callable[..., object]


def _finish(save: Callable[..., SaveHandle]) -> _Save:
    return lambda location: save(location, {"a": {"n": 1}}).result()


_SAVES: dict[str, _Save] = {
    "save": lambda location: ckptcore.save(location, {"n": 1}),
    "save_async": _finish(ckptcore.save_async),
    "save_checkpointables": lambda location: ckptcore.save_checkpointables(location, {"a": {"n": 1}}),
    "save_checkpointables_async": _finish(ckptcore.save_checkpointables_async),
    "partial": lambda location: ckptcore.partial(location).save({"n": 1}),
}


@pytest.mark.parametrize("how", _SAVES)
@pytest.mark.parametrize("around", ["checkpoint", "composite", "claim"])
def test_a_save_into_a_checkpoint_is_refused(how: str, around: str, top: str) -> None:
    if around == "claim" and top.startswith("file"):
        around = "checkpoint"  # in a file system the claim is next to the checkpoint
    if around == "checkpoint":
        ckptcore.save(f"{top}/x", {"n": 0})
    elif around == "composite":
        ckptcore.save_checkpointables(f"{top}/x", {"model": {"n": 0}})
    else:
        store_at(f"{top}/x").put("checkpoint.json", encode_claim(Claim("0123456789abcdef", "2020-01-01")))
    before = sorted(store_at(f"{top}/x").list())
    save = _SAVES[how]
    with pytest.raises(InvalidLocationError, match=r"cannot save to .*/x/1: it is inside .*/x, .*save outside it"):
        save(f"{top}/x/1")
    assert sorted(store_at(f"{top}/x").list()) == before
    ckptcore.save(f"{top}/y", {"n": 2})


@pytest.mark.parametrize("remove", ["delete", "save", "save_checkpointables", "copy", "convert"])
@pytest.mark.parametrize("around", ["checkpoint", "composite"])
def test_a_checkpoint_inside_another_is_never_removed_with_it(remove: str, around: str, top: str) -> None:
    """Another tool can write the inner checkpoint, or a save into a subdirectory that the outer one does not use."""
    if around == "checkpoint":
        ckptcore.save(f"{top}/x", {"n": 0})
    else:
        ckptcore.save_checkpointables(f"{top}/x", {"model": {"n": 0}, "own": ckptcore.PerProcess({"n": 0})})
    ckptcore.save(f"{top}/source", {"n": 1})
    ckptcore.save(f"{top}/x/a/1", {"n": 5})
    removals: dict[str, Callable[[], object]] = {
        "delete": lambda: ckptcore.delete(f"{top}/x"),
        "save": lambda: ckptcore.save(f"{top}/x", {"n": 1}, overwrite="non-atomic"),
        "save_checkpointables": lambda: ckptcore.save_checkpointables(
            f"{top}/x", {"other": {"n": 1}}, overwrite="non-atomic"
        ),
        "copy": lambda: ckptcore.copy(f"{top}/source", f"{top}/x", overwrite="non-atomic"),
        "convert": lambda: ckptcore.copy(f"{top}/source", f"{top}/x", layout="dcp", overwrite="non-atomic"),
    }
    with pytest.raises(CheckpointExistsError, match=r"/x has another checkpoint in its directory \(.*/x/a/1\)"):
        removals[remove]()
    assert ckptcore.load(f"{top}/x/a/1") == {"n": 5}
    ckptcore.delete(f"{top}/x/a/1")
    removals[remove]()
    assert not list(store_at(f"{top}/x/a").list())


def test_a_checkpoint_that_an_object_wrote_belongs_to_the_outer_checkpoint(top: str) -> None:
    """A checkpoint among the files of an object is deleted together with the checkpoint of the object."""

    class SavesItself:
        def save(self, directory: Path) -> None:
            ckptcore.save(directory / "a" / "b", {"n": 1})

        def load(self, directory: Path) -> None:
            raise NotImplementedError

    ckptcore.save_checkpointables(f"{top}/x", {"model": {"n": 0}, "files": SavesItself()})
    ckptcore.save_checkpointables(f"{top}/x", {"files": SavesItself()}, overwrite="non-atomic")
    ckptcore.delete(f"{top}/x")
    assert not list(store_at(f"{top}/x").list())


@pytest.mark.parametrize("other_files", [False, True])
def test_retention_keeps_a_step_with_another_checkpoint_or_files_inside(
    other_files: bool, top: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention deletes a step to which plain files were added only if the owner of the run allows it."""
    with ckptcore.Checkpointer(top, preservation_policy=LatestN(2), other_files=other_files) as run:
        for step in (1, 2):
            run.save(step, {"n": step})
        run.wait()
        ckptcore.save(f"{top}/1/a/b", {"n": 5})
        store_at(f"{top}/2").put("notes.txt", b"mine")
        for step in (3, 4, 5):
            run.save(step, {"n": step})
        run.wait()
        with pytest.raises(CheckpointExistsError, match="/1 has another checkpoint"):
            run.delete(1)
            run.wait()
    assert ckptcore.CheckpointReader(top).steps == ((1, 4, 5) if other_files else (1, 2, 4, 5))
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("step 2" in text and "(notes.txt)" in text for text in warned) is not other_files
    assert ckptcore.load(f"{top}/1/a/b") == {"n": 5}
    assert any("step 1" in text for text in warned)


def _write_dcp(location: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        torch.distributed.checkpoint.save(  # type: ignore[attr-defined]  # it is public
            {"a": torch.ones(5)}, checkpoint_id=str(location), no_dist=True
        )


def _write_orbax(location: Path) -> None:
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(location, {"a": np.ones(5, np.float32)})


def _write_orbax_items(location: Path) -> None:
    items = orbax.checkpoint.args.Composite(
        model=orbax.checkpoint.args.StandardSave({"a": np.ones(5)}), notes=orbax.checkpoint.args.JsonSave({"n": 1})
    )
    with orbax.checkpoint.Checkpointer(orbax.checkpoint.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(location, items)


_FOREIGN = {"dcp": _write_dcp, "orbax": _write_orbax, "orbax items": _write_orbax_items}


def _place(scheme: str, kind: str, tmp_path: Path) -> str:
    """Write a checkpoint of other software to a storage. Return its location."""
    location = tmp_path / "run" / "step"
    _FOREIGN[kind](location)
    if scheme == "file":
        return f"file://{location}"
    place = new_place(scheme, tmp_path)
    for file in location.rglob("*"):
        if file.is_file():
            store_at(place).put(str(file.relative_to(location)), file.read_bytes())
    return place


@pytest.mark.parametrize("kind", _FOREIGN)
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_checkpoint_of_other_software_is_replaced(kind: str, scheme: str, tmp_path: Path) -> None:
    place = _place(scheme, kind, tmp_path)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        ckptcore.save(place, {"n": 2})
    if scheme == "memory":
        with pytest.raises(AtomicityError):
            ckptcore.save(place, {"n": 2}, overwrite=True)
    ckptcore.save(place, {"n": 2}, overwrite=True if scheme == "file" else "non-atomic")
    assert ckptcore.load(place) == {"n": 2}
    assert sorted(store_at(place).list()) == ["checkpoint.json", "model.safetensors"]


@pytest.mark.parametrize(
    "how", ["save_async", "save_checkpointables", "copy", "convert", "consolidate", "Checkpointer"]
)
def test_all_functions_that_write_replace_a_checkpoint_of_other_software(how: str, tmp_path: Path) -> None:
    place = _place("file", "dcp", tmp_path)
    source = f"{tmp_path}/source"
    ckptcore.save(source, {"a": np.zeros(3)})
    if how == "save_async":
        ckptcore.save_async(place, {"n": 2}, overwrite=True).result()
    elif how == "save_checkpointables":
        ckptcore.save_checkpointables(place, {"a": {"n": 2}}, overwrite=True)
    elif how == "copy":
        ckptcore.copy(source, place, overwrite=True)
    elif how == "convert":
        ckptcore.copy(source, place, layout="ocdbt", overwrite=True)
    elif how == "consolidate":
        ckptcore.copy(source, place, subtree=(), overwrite=True)
    else:
        (tmp_path / "run" / "step").rename(tmp_path / "run" / "1")
        place = f"{tmp_path}/run/1"
        with ckptcore.Checkpointer(tmp_path / "run") as run:
            run.save(1, {"n": 2}, overwrite=True)
    assert not store_at(place).list_names()[0].startswith(".metadata")
    assert not [key for key in store_at(place).list() if key.endswith(".distcp")]


def _hugging_face(location: Path) -> None:
    """Write a model and a tokenizer. Only the file of the model is a checkpoint."""
    ckptcore.save(location, {"a": np.ones(5)})
    (location / "checkpoint.json").unlink()
    (location / "tokenizer.json").write_text("{}")


def _torch_files(location: Path) -> None:
    location.mkdir(parents=True)
    torch.save({"a": torch.ones(5)}, location / "pytorch_model.bin")
    (location / "notes.txt").write_text("mine")


def _run_of_orbax(location: Path) -> None:
    _write_orbax(location / "1")
    _write_orbax(location / "2")


def _run_of_dcp(location: Path) -> None:
    _write_dcp(location / "best")
    _write_dcp(location / "last")


def _unfinished_dcp(location: Path) -> None:
    _write_dcp(location)
    (location / ".metadata").unlink()


@pytest.mark.parametrize("write", [_hugging_face, _torch_files, _run_of_orbax, _run_of_dcp, _unfinished_dcp])
def test_a_directory_that_is_no_checkpoint_is_not_replaced(write: Callable[[Path], None], tmp_path: Path) -> None:
    location = tmp_path / "x"
    write(location)
    before = {path: path.read_bytes() for path in location.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointExistsError, match="a save does not replace them"):
        ckptcore.save(location, {"n": 2}, overwrite=True)
    assert {path: path.read_bytes() for path in location.rglob("*") if path.is_file()} == before


_INDEXES: Final[dict[str, set[str]]] = {
    "safetensors": {"model.safetensors.index.json"}, "dcp": {".metadata"}, "zarr3": set()
}  # fmt: skip
"""By layout, the files by which other software finds those with names of their own."""


def test_other_files_stay_in_place_if_they_are_kept(tmp_path: Path) -> None:
    location, outside = tmp_path / "x", tmp_path / "outside"
    outside.mkdir()
    (location / "logs").mkdir(parents=True)
    (location / "logs/1.txt").write_text("log")
    (location / "model.safetensors").write_bytes(b"replaced, because the checkpoint has a file of this name")
    (location / "directory").symlink_to(outside)
    (location / "broken").symlink_to("missing")
    names = {"checkpoint.json", "logs", "directory", "broken"}
    saves: list[_KeepingSave] = [ckptcore.save, ckptcore.save, lambda *a, **k: ckptcore.save_async(*a, **k).result()]
    for number, (save, layout) in enumerate(zip(saves, ("safetensors", "dcp", "zarr3"), strict=True)):
        state = {"n": number, "w": np.full(3, number)}
        save(location, state, layout=layout, overwrite="keep-other-files")
        own = {key.partition("/")[0] for key in ckptcore.metadata(location).objects} | _INDEXES[layout]
        assert {path.name for path in location.iterdir()} == names | own
        assert (location / "logs/1.txt").read_text() == "log"
        assert (location / "directory").readlink() == outside
        assert ckptcore.load(location)["n"] == number
        assert ckptcore.verify(location).problems == ()
    objects = {"model": {"n": 3}, "own": ckptcore.PerProcess({"n": 4})}
    ckptcore.save_checkpointables(location, objects, overwrite="keep-other-files")
    assert {path.name for path in location.iterdir()} == names | {"model", "own"}
    ckptcore.save(location, {"n": 5}, overwrite="keep-other-files")
    own = set(ckptcore.metadata(location).objects)
    assert {path.name for path in location.iterdir()} == names | _INDEXES["safetensors"] | own
    with pytest.raises(CheckpointExistsError, match=r"no checkpoint wrote \(logs/1.txt\)"):
        ckptcore.save(location, {"n": 6}, overwrite=True)
    ckptcore.save(location, {"n": 6}, overwrite="with-other-files")
    assert {path.name for path in location.iterdir()} == {"checkpoint.json", "model.safetensors"}


@pytest.mark.parametrize("layout", ["zarr3", "ocdbt"])
def test_layouts_with_fixed_names_of_files_are_refused_before_anything_is_written(layout: str, tmp_path: Path) -> None:
    location = tmp_path / "x"
    ckptcore.save(location, {"n": 0}, layout=layout)
    (location / "notes.txt").write_text("mine")
    before = sorted(location.rglob("*"))
    plan = FaultPlan()
    context = faulty_context(f"file://{location}", plan)
    with pytest.raises(CheckpointExistsError, match="layout dcp or safetensors"):
        ckptcore.save(
            through(f"file://{location}"), {"n": 1}, layout=layout, overwrite="keep-other-files", context=context
        )
    assert not [operation for operation in plan.operations if operation.changes]
    assert sorted(location.rglob("*")) == before and ckptcore.load(location) == {"n": 0}


def test_checkpointables_do_not_replace_directories_next_to_other_files(tmp_path: Path) -> None:
    (tmp_path / "x/model").mkdir(parents=True)
    (tmp_path / "x/model/notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"names of the new checkpoint \(model\)"):
        ckptcore.save_checkpointables(tmp_path / "x", {"model": {"n": 1}}, overwrite="keep-other-files")
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "model", "notes.txt"]


def test_a_file_with_the_name_of_an_object_stops_the_commit(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "x", {"n": 0})
    (tmp_path / "x/zarr.json").write_text("mine")
    with pytest.raises(CheckpointExistsError, match=r"names of the new checkpoint \(zarr.json\)"):
        ckptcore.save(tmp_path / "x", {"n": 1}, layout="zarr3", overwrite="keep-other-files")
    assert ckptcore.load(tmp_path / "x") == {"n": 0}
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "checkpoint.json", "model.safetensors", "x", "zarr.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"layout": "dcp"}, {"layout": "safetensors"}, {"subtree": ()}, {}],
    ids=["dcp", "one", "subtree", "copy"],
)
def test_copies_keep_other_files_too(options: dict[str, Any], tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "x", {"n": 0}, layout=options.get("layout", "dcp"))
    (tmp_path / "x/notes.txt").write_text("mine")
    for number in (1, 2):
        ckptcore.save(tmp_path / "source", {"n": number}, overwrite=True)
        if number == 2 and not options:
            with pytest.raises(CheckpointExistsError, match="model.safetensors"):
                ckptcore.copy(tmp_path / "source", tmp_path / "x", overwrite="keep-other-files")
            number = 1
        else:
            ckptcore.copy(tmp_path / "source", tmp_path / "x", overwrite="keep-other-files", **options)
        assert ckptcore.load(tmp_path / "x") == {"n": number} and ckptcore.verify(tmp_path / "x").ok
        own = set(ckptcore.metadata(tmp_path / "x").objects)
        names = {path.name for path in (tmp_path / "x").iterdir()} - own
        assert names - {".metadata", "model.safetensors.index.json"} == {"checkpoint.json", "notes.txt"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "x"]


@pytest.mark.parametrize("layout", ["dcp", ckptcore.SafetensorsLayout(max_file_bytes=10)], ids=["dcp", "two files"])
def test_a_copy_replaces_an_earlier_copy_next_to_other_files(layout: Any, tmp_path: Path) -> None:
    for name in ("source", "x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text(name)
    for number in (1, 2, 3):
        state = {"a": np.full(3, number), "b": np.full(3, number)}
        ckptcore.save(tmp_path / "source", state, layout=layout, overwrite="keep-other-files")
        (tmp_path / "source/notes.txt").unlink(missing_ok=True)  # otherwise the copy would include it
        ckptcore.copy(tmp_path / "source", tmp_path / "x", overwrite="keep-other-files")
        assert np.array_equal(ckptcore.load(tmp_path / "x")["b"], state["b"]) and ckptcore.verify(tmp_path / "x").ok
        files = {path.name for path in (tmp_path / "source").iterdir()}
        assert {path.name for path in (tmp_path / "x").iterdir()} == {*files, "notes.txt"}
        (tmp_path / "source/notes.txt").write_text("source")
    assert (tmp_path / "x/notes.txt").read_text() == "x"
    (index,) = files & {".metadata", "model.safetensors.index.json"}
    assert (tmp_path / "x" / index).read_bytes() == (tmp_path / "source" / index).read_bytes()


def test_processes_save_next_to_other_files(tmp_path: Path) -> None:
    state = [np.arange(8).reshape(4, 2), np.arange(4)]

    def save(layout: str, version: int) -> list[type[BaseException] | None]:
        def work(rank: int, context: ckptcore.Context) -> type[BaseException] | None:
            first = 2 * rank
            box = Box((first, 0), (first + 2, 2))
            shard = ckptcore.ArrayShard(box, (version * state[0])[first : first + 2])
            array = ckptcore.ShardedArray((4, 2), "int64", (shard,))
            try:
                ckptcore.save(
                    tmp_path / "x", {"w": array}, layout=layout, overwrite="keep-other-files", context=context
                )
            except CheckpointError as error:
                return type(error)
            return None

        return list(run_ranks(2, work, timeout_seconds=60))

    (tmp_path / "x").mkdir()
    (tmp_path / "x/notes.txt").write_text("mine")
    for version in (1, 2):
        assert save("dcp", version) == [None, None]
        assert np.array_equal(ckptcore.load(tmp_path / "x")["w"], version * state[0])
        assert len(list((tmp_path / "x").iterdir())) == len([".metadata", "checkpoint.json", "notes.txt", "0", "1"])
    assert UnsupportedLeafError in save("safetensors", 3)
    assert np.array_equal(ckptcore.load(tmp_path / "x")["w"], 2 * state[0])
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_object_storage_refuses_other_files() -> None:
    location = new_place("memory", Path("other-files"))
    store_at(location).put("notes.txt", b"mine")
    with pytest.raises(CheckpointExistsError, match=r"contains files that do not belong to a checkpoint \(notes.txt\)"):
        ckptcore.save(location, {"n": 1}, overwrite="keep-other-files")
    assert list(store_at(location).list()) == ["notes.txt"]


def test_a_kill_leaves_the_checkpoint_of_other_software_or_the_new_one(tmp_path: Path) -> None:
    sums: list[float] = []
    crashed = True
    while crashed:
        location = tmp_path / str(len(sums)) / "step"
        _write_dcp(location)
        plan = FaultPlan(CrashAt(len(sums)))
        place = f"file://{location}"
        with suppress(SimulatedCrash):
            ckptcore.save(through(place), {"a": np.zeros(5)}, overwrite=True, context=faulty_context(place, plan))
        crashed = plan.crashed
        sums.append(float(np.asarray(ckptcore.load(place)["a"]).sum()))
        ckptcore.save(place, {"n": 3}, overwrite=True)
        assert [path.name for path in location.parent.iterdir()] == ["step"]
    assert sums == sorted(sums, reverse=True)
    assert set(sums) == {0.0, 5.0} and len(sums) > 20


def test_the_next_save_removes_an_export_that_a_killed_deletion_left_inside(top: str) -> None:
    """The time of the save is unknown, because the claim of the deletion replaced the root."""
    place = f"{top}/c"
    ckptcore.save(
        place, {"a": np.ones(3)}, strategy=ckptcore.WithExports([ckptcore.Export(location=f"{place}/weights")])
    )
    store_at(place).put(ROOT_KEY, encode_claim(Claim("0123456789abcdef", "2024-01-01T00:00:00+00:00")))
    ckptcore.save(place, {"a": np.zeros(3)}, overwrite="non-atomic")
    assert ckptcore.load(place)["a"].tolist() == [0, 0, 0]
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(f"{place}/weights")


def test_a_copy_inside_a_checkpoint_is_not_removed_with_it(top: str) -> None:
    place = f"{top}/c"
    ckptcore.save(place, {"a": np.ones(3)}, metadata={"owned": True})
    ckptcore.copy(place, f"{place}/backup")
    with pytest.raises(CheckpointExistsError, match="c/backup"):
        ckptcore.save(place, {"a": np.zeros(3)}, overwrite="non-atomic")
    assert ckptcore.load(f"{place}/backup")["a"].tolist() == [1, 1, 1]


def test_deleting_several_checkpointables_reads_only_the_heads_of_their_roots(tmp_path: Path) -> None:
    objects = {f"m{number}": {"a": np.full(300, number)} for number in range(12)}
    place = f"memory://{tmp_path.name}/c"
    ckptcore.save_checkpointables(place, objects)
    plan = FaultPlan()
    ckptcore.delete(through(place), context=faulty_context(place, plan))
    gets = [
        operation for operation in plan.operations if operation.name == "get" and operation.keys[0].startswith("c/m")
    ]
    assert len(gets) == len(objects)


def test_new_files_next_to_a_file_of_other_software_do_not_disturb_its_reads(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(300), "b": np.ones(3)}, tmp_path / "model.safetensors")
    for number, part in enumerate(ckptcore.open(tmp_path).iter_boxes()):
        (tmp_path / f"out-{number}").write_bytes(part.elements.tobytes())
    ckptcore.copy(tmp_path, tmp_path / "copied", layout="safetensors")
    assert sorted(ckptcore.load(tmp_path / "copied")) == ["a", "b"]
