"""Decisions to save: the policy, and notices that the machine will be taken away."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self, TypeAlias

from ckptcore.io.threads import renew_in_children
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.policies import AnySave, PreemptionCheckpointing, SaveContext, SavePolicy

__all__ = ["Past", "PreemptionNotice", "SaveDecider", "TerminationSignal"]

PreemptionNotice: TypeAlias = Callable[[int], bool]
"""Returns, for a step, whether this process is to be preempted. Called at every step, on the training thread."""


_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""The results of `signal.getsignal`."""


class TerminationSignal:
    """A `PreemptionNotice` that SIGTERM gives: from the first one on, the answer is yes.

    While it is open, SIGTERM no longer ends the process: the training loop does, when it has saved. A handler that the program
    had is called too. A forked child does with SIGTERM what it did before, so that worker processes can be ended.
    """

    def __init__(self) -> None:
        """Listen from now on.

        Raises:
            ValueError: not on the main thread, where alone signals can be listened to.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "SIGTERM can be listened to on the main thread only: make the Checkpointer there, or pass "
                "preemption_notice=, a function that tells whether this process is to be preempted"
            )
        self._received = False
        self._closed = False
        # Not held by the signal: one that is dropped without being closed must not leave the process deaf.
        reference = weakref.ref(self)
        self._previous: _Handler = signal.getsignal(signal.SIGTERM)
        previous = self._previous

        def handle(number: int, frame: FrameType | None) -> None:
            own = reference()
            if own is not None:
                own._hear(number, frame)
            else:
                _hand_on(previous, handle, number, frame)

        self._handler = handle
        signal.signal(signal.SIGTERM, handle)
        renew_in_children(self)

    def renew(self) -> None:
        """Listen no longer: this is a forked child, and the training loop is its parent's."""
        self.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if self._closed:
            # It could not be taken out when it was closed.
            _hand_on(self._previous, self._handler, number, frame)
        elif callable(self._previous):
            self._previous(number, frame)

    def _is_asked_first(self) -> bool:
        return signal.getsignal(signal.SIGTERM) is self._handler

    def __call__(self, step: int) -> bool:
        """Return whether SIGTERM was received."""
        return self._received

    def close(self) -> None:
        """Listen no longer; what listened before does again. Any thread; again is no error."""
        self._closed = True
        # What somebody put in place meanwhile stays, and may still call this one. Off the main thread nothing can be put
        # back, and what comes is handed on.
        if self._is_asked_first() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Listen no longer."""
        self.close()


def _hand_on(previous: _Handler, own: _Handler, number: int, frame: FrameType | None) -> None:
    """Do with a signal what was done before somebody listened who no longer does."""
    if callable(previous):
        previous(number, frame)
    elif previous != signal.SIG_IGN and signal.getsignal(signal.SIGTERM) is own:
        # Nobody else listens: the process ends, as it would have.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Past:
    """The last save, as policies see it. The same in every process of a job, except the time.

    Attributes:
        step, epoch, began: as `SaveContext.last_step`, `SaveContext.last_epoch`, `SaveContext.last_save_began`.
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
        """Use a notice of preemption from now on. None: SIGTERM, if the policy asks for it.

        Raises:
            ValueError: if SIGTERM is to be listened to, and this is not the main thread.
        """
        if notice is None and _heeds_preemption(self._policy):
            notice = self._signal = TerminationSignal()
        self._notice = notice

    def begin(self, step: int, epoch: int | None) -> None:
        """Record that a save begins."""
        self.past = Past(step, epoch, time.time())

    def end(self) -> None:
        """Record that a save ended. Any thread."""
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
        """Return whether to save; the same on every rank.

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
            context = self._context_of(step, epoch, saving=saving)
            self.preempted = context.preempted
            return wants(context)
        agreement = agree()
        with agreement.stage("decide") as stage:
            context = self._context_of(step, epoch, saving=saving)  # asks the notice, which may fail
            stage.payload = [context.preempted, context.saving]
        decided: Any = agreement.lead("decision", partial(_decide_for_all, context, wants, stage.payloads))
        wanted, self.preempted = decided
        return bool(wanted)

    def _context_of(self, step: int, epoch: int | None, *, saving: bool) -> SaveContext:
        """Return what this process knows of a step."""
        return SaveContext(
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

    def _wants(self, context: SaveContext) -> bool:
        wanted = self._policy.should_save(context)
        # The last save before the machine goes is not one to skip.
        self.was_skipped = wanted and self._skips_when_busy and context.saving and not context.preempted
        return wanted and not self.was_skipped


def _heeds_preemption(policy: SavePolicy) -> bool:
    if isinstance(policy, AnySave):
        return any(_heeds_preemption(part) for part in policy.policies)
    return isinstance(policy, PreemptionCheckpointing)


def _always(context: SaveContext) -> bool:
    return True


def _decide_for_all(context: SaveContext, wants: Callable[[SaveContext], bool], facts: Sequence[Any]) -> list[JSON]:
    """Return whether to save, and whether the job is preempted, from the facts of every process."""
    preempted = any(fact[0] for fact in facts)
    saving = any(fact[1] for fact in facts)
    return [wants(replace(context, preempted=preempted, saving=saving)), preempted]
