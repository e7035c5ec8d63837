"""Prevents uses of tensorstore that would end the process: in a forked child, or in daemon threads at exit.

tensorstore 0.1.86 aborts in a forked child, because its threads do not exist there. At exit, Python
up to 3.13 terminates a daemon thread that waits for the interpreter lock, which crashes within C++.
Code that uses tensorstore calls this module first. This module does not import tensorstore.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ckptcore.errors import CheckpointError

_PATIENCE_SECONDS: Final = 10.0
"""Maximum wait at exit for daemon threads to leave tensorstore, because a read from a storage may hang."""


class _UseCounter:
    """Counts the uses of tensorstore in this process. Thread-safe."""

    def __init__(self) -> None:
        self._process: Final = os.getpid()
        self._changed = threading.Condition()
        self._daemons = 0
        self._ending = False
        atexit.register(self._end)

    def expect_usable(self) -> None:
        if os.getpid() != self._process:  # before any lock, which another thread of the parent may have held
            raise CheckpointError(
                f"cannot load or save compressed arrays: process {os.getpid()} was forked from process "
                f"{self._process}, which had used TensorStore, whose threads do not exist in the child; start "
                "processes with 'spawn' or 'forkserver', or load and save compressed arrays only after forking"
            )
        if self._ending and threading.current_thread().daemon:
            raise CheckpointError(
                "the program is ending, but a daemon thread was still loading or saving compressed arrays; join the "
                "thread first"
            )

    def begin(self) -> bool:
        """Start a use. Return whether `end` must be called: only in daemon threads, because others end before exit."""
        self.expect_usable()
        if not threading.current_thread().daemon:
            return False
        with self._changed:
            self.expect_usable()
            self._daemons += 1
        return True

    def end(self) -> None:
        with self._changed:
            self._daemons -= 1
            self._changed.notify_all()

    def _end(self) -> None:
        if os.getpid() != self._process:
            return
        with self._changed:
            self._ending = True
            self._changed.wait_for(lambda: not self._daemons, _PATIENCE_SECONDS)


_uses: Final = functools.cache(_UseCounter)
"""The counter of this process. Created on first use, so that a child forked earlier has its own."""


def expect_usable() -> None:
    """Check that tensorstore can be used. Call this before each operation.

    Raises:
        CheckpointError: tensorstore would end the process.
    """
    _uses().expect_usable()


def begin_use() -> Callable[[], None]:
    """Start a use of tensorstore. Call the returned function at its end.

    The exit of the program waits for the end of uses in daemon threads, for at most
    `_PATIENCE_SECONDS`. Other threads end before the exit.

    Raises:
        CheckpointError: tensorstore would end the process.
    """
    uses = _uses()
    return uses.end if uses.begin() else _nothing


def _nothing() -> None:
    pass


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and its causes.

    The frames refer to tensorstore objects, which must not outlive the use.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__


@contextmanager
def using_tensorstore() -> Iterator[None]:
    """Context manager for a use of tensorstore. See `begin_use`.

    The caller must not keep tensorstore objects beyond the context. In a daemon thread, the context
    clears the frames of an error, because they can refer to such objects.

    Raises:
        CheckpointError: tensorstore would end the process.
    """
    uses = _uses()
    counted = uses.begin()
    try:
        yield
    except BaseException as error:
        if counted:
            clear_frames(error)
        raise
    finally:
        if counted:
            uses.end()
