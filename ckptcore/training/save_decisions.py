"""Decisions to save: by the save policy, and by notices that this process will be preempted."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

from ckptcore.io.threads import reset_in_children
from ckptcore.job.agreement import Agreement
from ckptcore.model.tree import JSON
from ckptcore.policies import AnySave, PreemptionCheckpointing, SaveContext, SavePolicy
from ckptcore.records import dataclass

PreemptionNotice: TypeAlias = Callable[[int], bool]
"""Returns True if this process will be preempted. Called with each step, on the training thread."""


_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
"""A result of `signal.getsignal`."""


class TerminationSignal:
    """A `PreemptionNotice` that returns True once this process has received SIGTERM.

    While it is open, SIGTERM does not end the process: the training loop ends it after a last save. A handler that was
    installed before is called, too. Forked children handle SIGTERM as before, so that worker processes can be ended.
    """

    def __init__(self) -> None:
        """Install the handler.

        Raises:
            ValueError: this is not the main thread. Only the main thread can install signal handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "a handler of SIGTERM can be installed on the main thread only: create the Checkpointer there, or pass "
                "preemption_notice=, a function of the step that returns True if this process is to be preempted"
            )
        self._received = False
        self._closed = False
        # A weak reference: if this object is dropped without close(), SIGTERM must still end the process.
        reference = weakref.ref(self)
        self._previous: _Handler = signal.getsignal(signal.SIGTERM)
        previous = self._previous

        def handle(number: int, frame: FrameType | None) -> None:
            own = reference()
            if own is not None:
                own._handle(number, frame)
            else:
                _pass_on(previous, handle, number, frame)

        self._handler = handle
        signal.signal(signal.SIGTERM, handle)
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Close it in a forked child, because the training loop runs in the parent."""
        self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if self._closed:
            # `close` could not remove this handler.
            _pass_on(self._previous, self._handler, number, frame)
        elif callable(self._previous):
            self._previous(number, frame)

    def __call__(self, step: int) -> bool:
        """Return True if SIGTERM was received."""
        return self._received

    def close(self) -> None:
        """Restore the previous handler. Thread-safe. Further calls do nothing."""
        self._closed = True
        # A handler that was installed later stays, and may still call this handler. Only the main thread can restore a
        # handler. In both cases the closed handler passes signals on.
        is_installed = signal.getsignal(signal.SIGTERM) is self._handler
        if is_installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)


def _pass_on(previous: _Handler, own: _Handler, number: int, frame: FrameType | None) -> None:
    """Handle a signal as it was handled before the closed handler was installed."""
    if callable(previous):
        previous(number, frame)
    elif previous != signal.SIG_IGN and signal.getsignal(signal.SIGTERM) is own:
        # There is no other handler, so end the process, as the signal would have.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class LastSave:
    """The last save, for save policies. Equal in every process of a job, except the time.

    Attributes:
        step, epoch, began: see `last_step`, `last_epoch` and `last_save_began` of `SaveContext`.
    """

    step: int | None = None
    epoch: int | None = None
    began: float | None = None


class SaveDecider:
    """Decides by a policy and a notice of preemption whether to save. Used on the training thread.

    Attributes:
        last_save: the save that policies compare with.
        last_save_ended: when this process last committed a save, in seconds since the epoch; None before that.
        preempted: True if a process of the job had a notice of preemption at the last decision.
        was_skipped: True if the last decision dropped a save because another save was running. If the job decides
            together, this is set only on the leader.
    """

    def __init__(self, policy: SavePolicy, *, skips_when_busy: bool) -> None:
        """Create a decider without a notice.

        Args:
            policy: chooses the steps to save.
            skips_when_busy: True to skip a save while another is running.
        """
        self._policy = policy
        self._skips_when_busy = skips_when_busy
        self._notice: PreemptionNotice | None = None
        self._signal: TerminationSignal | None = None
        self.last_save = LastSave()
        self.last_save_ended: float | None = None
        self.preempted = False
        self.was_skipped = False

    def use_notice(self, notice: PreemptionNotice | None) -> None:
        """Use a notice of preemption from now on. None: SIGTERM, if the policy asks for it.

        Raises:
            ValueError: the notice is SIGTERM, and this is not the main thread.
        """
        if notice is None and _uses_preemption(self._policy):
            notice = self._signal = TerminationSignal()
        self._notice = notice

    def begin(self, step: int, epoch: int | None) -> None:
        """Record that a save begins."""
        self.last_save = LastSave(step, epoch, time.time())

    def end(self) -> None:
        """Record that a save was committed. Thread-safe."""
        self.last_save_ended = time.time()

    def close(self) -> None:
        """Remove the handler of SIGTERM. Further calls do nothing."""
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
        """Return True to save. The result is equal on every rank.

        Args:
            step, epoch: the step that could be saved.
            saving: True if a save of this process is running.
            force: save regardless of the policy.
            job_size: number of processes that decide together.
            agree: begins an exchange between all processes; called on all ranks or on none.

        Raises:
            ValueError: the policy cannot decide.
            RankFailedError: the policy or the notice of another rank failed.
        """
        self.was_skipped = False
        wants = _always if force else self._wants
        # A notice on one rank counts for all. The leader decides by its clock and its saves.
        differs = not force and (self._policy.needs_agreement or self._skips_when_busy)
        if job_size == 1 or not (differs or self._notice is not None):
            context = self._context_of(step, epoch, saving=saving)
            self.preempted = context.preempted
            return wants(context)
        agreement = agree()
        with agreement.stage("decide") as stage:
            context = self._context_of(step, epoch, saving=saving)  # calls the notice, which may raise
            stage.payload = [context.preempted, context.saving]
        decided: Any = agreement.lead("decision", partial(_decide_for_all, context, wants, stage.payloads))
        wanted, self.preempted = decided
        return bool(wanted)

    def _context_of(self, step: int, epoch: int | None, *, saving: bool) -> SaveContext:
        """Return the facts about a step that this process knows."""
        return SaveContext(
            step=step,
            now=time.time(),
            epoch=epoch,
            last_step=self.last_save.step,
            last_epoch=self.last_save.epoch,
            last_save_began=self.last_save.began,
            last_save_ended=self.last_save_ended,
            saving=saving,
            preempted=self.preempted or (self._notice is not None and bool(self._notice(step))),
        )

    def _wants(self, context: SaveContext) -> bool:
        wanted = self._policy.should_save(context)
        # Never skip the last save before a preemption.
        self.was_skipped = wanted and self._skips_when_busy and context.saving and not context.preempted
        return wanted and not self.was_skipped


def _uses_preemption(policy: SavePolicy) -> bool:
    if isinstance(policy, AnySave):
        return any(_uses_preemption(part) for part in policy.policies)
    return isinstance(policy, PreemptionCheckpointing)


def _always(context: SaveContext) -> bool:
    return True


def _decide_for_all(context: SaveContext, wants: Callable[[SaveContext], bool], facts: Sequence[Any]) -> list[JSON]:
    """Combine the facts of all processes. Return True to save, and True if the job will be preempted."""
    preempted = any(fact[0] for fact in facts)
    saving = any(fact[1] for fact in facts)
    return [wants(replace(context, preempted=preempted, saving=saving)), preempted]
