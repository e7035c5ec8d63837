"""States that tests hold as versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ckptcore_testing.locations import store_at
from ckptcore_versions.deltas.chunks import part_of
from ckptcore_versions.deltas.layout import DeltaLayout
from ckptcore_versions.held_version import BaseVersion

from ckptcore.model import JSON, ArraySpec, Box, HostArray, TreePath
from ckptcore.protocols import Snapshot, WriteStore


def version_at(location: str, number: int = 0) -> BaseVersion:
    """Return the version at a location."""
    root = store_at(location).get("checkpoint.json")
    return BaseVersion(
        location.rpartition("/")[2], json.loads(root)["save_id"], hashlib.sha256(root).hexdigest(), number
    )


@dataclass(frozen=True)
class HeldState:
    """A state as a `HeldVersion`.

    Attributes:
        version: the version.
        state: its elements.
    """

    version: BaseVersion
    state: Mapping[str, Any]

    def elements(self, path: TreePath, spec: ArraySpec, box: Box) -> HostArray | None:
        """See `HeldVersion.elements`."""
        array: Any = self.state
        try:
            for key in path:
                array = array[key]
        except (KeyError, IndexError):
            return None
        if array.shape != spec.shape or array.dtype != spec.numpy_dtype:
            return None
        return part_of(np.asarray(array), box, Box.whole(spec.shape))


class Unwritten(DeltaLayout):
    """A layout of differences whose saves are refused before they write."""

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Fail the test."""
        raise AssertionError("elements are written")
