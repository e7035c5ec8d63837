"""Who may use tensorstore: not a forked child of a process that did, and no daemon thread once the interpreter is going down.

Both end the process instead of raising an error: tensorstore 0.1.86 aborts in a child, since its threads did not follow
it there; and the interpreter, up to 3.13, takes a daemon thread down where it waits for the interpreter's lock, which
nothing within C++ survives. Whoever has tensorstore work uses this module first, which does not import it.
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

__all__ = ["begin_use", "clear_frames", "expect_usable", "using_tensorstore"]

_PATIENCE_SECONDS: Final = 10.0
"""How long the end of the program waits for daemon threads to leave tensorstore; one that reads from a storage may stand still."""


class _Uses:
    """What uses tensorstore in this process. Any thread."""

    def __init__(self) -> None:
        self._process: Final = os.getpid()
        self._changed = threading.Condition()
        self._daemons = 0
        self._ending = False
        atexit.register(self._end)

    def expect_usable(self) -> None:
        if os.getpid() != self._process:  # before any lock: another thread of the parent may have held it
            raise CheckpointError(
                f"arrays are compressed here, and process {os.getpid()} was forked from process {self._process} "
                "after that had used TensorStore, whose threads are not in the child; start processes with 'spawn' "
                "or 'forkserver', or load and save compressed arrays only after forking"
            )
        if self._ending and threading.current_thread().daemon:
            raise CheckpointError(
                "the program is ending, and a daemon thread was still loading or saving compressed arrays; join the "
                "thread first"
            )

    def begin(self) -> bool:
        """Whether `end` is to be called: a daemon thread begins. All other threads have ended before the interpreter goes down."""
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


_uses: Final = functools.cache(_Uses)
"""Made where tensorstore is first used: a child that was forked before has its own."""


def expect_usable() -> None:
    """Ask before each piece of work that tensorstore is given.

    Raises:
        CheckpointError: where it would end the process.
    """
    _uses().expect_usable()


def begin_use() -> Callable[[], None]:
    """Begin a piece of work of tensorstore; the end of the program waits until the returned function is called.

    Raises:
        CheckpointError: tensorstore would end the process.
    """
    uses = _uses()
    return uses.end if uses.begin() else _nothing


def _nothing() -> None:
    pass


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of its causes: they hold objects of tensorstore, which must not outlive the use."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__


@contextmanager
def using_tensorstore() -> Iterator[None]:
    """A context in which tensorstore is used, and after which nothing of it is left: the end of the program waits for it.

    Raises:
        CheckpointError: where tensorstore would end the process.
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
