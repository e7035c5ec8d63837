"""Versions of weights: a trainer publishes what changed since the version before, and inference engines follow.

publisher           `Publisher`: publishes versions
version_saves       save strategy of a version: its base, the copy that becomes the next base, the commit
held_weights        the copy of the newest version, in memory or in a mapped file
chains              when a full version is due, and which versions a version needs
version_directory   the directory of versions as the directory of a run
selecting           the leaves that a version has
version_labels      `labels`: run, number, step and digests of a version
follower            `follow`: yields the newest version from a cache
cache               the directory of the versions that a follower keeps, as a `local_version` with `local_files`
preparing           preparation of a version in the cache, and what changed in it
installing          writes of a version into weights; `version` has what a follower yields
layout              the layout `deltas`; `held_version` is what it knows of a publisher
slime               the layout `slime`: full versions and deltas for engines of slime, miles, SGLang, vime and stitch
slime_deltas        the index and the state of such a delta; `slime_frames`: its frames; `slime_chains`: reading a chain
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptcore_versions.follower import Follower, follow
    from ckptcore_versions.publisher import Publisher
    from ckptcore_versions.slime import SlimeLayout
    from ckptcore_versions.version import Version
    from ckptcore_versions.version_directory import VERSION_NAMES
    from ckptcore_versions.version_labels import VersionLabels, labels

_HOMES = {
    "VERSION_NAMES": "version_directory",
    "Follower": "follower",
    "Publisher": "publisher",
    "SlimeLayout": "slime",
    "Version": "version",
    "VersionLabels": "version_labels",
    "follow": "follower",
    "labels": "version_labels",
}

__all__ = ["VERSION_NAMES", "Follower", "Publisher", "SlimeLayout", "Version", "VersionLabels", "follow", "labels"]


def __getattr__(name: str) -> object:
    # Plugin discovery imports this package, so its modules are imported on first use.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
