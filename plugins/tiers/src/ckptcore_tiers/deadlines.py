"""`Deadline`: how long the end of a run waits for directories that do not answer."""

from __future__ import annotations

import time
from typing import Final

_STOP_SECONDS: Final = 5.0
"""Time in seconds after the deadline to stop threads and to release the directories."""

_RELEASE_SECONDS: Final = 1.0
"""Least time in seconds to release one directory: another one that does not answer may have used up the rest."""


class Deadline:
    """The end of a time, which begins when this object is created. Thread-safe."""

    def __init__(self, seconds: float | None) -> None:
        """Begin a time of `seconds`; None for no limit."""
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds that are left, at least 0; None for no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def left_to_stop(self) -> float | None:
        """Return the seconds that are left to stop and to release; None for no limit."""
        return None if self._end is None else max(0.0, self._end + _STOP_SECONDS - time.monotonic())

    def left_to_release(self) -> float | None:
        """Return the seconds to wait for the release of one directory; None for no limit."""
        left = self.left_to_stop()
        return None if left is None else max(_RELEASE_SECONDS, left)
