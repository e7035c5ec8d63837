"""Values that differ between the processes of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["PerProcess"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PerProcess(Generic[T]):
    """Says that every process has a value of its own under this name, and each is kept.

    Iterators, random generators and other objects that are known to differ need not be wrapped.

    Attributes:
        value: what this process has; for a load what it asks for, as it would stand without the wrapper.
    """

    value: T
