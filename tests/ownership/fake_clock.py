"""A clock that advances only in calls of `sleep`, and processes that can pause."""

from __future__ import annotations

from collections.abc import Callable

from ckptcore.commit.leases import Clock


class FakeClock(Clock):
    """A clock whose time passes only in `sleep`. Repeated callbacks run there, on the calling thread."""

    def __init__(self) -> None:
        self._now = 0.0
        self._repetitions: list[FakeRepetition] = []

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        end = self._now + seconds
        while True:
            due = [each for each in self._repetitions if each.runs and each.next <= end]
            if not due:
                break
            first = min(due, key=lambda each: each.next)
            self._now = max(self._now, first.next)
            first.next = self._now + first.seconds
            first.work()
        self._now = end

    def repeat(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> Callable[[], None]:
        return self.add(FakeRepetition(FakeProcess(self), self._now, seconds, work)).stop

    def process(self) -> FakeProcess:
        """Return a new process that uses this clock."""
        return FakeProcess(self)

    def add(self, repetition: FakeRepetition) -> FakeRepetition:
        """Add a callback that runs repeatedly as time passes."""
        self._repetitions.append(repetition)
        return repetition


class FakeProcess(Clock):
    """The clock of one process. While the process is frozen, its callbacks do not run."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.is_frozen = False

    def now(self) -> float:
        return self._clock.now()

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    def repeat(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> Callable[[], None]:
        return self._clock.add(FakeRepetition(self, self._clock.now(), seconds, work)).stop


class FakeRepetition:
    """A repeated callback."""

    def __init__(self, process: FakeProcess, now: float, seconds: float, work: Callable[[], None]) -> None:
        self._process = process
        self._is_stopped = False
        self.seconds = seconds
        self.next = now + seconds
        self.work = work

    @property
    def runs(self) -> bool:
        """True if the callback runs as time passes. After a pause, a callback that is due runs at once."""
        return not self._is_stopped and not self._process.is_frozen

    def stop(self) -> None:
        self._is_stopped = True
