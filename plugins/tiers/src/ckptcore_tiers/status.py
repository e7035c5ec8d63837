"""The progress of uploads: the state that threads share, and the status for users."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ckptcore.errors import UploadError
from ckptcore.io.background import Progress
from ckptcore.training.restoring import SkippedStep
from ckptcore.training.save_decisions import Past

__all__ = ["UploadState", "UploadStatus"]

_MOST_TOLD: Final = 100
"""The number of finished steps in a status; all are logged."""


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """The progress of the uploads of a run.

    Attributes:
        waiting: the steps that wait, ascending, without the one that is being uploaded.
        uploading: the step that is being uploaded; None if none is.
        progress: how far that one is.
        uploaded: the steps that this run has uploaded, or found uploaded, ascending; the last 100 of them.
        skipped: those that are not uploaded because they need not be, or may not wait any longer, and why; the last 100
            of them.
        failed: those that cannot be uploaded, and why; the last 100 of them.
        error: why the far tier does not take a step now; None if it does. It is tried again and again.
    """

    waiting: tuple[int, ...] = ()
    uploading: int | None = None
    progress: Progress | None = None
    uploaded: tuple[int, ...] = ()
    skipped: tuple[SkippedStep, ...] = ()
    failed: tuple[SkippedStep, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class UploadState:
    """The state that the threads of an uploader share, under its lock.

    Attributes:
        waiting: the steps that wait, with the one that is being uploaded.
        current: the one that is being uploaded; None if none is.
        progress: how far that one is.
        cancelled: steps of which nothing more is to be sent.
        again: steps that were saved again while they were being uploaded.
        stopped: whether nothing more is to be sent at all.
        last_chosen: the last step that the upload policy chose.
        error: why the far tier does not take a step now; None if it does.
        uploaded, skipped, failed: as of an `UploadStatus`, in the order in which it happened.
        unheard: by step, why it cannot be uploaded, where nobody was told.
    """

    waiting: set[int] = field(default_factory=set)
    current: int | None = None
    progress: Progress | None = None
    cancelled: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    stopped: bool = False
    last_chosen: Past = field(default_factory=Past)
    error: str | None = None
    uploaded: list[int] = field(default_factory=list)
    skipped: list[SkippedStep] = field(default_factory=list)
    failed: list[SkippedStep] = field(default_factory=list)
    unheard: dict[int, BaseException] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is left to wait for."""
        return self.stopped or (not self.waiting and self.current is None)

    @property
    def pending(self) -> frozenset[int]:
        """The steps whose near files are still needed."""
        return frozenset(self.waiting if self.current is None else self.waiting | {self.current})

    def wait_for(self, step: int) -> None:
        """Queue a step."""
        if step == self.current:
            self.again.add(step)  # what is being sent may be what it was before
        self.waiting.add(step)
        self.cancelled.discard(step)

    def cancel(self, step: int) -> None:
        """Cancel a step."""
        self.waiting.discard(step)
        self.again.discard(step)
        self.cancelled.add(step)

    def _end(self, step: int) -> None:
        if step in self.again:
            self.again.discard(step)
        else:
            self.waiting.discard(step)

    def succeed(self, step: int) -> None:
        """Record that a step is far."""
        self._end(step)
        self.error = None
        self.uploaded = [*self.uploaded, step][-_MOST_TOLD:]

    def skip(self, step: int, reason: str) -> None:
        """Record that a step is not uploaded: it need not be, or may not wait."""
        self.waiting.discard(step)
        self.skipped = [*self.skipped, SkippedStep(step, reason)][-_MOST_TOLD:]

    def fail(self, step: int, error: BaseException) -> None:
        """Record that a step cannot be uploaded."""
        self._end(step)
        self.failed = [*self.failed, SkippedStep(step, f"{type(error).__name__}: {error}")][-_MOST_TOLD:]
        self.unheard[step] = error

    def take_error(self, *, waiting: bool, near: str, far: str) -> UploadError | None:
        """Return an error for the steps that cannot be uploaded, once for each; None if there are none.

        Args:
            waiting: whether those that wait still are to be told of, too.
            near, far: the tiers, for the message.
        """
        unheard, self.unheard = self.unheard, {}
        told = [f"step {step} cannot be uploaded: {type(why).__name__}: {why}" for step, why in unheard.items()]
        left = sorted(self.pending) if waiting else []
        if left:
            numbers = ", ".join(map(str, left))
            why = f"because the far tier fails: {self.error}" if self.error else "and there was no time to upload more"
            told.append(
                f"{f'step {numbers} waits' if len(left) == 1 else f'the steps {numbers} wait'} in {near}, {why}. A "
                "Checkpointer with the same tiers that is opened later uploads what waits"
            )
        if not told:
            return None
        error = UploadError(f"not all steps are in {far}: " + "; ".join(told), sorted({*unheard, *left}))
        error.__cause__ = next(iter(unheard.values()), None)
        return error

    def status(self) -> UploadStatus:
        """Return the status for users."""
        return UploadStatus(
            waiting=tuple(sorted(self.waiting - {self.current})),
            uploading=self.current,
            progress=self.progress,
            uploaded=tuple(sorted(self.uploaded)),
            skipped=tuple(self.skipped),
            failed=tuple(self.failed),
            error=self.error,
        )
