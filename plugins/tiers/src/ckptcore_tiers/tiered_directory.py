"""`TieredDirectory`: a run with a fast near directory and a durable far directory."""

from __future__ import annotations

from ckptcore.commit.location import LocationLike
from ckptcore.context import Context
from ckptcore.redaction import redacted
from ckptcore.step_names import StepNames
from ckptcore.training.run_directory import Ownership
from ckptcore.training.steps import StepDirectory
from ckptcore_tiers.hosts import HostSteps
from ckptcore_tiers.near_tier import NearTier
from ckptcore_tiers.status import UploadStatus
from ckptcore_tiers.tiered_run import TieredRun
from ckptcore_tiers.tiered_steps import TieredSteps


class TieredDirectory:
    """A `RunDirectory` with two directories: steps are saved to the near directory and uploaded to the far one.

    A load reads the near copy of a step if it is valid, and otherwise the far copy. Errors of the
    far directory do not delay saves: uploads are retried until the run ends. One `Checkpointer` at
    a time can own the directories; any number of readers can use them.
    """

    def __init__(self, near: NearTier | LocationLike, far: LocationLike) -> None:
        """Describe the two directories. Does no I/O.

        Args:
            near: the fast directory: its options, or only its path or URL.
            far: the directory of the run: a path or URL. It receives the steps that the near tier's
                upload policy chooses, and keeps those that the `Checkpointer`'s preservation policy
                keeps.

        `open` and `own` raise `InvalidLocationError` if one directory is the other or inside it.
        """
        self.near = near if isinstance(near, NearTier) else NearTier(near)
        self.location = far
        self._run: TieredRun | None = None

    def __repr__(self) -> str:
        return redacted(f"TieredDirectory(near={self.near!r}, far={self.location!r})")

    def open(self, names: StepNames, context: Context) -> TieredSteps:
        """See `RunDirectory`."""
        near = StepDirectory(self.near.locate(self.location), names, context)
        far = StepDirectory(self.location, names, context)
        return TieredSteps(near, far, HostSteps(near, context) if self.near.seen_by == "host" else None)

    def own(self, names: StepNames, context: Context, ownership: Ownership) -> TieredRun:
        """See `RunDirectory`."""
        self._run = TieredRun(self.near, self.open(names, context), context, ownership)
        return self._run

    @property
    def uploads(self) -> UploadStatus:
        """Progress of the uploads. Empty on every process except the leader."""
        return UploadStatus() if self._run is None else self._run.uploads.status

    def wait_for_uploads(self, timeout: float | None = None) -> None:
        """Wait until all saves are done, and all uploads that the upload policy chose.

        In a job only the leader waits for uploads; the other processes wait only for saves.

        Args:
            timeout: maximum time to wait for uploads, in seconds; None for no limit.

        Raises:
            UploadError: if steps still wait after the timeout, or could not be uploaded.
            The errors of `Checkpointer.wait`.
        """
        if self._run is not None:
            self._run.wait_for_uploads(timeout)
