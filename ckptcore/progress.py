"""Progress of a save, load, copy or verification: counted bytes, which a function receives or a bar shows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO, TypeAlias

from ckptcore.errors import MissingDistributionError
from ckptcore.records import NamedTuple

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""A function that is called with the bytes done and the total bytes, from any thread. Calls do not overlap."""


class Progress(NamedTuple):
    """Progress of a save or load on this process.

    Attributes:
        done: bytes that are done. Equals `total` only once the operation has succeeded, or if `total` is 0.
        total: bytes of the arrays that this process and its workers write, or that it loads.
    """

    done: int
    total: int


class ByteProgress:
    """Counts the bytes of an operation, and reports them to a function. Thread-safe.

    Bytes are counted in two ways, and the larger count is used. The count of `complete` is exact and may be late,
    because it counts whole arrays. The count of `move` is early and may be inexact: an encoded array has another number
    of bytes, and a tied array may be stored twice.

    `done` never decreases. If an operation starts again, the total grows by the bytes that are moved again. `done`
    reaches the total only with `end`. Before `end` the operation can still fail, and a failed write releases its arrays
    like a complete one, so that they are counted.

    Attributes:
        later: bytes that are expected in addition to the planned bytes.
    """

    def __init__(self, report: ProgressCallback | None = None) -> None:
        """Count from zero. `report` is called with each change. If it raises, so does the method."""
        self.later = 0
        self._report = report
        self._reported: Progress | None = None
        self._before = self._planned = self._moved = self._completed = 0
        self._lock = threading.Lock()

    @property
    def value(self) -> Progress:
        """The progress so far."""
        with self._lock:
            return self._value()

    def plan(self, nbytes: int) -> None:
        """Begin to move `nbytes`. Earlier planned bytes that are not done are dropped from the total."""
        with self._lock:
            self._drop_rest(self._done())
            self._planned = nbytes
            self._tell()

    def move(self, nbytes: int) -> None:
        """Add bytes of arrays that were written or read."""
        with self._lock:
            self._moved += nbytes
            self._tell()

    def complete(self, nbytes: int) -> None:
        """Add the bytes of an array that is complete."""
        with self._lock:
            self._completed += nbytes
            self._tell()

    def end(self) -> None:
        """Report that the operation has succeeded: everything planned is done."""
        with self._lock:
            self.later = 0
            self._drop_rest(self._before + self._planned)
            self._tell()

    def _drop_rest(self, done: int) -> None:
        self._before = done
        self._planned = self._moved = self._completed = 0

    def _done(self) -> int:
        return self._before + min(max(self._moved, self._completed), self._planned)

    def _value(self) -> Progress:
        left = self._planned + self.later
        total = self._before + left
        return Progress(min(self._done(), total - 1) if left else total, total)

    def _tell(self) -> None:
        # The caller holds the lock, so that calls do not overlap and have the order of the counts.
        if self._report is not None and (value := self._value()) != self._reported:
            self._reported = value
            self._report(*value)


def show_progress(
    progress: bool | ProgressCallback, title: str, *, rank: int
) -> AbstractContextManager[ProgressCallback | None]:
    """Return a context manager that yields the function to report progress to, or None for no progress.

    Args:
        progress: False for no progress, a function to report to, or True to show a bar on rank 0.
        title: the text before the bar.
        rank: the rank of this process.

    Raises:
        TypeError: `progress` is neither a bool nor a function.
    """
    if progress is True:
        return show_bar(title, is_shown=rank == 0)
    if progress is False:
        return nullcontext()
    if not callable(progress):
        raise TypeError(f"progress={progress!r}: expected True, False, or a function of bytes done and total bytes")
    return nullcontext(progress)


@contextmanager
def show_bar(title: str, *, is_shown: bool = True, leave: bool = True) -> Iterator[ProgressCallback]:
    """Show a bar on stderr with rich or tqdm until the body ends. Yield the function that updates it.

    Args:
        title: the text before the bar.
        is_shown: False to show nothing. The bar is also not shown if stderr is neither a terminal nor a notebook.
        leave: True to leave the bar on the screen at the end.

    Raises:
        MissingDistributionError: neither rich nor tqdm is installed.
    """
    stderr: TextIO | None = sys.stderr  # None in a program without a console
    is_shown &= type(stderr).__module__.startswith("ipykernel.") or (stderr is not None and stderr.isatty())
    try:
        update, close = _rich_bar(title, is_shown, leave)
    except ImportError:
        try:
            update, close = _tqdm_bar(title, is_shown, leave)
        except ImportError:
            raise MissingDistributionError(
                "progress=True shows a bar with rich or tqdm, and neither is installed: `pip install rich`, or pass a "
                "function of bytes done and total bytes"
            ) from None
    try:
        yield update if is_shown else lambda done, total: None
    finally:
        close()


_Bar: TypeAlias = tuple[ProgressCallback, Callable[[], None]]
"""Functions that update and close a bar."""


def _rich_bar(title: str, is_shown: bool, leave: bool) -> _Bar:
    from rich.console import Console  # optional
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        # Notebooks can show the text of terminals. The notebook widget of rich shows nothing without ipywidgets.
        console=Console(stderr=True, force_terminal=is_shown, force_jupyter=False),
        transient=not leave,
        disable=not is_shown,
        redirect_stdout=False,
    )
    if is_shown:  # older versions of rich print an empty line at the end of a disabled bar
        bar.start()
    task = bar.add_task(title, total=None)

    def update(done: int, total: int) -> None:
        if not total:
            done = total = 1  # nothing to move: 100 %, not 0 %
        bar.update(task, completed=done, total=total)

    return update, bar.stop if is_shown else lambda: None


def _tqdm_bar(title: str, is_shown: bool, leave: bool) -> _Bar:
    from tqdm import tqdm  # type: ignore[import-untyped]  # optional, and has no types

    bar = tqdm(desc=title, unit="B", unit_scale=True, leave=leave, disable=not is_shown)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)  # tqdm takes increments

    return update, bar.close
