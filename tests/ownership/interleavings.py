"""Actors that take turns at every operation of a storage, in each order that there is."""

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
    """Says what happens next."""

    def choose(self, count: int) -> int:
        """One of so many possibilities, from 0."""
        ...


class Replay:
    """Follows given choices, then takes the first possibility; records all choices."""

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
    """Choices for as many runs as there are orders; each is used for one run before the next is taken."""
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
    """A process: it stops before each operation of its storage until it has its turn, and may die there.

    It is its own clock. No time passes; an actor that waits continues when another one has done something.
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
        """Stop, then continue as `FaultPlan` does; after a kill, at once."""
        if not self.crashed:
            self.stop()
        return super().begin(name, keys, offset, nbytes)

    def now(self) -> float:
        """No time passes."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Yield to other threads."""
        self.expect_alive()
        self.state = "waiting"
        self.stop()

    def repeat(self, seconds: float, work: Callable[[], None], at_end: Callable[[], None]) -> Callable[[], None]:
        """Nothing comes due, as no time passes."""
        return lambda: None

    @staticmethod
    def current() -> Actor | None:
        """Whose thread this is."""
        return getattr(_ACTING, "actor", None)

    def stop(self) -> None:
        """Wait for the next turn."""
        self._stopped.release()
        assert self._turn.acquire(timeout=_STUCK_SECONDS)
        if self._dies:
            self.crash()

    def start(self, work: Callable[[], None]) -> None:
        """Begin, up to the first operation."""

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
        """Do one operation."""
        self.state = "ready"
        self._turn.release()
        assert self._stopped.acquire(timeout=_STUCK_SECONDS)

    def die(self) -> None:
        """Die before the next operation."""
        self._dies = True
        self.go_on()


class Turns:
    """Gives turns to actors until all are done."""

    def __init__(self, choices: Choices, actors: Sequence[Actor], deaths: int = 0) -> None:
        """Choose by `choices`; up to so many actors die somewhere."""
        self._choices = choices
        self._actors = actors
        self._deaths = deaths

    def run(self) -> None:
        """Run all actors, which have been started, to their ends."""
        turns = 0
        while any(actor.state != "done" for actor in self._actors):
            turns += 1
            ready = [actor for actor in self._actors if actor.state == "ready"]
            # The awaited event may have happened during a look; the actor sees it when it looks again.
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
            # Two that wait for a third would keep it from its turn for ever, if they were always chosen.
            return turns % count
        return self._choices.choose(count) if count > 1 else 0
