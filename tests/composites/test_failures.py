"""Objects that fail in a save or load. Nothing is committed, no file remains, and the next save succeeds."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import run_ranks

import ckptcore
from ckptcore import Context
from ckptcore.errors import (
    CheckpointNotFoundError,
    RankFailedError,
    StorageError,
    TargetUndefinedError,
    TreeMismatchError,
)
from tests.composites.objects import Counter, Files, Linear, staged


class _BrokenState(Counter):
    """An object that fails to return its state."""

    def get_state(self) -> dict[str, Any]:
        raise RuntimeError("no state")


def _fails_at_once() -> Files:
    broken = Files({"a": b""})
    broken.save_error = RuntimeError("no room")
    return broken


def _fails_late() -> Files:
    broken = Files({"a": b""})
    broken.late_error = RuntimeError("no time")
    return broken


_BROKEN: dict[str, Callable[[], object]] = {"at once": _fails_at_once, "late": _fails_late, "state": _BrokenState}


@pytest.mark.parametrize("save_bytes", ["blocking", None, 10])
@pytest.mark.parametrize("name", _BROKEN)
def test_an_error_of_an_object_fails_the_save(name: str, save_bytes: Any, place: str) -> None:
    context = ckptcore.Context(
        memory=ckptcore.context.MemoryOptions(save_bytes=None if save_bytes == "blocking" else save_bytes)
    )

    def save(objects: dict[str, object], **options: Any) -> None:
        if save_bytes == "blocking":
            ckptcore.save_checkpointables(place + "/c", objects, context=context, **options)
        else:
            ckptcore.save_checkpointables_async(place + "/c", objects, context=context, **options).result()

    for first in (True, False):
        objects = {
            "model": Linear(1),
            "files": Files({"x": b"y"}),
            "broken": _BROKEN[name](),
            "last": {"w": np.ones(9)},
        }
        with pytest.raises(RuntimeError, match="no (room|time|state)") as caught:
            save(objects, overwrite="non-atomic" if "://" not in place and not first else False)
        assert any("'broken'" in note for note in caught.value.__notes__)
        assert not staged()
        if first:
            with pytest.raises(CheckpointNotFoundError):
                ckptcore.load_checkpointables(place + "/c")
            if "://" not in place:
                assert not Path(place).exists() or os.listdir(place) == []
                continue
        break
    save({"model": Linear(2)})
    assert ckptcore.load_checkpointables(place + "/c")["model"]["bias"].tolist() == Linear(2).bias.tolist()


def test_a_failed_overwrite_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"model": Linear(1), "files": Files({"x": b"old"})})
    for make in _BROKEN.values():
        with pytest.raises(RuntimeError):
            ckptcore.save_checkpointables(tmp_path / "c", {"model": Linear(2), "broken": make()}, overwrite=True)
        loaded = ckptcore.load_checkpointables(tmp_path / "c")
        assert loaded["files"] == {"x": b"old"} and loaded["model"]["bias"].tolist() == Linear(1).bias.tolist()
        assert os.listdir(tmp_path) == ["c"]


def test_an_error_of_an_object_fails_the_load(place: str) -> None:
    objects = {"model": Linear(3), "files": Files({"a": b"1"}), "params": {"w": np.ones(3)}}
    ckptcore.save_checkpointables(place + "/c", objects)
    model, broken = Linear(0), Files({"as it": b"was"})
    broken.load_error = ValueError("not mine")
    with pytest.raises(TargetUndefinedError, match="'files'.*ValueError: not mine"):
        ckptcore.load_checkpointables(place + "/c", {"params": None}, into={"model": model, "files": broken})
    assert not staged()


class _BrokenSetter(Counter):
    def set_state(self, state: dict[str, Any]) -> None:
        raise KeyError("position")


def test_an_object_that_refuses_its_stored_state_fails_the_load(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"data": Counter(3)})
    with pytest.raises(TreeMismatchError, match=f"{place}/c/data.* refused its stored state: KeyError: 'position'"):
        ckptcore.load_checkpointables(place + "/c", into={"data": _BrokenSetter()})


@pytest.mark.parametrize("with_files", [False, True])
def test_if_the_checkpoint_is_deleted_after_an_object_changed_target_is_undefined(with_files: bool, place: str) -> None:
    location = place + "/c"

    class Gone(Counter):
        def set_state(self, state: dict[str, Any]) -> None:
            super().set_state(state)
            ckptcore.delete(location)

    class GoneFiles(Files):
        def load(self, directory: Path) -> None:
            super().load(directory)
            ckptcore.delete(location)

    ckptcore.save_checkpointables(location, {"it": Files({"a": b"1"}) if with_files else Counter(3), "b": {"x": 1}})
    target = GoneFiles() if with_files else Gone()
    with pytest.raises(TargetUndefinedError, match="replaced or deleted"):
        ckptcore.load_checkpointables(location, into={"it": target})


def test_the_error_names_objects_that_changed_before_damage_was_found(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(
        tmp_path / "c", {"model": Linear(3), "params": {"w": np.ones(3)}, "files": Files({"a": b"1"})}
    )
    damaged = tmp_path / "c" / "files" / "a"
    damaged.write_bytes(b"2")
    model = Linear(0)
    with pytest.raises(ckptcore.errors.ChecksumError):
        ckptcore.load_checkpointables(tmp_path / "c", into={"model": model, "files": Files()})
    assert model.bias.tolist() == Linear(0).bias.tolist()  # arrays are filled last
    damaged.write_bytes(b"1")
    path = tmp_path / "c" / "params" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    model = Linear(0)
    with pytest.raises(ckptcore.errors.ChecksumError):
        ckptcore.load_checkpointables(tmp_path / "c", {"params": None}, into={"model": model})
    assert model.bias.tolist() == Linear(0).bias.tolist()  # new values are built first


def test_a_refused_load_changes_no_object(place: str) -> None:
    ckptcore.save_checkpointables(place + "/c", {"model": Linear(3), "data": Counter(3), "files": Files({"a": b"1"})})
    wrong = Linear(0)
    wrong.weight = np.zeros((9, 9), np.float32)
    files, data = Files({"as it": b"was"}), Counter()
    with pytest.raises(TreeMismatchError):
        ckptcore.load_checkpointables(place + "/c", into={"files": files, "data": data, "model": wrong})
    assert files.files == {"as it": b"was"} and data.position == 0


def test_a_disk_error_while_copying_files_fails_the_load(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ckptcore.save_checkpointables(place + "/c", {"files": Files({"a": b"1"})})

    def no_room(directory: Any, exist_ok: bool = False) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    files = Files({"as it": b"was"})
    monkeypatch.setattr("ckptcore.loading.targets.os.makedirs", no_room)
    with pytest.raises(StorageError, match="no space left") as caught:
        ckptcore.load_checkpointables(place + "/c", into={"files": files})
    assert not isinstance(caught.value, TargetUndefinedError)
    assert files.files == {"as it": b"was"}


@pytest.mark.system
def test_staged_files_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, ckptcore\n"
        "from tests.composites.objects import Files\n"
        "files = Files({'a': b'1'})\n"
        "files.then = lambda directory: os.kill(os.getpid(), signal.SIGKILL)\n"
        "ckptcore.save_checkpointables(sys.argv[1], {'files': files})\n"
    )
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    root = Path(__file__).parents[2]
    for _ in range(2):
        died = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "c")], check=False, cwd=root, env=environment
        )
        assert died.returncode == -signal.SIGKILL
        assert len(staged()) == 1
    ckptcore.save_checkpointables(tmp_path / "c", {"files": Files({"a": b"2"})})
    assert not staged()
    assert ckptcore.load_checkpointables(tmp_path / "c")["files"] == {"a": b"2"}


def test_staged_files_of_a_running_process_are_not_removed(tmp_path: Path) -> None:
    first = Files({"a": b"1"})
    first.then = lambda directory: ckptcore.save_checkpointables(
        tmp_path / "inner", {"files": Files({"b": b"2"})}, context=ckptcore.Context()
    )
    ckptcore.save_checkpointables(tmp_path / "outer", {"files": first}, context=ckptcore.Context())
    assert ckptcore.load_checkpointables(tmp_path / "outer")["files"] == {"a": b"1"}
    assert ckptcore.load_checkpointables(tmp_path / "inner")["files"] == {"b": b"2"}


class _Position:
    def __init__(self, number: int, *, refuses: bool = False) -> None:
        self.number, self.refuses = number, refuses

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise ValueError("not mine")
        self.number = state["number"]


def test_all_ranks_reset_their_objects_if_an_object_of_one_rank_refuses(tmp_path: Path) -> None:
    def save(rank: int, context: Context) -> None:
        ckptcore.save_checkpointables(tmp_path / "c", {"a": _Position(5), "b": _Position(6)}, context=context)

    def load(rank: int, context: Context) -> tuple[int, int]:
        objects = {"a": _Position(1), "b": _Position(1, refuses=rank == 0)}
        with pytest.raises((TreeMismatchError, RankFailedError), match="not mine"):
            ckptcore.load_checkpointables(tmp_path / "c", into=objects, context=context)
        return objects["a"].number, objects["b"].number

    run_ranks(2, save)
    assert list(run_ranks(2, load)) == [(1, 1), (1, 1)]


def test_damaged_files_change_no_object(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"position": _Position(5), "files": Files({"a": b"1"})})
    (tmp_path / "c" / "files" / "a").write_bytes(b"2")
    position = _Position(1)
    with pytest.raises(ckptcore.errors.ChecksumError):
        ckptcore.load_checkpointables(tmp_path / "c", into={"position": position, "files": Files()})
    assert position.number == 1
