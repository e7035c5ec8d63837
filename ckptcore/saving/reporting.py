"""A save that tells its progress to a callback."""

from __future__ import annotations

from collections.abc import Callable

from ckptcore.io.background import SaveHandle

__all__ = ["ReportedSave"]


class ReportedSave(SaveHandle):
    """A handle that tells its progress to a callback."""

    def __init__(self, location: str, total: int, callback: Callable[[int, int], None]) -> None:
        """Nothing is written yet.

        Args:
            location: as errors call it.
            total: bytes of arrays that are to be written.
            callback: called with bytes written and bytes in all, from any thread.
        """
        super().__init__(location, total)
        self._callback = callback

    def count(self, nbytes: int) -> None:
        """Say that so many more bytes are in the storage."""
        super().count(nbytes)
        progress = self.progress
        self._callback(min(progress.written, progress.total), progress.total)
