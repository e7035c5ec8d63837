"""A small observer of running phases against the conformance kit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import cast

from ckptcore_testing import BeginObserverTests

from ckptcore.events import BeginObserver, Event


class RunningPhases:
    """Counts the phases that run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count: Counter[tuple[str, str, float]] = Counter()

    def began(self, event: Event) -> None:
        """See `BeginObserver`."""
        with self._lock:
            self.count[event.phase, event.operation_id, event.began] += 1

    def __call__(self, event: Event) -> None:
        """See `Observer`."""
        with self._lock:
            self.count[event.phase, event.operation_id, event.began] -= 1


class TestRunningPhases(BeginObserverTests):
    """The observer above."""

    def observer(self) -> BeginObserver:
        """Return an observer of nothing yet."""
        return RunningPhases()

    def running(self, observer: BeginObserver) -> Sequence[str]:
        """Return the phases with a positive count."""
        return [phase for phase, _, _ in cast(RunningPhases, observer).count.elements()]
