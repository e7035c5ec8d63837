"""Versions of weights: a trainer publishes what changed since the version before, and inference engines follow.

publishing          `Publisher`: publishes versions
following           `follow`: yields the newest version from a cache on a local disk
deltas              the layout `deltas`
slime               the layout `slime`: full versions and deltas for engines of slime, miles, SGLang, vime and stitch
local_directory     the path of a directory on a local disk
held_version        what a layout of versions knows of the version before
version_directory   the directory of versions as the directory of a run
chains              when a full version is due, and which versions a version needs
tensor_names        the names of arrays
version_labels      `labels`: run, number, step and digests of a version
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptcore_versions.following.follower import Follower, follow
    from ckptcore_versions.following.version import Version
    from ckptcore_versions.publishing.publisher import Publisher
    from ckptcore_versions.slime.layout import SlimeLayout
    from ckptcore_versions.version_directory import VERSION_NAMES
    from ckptcore_versions.version_labels import VersionLabels, labels

_HOMES = {
    "VERSION_NAMES": "version_directory",
    "Follower": "following.follower",
    "Publisher": "publishing.publisher",
    "SlimeLayout": "slime.layout",
    "Version": "following.version",
    "VersionLabels": "version_labels",
    "follow": "following.follower",
    "labels": "version_labels",
}

__all__ = ["VERSION_NAMES", "Follower", "Publisher", "SlimeLayout", "Version", "VersionLabels", "follow", "labels"]


def __getattr__(name: str) -> object:
    # Plugin discovery imports this package, so its modules are imported on first use.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
