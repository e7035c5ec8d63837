"""Save policies: at which steps of a training loop a checkpoint is saved. Checks of the arguments of all policies."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveContext:
    """The facts that a save policy uses.

    `step`, `epoch`, `last_step`, `last_epoch` and `first` are the same in every process of a job: they change only when
    all processes save, load or delete a step. The other attributes may differ between processes.

    Attributes:
        step: the step that could be saved.
        now: seconds since the epoch, UTC.
        epoch: the training epoch of the step; None if the caller did not pass one.
        last_step: the newest step when the directory was opened, or the step that was saved or loaded last since then.
            A save counts once it has begun, even if it fails later. None if there is none.
        last_epoch: the epoch of that step; None if unknown.
        last_save_began: start of the save of that step, in seconds since the epoch (UTC). For a step that was found in
            the directory, its creation time. None if there is no such step.
        last_save_ended: when this process last committed a save, in seconds since the epoch; None before that.
        saving: True while a save runs in this process; if the leader decides for the job, in any process.
        preempted: True once this process has a notice that its machine will be preempted; if the leader decides for the
            job, once any process has a notice.
    """

    step: int
    now: float
    epoch: int | None = None
    last_step: int | None = None
    last_epoch: int | None = None
    last_save_began: float | None = None
    last_save_ended: float | None = None
    saving: bool = False
    preempted: bool = False

    @property
    def first(self) -> bool:
        """True if the directory has no step and no save has begun."""
        return self.last_step is None


@runtime_checkable
class SavePolicy(Protocol):
    """Decides at which steps to save. Stateless; may be called from several threads."""

    @property
    def needs_agreement(self) -> bool:
        """True if processes of one job may decide differently.

        This happens if the decision depends on time, on preemption or on running saves. The leader then decides for all
        processes, which costs an exchange between the processes for each decision.
        """
        ...

    def should_save(self, context: SaveContext) -> bool:
        """Return True to save."""
        ...


@dataclass(frozen=True, slots=True)
class EveryStep:
    """Saves at every call: the training loop decides."""

    needs_agreement: ClassVar[bool] = False

    def should_save(self, context: SaveContext) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """Saves at multiples of a number of steps, including step 0.

    A multiple that the steps jump over is not saved: with an interval of 100, nothing is saved if step 101 follows step
    99. In that case use `TimeInterval`, or a `CustomSave` that compares with `SaveContext.last_step`.

    Attributes:
        steps: the interval, at least 1.

    Raises:
        ValueError: if `steps` is not a whole number of at least 1.
    """

    steps: int

    needs_agreement: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number(self, "steps", self.steps, at_least=1))

    def should_save(self, context: SaveContext) -> bool:
        """Return True for a multiple."""
        return context.step % self.steps == 0


@dataclass(frozen=True, slots=True)
class EpochInterval:
    """Saves once in each epoch that is a multiple of a number of epochs, including epoch 0.

    It saves at the first call in such an epoch. To save at the end of epochs, call `save` only there.

    Attributes:
        epochs: the interval, at least 1.

    Raises:
        ValueError: if `epochs` is not a whole number of at least 1.
    """

    epochs: int

    needs_agreement: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", whole_number(self, "epochs", self.epochs, at_least=1))

    def should_save(self, context: SaveContext) -> bool:
        """Return True if the epoch is a multiple and has no save.

        Raises:
            ValueError: if the caller did not pass the epoch.
        """
        if context.epoch is None:
            raise ValueError(
                f"EpochInterval(epochs={self.epochs}): step {context.step} has no epoch; pass epoch= to save and to "
                "should_save"
            )
        return context.epoch % self.epochs == 0 and context.epoch != context.last_epoch


@dataclass(frozen=True, slots=True)
class TimeInterval:
    """Saves when a number of seconds has passed since the last save began. Saves at the first call if there is none.

    The newest step counts even if an earlier run saved it. So a job that is killed more often than the interval still
    makes progress.

    Attributes:
        seconds: the interval, above 0.

    Raises:
        ValueError: if `seconds` is not a finite number above 0.
    """

    seconds: float

    needs_agreement: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", seconds(self, "seconds", self.seconds))

    def should_save(self, context: SaveContext) -> bool:
        """Return True if the time has passed."""
        return _has_passed(self.seconds, context)


@dataclass(frozen=True, slots=True)
class SpecificSteps:
    """Saves at given steps.

    Attributes:
        steps: the steps; stored as a frozenset.

    Raises:
        TypeError: if `steps` is not an iterable, or is text.
        ValueError: if a step is not a whole number of at least 0.
    """

    steps: Collection[int]

    needs_agreement: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", step_numbers(self, "steps", self.steps))

    def should_save(self, context: SaveContext) -> bool:
        """Return True at the given steps."""
        return context.step in self.steps


@dataclass(frozen=True, slots=True)
class ContinuousCheckpointing:
    """Saves as often as possible without waiting: whenever no save is running.

    Attributes:
        minimum_interval_secs: seconds that must have passed since the last save began, at least 0.

    Raises:
        ValueError: if `minimum_interval_secs` is not a finite number of at least 0.
    """

    minimum_interval_secs: float = 0

    needs_agreement: ClassVar[bool] = True

    def __post_init__(self) -> None:
        interval = seconds(self, "minimum_interval_secs", self.minimum_interval_secs, at_least=0)
        object.__setattr__(self, "minimum_interval_secs", interval)

    def should_save(self, context: SaveContext) -> bool:
        """Return True if no save is running and the time has passed."""
        return not context.saving and _has_passed(self.minimum_interval_secs, context)


@dataclass(frozen=True, slots=True)
class PreemptionCheckpointing:
    """Saves at every step after a notice of preemption. Leave the training loop after the first such save."""

    needs_agreement: ClassVar[bool] = True

    def should_save(self, context: SaveContext) -> bool:
        """Return True after the notice."""
        return context.preempted


@dataclass(frozen=True, slots=True)
class InitialSave:
    """Saves at the first call if there is no step, so that a new run finds out early whether it can save."""

    needs_agreement: ClassVar[bool] = False

    def should_save(self, context: SaveContext) -> bool:
        """Return True if there is no step."""
        return context.first


@dataclass(frozen=True, slots=True)
class AnySave:
    """Saves if any of its policies does.

    Attributes:
        policies: at least one; stored as a tuple.

    Raises:
        TypeError: if an item is not a policy.
        ValueError: if there is no policy.
    """

    policies: Collection[SavePolicy]

    def __post_init__(self) -> None:
        check_policies(self, self.policies, SavePolicy)
        object.__setattr__(self, "policies", tuple(self.policies))

    @property
    def needs_agreement(self) -> bool:
        """True if any of the policies needs it."""
        return any(policy.needs_agreement for policy in self.policies)

    def should_save(self, context: SaveContext) -> bool:
        """Return True if any of the policies saves."""
        # Call every policy, so that an error is raised at the first step, not once the other policies return False.
        decisions = [policy.should_save(context) for policy in self.policies]
        return any(decisions)


@dataclass(frozen=True, slots=True)
class CustomSave:
    """A function as a policy.

    Attributes:
        function: returns True to save.
        needs_agreement: see `SavePolicy`. Pass False only for a function of facts that are equal in every process of a
            job; otherwise some processes save and wait for processes that do not save.

    Raises:
        TypeError: if `function` cannot be called.
    """

    function: Callable[[SaveContext], bool]
    needs_agreement: bool = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"CustomSave(function={self.function!r}): pass a function from a SaveContext to a bool")

    def should_save(self, context: SaveContext) -> bool:
        """Return the result of the function."""
        return bool(self.function(context))


def _has_passed(interval: float, context: SaveContext) -> bool:
    if context.last_save_began is None:
        return True
    elapsed = context.now - context.last_save_began
    # If the clock was set back, save now rather than wait until it has caught up.
    return elapsed < 0 or elapsed >= interval


def whole_number(owner: object, name: str, value: object, at_least: int) -> int:
    """Return the value as an int; NumPy integers are accepted.

    Raises:
        ValueError: for a bool, a float, or a number below `at_least`.
    """
    try:
        # operator.index raises TypeError for anything else
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < at_least:
        raise ValueError(f"{_argument(owner, name, value)}: give a whole number of at least {at_least}")
    return number


def seconds(owner: object, name: str, value: object, at_least: float | None = None) -> float:
    """Return the value as a float of seconds.

    Args:
        at_least: the minimum; None: any number above 0.

    Raises:
        ValueError: for a bool, NaN, infinity, anything that is not a number, or a number below the minimum.
    """
    try:
        # float raises TypeError for anything else
        number = math.nan if isinstance(value, bool | str) else float(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (number <= 0 if at_least is None else number < at_least):
        bound = "above 0" if at_least is None else f"of at least {at_least:g}"
        hint = "; for a timedelta, pass its total_seconds()" if hasattr(value, "total_seconds") else ""
        raise ValueError(f"{_argument(owner, name, value)}: give a finite number of seconds {bound}{hint}")
    return number


def step_numbers(owner: object, name: str, value: object) -> frozenset[int]:
    """Return the value as a set of steps.

    Raises:
        TypeError: if it is not an iterable, or is text.
        ValueError: if a step is not a whole number of at least 0.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise TypeError(f"{_argument(owner, name, value)}: give a collection of steps, such as [100, 200]")
    return frozenset(whole_number(owner, name, step, at_least=0) for step in value)


def check_policies(owner: object, value: object, protocol: type) -> None:
    """Check that a value is a collection of policies.

    Args:
        protocol: the runtime-checkable protocol of each policy.

    Raises:
        TypeError: if an item is something else.
        ValueError: if the collection is empty.
    """
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        raise TypeError(f"{_argument(owner, 'policies', value)}: give a list of policies")
    if not value:
        raise ValueError(f"{_argument(owner, 'policies', value)}: give at least one policy")
    for policy in value:
        if isinstance(policy, type) or not isinstance(policy, protocol):
            raise TypeError(
                f"{_argument(owner, 'policies', policy)}: expected a policy of ckptcore.policies (an instance, not its "
                f"class), or an object with the members of {protocol.__name__}"
            )


def _argument(owner: object, name: str, value: object) -> str:
    return f"{type(owner).__name__}({name}={repr(value)[:200]})"
