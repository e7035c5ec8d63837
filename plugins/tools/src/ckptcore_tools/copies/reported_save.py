"""A save that reports its progress to a callback."""

from __future__ import annotations

from collections.abc import Callable

from ckptcore.results import SaveHandle

__all__ = ["ReportedSave"]


class ReportedSave(SaveHandle):
    """A handle that reports its progress to a callback."""

    def __init__(self, location: str, total: int, callback: Callable[[int, int], None]) -> None:
        """Start with nothing written.

        Args:
            location: as error messages name it.
            total: bytes of arrays that are to be written.
            callback: called with bytes written and bytes in all, from any thread.
        """
        super().__init__(location, total)
        self._callback = callback

    def count(self, nbytes: int) -> None:
        """Add bytes that are in the storage, and call the callback."""
        super().count(nbytes)
        progress = self.progress
        self._callback(min(progress.written, progress.total), progress.total)
