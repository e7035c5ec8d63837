"""Coordinators: the processes of a job agreeing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = [
    "Coordinator",
]


class Coordinator(Protocol):
    """The processes of a job agreeing. Safe off the main thread; keys are unique per exchange.

    Every wait has a deadline; past it `CoordinationTimeoutError` names the ranks that did not come.
    """

    @property
    def rank(self) -> int:
        """Which process this is; 0 leads."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def gather(self, key: str, payload: bytes) -> Sequence[bytes] | None:
        """Give a payload to the leader: there all of them in order of rank, elsewhere None."""
        ...

    def broadcast(self, key: str, payload: bytes | None) -> bytes:
        """Get the leader's payload; the others pass None."""
        ...
