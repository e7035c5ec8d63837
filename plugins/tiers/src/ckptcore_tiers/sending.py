"""Sending a step to the far tier: a byte-for-byte copy that resumes an interrupted one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ckptcore_tools.copies import copy_whole

from ckptcore.commit.location import Within
from ckptcore.context import Context
from ckptcore.training.steps import StepDirectory

__all__ = ["CopiesSteps", "Send"]


class Send(Protocol):
    """Copies a committed step to the far tier and commits it there."""

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
        """Copy a step, or resume an interrupted copy. Returns once it is committed.

        Args:
            step: which.
            name: of its directory in the far tier.
            replaces: whether a step of that name is there, which has to give way.
            progress: called with bytes done and bytes in all.
            is_stopped: asked now and then.
            before_commit: called when all but the root is there; what it raises stops the commit.

        Returns:
            Bytes that were sent.

        Raises:
            CancelledError: because `is_stopped` said so; what was copied stays for the next time.
            CorruptCheckpointError, CheckpointNotFoundError: what is near is damaged or gone.
            CheckpointError: the far tier failed.
        """
        ...


class CopiesSteps:
    """The `Send` of one process that has whole steps."""

    def __init__(self, near: StepDirectory, far: StepDirectory, context: Context) -> None:
        """Send nothing yet.

        Args:
            near: where steps are.
            far: where they go.
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
        """See `Send`."""
        # What refers to others is uploaded whole: whether these ever come there is for policies to say.
        report = copy_whole(
            self._near.place(step),
            Within(self._far.directory, name),
            self._context,
            overwrite="non-atomic" if replaces else False,
            progress=progress,
            is_stopped=is_stopped,
            before_commit=before_commit,
        )
        return report.sent_bytes
