"""What every hold can do, and where holds stand."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Literal, Protocol, Self, TypeAlias

__all__ = ["ADMINISTRATION", "Hold", "HoldsOfSteps", "Purpose"]

ADMINISTRATION: Final = ".ckptcore"
"""The directory beside the steps in which holds stand."""

Purpose: TypeAlias = Literal["pins", "deleting"]
"""Why a step is held, and the directory in which such holds stand: a reader needs it; it is being deleted."""


class Hold(Protocol):
    """Something that this process holds until it is closed, or dies. Any thread.

    A child that was forked holds nothing of what its parent holds: there `check` raises and `close` does nothing.
    """

    def check(self) -> None:
        """Do nothing while this is held; at most one small request to the storage, mostly.

        Raises:
            SaveLostError: it was taken over, removed or closed, or belongs to the parent of this process. For ever.
            StorageError: the storage failed, so it cannot be known.
        """
        ...

    def close(self) -> None:
        """Let it go; again is no error. What the storage fails to let go is logged, and loses its force by itself."""
        ...

    def __enter__(self) -> Self:
        """Itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let it go."""
        ...


class HoldsOfSteps(Protocol):
    """How steps are held in one kind of storage. Any thread; kept, because it may remember what it saw."""

    def take(self, purpose: Purpose, name: str) -> Hold:
        """Hold a step; others see it from when this returns. Many may hold one step.

        Raises:
            StorageError
        """
        ...

    def living(self, purpose: Purpose, name: str | None = None) -> frozenset[str]:
        """The steps, or of these the one called `name`, that the living hold; removes what it meets of the dead.

        Raises:
            StorageError
        """
        ...
