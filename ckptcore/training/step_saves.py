"""Saves of steps: the decision to save, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

from ckptcore.io.background import SaveHandle
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.policies import AnySave, Moment, PreemptionCheckpointing, SavePolicy
from ckptcore.training.preemption import PreemptionNotice, TerminationSignal

__all__ = [
    "Past",
    "SaveDecider",
    "StepSaves",
]


@dataclass(frozen=True, slots=True)
class _Saving:
    """A save in the background."""

    step: int
    handle: SaveHandle


class StepSaves:
    """The saves of a run in this process. One thread begins them; any may ask.

    Attributes:
        last_committed: the step that was committed last; None before.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._saves: list[_Saving] = []
        self._beginning: int | None = None
        self.last_committed: int | None = None

    def __len__(self) -> int:
        """How many are kept: under way, or failed without anybody having asked, or over since the last began."""
        with self._lock:
            return len(self._saves)

    @contextmanager
    def beginning(self, step: int) -> Iterator[None]:
        """Count a step as under way in the body: while its save begins, or for as long as it blocks."""
        self._beginning = step
        try:
            yield
        finally:
            self._beginning = None

    def add(self, step: int, handle: SaveHandle) -> None:
        """Keep a save that goes on in the background."""
        with self._lock:
            self._saves = [*(save for save in self._saves if save.handle.matters), _Saving(step, handle)]

    @property
    def are_under_way(self) -> bool:
        """Whether a save goes on in the background."""
        with self._lock:
            return any(not save.handle.done() for save in self._saves)

    def under_way(self) -> set[int]:
        """The steps that are being saved."""
        beginning = self._beginning
        with self._lock:
            under_way = {save.step for save in self._saves if not save.handle.done()}
        return under_way if beginning is None else under_way | {beginning}

    def take_errors(self) -> Sequence[BaseException]:
        """Wait until every save that was begun is over; the errors that nobody has asked for, each once.

        Who is interrupted while it waits, waits again the next time.
        """
        with self._lock:
            saves = list(self._saves)
        errors: list[BaseException] = []
        for save in saves:
            told = not save.handle.matters
            error = save.handle.exception()
            if error is not None and not told:
                errors.append(error)
        with self._lock:
            self._saves = [save for save in self._saves if save not in saves]
        return errors


@dataclass(frozen=True, slots=True)
class Past:
    """What policies ask of the saves before. The same in every process of a job, but for the time.

    Attributes:
        step, epoch, began: as `Moment.last_step`, `Moment.last_epoch`, `Moment.last_save_began`.
    """

    step: int | None = None
    epoch: int | None = None
    began: float | None = None


class SaveDecider:
    """Asks a policy, and heeds preemption. On the training thread.

    Attributes:
        past: the save that policies compare with.
        last_save_ended: when a save of this process last ended, in seconds since the epoch; None if none did.
        preempted: whether the job was told, when it was last decided, that a machine of it will be taken away.
        was_skipped: whether the last decision was not to save because another save was under way.
    """

    def __init__(self, policy: SavePolicy, *, skips_when_busy: bool) -> None:
        """Decide by a policy.

        Args:
            policy: when to save.
            skips_when_busy: whether a save is let be while another is under way.
        """
        self._policy = policy
        self._skips_when_busy = skips_when_busy
        self._notice: PreemptionNotice | None = None
        self._signal: TerminationSignal | None = None
        self.past = Past()
        self.last_save_ended: float | None = None
        self.preempted = False
        self.was_skipped = False

    def heed(self, notice: PreemptionNotice | None) -> None:
        """Ask `notice` at each step whether this process is to be preempted; SIGTERM if it is None and the policy asks for that.

        Raises:
            ValueError: if SIGTERM is to be listened to, and this is not the main thread.
        """
        if notice is None and _heeds_preemption(self._policy):
            notice = self._signal = TerminationSignal()
        self._notice = notice

    def begin(self, step: int, epoch: int | None) -> None:
        """Say that a save begins, also if it will not end well."""
        self.past = Past(step, epoch, time.time())

    def end(self) -> None:
        """Say that a save ended. Any thread."""
        self.last_save_ended = time.time()

    def close(self) -> None:
        """Listen to SIGTERM no longer; again is no error."""
        if self._signal is not None:
            self._signal.close()

    def decide(
        self,
        step: int,
        epoch: int | None,
        *,
        saving: bool,
        force: bool,
        job_size: int,
        agree: Callable[[], Agreement],
    ) -> bool:
        """Whether to save; the same on every rank.

        Args:
            step, epoch: what could be saved.
            saving: whether a save of this process is under way.
            force: whether to save whatever the policy says.
            job_size: how many processes decide together.
            agree: begins an exchange between them; called on all or none.

        Raises:
            ValueError: if the policy cannot answer.
            RankFailedError: if the policy or the notice of another rank cannot.
        """
        self.was_skipped = False
        wants = _always if force else self._wants
        # One rank's notice is everybody's; and who leads decides by its own clock and its own saves.
        differs = not force and (self._policy.needs_agreement or self._skips_when_busy)
        if job_size == 1 or not (differs or self._notice is not None):
            moment = self._moment(step, epoch, saving=saving)
            self.preempted = moment.preempted
            return wants(moment)
        agreement = agree()
        with agreement.stage("decide") as stage:
            moment = self._moment(step, epoch, saving=saving)  # asks the notice, which may fail
            stage.payload = [moment.preempted, moment.saving]
        decided: Any = agreement.lead("decision", partial(_decide_for_all, moment, wants, stage.payloads))
        wanted, self.preempted = decided
        return bool(wanted)

    def _moment(self, step: int, epoch: int | None, *, saving: bool) -> Moment:
        """What this process knows of a step."""
        return Moment(
            step=step,
            now=time.time(),
            epoch=epoch,
            last_step=self.past.step,
            last_epoch=self.past.epoch,
            last_save_began=self.past.began,
            last_save_ended=self.last_save_ended,
            saving=saving,
            preempted=self.preempted or (self._notice is not None and bool(self._notice(step))),
        )

    def _wants(self, moment: Moment) -> bool:
        wanted = self._policy.should_save(moment)
        # The last save before the machine goes is not one to skip.
        self.was_skipped = wanted and self._skips_when_busy and moment.saving and not moment.preempted
        return wanted and not self.was_skipped


def _heeds_preemption(policy: SavePolicy) -> bool:
    if isinstance(policy, AnySave):
        return any(_heeds_preemption(part) for part in policy.policies)
    return isinstance(policy, PreemptionCheckpointing)


def _always(moment: Moment) -> bool:
    return True


def _decide_for_all(moment: Moment, wants: Callable[[Moment], bool], facts: Sequence[Any]) -> list[JSON]:
    """Whether to save, and whether the job is preempted, by what every process says of itself."""
    preempted = any(fact[0] for fact in facts)
    saving = any(fact[1] for fact in facts)
    return [wants(replace(moment, preempted=preempted, saving=saving)), preempted]
