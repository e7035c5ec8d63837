"""Senders: copy a step byte for byte to the far directory, and resume an interrupted copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ckptcore_tools.copies import copy_whole

from ckptcore.commit.location import SubPath
from ckptcore.context import Context
from ckptcore.training.steps import StepDirectory


class StepSender(Protocol):
    """Copies a committed step to the far directory, and commits it there."""

    def __call__(
        self,
        step: int,
        name: str,
        *,
        replaces: bool,
        progress: Callable[[int, int], None],
        is_stopped: Callable[[], bool],
        before_commit: Callable[[], None],
    ) -> int:
        """Copy a step, or resume an interrupted copy. Return once it is committed.

        Args:
            step: number of the step.
            name: name of its directory in the far directory.
            replaces: True to replace an existing step of that name.
            progress: called with the bytes done and the total bytes.
            is_stopped: polled during the copy; True stops it.
            before_commit: called when everything but the root is copied. An error prevents the
                commit.

        Returns:
            Number of bytes sent.

        Raises:
            CancelledError: if `is_stopped` returned True. The next call resumes the copy.
            CorruptCheckpointError, CheckpointNotFoundError: if the near step is damaged or missing.
            CheckpointError: if the far directory failed.
        """
        ...


class WholeStepSender:
    """A `StepSender` for a near directory that all processes share, so that it contains whole steps."""

    def __init__(self, near: StepDirectory, far: StepDirectory, context: Context) -> None:
        """Do no I/O.

        Args:
            near: directory to copy steps from.
            far: directory to copy steps to.
            context: options.
        """
        self._near = near
        self._far = far
        self._context = context

    def __call__(
        self,
        step: int,
        name: str,
        *,
        replaces: bool,
        progress: Callable[[int, int], None],
        is_stopped: Callable[[], bool],
        before_commit: Callable[[], None],
    ) -> int:
        """See `StepSender`."""
        # Copy also the arrays that the step refers to in other checkpoints (its bases), because the
        # policies may not upload or keep the bases themselves.
        report = copy_whole(
            self._near.location(step),
            SubPath(self._far.directory, name),
            self._context,
            overwrite="non-atomic" if replaces else False,
            progress=progress,
            is_stopped=is_stopped,
            before_commit=before_commit,
        )
        return report.sent_bytes
