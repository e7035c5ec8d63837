"""Release of locks: exactly once, even if several threads close a lock, or if the storage answers late."""

from __future__ import annotations

import fcntl
import functools
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

import ckptcore
from ckptcore.builtin import local_directories
from ckptcore.builtin.local_calls import close_descriptor
from ckptcore.builtin.local_directories import try_to_lock
from ckptcore.commit.locks import Lock

_PACKAGE: Final = str(Path(ckptcore.__file__).parent)


def close_twice(close: Callable[[], None], line: int) -> bool:
    """Call a function, and call it on another thread before line `line` of the first call.

    Return False if the first call runs fewer lines of the package.
    """
    reached = 0

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal reached
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            reached += 1
            if reached == line:
                other = threading.Thread(target=close)
                other.start()
                other.join()
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        close()
    finally:
        sys.settrace(before)
    return reached >= line


def test_two_threads_release_a_lock_once() -> None:
    for line in itertools.count(1):
        released: list[int] = []
        lock = Lock("the step 1", check=lambda: None, release=functools.partial(released.append, 1))
        more = close_twice(lock.close, line)
        assert released == [1], line
        if not more:
            break
    assert line > 3


def test_two_threads_unlock_a_directory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second release could unlock and close another file, which has got the same descriptor."""
    calls: list[int] = []
    flock, close = fcntl.flock, close_descriptor

    def count_unlocks(descriptor: int, operation: int) -> None:
        calls.extend([operation] * (operation == fcntl.LOCK_UN))
        flock(descriptor, operation)

    def count_closes(descriptor: int, path: str) -> None:
        calls.append(-1)
        close(descriptor, path)

    monkeypatch.setattr(fcntl, "flock", count_unlocks)
    monkeypatch.setattr(local_directories, "close_descriptor", count_closes)
    for line in itertools.count(1):
        lock = try_to_lock(str(tmp_path))
        assert lock is not None
        calls.clear()
        more = close_twice(lock.close, line)
        assert calls == [fcntl.LOCK_UN, -1], line
        if not more:
            break
    assert line > 3


def test_a_close_with_a_time_limit_does_not_wait_for_the_storage(caplog: pytest.LogCaptureFixture) -> None:
    asked, answer, released = threading.Event(), threading.Event(), threading.Event()

    def release() -> None:
        asked.set()
        answer.wait()
        released.set()

    lock = Lock("the directory far", check=lambda: None, release=release)
    lock.close(0)
    assert asked.wait(60) and not released.is_set()
    assert "the directory far is not released" in caplog.text
    lock.close()
    answer.set()
    assert released.wait(60), "it goes on meanwhile"
