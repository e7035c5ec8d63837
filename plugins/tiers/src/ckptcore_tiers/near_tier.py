"""NearTier: the options of the fast directory of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ckptcore.commit.location import LocationLike, absolute_location
from ckptcore.errors import InvalidLocationError
from ckptcore.policies import EveryStep, LatestN, PreservationPolicy, SavePolicy

__all__ = ["NearTier", "SeenBy"]

SeenBy: TypeAlias = Literal["job", "host"]
"""The processes that see the files of a near directory: those of the whole job, or those on the same host."""

_SEEN_BY: Final[tuple[SeenBy, ...]] = ("job", "host")


@dataclass(frozen=True, slots=True)
class NearTier:
    """A fast directory, such as one on the local disk, that a `Checkpointer` saves steps to.

    A step is committed there, and the job does not wait for more. Uploads to the far directory run in the background.

    Attributes:
        directory: a path or URL, or a function that returns one in each process. It belongs to this run alone.
        preservation_policy: which steps are kept near. The newest always is, and so are steps that wait for their
            upload.
        upload_policy: which steps are uploaded: a save policy. The last step of its `SaveContext` is the last one that
            it chose. A step that replaces one in the far directory is uploaded in any case.
        most_waiting: how many steps may wait for their upload; the oldest of more is given up. At least 1.
        close_seconds: how long `Checkpointer.close` waits for uploads, in seconds; None: until all are done. 0: not at
            all, and the next run uploads them.
        seen_by: the processes that see one near directory: ``"job"``, all; ``"host"``, those on the same host. With
            ``"host"`` each host has a part of a step, and a step counts if all hosts have theirs.

    Raises:
        TypeError, ValueError: if an argument is none of its values.
    """

    directory: LocationLike | Callable[[], LocationLike]
    preservation_policy: PreservationPolicy = field(default_factory=lambda: LatestN(2), kw_only=True)
    upload_policy: SavePolicy = field(default_factory=EveryStep, kw_only=True)
    most_waiting: int = field(default=8, kw_only=True)
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
        if isinstance(self.most_waiting, bool) or not isinstance(self.most_waiting, int) or self.most_waiting < 1:
            raise ValueError(f"NearTier(most_waiting={self.most_waiting!r}): give a whole number of at least 1")
        seconds = self.close_seconds
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError(f"NearTier(close_seconds={seconds!r}): give seconds, at least 0, or None to wait for ever")
        if self.seen_by not in _SEEN_BY:
            raise ValueError(f"NearTier(seen_by={self.seen_by!r}): expected one of {', '.join(map(repr, _SEEN_BY))}")

    def locate(self, far: LocationLike) -> LocationLike:
        """Return the directory of this process.

        Args:
            far: the far directory.

        Raises:
            InvalidLocationError: if one directory is inside the other.
        """
        directory = self.directory() if callable(self.directory) else self.directory
        near, other = absolute_location(directory), absolute_location(far)
        if f"{near}/".startswith(f"{other}/") or f"{other}/".startswith(f"{near}/"):
            raise InvalidLocationError(
                f"NearTier({str(directory)!r}) and the directory of the run, {str(far)!r}, are the same or lie in "
                "each other; give each tier a directory of its own"
            )
        return directory
