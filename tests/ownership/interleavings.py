"""Interleavings of actors: at every operation of a storage another actor can continue, in every possible order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, Protocol

from ckptcore_testing.faults import FaultPlan, SimulatedCrash, Step

from ckptcore.commit.leases import Clock

_STUCK_SECONDS: Final = 60.0
_FREE_TURNS: Final = 100
_MOST_TURNS: Final = 2000
_ACTING: Final = threading.local()


class Choices(Protocol):
    """A source of choices between possible next events."""

    def choose(self, count: int) -> int:
        """Return the number of one of `count` possibilities, from 0."""
        ...


class Replay:
    """Choices that repeat a given list, and then take the first possibility. Records all choices."""

    def __init__(self, chosen: Sequence[int]) -> None:
        self._told = list(chosen)
        self.made: list[tuple[int, int]] = []

    def choose(self, count: int) -> int:
        """See `Choices`."""
        number = len(self.made)
        chosen = self._told[number] if number < len(self._told) else 0
        self.made.append((chosen, count))
        return chosen


def every_order() -> Iterator[Replay]:
    """Yield the choices for one run after another, until all orders were used. Run each before taking the next."""
    told: list[int] = []
    while True:
        replay = Replay(told)
        yield replay
        made = replay.made
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        if not made:
            return
        told = [*(chosen for chosen, _ in made[:-1]), made[-1][0] + 1]


class Actor(FaultPlan, Clock):
    """A simulated process. It stops before each operation of its storage until its turn, and can be killed there.

    An actor is also its own clock, on which no time passes. Its `sleep` ends after an operation of another actor.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.state: Literal["ready", "waiting", "done"] = "ready"
        self.error: BaseException | None = None
        self._turn = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._dies = False

    def begin(self, name: str, keys: Sequence[str], offset: int = 0, nbytes: int = 0) -> Step:
        """Wait for the turn, unless the actor was killed. Then begin the operation. See `FaultPlan`."""
        if not self.crashed:
            self.stop()
        return super().begin(name, keys, offset, nbytes)

    def now(self) -> float:
        """Return a constant time."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Wait until another actor has done an operation."""
        self.expect_alive()
        self.state = "waiting"
        self.stop()

    def repeat(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> Callable[[], None]:
        """Do not run the callback, because no time passes."""
        return lambda: None

    @staticmethod
    def current() -> Actor | None:
        """Return the actor of the current thread."""
        return getattr(_ACTING, "actor", None)

    def stop(self) -> None:
        """Wait for the next turn."""
        self._stopped.release()
        assert self._turn.acquire(timeout=_STUCK_SECONDS)
        if self._dies:
            self.crash()

    def start(self, work: Callable[[], None]) -> None:
        """Run the work on a new thread, up to its first operation."""

        def run() -> None:
            _ACTING.actor = self
            try:
                work()
            except SimulatedCrash:
                pass
            except BaseException as error:  # noqa: BLE001  # the test raises it
                self.error = error
            finally:
                self.state = "done"
                self._stopped.release()

        threading.Thread(target=run, name=self.name, daemon=True).start()
        assert self._stopped.acquire(timeout=_STUCK_SECONDS)

    def go_on(self) -> None:
        """Run one operation."""
        self.state = "ready"
        self._turn.release()
        assert self._stopped.acquire(timeout=_STUCK_SECONDS)

    def die(self) -> None:
        """Kill the actor before its next operation."""
        self._dies = True
        self.go_on()


class Turns:
    """A scheduler that gives turns to actors until all are done."""

    def __init__(self, choices: Choices, actors: Sequence[Actor], deaths: int = 0) -> None:
        """Create a scheduler that follows `choices`, and kills up to `deaths` actors."""
        self._choices = choices
        self._actors = actors
        self._deaths = deaths

    def run(self) -> None:
        """Run all started actors to their ends."""
        turns = 0
        while any(actor.state != "done" for actor in self._actors):
            turns += 1
            ready = [actor for actor in self._actors if actor.state == "ready"]
            # The awaited event may have happened after the last look of an actor, so waiting actors look again.
            ready = ready or [actor for actor in self._actors if actor.state == "waiting"]
            assert turns < _MOST_TURNS, f"{[actor.name for actor in ready]} do not end"
            possible: list[tuple[Actor, Literal["go on", "die"]]] = [(actor, "go on") for actor in ready]
            if self._deaths:
                possible += [(actor, "die") for actor in self._actors if actor.state != "done"]
            actor, what = possible[self._choose(turns, len(possible))]
            if what == "die":
                self._deaths -= 1
                actor.die()
            else:
                actor.go_on()
            for other in self._actors:
                if other is not actor and other.state == "waiting":
                    other.state = "ready"
        for actor in self._actors:
            if actor.error is not None:
                raise actor.error

    def _choose(self, turns: int, count: int) -> int:
        if turns > _FREE_TURNS:
            # Round robin: otherwise two actors that wait for a third could get every turn.
            return turns % count
        return self._choices.choose(count) if count > 1 else 0
