"""System calls of the local storage that fail or are interrupted by Ctrl-C, one call at a time."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import ckptcore
from ckptcore.errors import CheckpointError, CommitUnknownError, StorageFullError
from ckptcore.policies import LatestN

_PACKAGE: Final = str(Path(ckptcore.__file__).parent)
_CALLS: Final = [
    *[(os, name) for name in (
        "close", "fdatasync", "fstat", "fsync", "getcwd", "link", "lseek", "lstat", "mkdir", "open", "preadv", "pread",
        "pwrite", "read", "rename", "rmdir", "scandir", "stat", "unlink", "write",
    )],
    (fcntl, "flock"),
]  # fmt: skip
_TAKE_SPACE: Final = frozenset({"link", "mkdir", "open", "pwrite", "write"})
_STATE: Final = {"w": np.arange(1 << 16, dtype=np.float32), "n": 3}


class Calls:
    """A counter of the system calls of ckptcore, which can inject a fault into a call."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.fault: tuple[str, int] | None = None
        self.error: BaseException | None = None
        self.after = False
        self.only: threading.Thread | None = None
        self.full: int | None = None  # number of calls that take space before the disk is full
        self.taken = 0

    def _is_full(self, name: str, arguments: tuple[Any, ...]) -> bool:
        if name not in _TAKE_SPACE or (name == "open" and not arguments[1] & os.O_CREAT):
            return False
        self.taken += 1
        return self.full is not None and self.taken > self.full

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts a call, and may fail instead of the call or after it."""

        def call(*arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_code
            # No faults in destructors, because Python ignores their errors.
            made_here = caller.co_filename.startswith(_PACKAGE) and caller.co_name != "__del__"
            if not made_here or self.only not in (None, threading.current_thread()):
                return function(*arguments, **options)
            self.counts[name] += 1
            fails = self.fault == (name, self.counts[name]) or self._is_full(name, arguments)
            # Always close files, because otherwise the test would leak them.
            result = function(*arguments, **options) if not fails or self.after or name == "close" else None
            if fails:
                assert self.error is not None
                raise self.error
            return result

        return call

    def clear(self) -> None:
        """Count from the beginning, without a fault."""
        self.counts.clear()
        self.full, self.taken = None, 0
        self.fault = self.error = None  # an error keeps the frames of its traceback alive


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Count the system calls of this process."""
    counter = Calls()
    for module, name in _CALLS:
        monkeypatch.setattr(module, name, counter.wrap(name, getattr(module, name)))
    return counter


def _save(directory: Path) -> None:
    ckptcore.save(directory / "saved", _STATE, overwrite=True)


def _load(directory: Path) -> None:
    assert ckptcore.load(directory / "saved")["w"][7] == 7


def _delete(directory: Path) -> None:
    ckptcore.save(directory / "deleted", _STATE, overwrite=True)
    ckptcore.delete(directory / "deleted")


def _run(directory: Path) -> None:
    with ckptcore.Checkpointer(directory / "run", preservation_policy=LatestN(1)) as checkpointer:
        step = max((int(str(step)) for step in checkpointer.steps), default=0)
        checkpointer.save(step + 1, _STATE)


_OPERATIONS: Final = [_save, _load, _delete, _run]


@contextmanager
def _one_after_another(
    calls: Calls, operation: Callable[[Path], None], directory: Path
) -> Iterator[list[tuple[str, int]]]:
    """Yield the system calls of an operation, after it has run several times."""
    for _ in range(3):  # repeat, because the first run creates files that later runs find
        calls.clear()
        operation(directory)
    faults = [(name, number) for name, count in calls.counts.items() for number in range(1, count + 1)]
    assert len(faults) > 3
    yield faults
    calls.clear()


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOLCK, errno.ESTALE, errno.EBADF])
@pytest.mark.parametrize("operation", _OPERATIONS)
def test_a_call_that_fails_is_a_checkpoint_error(
    operation: Callable[[Path], None], number: int, calls: Calls, tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "saved", _STATE)
    others = []
    with _one_after_another(calls, operation, tmp_path) as faults:
        for fault in faults:
            calls.clear()
            calls.fault, calls.error = fault, OSError(number, os.strerror(number))
            try:
                operation(tmp_path)
            except CheckpointError:
                pass
            except Exception as error:  # noqa: BLE001  # all errors are reported together
                others.append((fault, repr(error)))
            calls.clear()
            with suppress(CheckpointError):  # a failed save in the background is reported once
                operation(tmp_path)
            operation(tmp_path)
    assert others == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_becomes_full_at_any_call_keeps_old_checkpoint(number: int, calls: Calls, tmp_path: Path) -> None:
    """A save can fail at every call. Other operations still work, and remains do not prevent the next save."""
    place = tmp_path / "place"
    ckptcore.save(place / "old", {**_STATE, "n": 1})
    calls.clear()
    ckptcore.save(place / "old", {**_STATE, "n": 1}, overwrite=True)
    total, refused = calls.taken, 0
    assert total > 5
    for room in range(total + 1):
        ckptcore.save(place / "other", _STATE, overwrite=True)
        calls.clear()
        calls.full, calls.error = room, OSError(number, os.strerror(number))
        try:
            ckptcore.save(place / "old", {**_STATE, "n": 2}, overwrite=True)
        except StorageFullError as error:
            refused += 1
            what = "quota of this user" if number == errno.EDQUOT else "file system"
            assert f"the {what} is full" in str(error) and "Free some space" in str(error)
            assert str(place) in str(error)
        assert ckptcore.load(place / "old")["n"] == (2 if room == total else 1)
        assert ckptcore.open(place / "old")["w"][7] == 7
        ckptcore.delete(place / "other")
        calls.clear()
        ckptcore.save(place / "old", {**_STATE, "n": 1}, overwrite=True)
        assert os.listdir(place) == ["old"]
    assert refused == total


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_single_call_that_finds_no_space_keeps_the_old_checkpoint(number: int, calls: Calls, tmp_path: Path) -> None:
    """A network file system may report a full disk only at the sync or later, so calls that take no space fail, too."""
    ckptcore.save(tmp_path / "saved", _STATE)
    failed = 0
    with _one_after_another(calls, _save, tmp_path) as faults:
        for fault in faults:
            if fault[0] not in _TAKE_SPACE | {"rename", "fsync", "fdatasync", "close"}:
                continue
            calls.clear()
            calls.fault, calls.error = fault, OSError(number, os.strerror(number))
            try:
                _save(tmp_path)
            except (StorageFullError, CommitUnknownError) as error:
                failed += 1
                assert str(tmp_path.parent) in str(error)
            calls.clear()
            _load(tmp_path)
            _save(tmp_path)
            assert os.listdir(tmp_path) == ["saved"]
    assert failed > 10


@pytest.mark.parametrize("operation", [_save, _load])
def test_an_interrupted_call_leaks_no_file_and_no_lock(
    operation: Callable[[Path], None], calls: Calls, tmp_path: Path
) -> None:
    """Ctrl-C takes effect after a call. `open` and `scandir` are omitted, because nothing could close their results."""
    ckptcore.save(tmp_path / "saved", _STATE)
    calls.only = threading.current_thread()
    with _one_after_another(calls, operation, tmp_path) as faults:
        _save(tmp_path)
        _load(tmp_path)
        gc.collect()
        before, interrupted = _open_files(), 0
        for fault in faults:
            if fault[0] in ("open", "scandir"):
                continue
            calls.clear()
            calls.fault, calls.error, calls.after = fault, KeyboardInterrupt(), True
            try:
                operation(tmp_path)
            except (KeyboardInterrupt, CommitUnknownError):
                interrupted += 1
            calls.clear()
            _save(tmp_path)
            _load(tmp_path)
            gc.collect()
            assert _open_files() <= before, fault
    assert interrupted > 3, "other threads made most calls"


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
