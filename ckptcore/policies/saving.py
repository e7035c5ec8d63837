"""Save policies: at which steps of a training loop a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from ckptcore.policies.arguments import check_policies, seconds, step_numbers, whole_number

__all__ = [
    "AnySave",
    "ContinuousCheckpointing",
    "CustomSave",
    "EpochInterval",
    "EveryStep",
    "FixedInterval",
    "InitialSave",
    "Moment",
    "PreemptionCheckpointing",
    "SavePolicy",
    "SpecificSteps",
    "TimeInterval",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a save policy knows when it is asked.

    `step`, `epoch`, `last_step`, `last_epoch` and `first` are the same in every process of a job: they change only when the
    job begins a save together. The rest differs from one process to the next.

    Attributes:
        step: the step that could be saved.
        now: seconds since the epoch, UTC.
        epoch: the epoch of training that the step is in; None where the caller did not say.
        last_step: the newest step: found in the directory when it was opened, or a save of it began since then, whether or
            not it ended well. None if there is none.
        last_epoch: the epoch of that step; None if it is not known.
        last_save_began: when the save of that step began, in seconds since the epoch. Of a step found in the directory: when
            it was created. None if there is none.
        last_save_ended: when a save last ended in this process, in seconds since the epoch; None if none did.
        saving: whether a save is under way in this process.
        preempted: whether this process was told that its machine will be taken away.
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
        """Whether the directory has no step yet, and no save of one began."""
        return self.last_step is None


@runtime_checkable
class SavePolicy(Protocol):
    """Decides at which steps to save. One policy object may be asked from several threads; it keeps no state."""

    @property
    def needs_agreement(self) -> bool:
        """Whether processes of one job may decide differently.

        They do where the answer depends on time, on preemption or on whether a save is under way. The leader then decides
        for all, which costs an exchange between the processes each time that the policy is asked.
        """
        ...

    def should_save(self, moment: Moment) -> bool:
        """Whether to save at this moment."""
        ...


@dataclass(frozen=True, slots=True)
class EveryStep:
    """Saves whenever it is asked: the training loop decides."""

    needs_agreement: ClassVar[bool] = False

    def should_save(self, moment: Moment) -> bool:
        """True."""
        return True


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """Saves at multiples of a number of steps, step 0 among them.

    A loop whose step jumps over a multiple does not save then: with an interval of 100, steps 99 and 101 are not saved. Where
    steps jump, use `TimeInterval`, or a `CustomSave` that compares with `Moment.last_step`.

    Attributes:
        steps: the interval, at least 1.

    Raises:
        ValueError: if `steps` is less, or no whole number.
    """

    steps: int

    needs_agreement: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number(self, "steps", self.steps, at_least=1))

    def should_save(self, moment: Moment) -> bool:
        """Whether the step is a multiple."""
        return moment.step % self.steps == 0


@dataclass(frozen=True, slots=True)
class EpochInterval:
    """Saves once in each epoch that is a multiple of a number of epochs, epoch 0 among them.

    It saves when it is first asked in such an epoch. To save at the end of epochs, ask only there.

    Attributes:
        epochs: the interval, at least 1.

    Raises:
        ValueError: if `epochs` is less, or no whole number.
    """

    epochs: int

    needs_agreement: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", whole_number(self, "epochs", self.epochs, at_least=1))

    def should_save(self, moment: Moment) -> bool:
        """Whether the epoch is a multiple and nothing was saved in it.

        Raises:
            ValueError: if the caller did not say which epoch it is.
        """
        if moment.epoch is None:
            raise ValueError(
                f"EpochInterval(epochs={self.epochs}) was asked about step {moment.step} without its epoch; "
                "pass epoch= to save and to should_save"
            )
        return moment.epoch % self.epochs == 0 and moment.epoch != moment.last_epoch


@dataclass(frozen=True, slots=True)
class TimeInterval:
    """Saves when a number of seconds has passed since the last save began, and at once where there is none.

    The time is that of the newest step also where an earlier run saved it, so that a job that is killed more often than the
    interval gets on all the same.

    Attributes:
        seconds: the interval, above 0.

    Raises:
        ValueError: if `seconds` is not a finite number above 0.
    """

    seconds: float

    needs_agreement: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", seconds(self, "seconds", self.seconds))

    def should_save(self, moment: Moment) -> bool:
        """Whether the time has passed."""
        return _has_passed(self.seconds, moment)


@dataclass(frozen=True, slots=True)
class SpecificSteps:
    """Saves at the steps it is given.

    Attributes:
        steps: the steps; kept as a frozenset.

    Raises:
        ValueError: if one of them is no whole number of at least 0.
    """

    steps: Collection[int]

    needs_agreement: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", step_numbers(self, "steps", self.steps))

    def should_save(self, moment: Moment) -> bool:
        """Whether the step is among them."""
        return moment.step in self.steps


@dataclass(frozen=True, slots=True)
class ContinuousCheckpointing:
    """Saves as often as it can without waiting: whenever no save is under way.

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

    def should_save(self, moment: Moment) -> bool:
        """Whether no save is under way and the time has passed."""
        return not moment.saving and _has_passed(self.minimum_interval_secs, moment)


@dataclass(frozen=True, slots=True)
class PreemptionCheckpointing:
    """Saves once the machine is about to be taken away: at every step from then on, so leave the loop."""

    needs_agreement: ClassVar[bool] = True

    def should_save(self, moment: Moment) -> bool:
        """Whether the machine is about to be taken away."""
        return moment.preempted


@dataclass(frozen=True, slots=True)
class InitialSave:
    """Saves as soon as it is asked where there is no step yet, so that a new run finds out early whether it can save."""

    needs_agreement: ClassVar[bool] = False

    def should_save(self, moment: Moment) -> bool:
        """Whether there is no step yet."""
        return moment.first


@dataclass(frozen=True, slots=True)
class AnySave:
    """Saves when any of its policies does.

    Attributes:
        policies: at least one; kept as a tuple.

    Raises:
        TypeError: if one of them is not a policy.
        ValueError: if there is none.
    """

    policies: Collection[SavePolicy]

    def __post_init__(self) -> None:
        check_policies(self, self.policies, SavePolicy)
        object.__setattr__(self, "policies", tuple(self.policies))

    @property
    def needs_agreement(self) -> bool:
        """Whether any of the policies needs it."""
        return any(policy.needs_agreement for policy in self.policies)

    def should_save(self, moment: Moment) -> bool:
        """Whether any of the policies saves."""
        # Each is asked, so that one that cannot answer says so at the first step and not only once the others say no.
        decisions = [policy.should_save(moment) for policy in self.policies]
        return any(decisions)


@dataclass(frozen=True, slots=True)
class CustomSave:
    """A function as a policy.

    Attributes:
        function: whether to save at a moment.
        needs_agreement: as in `SavePolicy`. False only for a function that looks at nothing but what is the same in every
            process of the job; otherwise some processes save and wait for others that do not.

    Raises:
        TypeError: if `function` cannot be called.
    """

    function: Callable[[Moment], bool]
    needs_agreement: bool = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"CustomSave(function={self.function!r}): give a function from a Moment to a bool")

    def should_save(self, moment: Moment) -> bool:
        """What the function says."""
        return bool(self.function(moment))


def _has_passed(interval: float, moment: Moment) -> bool:
    if moment.last_save_began is None:
        return True
    elapsed = moment.now - moment.last_save_began
    # A clock that was set back must not stop saves for as long as it was set back by.
    return elapsed < 0 or elapsed >= interval
