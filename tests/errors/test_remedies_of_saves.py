"""Remedies in errors about locations, saves and deletions. Each test follows the text of a remedy."""

from __future__ import annotations

import pickle
import shutil
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value
from safetensors.numpy import save_file

import ckptcore
from ckptcore import Checkpointer, Context
from ckptcore.builtin.memory import MemoryStorage, MemoryStorages
from ckptcore.context import IOOptions
from ckptcore.errors import (
    AtomicityError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointReferredError,
    InvalidLocationError,
    SaveLostError,
    StorageError,
    UncommittedCheckpointError,
)
from ckptcore.protocols import StorageOptions
from tests.errors.refusals import ONE, TWO, interrupted

# --- locations --------------------------------------------------------------------------------------------------------


def test_a_local_directory_named_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("memory:/run/c")
    advice = "or the absolute path of a local directory that has this name"
    refused(lambda: ckptcore.save(path, {"w": ONE}), advice, error=InvalidLocationError)
    ckptcore.save(path.absolute(), {"w": ONE})
    assert same_value(ckptcore.load(path.absolute()), {"w": ONE})
    assert (tmp_path / "memory:" / "run" / "c").is_dir()


@pytest.mark.parametrize("url", ["file://host{}/c", "file://{}/a?b", "file://{}/a#b"])
def test_urls_of_local_files(url: str, tmp_path: Path) -> None:
    wrong = url.format(tmp_path)
    refused(lambda: ckptcore.save(wrong, {"w": ONE}), "write file:///path, with ? and # as %3F and %23")
    right = wrong.replace("host", "").replace("?", "%3F").replace("#", "%23")
    ckptcore.save(right, {"w": ONE})
    assert same_value(ckptcore.load(right), {"w": ONE})
    assert same_value(ckptcore.load(tmp_path / wrong.rpartition("/")[2]), {"w": ONE})


# --- several saves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["checkpoint.json", "model.safetensors"])
def test_a_save_that_another_one_took_over(key: str) -> None:
    """The other save runs before this save writes its claim, or after it, and then takes the claim over."""
    run = f"memory://{uuid.uuid4().hex}"

    def save_another() -> None:
        ckptcore.save(f"{run}/c", {"w": ONE}, overwrite="non-atomic")

    context = interrupted("memory", "put", key, save_another)
    refused(
        lambda: ckptcore.save(f"{run}/c", {"w": TWO}, context=context),
        "Only one save at a time may write there: wait until the other save has ended, or save to another location",
        error=SaveLostError,
    )
    assert same_value(ckptcore.load(f"{run}/c"), {"w": ONE})
    ckptcore.save(f"{run}/d", {"w": TWO})
    assert same_value(ckptcore.load(f"{run}/d"), {"w": TWO})
    ckptcore.save(f"{run}/c", {"w": TWO}, overwrite="non-atomic")
    assert same_value(ckptcore.load(f"{run}/c"), {"w": TWO})


def test_an_upload_that_another_save_removed() -> None:
    storage = MemoryStorages().open("memory://run", StorageOptions())
    writer = storage.open_writer("c/model", 3)
    writer.write_at(0, b"abc")
    assert storage.abort_uploads("c") == 1
    refused(writer.finish, "'c/model'", "Save again", error=StorageError)
    again = storage.open_writer("c/model", 3)
    again.write_at(0, b"abc")
    again.finish()
    assert storage.get("c/model") == b"abc"


def test_a_save_whose_directory_is_removed(tmp_path: Path) -> None:
    def remove() -> None:
        (hidden,) = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        shutil.rmtree(hidden)

    context = interrupted("file", "rename", "", remove)
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": ONE}, context=context),
        f"next to {tmp_path}/c, was removed during the save; save again",
        error=SaveLostError,
    )
    ckptcore.save(tmp_path / "c", {"w": ONE}, context=context)
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


def test_another_save_among_other_files(tmp_path: Path) -> None:
    for name, value in (("c", ONE), ("other", ONE * 2)):
        ckptcore.save(tmp_path / name, {"w": value})
    (tmp_path / "c" / "notes.txt").write_text("mine")

    def save_another() -> None:
        (tmp_path / "other" / "checkpoint.json").replace(tmp_path / "c" / "checkpoint.json")

    context = interrupted("file", "replace", "checkpoint.json", save_another)

    def save() -> None:
        ckptcore.save(tmp_path / "c", {"w": TWO}, overwrite="keep-other-files", context=context)

    refused(save, "another process saved there or removed it during the commit; save again", error=SaveLostError)
    save()
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": TWO})
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"


def test_two_copies_to_one_location(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    refusals = []

    def copy_another() -> None:
        call = partial(ckptcore.copy, tmp_path / "c", tmp_path / "d")
        refusals.append(refused(call, "another process is writing there", "try again when it has ended"))

    ckptcore.copy(tmp_path / "c", tmp_path / "d", context=interrupted("file", "rename", "", copy_another))
    assert len(refusals) == 1
    assert ckptcore.copy(tmp_path / "c", tmp_path / "d").sent_bytes == 0
    assert same_value(ckptcore.load(tmp_path / "d"), {"w": ONE})


# --- deletions --------------------------------------------------------------------------------------------------------


def test_files_of_other_software_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "run" / "1").mkdir(parents=True)
    save_file({"w": ONE}, tmp_path / "run" / "1" / "model.safetensors")
    advice = "was not written by ckptcore and is left alone; remove it with your own tools"
    refused(lambda: ckptcore.delete(tmp_path / "run" / "1"), advice, error=CheckpointExistsError)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_blocking(2, {"w": TWO})
        refused(lambda: checkpointer.delete(1), advice, error=CheckpointNotFoundError)
        assert same_value(checkpointer.load(1), {"w": ONE})
        shutil.rmtree(tmp_path / "run" / "1")
        checkpointer.reload()
        assert list(checkpointer.steps) == [2]


def test_a_neighbour_that_cannot_be_read(tmp_path: Path) -> None:
    """The neighbour may be an update that refers to the checkpoint."""
    for name in ("c", "d"):
        ckptcore.save(tmp_path / name, {"w": ONE})

    def fail() -> None:
        raise StorageError(f"cannot read {tmp_path}/d/checkpoint.json")

    context = interrupted("file", "get", "d/checkpoint.json", fail)
    with pytest.raises(StorageError) as caught:
        ckptcore.delete(tmp_path / "c", context=context)
    (note,) = caught.value.__notes__
    assert note.startswith("Nothing was deleted") and "its parent directory must be listed and read" in note
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})
    ckptcore.delete(tmp_path / "c", context=context)
    assert not (tmp_path / "c").exists()


def test_a_deletion_with_old_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    for follow in (ckptcore.delete, lambda location: ckptcore.save(location, {"w": TWO})):
        location = f"memory://{uuid.uuid4().hex}/c"
        ckptcore.save(location, {"w": ONE})
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStorage, "list", lambda storage, prefix="": iter(()))
            refused(lambda: ckptcore.delete(location), "Delete it again later, or save there", error=StorageError)  # noqa: B023  # called here
        refused(lambda: ckptcore.load(location), "", error=UncommittedCheckpointError)  # noqa: B023  # called here
        follow(location)
        if follow is ckptcore.delete:
            refused(lambda: ckptcore.load(location), "does not exist", error=CheckpointNotFoundError)  # noqa: B023  # called here
        else:
            assert same_value(ckptcore.load(location), {"w": TWO})
            assert ckptcore.verify(location).ok


# --- locations that a save does not replace ---------------------------------------------------------------------------


def test_names_that_are_reserved_for_uncommitted_saves(tmp_path: Path) -> None:
    advice = "Save to a name that does not begin with a dot"
    refused(
        lambda: ckptcore.save(tmp_path / ".c.0123456789abcdef.ckptcore", {"w": ONE}), advice, error=InvalidLocationError
    )
    ckptcore.save(tmp_path / "c", {"w": ONE})
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


def test_a_checkpoint_within_another(tmp_path: Path) -> None:
    """Other software wrote the inner checkpoint."""
    for name in ("c", "inner"):
        ckptcore.save(tmp_path / name, {"w": ONE})
    (tmp_path / "inner").rename(tmp_path / "c" / "inner")
    advice = "which would be removed with it: move or delete that one first. Nothing was changed"
    for call in (
        lambda: ckptcore.save(tmp_path / "c", {"w": TWO}, overwrite=True),
        lambda: ckptcore.delete(tmp_path / "c"),
    ):
        refused(call, f"{tmp_path}/c/inner", advice, error=CheckpointExistsError)
    (tmp_path / "c" / "inner").rename(tmp_path / "moved")
    ckptcore.save(tmp_path / "c", {"w": TWO}, overwrite=True)
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": TWO})
    assert same_value(ckptcore.load(tmp_path / "moved"), {"w": ONE})


@pytest.mark.parametrize("follow", ["one tree", "delete", "elsewhere"])
def test_layouts_with_fixed_names(follow: str, tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE}, layout="ocdbt")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    refused(
        lambda: ckptcore.save(tmp_path / "c", {"w": TWO}, layout="ocdbt", overwrite="keep-other-files"),
        "Save one tree with the layout dcp or safetensors, save elsewhere, or pass overwrite='with-other-files' to "
        "delete the other files too. Nothing was changed",
        error=CheckpointExistsError,
    )
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})
    location = tmp_path / ("d" if follow == "elsewhere" else "c")
    if follow == "one tree":
        for layout in ("dcp", "safetensors"):
            ckptcore.save(location, {"w": TWO}, layout=layout, overwrite="keep-other-files")
            assert same_value(ckptcore.load(location), {"w": TWO})
    else:
        overwrite: Any = "with-other-files" if follow == "delete" else False
        ckptcore.save(location, {"w": TWO}, layout="ocdbt", overwrite=overwrite)
    assert same_value(ckptcore.load(location), {"w": TWO})
    assert (tmp_path / "c" / "notes.txt").exists() == (follow != "delete")


def test_a_storage_that_replaces_nothing_atomically() -> None:
    run = f"memory://{uuid.uuid4().hex}"
    ckptcore.save(f"{run}/c", {"w": ONE})
    advice = "save to another location, or pass overwrite='non-atomic'. Nothing was changed"
    refused(lambda: ckptcore.save(f"{run}/c", {"w": TWO}, overwrite=True), advice, error=AtomicityError)
    assert same_value(ckptcore.load(f"{run}/c"), {"w": ONE})
    ckptcore.save(f"{run}/d", {"w": TWO})
    ckptcore.save(f"{run}/c", {"w": TWO}, overwrite="non-atomic")
    for name in ("c", "d"):
        assert same_value(ckptcore.load(f"{run}/{name}"), {"w": TWO})


def test_a_file_system_without_exchanges(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})

    def fail() -> None:
        raise AtomicityError("cannot exchange directories")

    context = interrupted("file", "exchange", "", fail, times=9)
    advice = "save to another location, or pass overwrite='non-atomic'. Nothing was changed"
    save = partial(ckptcore.save, state={"w": TWO}, context=context)
    refused(lambda: save(tmp_path / "c", overwrite=True), advice, error=AtomicityError)
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})
    save(tmp_path / "d")
    save(tmp_path / "c", overwrite="non-atomic")
    for name in ("c", "d"):
        assert same_value(ckptcore.load(tmp_path / name), {"w": TWO})


def test_a_storage_without_conditions() -> None:
    location = "fsspec+memory://remedies-of-saves/c"
    text = refused(lambda: ckptcore.save(location, {"w": ONE}), "Nothing was saved", error=AtomicityError)
    code = text.partition("you can pass ")[2].partition(" instead")[0]
    context = eval(code, {"Context": Context, "IOOptions": IOOptions})
    ckptcore.save(location, {"w": ONE}, context=context)
    assert same_value(ckptcore.load(location, context=context), {"w": ONE})


def test_results_cannot_be_pickled(tmp_path: Path) -> None:
    handle = ckptcore.save_async(tmp_path / "c", {"w": ONE})
    refused(lambda: pickle.dumps(handle), "wait for its result() here", error=TypeError)
    handle.result()
    loading = ckptcore.load_async(tmp_path / "c")
    refused(lambda: pickle.dumps(loading), "wait for its result() here, and pickle that", error=TypeError)
    assert same_value(pickle.loads(pickle.dumps(loading.result())), {"w": ONE})


@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_leaves_with_one_name(layout: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"a\\.b": ONE, "a": {"b": TWO}, "a.b": ONE + TWO}
    save = partial(ckptcore.save, tmp_path / "c", layout=layout)
    refused(lambda: save(state), "would both be stored as", "rename one of the keys. Nothing was written")
    assert not (tmp_path / "c").exists()
    state["renamed"] = state.pop("a\\.b")
    save(state)
    assert same_value(ckptcore.load(tmp_path / "c"), state)


def test_a_base_of_an_update_that_is_being_saved(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "base", {"w": ONE, "v": TWO})
    refusals = []

    def delete() -> None:
        advice = "wait until it is committed, and delete it first. Nothing was deleted"
        call = partial(ckptcore.delete, tmp_path / "base")
        refusals.append(refused(call, "is being saved", advice, error=CheckpointReferredError))

    update = ckptcore.Update(base=tmp_path / "base")
    context = interrupted("file", "rename", "", delete)
    ckptcore.save(tmp_path / "update", {"w": TWO}, strategy=update, context=context)
    assert len(refusals) == 1
    assert same_value(ckptcore.load(tmp_path / "update"), {"w": TWO, "v": TWO})
    for name in ("update", "base"):
        ckptcore.delete(tmp_path / name)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
