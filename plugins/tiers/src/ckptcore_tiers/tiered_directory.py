"""TieredDirectory: a run in two directories, a fast one near and the durable one far away."""

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

__all__ = ["TieredDirectory"]


class TieredDirectory:
    """A `RunDirectory` in two places: steps are saved near and uploaded to the far directory, which names the run.

    A load takes the near copy of a step if it is valid, else the far one. A far tier that fails delays no save: uploads
    are tried again for as long as the run lasts. One `Checkpointer` at a time owns it; several readers may use it.
    """

    def __init__(self, near: NearTier | LocationLike, far: LocationLike) -> None:
        """Describe the two directories. Opens nothing.

        Args:
            near: the fast directory, with its options or as a path.
            far: the directory of the run: a path or URL. It gets the steps that the near tier's upload policy chooses,
                and keeps those that the `Checkpointer`'s preservation policy wants.

        Raises:
            InvalidLocationError: when the run is opened, if one directory is inside the other.
        """
        self.near = near if isinstance(near, NearTier) else NearTier(near)
        self.location = far
        self._run: TieredRun | None = None

    def __repr__(self) -> str:
        return redacted(f"TieredDirectory(near={self.near!r}, far={self.location!r})")

    def open(self, names: StepNames, context: Context) -> TieredSteps:
        """See `RunDirectory`."""
        near, far = (StepDirectory(place, names, context) for place in (self.near.locate(self.location), self.location))
        return TieredSteps(near, far, HostSteps(near, context) if self.near.seen_by == "host" else None)

    def own(self, names: StepNames, context: Context, ownership: Ownership) -> TieredRun:
        """See `RunDirectory`."""
        self._run = TieredRun(self.near, self.open(names, context), context, ownership)
        return self._run

    @property
    def uploads(self) -> UploadStatus:
        """The progress of the uploads. Empty in processes of a job that do not lead."""
        return UploadStatus() if self._run is None else self._run.uploads.status

    def wait_for_uploads(self, timeout: float | None = None) -> None:
        """Wait until every save has ended, and every step that is to be uploaded is in the far directory.

        In a job only the leader waits for uploads; the other processes wait for saves.

        Args:
            timeout: how long to wait for uploads at most, in seconds; None: until they are done.

        Raises:
            UploadError: if steps still wait, or cannot be uploaded.
            What `Checkpointer.wait` raises.
        """
        if self._run is not None:
            self._run.wait_for_uploads(timeout)
