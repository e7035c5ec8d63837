"""Children by fork: what holds locks and counts requests begins anew there, where the threads that hold them are not."""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol

__all__ = ["renew_in_children"]


class _Renewable(Protocol):
    """An object that can begin anew."""

    def renew(self) -> None:
        """Become as at first, without using a lock: one that another thread of the parent held stays locked for ever."""
        ...


def renew_in_children(thing: _Renewable) -> None:
    """Have `thing` renewed in every child that is forked while it lives; does not keep it alive. For things that are few."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(_renew, weakref.ref(thing)))


def _renew(found: weakref.ref[_Renewable]) -> None:
    thing = found()
    if thing is not None:
        thing.renew()
