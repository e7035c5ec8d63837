"""Copies of committed checkpoints between any two storages."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from ckptcore_testing.locations import new_place, objects_at, store_at
from ckptcore_tools.copies.copying import copy_checkpoint

import ckptcore
from ckptcore.commit.root import Claim
from ckptcore.commit.root_json import encode_claim
from ckptcore.context import default_context
from ckptcore.errors import (
    AtomicityError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ChecksumError,
    CorruptCheckpointError,
    InvalidLocationError,
    UncommittedCheckpointError,
)
from tests.crashes.states import LARGE, make_composite, make_state, version_at

_PAIRS = list(itertools.product(["file", "memory"], repeat=2))


def _saved(scheme: str, directory: Path, version: int = 1, elements: int = 200) -> str:
    place = new_place(scheme, directory)
    ckptcore.save(place, make_state(version, elements))
    return place


@pytest.mark.parametrize(("source", "destination"), _PAIRS)
def test_a_copy_is_the_same_save(source: str, destination: str, tmp_path: Path) -> None:
    here, there = _saved(source, tmp_path, elements=LARGE), new_place(destination, tmp_path)
    reports: list[tuple[int, int]] = []
    report = ckptcore.copy(here, there, progress=lambda done, total: reports.append((done, total)))
    assert objects_at(there) == objects_at(here)
    assert version_at(there) == 1
    assert report.objects == len(objects_at(here))
    assert report.nbytes == report.sent_bytes == sum(map(len, objects_at(here).values()))
    assert (report.kept_bytes, report.read_back_bytes, report.unverified) == (0, 0, ())
    assert reports[-1] == (report.nbytes, report.nbytes)
    assert reports == sorted(reports)


@pytest.mark.parametrize(("source", "destination"), _PAIRS)
def test_several_checkpointables(source: str, destination: str, tmp_path: Path) -> None:
    here, there = new_place(source, tmp_path), new_place(destination, tmp_path)
    ckptcore.save_checkpointables(here, make_composite(3))
    ckptcore.copy(here, there)
    assert objects_at(there) == objects_at(here)
    assert version_at(there) == 3


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_one_of_several_checkpointables(scheme: str, tmp_path: Path) -> None:
    here, there = new_place("file", tmp_path), new_place(scheme, tmp_path)
    ckptcore.save_checkpointables(here, make_composite(3))
    ckptcore.copy(f"{here}/state", there)
    assert version_at(there) == 3
    with pytest.raises(InvalidLocationError, match="one of several"):
        ckptcore.copy(f"{here}/state", f"{here}/other")


def test_deleted_checkpointables_are_not_copied(tmp_path: Path) -> None:
    here, there = new_place("memory", tmp_path), new_place("memory", tmp_path)
    ckptcore.save_checkpointables(here, {"a": {"x": np.arange(3)}, "b": {"x": np.arange(4)}})
    ckptcore.delete(f"{here}/a")
    store_at(here).put("a/left", b"of a deletion that died")
    store_at(here).put("a/checkpoint.json", encode_claim(Claim("0123456789abcdef", "2026-01-01T00:00:00+00:00")))
    ckptcore.copy(here, there)
    assert not any(key.startswith("a/") for key in objects_at(there))
    assert list(ckptcore.load_checkpointables(there)) == ["b"]


def test_metadata_files_of_other_software_are_copied(tmp_path: Path) -> None:
    here, there = _saved("file", tmp_path), new_place("memory", tmp_path)
    store = store_at(here)
    store.put("config.json", b"{}")
    store.put("notes/today", b"")
    store.put("checkpoint.0123456789abcdef.tree.json", b"of a save that died")
    store.put(".x.0123456789abcdef.ckptcore/data", b"of a save that runs")
    report = ckptcore.copy(here, there)
    assert objects_at(there).keys() - objects_at(here).keys() == set()
    assert objects_at(here).keys() - objects_at(there).keys() == {
        "checkpoint.0123456789abcdef.tree.json",
        ".x.0123456789abcdef.ckptcore/data",
    }
    assert report.unverified == ("config.json",)


def test_a_copy_into_itself_is_refused(tmp_path: Path) -> None:
    here = _saved("file", tmp_path)
    with pytest.raises(InvalidLocationError, match="both source and destination"):
        ckptcore.copy(here, f"{here}/../step")
    with pytest.raises(InvalidLocationError, match="contains the source"):
        ckptcore.copy(here, here.removesuffix("/step"), overwrite=True)
    ckptcore.copy(here, f"{here}/backup")
    assert version_at(f"{here}/backup") == version_at(here) == 1
    assert not any(key.startswith("backup/") for key in objects_at(f"{here}/backup"))


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_an_existing_checkpoint_is_replaced_only_on_request(scheme: str, tmp_path: Path) -> None:
    here, there = _saved("memory", tmp_path, 1), _saved(scheme, tmp_path, 2)
    with pytest.raises(CheckpointExistsError):
        ckptcore.copy(here, there)
    if scheme == "memory":
        with pytest.raises(AtomicityError):
            ckptcore.copy(here, there, overwrite=True)
    assert version_at(there) == 2
    ckptcore.copy(here, there, overwrite="non-atomic" if scheme == "memory" else True)
    assert version_at(there) == 1


def test_a_complete_copy_is_not_written_again(tmp_path: Path) -> None:
    here, there = _saved("file", tmp_path, elements=LARGE), new_place("memory", tmp_path)
    ckptcore.copy(here, there)
    report = ckptcore.copy(here, there, verify="read-back")
    assert (report.sent_bytes, report.kept_bytes) == (0, report.nbytes)
    assert report.read_back_bytes > LARGE
    store = store_at(there)
    key = max(objects_at(there), key=lambda key: len(objects_at(there)[key]))
    store.put(key, objects_at(there)[key][:-1] + b"?")
    assert ckptcore.copy(here, there).sent_bytes == 0
    with pytest.raises(CorruptCheckpointError, match="the copy differs from the source"):
        ckptcore.copy(here, there, verify="read-back")


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_damaged_source_is_an_error(scheme: str, tmp_path: Path) -> None:
    here, there = _saved("file", tmp_path, elements=LARGE), new_place(scheme, tmp_path)
    objects = objects_at(here)
    key = max(objects, key=lambda key: len(objects[key]))
    data = bytearray(objects[key])
    data[len(data) // 2] ^= 1
    store_at(here).put(key, bytes(data))
    with pytest.raises(ChecksumError, match="is damaged"):
        ckptcore.copy(here, there)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.load(there)
    store_at(here).put(key, bytes(data[:-1]))
    with pytest.raises(CorruptCheckpointError, match="were written"):
        ckptcore.copy(here, there)
    store_at(here).delete([key])
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        ckptcore.copy(here, there)
    store_at(here).put(key, objects[key])
    ckptcore.copy(here, there)
    assert version_at(there) == 1


def test_a_missing_source_is_an_error(tmp_path: Path) -> None:
    there = new_place("file", tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        ckptcore.copy(tmp_path / "missing", there)
    claimed = new_place("memory", tmp_path)
    with pytest.raises(ValueError, match="read-back"):
        ckptcore.copy(claimed, there, verify="twice")  # type: ignore[call-overload]
    stopped = threading.Event()
    stopped.set()
    here = _saved("file", tmp_path)
    with pytest.raises(CancelledError, match="stopped"):
        copy_checkpoint(here, claimed, default_context(), is_stopped=stopped.is_set)
    with pytest.raises(UncommittedCheckpointError):
        ckptcore.copy(claimed, there)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_save_replaces_an_interrupted_copy(scheme: str, tmp_path: Path) -> None:
    here, there = _saved("file", tmp_path), new_place(scheme, tmp_path)
    with pytest.raises(CancelledError):
        copy_checkpoint(here, there, default_context(), is_stopped=lambda: True)
    ckptcore.save(there, make_state(5))
    assert version_at(there) == 5
    assert set(store_at(there.removesuffix("/step")).list_names()) == {"step/"}


def test_a_foreign_checkpoint(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    (tmp_path / "hub" / "sub").mkdir(parents=True)
    save_file({"w": np.arange(500_000.0)}, tmp_path / "hub" / "model.safetensors")
    (tmp_path / "hub" / "config.json").write_text("{}")
    (tmp_path / "hub" / "checkpoint.pt").write_bytes(b"of other software")
    (tmp_path / "hub" / "sub" / "vocabulary").write_bytes(b"a b c")
    here, middle, there = str(tmp_path / "hub"), new_place("memory", tmp_path), new_place("file", tmp_path)
    report = ckptcore.copy(here, middle)
    assert len(report.unverified) == report.objects == 4
    assert objects_at(middle) == objects_at(here)
    with pytest.raises(CheckpointExistsError):
        ckptcore.copy(here, middle)
    ckptcore.copy(middle, there, verify="read-back")
    assert objects_at(there) == objects_at(here)
    loaded = load_file(Path(there.removeprefix("file://")) / "model.safetensors")
    np.testing.assert_array_equal(loaded["w"], ckptcore.load(middle)["w"])
    with pytest.raises(InvalidLocationError, match="is a file"):
        ckptcore.copy(tmp_path / "hub" / "model.safetensors", new_place("file", tmp_path))
