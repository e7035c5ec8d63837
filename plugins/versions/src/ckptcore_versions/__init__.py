"""Versions of weights: a trainer publishes what changed since the version before, and inference engines follow."""

from __future__ import annotations

from ckptcore_versions.follower import Follower, follow
from ckptcore_versions.version import Version

__all__ = ["Follower", "Version", "follow"]
