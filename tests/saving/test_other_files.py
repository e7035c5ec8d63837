"""Other files in the directory of a checkpoint: files that no save wrote are deleted only on request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ckptcore_integrations.added_files import SaveWithFiles
from ckptcore_testing import ThreadJob
from ckptcore_testing.faults import CrashAt, FaultPlan, SimulatedCrash
from ckptcore_testing.locations import faulty_context, new_place, store_at, through

import ckptcore
from ckptcore.commit.contents import find_other_files
from ckptcore.commit.location import resolve_location
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.context import default_context
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError
from ckptcore.policies import LatestN
from ckptcore.protocols import Coordinator
from ckptcore.runtime import runtime_of

_STATE: Final = {"w": np.ones((2, 3)), "n": 1}


def _others(place: str | Path) -> list[str]:
    return list(find_other_files(resolve_location(place, runtime_of(default_context()).storages).store))


class _WritesFiles:
    def save(self, directory: Path) -> None:
        (directory / "a").mkdir()
        (directory / "a/b.txt").write_text("own")
        ckptcore.save(directory / "inner", {"n": 1})

    def load(self, directory: Path) -> None:
        raise NotImplementedError


_OBJECTS: Final[dict[str, object]] = {"model": _STATE, "own": ckptcore.PerProcess({"n": 1}), "files": _WritesFiles()}


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt", "zarr", "zarr3"])
def test_every_file_of_a_save_belongs_to_its_checkpoint(layout: str, tmp_path: Path) -> None:
    place = tmp_path / "x"
    ckptcore.save(place, _STATE, layout=layout)
    assert _others(place) == []
    ckptcore.save(place, _STATE, layout=layout, overwrite=True)
    ckptcore.save_checkpointables(place, _OBJECTS, layout=layout, overwrite=True)
    ckptcore.delete(place / "own")  # leaves a mark, which belongs to the checkpoint, too
    assert _others(place) == []
    ckptcore.save_checkpointables(
        place, _OBJECTS, layout=layout, overwrite=True, strategy=SaveWithFiles(files={"a/config.json": b"{}"}),
    )  # fmt: skip
    for name in (
        ".nfs00000000000000012", "@eaDir/a.txt", "desktop.ini", "Thumbs.db", ".AppleDouble/a", ".~lock.notes.odt#",
        ".ipynb_checkpoints/a-checkpoint.json", ".Trash-1000/a", ".snapshot/a", ".directory", "lost+found/a",
        ".fseventsd/a", ".Spotlight-V100/a",
    ):  # fmt: skip
        store_at(str(place)).put(name, b"of the system")
    assert _others(place) == []
    for added in ("config.json", "checkpoint.pt", "model/vocab.txt", "files/a/c.txt"):
        (place / added).write_text("mine")
    assert _others(place) == ["checkpoint.pt", "config.json", "files/a/c.txt", "model/vocab.txt"]


def test_an_export_inside_a_checkpoint_belongs_to_it(tmp_path: Path) -> None:
    place = tmp_path / "x"
    export = ckptcore.WithExports([ckptcore.Export(location=place / "weights")])
    ckptcore.save(place, _STATE, strategy=export)
    assert _others(place) == []
    (place / "weights/tokenizer.json").write_text("{}")
    assert _others(place) == ["weights/tokenizer.json"]


_REMOVALS: Final[dict[str, Callable[[str, str], object]]] = {
    "save": lambda place, _: ckptcore.save(place, {"n": 2}, overwrite=True),
    "save_async": lambda place, _: ckptcore.save_async(place, {"n": 2}, overwrite=True).result(),
    "best-effort": lambda place, _: ckptcore.save(place, {"n": 2}, overwrite="best-effort"),
    "non-atomic": lambda place, _: ckptcore.save(place, {"n": 2}, overwrite="non-atomic"),
    "composite": lambda place, _: ckptcore.save_checkpointables(place, {"a": {"n": 2}}, overwrite="non-atomic"),
    "copy": lambda place, source: ckptcore.copy(source, place, overwrite="non-atomic"),
    "convert": lambda place, source: ckptcore.copy(source, place, layout="dcp", overwrite="non-atomic"),
    "consolidate": lambda place, source: ckptcore.copy(source, place, subtree=(), overwrite="non-atomic"),
    "delete": lambda place, _: ckptcore.delete(place),
}


@pytest.mark.parametrize("how", _REMOVALS)
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_nothing_deletes_the_files_of_the_user(how: str, scheme: str, tmp_path: Path) -> None:
    top = new_place(scheme, tmp_path)
    place, source = f"{top}/x", f"{top}/source"
    ckptcore.save(source, {"n": 3})
    ckptcore.save(place, {"n": 1})
    for number in range(7):
        store_at(place).put(f"{number}.json", b"{}")
    before = sorted(store_at(place).list())
    if scheme == "memory" and how in ("save", "save_async", "best-effort"):
        how = "non-atomic"  # the only mode that replaces a checkpoint in memory
    with pytest.raises(CheckpointExistsError) as raised:
        _REMOVALS[how](place, source)
    message = str(raised.value)
    assert "no checkpoint wrote (0.json, 1.json, 2.json, 3.json, 4.json and 2 more)" in message
    assert "Nothing was changed" in message and sorted(store_at(place).list()) == before
    assert ("overwrite='keep-other-files'" in message) is (how != "delete" and scheme == "file")
    # The remedies in the message work.
    if "keep-other-files" in message and how != "composite":
        ckptcore.save(place, {"n": 2}, overwrite="keep-other-files")
        assert ckptcore.load(place) == {"n": 2} and len(_others(place)) == 7
    text = message.partition("ckptcore.delete(")[2].partition(", other_files=True)")[0]
    ckptcore.delete(text.strip("'"), other_files=True)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(place)
    assert not list(store_at(place).list())


def test_all_ranks_refuse_before_anything_is_written(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "x", _STATE)
    (tmp_path / "x/tokenizer.json").write_text("{}")
    plan = FaultPlan()
    place = f"file://{tmp_path}/x"

    def work(coordinator: Coordinator) -> str:
        job = ckptcore.context.JobOptions(coordinator=coordinator)
        context = dataclasses.replace(faulty_context(place, plan), job=job)
        with pytest.raises(ckptcore.CheckpointError) as raised:
            ckptcore.save(through(place), _STATE, layout="dcp", overwrite=True, context=context)
        return str(raised.value)

    assert all("(tokenizer.json)" in text for text in ThreadJob(2, timeout_seconds=60).run(work))
    assert not [operation for operation in plan.operations if operation.changes]


def test_a_damaged_root_is_replaced_because_its_files_are_unknown(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "x", _STATE)
    (tmp_path / "x/checkpoint.json").write_text("{")
    ckptcore.save(tmp_path / "x", {"n": 2}, overwrite=True)
    assert ckptcore.load(tmp_path / "x") == {"n": 2}


_USERS: Final = ("tokenizer.json", "logs/1.txt")


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "ocdbt", "zarr", "zarr3", "members"])
def test_files_of_a_user_next_to_a_root_that_cannot_be_read_stay(layout: str, tmp_path: Path) -> None:
    """A checkpoint without a readable root can be replaced and deleted only if its files may come from saves."""
    place = tmp_path / "x"
    if layout == "members":
        ckptcore.save_checkpointables(place, _OBJECTS, layout="zarr3")
        (place / "checkpoint.json").unlink()
    else:
        ckptcore.save(place, _STATE, layout=layout)
        (place / "checkpoint.json").write_text("{")
    assert _others(place) == []
    for name in _USERS:
        store_at(str(place)).put(name, b"mine")
    removals: list[Callable[[], object]] = [lambda: ckptcore.save(place, _STATE, overwrite=True)]
    if layout != "members":
        removals.append(lambda: ckptcore.delete(place))
    for remove in removals:
        with pytest.raises(CheckpointExistsError, match=r"no checkpoint wrote \(logs/1.txt, tokenizer.json\)"):
            remove()
    assert {name for name in _USERS if (place / name).exists()} == {*_USERS}
    ckptcore.save(place, _STATE, overwrite="with-other-files")
    assert _others(place) == []


def test_files_of_a_user_next_to_the_claim_of_a_failed_save_stay(tmp_path: Path) -> None:
    place = new_place("memory", tmp_path)
    claim = encode_claim(Claim("0123456789abcdef", "2020-01-01"))
    for key, data in {"checkpoint.json": claim, "model.safetensors": b"", "files/of/an/object": b""}.items():
        store_at(place).put(key, data)
    store_at(place).put("tokenizer.json", b"mine")
    removals: list[Callable[[], object]] = [lambda: ckptcore.save(place, _STATE), lambda: ckptcore.delete(place)]
    for remove in removals:
        with pytest.raises(CheckpointExistsError, match=r"no checkpoint wrote \(tokenizer.json\)"):
            remove()
    store_at(place).delete(["tokenizer.json"])
    ckptcore.save(place, _STATE)
    assert sorted(store_at(place).list()) == ["checkpoint.json", "model.safetensors"]


def _write_dcp(place: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(5)}, checkpoint_id=str(place), no_dist=True)  # type: ignore[attr-defined]  # it is public


def _write_orbax(place: Path) -> None:
    import orbax.checkpoint  # type: ignore[import-untyped]  # it has no types

    items: Any = orbax.checkpoint.args.Composite(model=orbax.checkpoint.args.StandardSave({"a": np.ones(5)}))
    with orbax.checkpoint.Checkpointer(orbax.checkpoint.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(place, items)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("write", [_write_dcp, _write_orbax])
def test_files_next_to_a_checkpoint_of_other_software_stay(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "x")
    (tmp_path / "x/config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointExistsError, match=r"no checkpoint wrote \(config.json\)"):
        ckptcore.save(tmp_path / "x", _STATE, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "x/config.json").unlink()
    ckptcore.save(tmp_path / "x", {"n": 2}, overwrite=True)
    assert ckptcore.load(tmp_path / "x") == {"n": 2}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("write", "added"),
    [
        (_write_dcp, ["model.safetensors", "model.safetensors.index.json", "export/pytorch_model.bin"]),
        (_write_orbax, ["tokenizer/vocab.txt", "eval/results.json", "logs/d/x"]),
    ],
)
def test_only_the_files_of_other_software_belong_to_its_checkpoint(
    write: Callable[[Path], None], added: list[str], tmp_path: Path
) -> None:
    """A user may give files in other directories the names that the software uses."""
    write(tmp_path / "x")
    for name in added:
        store_at(f"{tmp_path}/x").put(name, b"mine")
    with pytest.raises(CheckpointExistsError, match="no checkpoint wrote") as raised:
        ckptcore.save(tmp_path / "x", _STATE, overwrite=True)
    assert all(name in str(raised.value) for name in added)
    for name in added:
        (tmp_path / "x" / name).unlink()
    ckptcore.save(tmp_path / "x", _STATE, overwrite=True)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["checkpoint.json", "model.safetensors"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["dcp", "safetensors"])
@pytest.mark.parametrize("write", [_write_dcp, _write_orbax])
def test_the_checkpoint_of_other_software_is_deleted_even_if_other_files_are_kept(
    layout: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    """Otherwise the other software would load the old values."""
    write(tmp_path / "x")
    (tmp_path / "x/notes.txt").write_text("mine")
    before = {key for key in store_at(f"{tmp_path}/x").list() if key != "notes.txt"}
    ckptcore.save(tmp_path / "x", _STATE, layout=layout, overwrite="keep-other-files")
    assert before & {*store_at(f"{tmp_path}/x").list()} <= {".metadata"}  # the new checkpoint has this name, too
    assert (tmp_path / "x/notes.txt").read_text() == "mine"
    assert ckptcore.load(tmp_path / "x")["n"] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_remedies_next_to_other_software_work(tmp_path: Path) -> None:
    _write_dcp(tmp_path / "x")
    (tmp_path / "x/notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="pass overwrite='with-other-files'") as raised:
        ckptcore.save(tmp_path / "x", _STATE, overwrite=True)
    assert "ckptcore.delete" not in str(raised.value)  # `delete` refuses checkpoints of other software
    ckptcore.save(tmp_path / "x", _STATE, overwrite="with-other-files")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["checkpoint.json", "model.safetensors"]


@pytest.mark.parametrize("overwrite", [True, "non-atomic"])
def test_a_copy_over_a_copy_of_the_same_save_names_the_files_that_prevent_it(overwrite: Any, top: str) -> None:
    ckptcore.save(f"{top}/a", _STATE)
    ckptcore.copy(f"{top}/a", f"{top}/b")
    store_at(f"{top}/b").put("notes.txt", b"mine")
    if overwrite is True and top.startswith("memory"):
        overwrite = "non-atomic"
    with pytest.raises(CheckpointExistsError, match=r"no checkpoint wrote \(notes.txt\)"):
        ckptcore.copy(f"{top}/a", f"{top}/b", overwrite=overwrite)


@pytest.mark.parametrize("remove", [ckptcore.delete, lambda place: ckptcore.save(place, _STATE, overwrite=True)])
def test_objects_of_a_killed_save_are_deleted_and_do_not_count_as_other_files(
    remove: Callable[[str], object], tmp_path: Path
) -> None:
    seen, number, crashed = set(), 0, True
    while crashed:
        place = f"file://{tmp_path}/{number}/x"
        ckptcore.save(place, _STATE)
        plan = FaultPlan(CrashAt(number))
        with suppress(SimulatedCrash):
            ckptcore.save(through(place), _STATE, overwrite="keep-other-files", context=faulty_context(place, plan))
        crashed, number = plan.crashed, number + 4
        seen.add(bool(_others(place)))
        remove(place)
        assert _others(place) == []
    assert seen == {True, False}


def test_a_run_that_owns_other_files_saves_a_step_again(tmp_path: Path) -> None:
    for other_files in (True, False):
        with ckptcore.Checkpointer(tmp_path / str(other_files), other_files=other_files) as run:
            for overwrite in (False, "best-effort"):
                if not other_files and overwrite:
                    with pytest.raises(CheckpointExistsError, match="eval.json"):
                        run.save_blocking(1, _STATE, overwrite="best-effort")
                else:
                    run.save_blocking(1, _STATE, overwrite=overwrite)
                    (tmp_path / str(other_files) / "1/eval.json").write_text("{}")


def test_retention_tries_a_deletion_again_only_after_the_files_of_the_step_change(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/run"
    plan = FaultPlan()
    with ckptcore.Checkpointer(
        through(place), preservation_policy=LatestN(1), context=faulty_context(place, plan)
    ) as run:
        run.save_blocking(1, _STATE)
        run.wait()
        (tmp_path / "run/1/notes.txt").write_text("mine")
        begun: list[bool] = []
        for step in (2, 3):
            plan.operations.clear()
            run.save_blocking(step, _STATE)
            run.wait()
            begun.append(any("/deleting/1." in key for operation in plan.operations for key in operation.keys))
        assert begun == [True, False]
        (tmp_path / "run/1/notes.txt").unlink()
        run.save_blocking(4, _STATE)
        run.wait()
        assert run.steps == (4,)


def test_a_damaged_step_is_replaced_with_the_files_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise every attempt of the run to save the step again would fail."""
    with ckptcore.Checkpointer(tmp_path) as run:
        for step in (1, 2):
            run.save_blocking(step, {"w": np.full(3, step)})
    (tmp_path / "2/model.safetensors").write_bytes(b"damaged")
    (tmp_path / "2/scores.json").write_text("{}")
    with ckptcore.Checkpointer(tmp_path) as run:
        assert run.load()["w"][0] == 1
        run.save_blocking(2, {"w": np.full(3, 5)})
        assert "no checkpoint wrote (scores.json), which are deleted" in caplog.text
        assert run.load()["w"][0] == 5
