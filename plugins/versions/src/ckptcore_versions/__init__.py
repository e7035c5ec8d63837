"""Versions of weights: a trainer publishes what changed since the version before, and inference engines follow."""

from __future__ import annotations

from ckptcore_versions.labels import VersionLabels as VersionLabels
from ckptcore_versions.labels import labels as labels
from ckptcore_versions.publisher import Publisher as Publisher

__all__ = ["Publisher", "VersionLabels", "labels"]
