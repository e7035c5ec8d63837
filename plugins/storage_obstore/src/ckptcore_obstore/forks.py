"""Reset of objects in forked children.

A forked child inherits locks and counters, but not the threads that use them.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol


class _Resettable(Protocol):
    """An object that can be reset."""

    def reset_after_fork(self) -> None:
        """Return to the initial state.

        Acquires no lock, because a thread of the parent may have held it during the fork.
        """
        ...


def reset_in_children(thing: _Resettable) -> None:
    """Call `reset_after_fork` of `thing` in every child forked during its lifetime.

    Only a weak reference is kept. Callbacks are never unregistered, so use this for few objects.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(_reset, weakref.ref(thing)))


def _reset(reference: weakref.ref[_Resettable]) -> None:
    thing = reference()
    if thing is not None:
        thing.reset_after_fork()
