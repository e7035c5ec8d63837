"""Remedies in errors about uncommitted saves and partial saves. Each test follows the text of a remedy."""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path

import pytest
from ckptcore_testing.cases import refused
from ckptcore_testing.trees import same_value

import ckptcore
from ckptcore.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    SaveLostError,
    UncommittedCheckpointError,
)
from ckptcore.plugins import installed_plugins
from ckptcore.protocols import StorageOptions
from tests.errors.refusals import ONE, TWO, interrupted


def test_a_save_that_is_not_committed() -> None:
    run = f"memory://{uuid.uuid4().hex}"
    storage = installed_plugins().storage("memory")(run, StorageOptions())
    claims = []

    def look() -> None:
        """While the save runs, the user can only load another checkpoint."""
        advice = "Load another checkpoint. If no process writes there, you can save here again"
        refused(lambda: ckptcore.load(f"{run}/c"), advice, error=UncommittedCheckpointError)
        assert same_value(ckptcore.load(f"{run}/b"), {"w": TWO})
        claims.append(storage.get("c/checkpoint.json"))

    ckptcore.save(f"{run}/b", {"w": TWO})
    ckptcore.save(f"{run}/c", {"w": ONE}, context=interrupted("memory", "put", "model.safetensors", look))
    assert same_value(ckptcore.load(f"{run}/c"), {"w": ONE})
    storage.put("d/checkpoint.json", claims[0])  # as after a killed process
    refused(lambda: ckptcore.load(f"{run}/d"), "you can save here again", error=UncommittedCheckpointError)
    ckptcore.save(f"{run}/d", {"w": ONE})
    assert same_value(ckptcore.load(f"{run}/d"), {"w": ONE})


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_partial_save_that_is_not_finalized(scheme: str, tmp_path: Path) -> None:
    location = f"{tmp_path}/c" if scheme == "file" else f"memory://{uuid.uuid4().hex}/c"

    def begin() -> None:
        ckptcore.partial(location).save({"w": ONE})
        refused(
            lambda: ckptcore.load(location),
            "Save the missing parts with ckptcore.partial(...).save, then call ckptcore.partial(...).finalize; or "
            "remove it with ckptcore.delete",
            error=UncommittedCheckpointError,
        )
        refused(
            lambda: ckptcore.save(location, {"w": TWO}),
            "finalize it with ckptcore.partial(...).finalize, or delete it with ckptcore.delete, before saving there",
            error=CheckpointExistsError,
        )

    begin()
    ckptcore.partial(location).save({"v": TWO})
    ckptcore.partial(location).finalize()
    assert same_value(ckptcore.load(location), {"w": ONE, "v": TWO})
    ckptcore.delete(location)
    begin()
    ckptcore.delete(location)
    ckptcore.save(location, {"w": TWO})
    assert same_value(ckptcore.load(location), {"w": TWO})
    refused(
        lambda: ckptcore.partial(location).save({"w": ONE}),
        "save to another location, or delete the checkpoint with ckptcore.delete first. Nothing was changed",
        error=CheckpointExistsError,
    )
    assert same_value(ckptcore.load(location), {"w": TWO})
    for to in (f"{location}2", location):
        if to == location:
            ckptcore.delete(location)
        ckptcore.partial(to).save({"w": ONE})
        ckptcore.partial(to).finalize()
        assert same_value(ckptcore.load(to), {"w": ONE})


def test_a_root_that_is_a_broken_link(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "c", {"w": ONE})
    (tmp_path / "c" / "checkpoint.json").rename(tmp_path / "root.json")
    (tmp_path / "c" / "checkpoint.json").symlink_to("gone.json")
    refused(
        lambda: ckptcore.load(tmp_path / "c"),
        "restore checkpoint.json from a copy, or load another checkpoint. To load the arrays alone, without checks, "
        "name the file, or the index of several files, as the location",
        error=CorruptCheckpointError,
    )
    assert same_value(ckptcore.load(tmp_path / "c" / "model.safetensors"), {"w": ONE})
    (tmp_path / "c" / "checkpoint.json").unlink()
    (tmp_path / "root.json").rename(tmp_path / "c" / "checkpoint.json")
    assert same_value(ckptcore.load(tmp_path / "c"), {"w": ONE})


def test_two_sessions_at_once(tmp_path: Path) -> None:
    location = tmp_path / "c"
    refusals = []

    def save_another() -> None:
        call = partial(ckptcore.partial(location).save, {"v": TWO})
        refusals.append(refused(call, "wait for it and call again. Nothing was changed", error=SaveLostError))

    context = interrupted("file", "open_writer", ".safetensors", save_another)
    ckptcore.partial(location, context=context).save({"w": ONE})
    assert len(refusals) == 1
    ckptcore.partial(location).save({"v": TWO})
    ckptcore.partial(location).finalize()
    assert same_value(ckptcore.load(location), {"w": ONE, "v": TWO})


def test_two_sessions_at_once_on_an_object_store() -> None:
    """The later session takes the location over."""
    location = f"memory://{uuid.uuid4().hex}/c"
    context = interrupted("memory", "put", ".safetensors", lambda: ckptcore.partial(location).save({"v": TWO}))
    first = partial(ckptcore.partial(location, context=context).save, {"w": ONE})
    refused(first, "wait until the other save has ended", error=SaveLostError)
    first()
    ckptcore.partial(location).finalize()
    assert same_value(ckptcore.load(location), {"v": TWO, "w": ONE})
