"""Simulated training processes: their steps, saves, uploads, deletions and evaluations, on a simulated clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ckptcore_recovery.watchdog.bounds import DEFAULT_BOUNDS, Kind
from ckptcore_recovery.watchdog.detection import Detector, RunningPause, RunningPhase, RunningStep, Stall
from ckptcore_recovery.watchdog.monitor import WatchClock

SECONDS: Final = 1000 * 60.0
PHASES: Final[Sequence[tuple[Kind, str]]] = (
    ("save", "wait_for_previous"), ("save", "describe"), ("save", "copy"), ("save", "claim"), ("save", "write"),
    ("save", "exchange"), ("save", "commit"), ("load", "open"), ("load", "read"), ("load", "restore"),
    ("upload", "upload"), ("delete", "delete"), ("delete", "clean"),
)  # fmt: skip
"""Every phase in which an operation can stall."""


class Happening(NamedTuple):
    """A message to the monitor, and its time.

    Attributes:
        at: when, in seconds of running time.
        what: a step or pause that begins, a phase that begins, the key of one that ends, or the number of a pause.
        in_training: True if it happens on the thread that trains.
    """

    at: float
    what: RunningStep | RunningPause | RunningPhase | tuple[str, str, float] | int
    in_training: bool


class Alarm(NamedTuple):
    """A stall that was found.

    Attributes:
        at: when, in seconds of running time.
        stall: the stall.
    """

    at: float
    stall: Stall


@dataclass
class Training:
    """A healthy training process of 1,000 minutes, which a seed determines.

    Attributes:
        happenings: in the order of time.
        suspended: when the machine is suspended, in seconds of running time, and for how many seconds.
        end: when it ends, in seconds of running time.
    """

    happenings: list[Happening]
    suspended: list[tuple[float, float]]
    end: float

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.happenings = []
        self._numbers = itertools.count()
        self._train()
        self.happenings.sort(key=lambda happening: happening.at)
        self.suspended = sorted((self._random.uniform(0, SECONDS), self._random.uniform(1, 36_000)) for _ in range(8))

    def _jittered(self, typical: float, spread: float, *, slow: float = 0.0, times: float = 1.0) -> float:
        """Return a duration. It is multiplied by up to `times` with the probability `slow`."""
        seconds = typical * self._random.lognormvariate(0.0, spread)
        return seconds * self._random.uniform(1.0, times) if self._random.random() < slow else seconds

    def _phase(self, of: str, kind: Kind, name: str, began: float, seconds: float, *, in_training: bool) -> float:
        """Add a phase. Return when it ends."""
        phase = RunningPhase(of, kind, name, began, None, "run", 1 if in_training else 2)
        self.happenings.append(Happening(began, phase, in_training))
        self.happenings.append(Happening(began + seconds, phase.key, in_training))
        return began + seconds

    def _operation(
        self, kind: Kind, began: float, phases: Sequence[tuple[str, float]], *, whole: str, in_training: bool = False
    ) -> float:
        """Add an operation, which the phase `whole` spans, and its phases, one after another. Return when it ends.

        Without a name, its only phase is `whole`.
        """
        operation_id, now, seconds = f"operation-{next(self._numbers)}", began, sum([each for _, each in phases])
        self._phase(operation_id, kind, whole, began, seconds, in_training=in_training)
        for phase, duration in phases:
            if phase:
                now = self._phase(operation_id, kind, phase, now, duration, in_training=in_training)
        return began + seconds

    def _train(self) -> None:
        pick = self._random
        step_seconds, write_seconds = pick.uniform(1.0, 30.0), pick.uniform(2.0, 300.0)
        compile_seconds, steps_per_save = pick.uniform(30.0, 1500.0), pick.randrange(20, 200)
        steps_per_evaluation = pick.randrange(100, 1000)
        slower_from = pick.uniform(0.3, 0.7) * SECONDS  # longer sequences
        load = [("open", 1.0), ("read", pick.uniform(1.0, 1700.0)), ("restore", 2.0)]
        now = self._operation("load", 0.0, load, whole="load", in_training=True) + pick.uniform(1.0, 600.0)
        saved = uploaded = 0.0
        for step in itertools.count():
            self.happenings.append(Happening(now, RunningStep(step, now, 1), True))
            seconds = self._jittered(step_seconds, 0.25, slow=0.01, times=4.0) * (1.0 if now < slower_from else 2.0)
            now += seconds + (compile_seconds if step == 0 else 0.0)
            if now > SECONDS:
                self.end = max(now, saved, uploaded)  # it waits for saves and uploads
                return
            if step % steps_per_save == 0:
                waited, name = max(0.0, saved - now), f"operation-{next(self._numbers)}"
                blocked = [("wait_for_previous", waited), ("describe", 0.2), ("copy", self._jittered(1.0, 0.5))]
                written = self._jittered(write_seconds, 0.3, slow=0.08, times=6.0)
                exchanged = self._jittered(2.0, 1.0)
                background = [("claim", 0.1), ("write", written), ("exchange", exchanged), ("commit", 0.1)]
                self._phase(name, "save", "save", now, sum([s for _, s in (*blocked, *background)]), in_training=True)
                for phase, duration in blocked:
                    now = self._phase(name, "save", phase, now, duration, in_training=True)
                saved = now
                for phase, duration in background:
                    saved = self._phase(name, "save", phase, saved, duration, in_training=False)
                upload = [("", self._jittered(2 * write_seconds, 0.5))]
                uploaded = self._operation("upload", max(saved, uploaded) + 0.1, upload, whole="upload")
                cleaned = self._operation("delete", saved + 0.1, [("", self._jittered(5.0, 0.5))], whole="clean")
                self._operation("delete", cleaned, [("", self._jittered(3.0, 0.5))], whole="delete")
            if step % steps_per_evaluation == steps_per_evaluation - 1:
                pause = RunningPause(next(self._numbers), "evaluation", 4000.0, now, 1)
                self.happenings.append(Happening(now, pause, True))
                now += self._jittered(600.0, 0.5)
                self.happenings.append(Happening(now, pause.number, True))

    def stall_at(self, number: int) -> Happening:
        """Stall the process: what begins with a happening never ends, nor what waits for it. Return the happening.

        Args:
            number: the index of a happening with which a step, a phase or a pause begins.
        """
        stalled = self.happenings[number]
        begun = {
            happening.what.operation_id
            for happening in self.happenings[:number]
            if isinstance(happening.what, RunningPhase)
        }
        if isinstance(stalled.what, RunningPhase):
            begun.discard(stalled.what.operation_id)

        def happens(later: Happening) -> bool:
            match later.what:
                case RunningStep() | RunningPause() | int():
                    return not stalled.in_training
                case RunningPhase() as phase:
                    return phase.operation_id in begun
                case operation_id, _, _:
                    return operation_id in begun

        self.happenings[number + 1 :] = [later for later in self.happenings[number + 1 :] if happens(later)]
        return stalled


class _Clock:
    """A monotonic clock that goes on while the machine is suspended."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def alarms(training: Training, seed: int, until: float) -> Iterator[Alarm]:
    """Replay a training process, with a monitor that looks every second or later. Yield each stall that it finds."""
    jitter, monotonic = random.Random(seed), _Clock()
    clock, detector = WatchClock(monotonic, most=5.0), Detector(DEFAULT_BOUNDS)
    running, suspended, next_look = 0.0, list(training.suspended), 1.0
    happenings = iter([*training.happenings, None])
    happening = next(happenings)
    while running < until:
        at = next_look if happening is None else min(next_look, happening.at)
        monotonic.now += max(0.0, at - running)
        running = max(running, at)
        while suspended and suspended[0][0] <= running:
            monotonic.now += suspended.pop(0)[1]
        if happening is not None and happening.at <= running:
            tell(detector, happening, clock.now())
            happening = next(happenings)
            continue
        next_look = running + jitter.uniform(0.9, 1.1) + (jitter.uniform(0.0, 3.0) if jitter.random() < 0.01 else 0.0)
        for stall in detector.check(clock.now())[0]:
            yield Alarm(running, stall)


def tell(detector: Detector, happening: Happening, now: float) -> None:
    """Tell a detector what happens."""
    match happening.what:
        case RunningStep() as step:
            detector.step(step, now)
        case RunningPause() as pause:
            detector.pause(pause, now)
        case RunningPhase() as phase:
            detector.begin(phase, now)
        case int() as number:
            detector.resume(number, now)
        case key:
            detector.end(key, now)
