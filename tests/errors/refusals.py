"""Helpers of the tests of remedies: states, and a Context that runs an action before an operation of its storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from ckptcore_testing.faults import FaultPlan, Step
from ckptcore_testing.faulty_storage import with_faults, with_storage

import ckptcore
from ckptcore.plugins import installed_plugins

ONE: Final = np.arange(3.0)
TWO: Final = np.arange(3.0, 6.0)


class Interrupting(FaultPlan):
    """A plan that runs `action` before the first `times` operations called `name` whose key ends in `ending`."""

    def __init__(self, name: str, ending: str, action: Callable[[], object], times: int) -> None:
        super().__init__()
        self._name, self._ending, self._action, self._left = name, ending, action, times

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """See `FaultPlan`."""
        if self._left and name == self._name and any(key.endswith(self._ending) for key in keys):
            self._left -= 1
            self._action()
        return super().begin(name, keys, offset, nbytes)


def interrupted(
    scheme: str, name: str, ending: str, action: Callable[[], object], *, times: int = 1
) -> ckptcore.Context:
    """Return a Context whose storage runs `action` before some operations, like another process. See `Interrupting`."""
    opener = installed_plugins().storage(scheme)
    plan = Interrupting(name, ending, action, times)
    return with_storage(ckptcore.Context(), scheme, lambda url, options: with_faults(opener(url, options), plan))
