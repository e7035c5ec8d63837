"""`NearTier`: options of the fast directory of a run, and how long the end of a run waits for directories."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ckptcore.commit.location import LocationLike, absolute_location
from ckptcore.errors import InvalidLocationError
from ckptcore.policies import EveryStep, LatestN, PreservationPolicy, SavePolicy

_STOP_SECONDS: Final = 5.0
"""Time in seconds after the deadline to stop threads and to release the directories."""

_RELEASE_SECONDS: Final = 1.0
"""Minimum time in seconds to release a directory, even if the other directory does not answer and used up the time."""


class Deadline:
    """A deadline, a number of seconds after this object is created. Thread-safe."""

    def __init__(self, seconds: float | None) -> None:
        """Set the deadline in `seconds` from now; None for no limit."""
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Return the seconds that are left, at least 0; None for no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def left_to_stop(self) -> float | None:
        """Return the seconds that are left to stop threads and to release the directories; None for no limit."""
        return None if self._end is None else max(0.0, self._end + _STOP_SECONDS - time.monotonic())

    def left_to_release(self) -> float | None:
        """Return the seconds to wait for the release of one directory; None for no limit."""
        left = self.left_to_stop()
        return None if left is None else max(_RELEASE_SECONDS, left)


SeenBy: TypeAlias = Literal["job", "host"]
"""The processes that share one near directory: all processes of the job, or all processes on one host."""

_SEEN_BY: Final[tuple[SeenBy, ...]] = ("job", "host")


@dataclass(frozen=True, slots=True)
class NearTier:
    """A fast directory, such as one on a local disk, to which a `Checkpointer` saves steps.

    A save is complete once the step is committed there. Uploads to the far directory run in the
    background.

    Attributes:
        directory: a path or URL, or a function that returns it in each process. No other run may
            use the directory.
        preservation_policy: which steps to keep in the near directory. The newest step, the step
            that the run saved or loaded last, and steps that wait for their upload are always kept.
        upload_policy: which steps to upload, as a save policy. `SaveContext.last_step` is the last
            step that was queued for upload, or initially the newest step in the far directory. A
            step that replaces one in the far directory is always uploaded.
        max_waiting: maximum number of steps that wait for their upload, at least 1, without the
            step that is being uploaded. If there are more, the oldest are not uploaded.
        close_seconds: maximum time in seconds that `Checkpointer.close` waits for uploads and
            deletions, and that the exit of a program without `close` waits for uploads. None: until
            all are done. 0: do not wait; the next run uploads the steps.
            If the far directory does not answer, `close` takes about 6 seconds more: 5 to stop
            the upload, and 1 to release the directory.
        seen_by: the processes that share one near directory: ``"job"`` for all processes of the job,
            ``"host"`` for all processes on one host. With ``"host"`` each host has a part of a step, and a step is
            complete if all hosts have their parts.

    Raises:
        TypeError, ValueError: for an invalid argument.
    """

    directory: LocationLike | Callable[[], LocationLike]
    preservation_policy: PreservationPolicy = field(default_factory=lambda: LatestN(2), kw_only=True)
    upload_policy: SavePolicy = field(default_factory=EveryStep, kw_only=True)
    max_waiting: int = field(default=8, kw_only=True)
    close_seconds: float | None = field(default=600.0, kw_only=True)
    seen_by: SeenBy = field(default="job", kw_only=True)

    def __post_init__(self) -> None:
        for name, kind, wanted in (
            ("preservation_policy", PreservationPolicy, "a preservation policy, such as LatestN(2)"),
            ("upload_policy", SavePolicy, "a save policy, such as FixedInterval(1000)"),
        ):
            value = getattr(self, name)
            if isinstance(value, type) or not isinstance(value, kind):
                raise TypeError(f"NearTier({name}={value!r}): expected {wanted}")
        if isinstance(self.max_waiting, bool) or not isinstance(self.max_waiting, int) or self.max_waiting < 1:
            raise ValueError(f"NearTier(max_waiting={self.max_waiting!r}): expected an integer of at least 1")
        seconds = self.close_seconds
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError(
                f"NearTier(close_seconds={seconds!r}): expected seconds, at least 0, or None to wait without a limit"
            )
        if self.seen_by not in _SEEN_BY:
            raise ValueError(f"NearTier(seen_by={self.seen_by!r}): expected one of {', '.join(map(repr, _SEEN_BY))}")

    def locate(self, far: LocationLike) -> LocationLike:
        """Return the near directory of this process.

        Args:
            far: the far directory.

        Raises:
            InvalidLocationError: if one directory is the other or inside it.
        """
        directory = self.directory() if callable(self.directory) else self.directory
        near, other = absolute_location(directory), absolute_location(far)
        if f"{near}/".startswith(f"{other}/") or f"{other}/".startswith(f"{near}/"):
            raise InvalidLocationError(
                f"NearTier({str(directory)!r}) is the same as the directory of the run {str(far)!r}, or one is inside "
                "the other; use two separate directories"
            )
        return directory
