"""Run directories of the core and of ``ckptcore-tiers`` against the conformance kit."""

from __future__ import annotations

from pathlib import Path

from ckptcore_testing import RunDirectoryTests
from ckptcore_tiers import NearTier, TieredDirectory

from ckptcore.policies import AnySave, FixedInterval
from ckptcore.training import RunDirectory
from ckptcore.training.path_directory import PathDirectory


class TestPathDirectory(RunDirectoryTests):
    """One directory."""

    def directory(self, path: Path) -> RunDirectory:
        """Return a directory of the core."""
        return PathDirectory(path)


class TestTieredDirectory(RunDirectoryTests):
    """A near and a far directory."""

    def directory(self, path: Path) -> RunDirectory:
        """Upload every second step."""
        near = NearTier(path / "near", upload_policy=AnySave([FixedInterval(2)]))
        return TieredDirectory(near, path / "far")
