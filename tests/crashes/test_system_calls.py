"""System calls of the local storage that fail, or that Ctrl-C interrupts: each of them, one at a time."""

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
from ckptcore.errors import CheckpointError, CommitUnknownError
from ckptcore.policies import LatestN

_PACKAGE: Final = str(Path(ckptcore.__file__).parent)
_CALLS: Final = [
    *[(os, name) for name in (
        "close", "fdatasync", "fstat", "fsync", "getcwd", "link", "lseek", "lstat", "mkdir", "open", "preadv", "pread",
        "pwrite", "read", "rename", "rmdir", "scandir", "stat", "unlink", "write",
    )],
    (fcntl, "flock"),
]  # fmt: skip
_STATE: Final = {"w": np.arange(1 << 16, dtype=np.float32), "n": 3}


class Calls:
    """Counts the system calls that ckptcore makes, and lets one of them meet a fault."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.fault: tuple[str, int] | None = None
        self.error: BaseException | None = None
        self.after = False
        self.only: threading.Thread | None = None

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts and fails instead of, or after, a call."""

        def call(*arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_code
            # Python ignores what a destructor raises.
            made_here = caller.co_filename.startswith(_PACKAGE) and caller.co_name != "__del__"
            if not made_here or self.only not in (None, threading.current_thread()):
                return function(*arguments, **options)
            self.counts[name] += 1
            fails = self.fault == (name, self.counts[name])
            # A file must be closed in any case, or the test would leak it.
            result = function(*arguments, **options) if not fails or self.after or name == "close" else None
            if fails:
                assert self.error is not None
                raise self.error
            return result

        return call

    def clear(self) -> None:
        """Count from the beginning, without a fault."""
        self.counts.clear()
        self.fault = self.error = None  # an error holds the frames that it passed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The system calls of this process."""
    found = Calls()
    for module, name in _CALLS:
        monkeypatch.setattr(module, name, found.wrap(name, getattr(module, name)))
    return found


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
    """Give every system call of an operation that was done before."""
    for _ in range(3):  # until nothing is created that a later one finds
        calls.clear()
        operation(directory)
    found = [(name, number) for name, count in calls.counts.items() for number in range(1, count + 1)]
    assert len(found) > 3
    yield found
    calls.clear()


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOLCK, errno.ESTALE, errno.EBADF])
@pytest.mark.parametrize("operation", _OPERATIONS)
def test_a_call_that_fails_is_a_checkpoint_error(
    operation: Callable[[Path], None], number: int, calls: Calls, tmp_path: Path
) -> None:
    ckptcore.save(tmp_path / "saved", _STATE)
    others = []
    with _one_after_another(calls, operation, tmp_path) as found:
        for fault in found:
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


@pytest.mark.parametrize("operation", [_save, _load])
def test_an_interrupted_call_leaks_no_file_and_no_lock(
    operation: Callable[[Path], None], calls: Calls, tmp_path: Path
) -> None:
    """Ctrl-C takes effect after a call. `open` and `scandir` are left out: their results have no owner yet."""
    ckptcore.save(tmp_path / "saved", _STATE)
    calls.only = threading.current_thread()
    with _one_after_another(calls, operation, tmp_path) as found:
        _save(tmp_path)
        _load(tmp_path)
        gc.collect()
        before, interrupted = _open_files(), 0
        for fault in found:
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
