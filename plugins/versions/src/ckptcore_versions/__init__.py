"""Versions of weights: a trainer publishes what changed since the version before, and inference engines follow."""

from __future__ import annotations

from ckptcore_versions.follower import Follower as Follower
from ckptcore_versions.follower import follow as follow
from ckptcore_versions.labels import VersionLabels as VersionLabels
from ckptcore_versions.labels import labels as labels
from ckptcore_versions.publisher import Publisher as Publisher
from ckptcore_versions.version import Version as Version
from ckptcore_versions.version_directory import VERSION_NAMES as VERSION_NAMES

__all__ = ["VERSION_NAMES", "Follower", "Publisher", "Version", "VersionLabels", "follow", "labels"]
