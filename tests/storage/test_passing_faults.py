"""Runs that temporarily lose space, inodes, quotas, permissions, mounts, the network or credentials, but no step."""

from __future__ import annotations

import pytest

from tests.storage.mounts import Mounts, mounts
from tests.storage.passing_faults import PLACES, run

__all__ = ["mounts"]

pytestmark = pytest.mark.system


@pytest.mark.parametrize("kind", PLACES)
def test_a_short_run_loses_no_step(kind: str, mounts: Mounts) -> None:
    run(PLACES[kind](mounts), 1, 25)


@pytest.mark.lives(
    "places where something passes",
    "ext4, XFS, tmpfs and overlayfs on Linux 6.18, bindfs 1.14.7, a quota by FUSE, S3 and GCS behind a proxy: runs of "
    "200 saves, with space, inodes, the quota, rights, the mount, the network or the identity taken away and given "
    "back at random moments",
    "no step is lost, and the run goes on without a restart",
    "saves fail meanwhile. A quota of XFS is skipped without a kernel that has them",
)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", PLACES)
def test_a_run_of_200_saves(kind: str, seed: int, mounts: Mounts) -> None:
    run(PLACES[kind](mounts), seed, 200)
