"""Objects with locks or threads that a forked child must not share with its parent."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

__all__ = ["Renewable", "renew_in_children"]


class Renewable(Protocol):
    """An object that can begin anew."""

    def renew(self) -> None:
        """Become as at first, without using a lock: one that another thread of the parent held stays locked for ever."""
        ...


def renew_in_children(thing: Renewable) -> None:
    """Have `thing` renewed in every child that is forked while it lives; does not keep it alive."""
    _RENEWABLES.add(thing)


_RENEWABLES: Final[weakref.WeakSet[Renewable]] = weakref.WeakSet()


def _after_fork() -> None:
    for thing in _RENEWABLES:
        thing.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
