"""Preservation policies: which steps of a run are kept, and which garbage collection deletes."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Final, Literal, Protocol, runtime_checkable

from ckptcore.policies.saving import check_policies, seconds, step_numbers, whole_number
from ckptcore.records import dataclass

_NEWEST: Final = "the newest step, which is never deleted"


def what_to_delete(policy: PreservationPolicy, steps: Sequence[StepInfo], now: float) -> tuple[int, ...]:
    """Return the steps that garbage collection deletes, ascending.

    The newest step is never deleted, because a job that resumes from an older step would lose work.

    Args:
        policy: chooses the steps to keep.
        steps: all committed steps, in any order.
        now: seconds since the epoch, UTC.
    """
    ascending = _ascending(steps)
    if len(ascending) < 2:
        return ()
    kept = policy.keep(ascending, now)
    return tuple([info.step for info in ascending[:-1] if info.step not in kept])


def explain(policy: PreservationPolicy, steps: Sequence[StepInfo], now: float) -> Mapping[int, tuple[str, ...]]:
    """Return the reasons to keep each step, by step in ascending order.

    A step that `what_to_delete` returns has no reasons.

    Args:
        policy: chooses the steps to keep. The reason is its `str`, or the `str` of a policy in an `AnyPreservation`.
        steps: all committed steps, in any order.
        now: seconds since the epoch, UTC.
    """
    ascending = _ascending(steps)
    reasons: dict[int, list[str]] = {info.step: [] for info in ascending}
    for part in _parts(policy):
        kept = part.keep(ascending, now)
        for info in ascending:
            if info.step in kept:
                reasons[info.step].append(_reason(part, info))
    if ascending and not reasons[ascending[-1].step]:
        reasons[ascending[-1].step].append(_NEWEST)
    return {step: tuple(words) for step, words in reasons.items()}


def _ascending(steps: Sequence[StepInfo]) -> list[StepInfo]:
    return sorted(steps, key=operator.attrgetter("step"))


def _reason(policy: PreservationPolicy, info: StepInfo) -> str:
    if isinstance(policy, BestN) and policy.measure(info) is None:
        return f"has no metric {policy.metric!r}"
    return str(policy)


def _parts(policy: PreservationPolicy) -> Iterator[PreservationPolicy]:
    if isinstance(policy, AnyPreservation):
        for part in policy.policies:
            yield from _parts(part)
    else:
        yield policy


_NO_METRICS: Final[Mapping[str, float]] = {}


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The facts about a committed step that a preservation policy uses.

    Attributes:
        step: its number.
        created: start of its save, in seconds since the epoch, UTC.
        metrics: the metrics that were saved with it, by name.
    """

    step: int
    created: float
    metrics: Mapping[str, float] = field(default_factory=lambda: _NO_METRICS)


@runtime_checkable
class PreservationPolicy(Protocol):
    """Decides which steps to keep. Its `str` describes the kept steps.

    Collecting after each save should keep the same steps as one collection at the end. All policies of this module
    except `CustomPreservation` ensure this, if metrics do not change and the clock is not set back.
    """

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the steps to keep.

        Args:
            steps: all committed steps, ascending.
            now: seconds since the epoch, UTC.
        """
        ...


@dataclass(frozen=True, slots=True)
class PreserveAll:
    """Keeps every step."""

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return every step."""
        return frozenset([info.step for info in steps])

    def __str__(self) -> str:
        return "all steps"


@dataclass(frozen=True, slots=True)
class LatestN:
    """Keeps the newest steps.

    Attributes:
        n: number of steps, at least 0. The newest step is never deleted, so 0 keeps one step.

    Raises:
        ValueError: if `n` is not a whole number of at least 0.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number(self, "n", self.n, at_least=0))

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the last `n` steps."""
        return frozenset([info.step for info in steps[max(0, len(steps) - self.n) :]])

    def __str__(self) -> str:
        return f"the latest {self.n}"


@dataclass(frozen=True, slots=True)
class LatestDuration:
    """Keeps the oldest step that is at most a number of seconds old, and every later step.

    The age is the time on this host minus the time on the host that saved the step. Synchronize the clocks of the
    hosts, for example with NTP.

    Attributes:
        seconds: the age, at least 0.

    Raises:
        ValueError: if `seconds` is not a finite number of at least 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", seconds(self, "seconds", self.seconds, at_least=0))

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the first step that is young enough, and all later steps."""
        for number, info in enumerate(steps):
            if now - info.created <= self.seconds:
                return frozenset([later.step for later in steps[number:]])
        return frozenset()

    def __str__(self) -> str:
        return f"of the last {self.seconds:.12g} s"


@dataclass(frozen=True, slots=True)
class EveryNSeconds:
    """Keeps the first step, and every step that was created at least a number of seconds after the last kept step.

    Attributes:
        seconds: the interval, above 0.

    Raises:
        ValueError: if `seconds` is not a finite number above 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", seconds(self, "seconds", self.seconds))

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return steps that are at least the interval apart."""
        kept: list[StepInfo] = []
        for info in steps:
            # Use the absolute difference, so that the next step is kept after the clock is set back. Otherwise no step
            # would be kept for a long time.
            if not kept or abs(info.created - kept[-1].created) >= self.seconds:
                kept.append(info)
        return frozenset([info.step for info in kept])

    def __str__(self) -> str:
        return f"one every {self.seconds:.12g} s"


@dataclass(frozen=True, slots=True)
class EveryNSteps:
    """Keeps multiples of a number of steps, including step 0.

    Attributes:
        steps: the interval, at least 1. If saved steps are not multiples of it, use `EveryNStepsClosest`.

    Raises:
        ValueError: if `steps` is not a whole number of at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number(self, "steps", self.steps, at_least=1))

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the multiples."""
        return frozenset([info.step for info in steps if info.step % self.steps == 0])

    def __str__(self) -> str:
        return f"a multiple of {self.steps} steps"


@dataclass(frozen=True, slots=True)
class EveryNStepsClosest:
    """Keeps, for each multiple of a number of steps, the step nearest to it.

    A step belongs to the nearest multiple; in a tie, to the higher multiple. Of two steps at the same distance from
    their multiple, the later step is kept.

    Attributes:
        steps: the interval, at least 1.

    Raises:
        ValueError: if `steps` is not a whole number of at least 1.
    """

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number(self, "steps", self.steps, at_least=1))

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the nearest steps."""
        nearest: dict[int, int] = {}
        for info in steps:
            multiple = (2 * info.step + self.steps) // (2 * self.steps) * self.steps
            if multiple not in nearest or abs(info.step - multiple) <= abs(nearest[multiple] - multiple):
                nearest[multiple] = info.step
        return frozenset(nearest.values())

    def __str__(self) -> str:
        return f"nearest to a multiple of {self.steps} steps"


@dataclass(frozen=True, slots=True)
class CustomSteps:
    """Keeps given steps.

    Attributes:
        steps: at least one; stored as a frozenset.

    Raises:
        TypeError: if `steps` is not an iterable, or is text.
        ValueError: if there is no step, or a step is not a whole number of at least 0.
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        steps = step_numbers(self, "steps", self.steps)
        if not steps:
            raise ValueError(f"CustomSteps(steps={self.steps!r}): give at least one step")
        object.__setattr__(self, "steps", steps)

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the given steps that exist."""
        return frozenset([info.step for info in steps if info.step in self.steps])

    def __str__(self) -> str:
        return f"among {len(self.steps)} chosen {'step' if len(self.steps) == 1 else 'steps'}"


@dataclass(frozen=True, slots=True)
class BestN:
    """Keeps the steps with the best values of a metric. Of steps with equal values, the later steps are better.

    Attributes:
        n: number of steps, at least 0.
        metric: the name of the metric.
        mode: ``"min"`` if low values are better, ``"max"`` if high values are.
        keep_unmeasured: True to keep all steps without this metric, or with NaN, as well. True by default, because
            otherwise a mistyped name of a metric would delete every step but the newest.

    Raises:
        ValueError: if `n` is not a whole number of at least 0, `metric` is empty or not a str, or `mode` is invalid.
    """

    n: int
    metric: str
    mode: Literal["min", "max"]
    keep_unmeasured: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole_number(self, "n", self.n, at_least=0))
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"BestN(metric={self.metric!r}): give the name of a metric")
        if self.mode not in ("min", "max"):
            raise ValueError(f"BestN(mode={self.mode!r}): give 'min' if low values are good, or 'max' if high ones are")

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the best steps and, if wanted, the steps without the metric."""
        sign = 1 if self.mode == "max" else -1
        measured: list[tuple[float, int]] = []
        kept: set[int] = set()
        for info in steps:
            value = self.measure(info)
            if value is not None:
                measured.append((sign * value, info.step))
            elif self.keep_unmeasured:
                kept.add(info.step)
        return frozenset(kept.union([step for _, step in heapq.nlargest(self.n, measured)]))

    def measure(self, info: StepInfo) -> float | None:
        """Return the value of the metric at a step; None if it is missing or NaN."""
        value = info.metrics.get(self.metric)
        return None if value is None or math.isnan(value) else value

    def __str__(self) -> str:
        return f"the best {self.n} by {self.metric} ({self.mode})"


@dataclass(frozen=True, slots=True)
class AnyPreservation:
    """Keeps every step that at least one of its policies keeps.

    Attributes:
        policies: at least one; stored as a tuple.

    Raises:
        TypeError: if an item is not a policy.
        ValueError: if there is no policy.
    """

    policies: Collection[PreservationPolicy]

    def __post_init__(self) -> None:
        check_policies(self, self.policies, PreservationPolicy)
        object.__setattr__(self, "policies", tuple(self.policies))

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the union of the steps that the policies keep."""
        return frozenset[int]().union(*[policy.keep(steps, now) for policy in self.policies])

    def __str__(self) -> str:
        return ", or ".join(map(str, self.policies))


@dataclass(frozen=True, slots=True)
class CustomPreservation:
    """A function as a policy.

    Attributes:
        function: called with the steps, ascending, and the time (seconds since the epoch). Returns the steps to keep.

    Raises:
        TypeError: if `function` cannot be called.
    """

    function: Callable[[Sequence[StepInfo], float], Iterable[int]]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"CustomPreservation(function={self.function!r}): "
                "give a function from steps and the time to steps to keep"
            )

    def keep(self, steps: Sequence[StepInfo], now: float) -> frozenset[int]:
        """Return the result of the function."""
        return frozenset(self.function(steps, now))

    def __str__(self) -> str:
        return f"kept by {getattr(self.function, '__name__', repr(self.function))}"
