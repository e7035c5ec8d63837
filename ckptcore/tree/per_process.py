"""Values that differ between the processes of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["PerProcess"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PerProcess(Generic[T]):
    """A value that each process of a job has for itself. A checkpoint keeps that of every process.

    Iterators, random generators and other objects that are known to differ need not be wrapped.

    Attributes:
        value: the value of this process; in a load its abstract value, as without the wrapper.
    """

    value: T
