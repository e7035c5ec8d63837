"""VersionDirectory: the versions in a directory as the steps of a run, whose chains are kept whole."""

from __future__ import annotations

from dataclasses import replace

from ckptcore.commit.location import LocationLike, SubPath
from ckptcore.commit.subdirectory import subdirectory
from ckptcore.context import Context
from ckptcore.errors import CheckpointError
from ckptcore.policies import PreserveAll
from ckptcore.protocols import StorageBackend
from ckptcore.step_names import StepNameFormat, StepNames
from ckptcore.training import OwnedRun, Ownership, PathDirectory, RunSteps
from ckptcore.training.steps import StepDirectory
from ckptcore_versions.chains import WholeChains

VERSION_NAMES = StepNames(StepNameFormat("v", width=6), read=[StepNameFormat("v", width=None)])
"""The names of versions: ``v000007``."""


class VersionDirectory:
    """A directory of versions. See `RunDirectory`. It is opened by one `Checkpointer`.

    Attributes:
        location: its path or URL.
    """

    def __init__(self, location: LocationLike) -> None:
        """Describe a directory. Opens nothing yet."""
        self.location = location
        self._inner = PathDirectory(location)
        self._opened: StepDirectory | None = None

    def open(self, names: StepNames, context: Context) -> RunSteps:
        """See `RunDirectory`."""
        return self._inner.open(names, context)

    def own(self, names: StepNames, context: Context, ownership: Ownership) -> OwnedRun:
        """See `RunDirectory`."""
        if not isinstance(ownership.policy, PreserveAll):
            ownership = replace(ownership, policy=WholeChains(ownership.policy, self.base_of))
        run = self._inner.own(names, context, ownership)
        self._opened = run.steps
        return run

    @property
    def _steps(self) -> StepDirectory:
        assert self._opened is not None  # the `Checkpointer` owns the directory
        return self._opened

    def name(self, number: int) -> str:
        """Return the name of a version."""
        return self._steps.name(number)

    def location_of(self, number: int) -> SubPath:
        """Return the location of a version."""
        return self._steps.location(number)

    def store_of(self, number: int) -> StorageBackend:
        """Return the storage of a version, for reading."""
        return subdirectory(self._steps.store, self.name(number))

    def base_of(self, number: int) -> int | None:
        """Return the number of the base of a version; None if it needs no base, or its root cannot be read."""
        try:
            summary = self._steps.summary(number)
        except CheckpointError:
            return None
        bases = () if summary is None else summary.bases
        return self._steps.names.parse(bases[0].path) if bases else None
