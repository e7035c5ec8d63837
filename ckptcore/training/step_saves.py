"""StepSaves: the saves of steps that a process began, until somebody has heard how they ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from ckptcore.io.background import SaveHandle

__all__ = ["StepSaves"]


@dataclass(frozen=True, slots=True)
class _Saving:
    """A save in the background."""

    step: int
    handle: SaveHandle


class StepSaves:
    """The saves of a run in this process. One thread begins them; any may ask.

    Attributes:
        last_committed: the step that was committed last; None before.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._saves: list[_Saving] = []
        self._beginning: int | None = None
        self.last_committed: int | None = None

    def __len__(self) -> int:
        """How many are kept: under way, or failed without anybody having asked, or over since the last began."""
        with self._lock:
            return len(self._saves)

    @contextmanager
    def beginning(self, step: int) -> Iterator[None]:
        """Count a step as under way in the body: while its save begins, or for as long as it blocks."""
        self._beginning = step
        try:
            yield
        finally:
            self._beginning = None

    def add(self, step: int, handle: SaveHandle) -> None:
        """Keep a save that goes on in the background."""
        with self._lock:
            self._saves = [*(save for save in self._saves if save.handle.matters), _Saving(step, handle)]

    @property
    def are_under_way(self) -> bool:
        """Whether a save goes on in the background."""
        with self._lock:
            return any(not save.handle.done() for save in self._saves)

    def under_way(self) -> set[int]:
        """The steps that are being saved."""
        beginning = self._beginning
        with self._lock:
            under_way = {save.step for save in self._saves if not save.handle.done()}
        return under_way if beginning is None else under_way | {beginning}

    def take_errors(self) -> Sequence[BaseException]:
        """Wait until every save that was begun is over; the errors that nobody has asked for, each once.

        Who is interrupted while it waits, waits again the next time.
        """
        with self._lock:
            saves = list(self._saves)
        errors: list[BaseException] = []
        for save in saves:
            told = not save.handle.matters
            error = save.handle.exception()
            if error is not None and not told:
                errors.append(error)
        with self._lock:
            self._saves = [save for save in self._saves if save not in saves]
        return errors
