"""Progress of uploads: the state shared by the threads of an uploader, and the status for users."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ckptcore.errors import UploadError
from ckptcore.results import Progress
from ckptcore.training.restoring import SkippedStep
from ckptcore.training.save_decisions import LastSave

_MAX_FINISHED: Final = 100
"""Maximum number of finished steps in each list of a status. The log also has older skipped and failed steps."""


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """Progress of the uploads of a run.

    Attributes:
        waiting: steps that wait, ascending, without the step that is being uploaded.
        uploading: the step that is being uploaded; None if there is none.
        progress: progress of that upload.
        uploaded: steps that this run uploaded or found in the far directory, ascending; the last
            100.
        skipped: steps that will not be uploaded, because the far directory would delete them or too
            many steps wait, with the reason; the last 100.
        failed: steps that cannot be uploaded, with the error; the last 100.
        error: the latest error of the far directory; None after an upload succeeded. The upload is
            retried.
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
    """State shared by the threads of an uploader. Access it under the uploader's lock.

    Exceptions: callbacks of a running upload assign `progress`, and read `stopped` and `cancelled`,
    without the lock.

    Attributes:
        waiting: steps that wait, including the step that is being uploaded.
        current: the step that is being uploaded; None if there is none.
        progress: progress of that upload.
        cancelled: steps whose upload was cancelled.
        again: steps that were saved again during their upload.
        stopped: True if the uploader must stop.
        last_chosen: the last step that was queued; initially the newest step in the far directory.
        error: the latest error of the far directory; None after an upload succeeded.
        uploaded, skipped, failed: see `UploadStatus`; in chronological order.
        unreported: for each step that cannot be uploaded, its error, until the error is raised to
            the user.
    """

    waiting: set[int] = field(default_factory=set)
    current: int | None = None
    progress: Progress | None = None
    cancelled: set[int] = field(default_factory=set)
    again: set[int] = field(default_factory=set)
    stopped: bool = False
    last_chosen: LastSave = field(default_factory=LastSave)
    error: str | None = None
    uploaded: list[int] = field(default_factory=list)
    skipped: list[SkippedStep] = field(default_factory=list)
    failed: list[SkippedStep] = field(default_factory=list)
    unreported: dict[int, BaseException] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """True if no step waits or is being uploaded, or if the uploader was stopped."""
        return self.stopped or (not self.waiting and self.current is None)

    @property
    def pending(self) -> frozenset[int]:
        """Steps whose near files are still needed."""
        return frozenset(self.waiting if self.current is None else self.waiting | {self.current})

    def wait_for(self, step: int) -> None:
        """Queue a step."""
        if step == self.current:
            self.again.add(step)  # the running upload may send the previous save of the step
        self.waiting.add(step)
        self.cancelled.discard(step)

    def cancel(self, step: int) -> None:
        """Cancel the upload of a step."""
        self.waiting.discard(step)
        self.again.discard(step)
        self.cancelled.add(step)

    def _end(self, step: int) -> None:
        if step in self.again:
            self.again.discard(step)
        else:
            self.waiting.discard(step)

    def succeed(self, step: int) -> None:
        """Record that a step is in the far directory."""
        self._end(step)
        self.error = None
        self.uploaded = [*self.uploaded, step][-_MAX_FINISHED:]

    def skip(self, step: int, reason: str) -> None:
        """Record that a step will not be uploaded."""
        self.waiting.discard(step)
        self.skipped = [*self.skipped, SkippedStep(step, reason)][-_MAX_FINISHED:]

    def fail(self, step: int, error: BaseException) -> None:
        """Record that a step cannot be uploaded."""
        self._end(step)
        self.failed = [*self.failed, SkippedStep(step, f"{type(error).__name__}: {error}")][-_MAX_FINISHED:]
        self.unreported[step] = error

    def take_error(self, *, waiting: bool, near: str, far: str) -> UploadError | None:
        """Return an error for the steps that cannot be uploaded, or None if there are none. Reports each only once.

        Args:
            waiting: True to include steps that still wait.
            near, far: the directories, for the message.
        """
        failed, self.unreported = self.unreported, {}
        reasons = [f"step {step} cannot be uploaded: {type(why).__name__}: {why}" for step, why in failed.items()]
        left = sorted(self.pending) if waiting else []
        if left:
            numbers = ", ".join(map(str, left))
            why = f", because the far tier fails: {self.error}" if self.error else ""
            reasons.append(
                f"{f'step {numbers} waits' if len(left) == 1 else f'steps {numbers} wait'} in {near}{why}. The next "
                "Checkpointer with the same tiers uploads waiting steps"
            )
        if not reasons:
            return None
        error = UploadError(f"not all steps are in {far}: " + "; ".join(reasons), sorted({*failed, *left}))
        error.__cause__ = next(iter(failed.values()), None)
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
