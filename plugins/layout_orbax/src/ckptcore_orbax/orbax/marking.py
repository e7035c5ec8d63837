"""Files in the directory of a checkpoint by which Orbax and readers of zarr recognise it."""

from __future__ import annotations

import time
from typing import Final

from ckptcore.protocols import About, WriteStore
from ckptcore_orbax.orbax.markers import PYTREE_HANDLER, encode_metrics, marker_files
from ckptcore_orbax.zarr.groups import encode_group
from ckptcore_orbax.zarr.stored_arrays import Form

__all__ = ["mark_checkpoint"]

_METRICS: Final = "metrics"
"""The item in which Orbax's managers of steps look for metrics; a checkpointable of this name comes first."""


def mark_checkpoint(about: About, form: Form, store: WriteStore) -> None:
    """Write what Orbax and readers of zarr look for in the directory of a checkpoint.

    Args:
        about: what is said of it.
        form: how its arrays are stored.
        store: at the directory.
    """
    item = form.item
    trees = [name for name, kind in about.members.items() if kind == "tree"] if about.members else [item]
    handlers = PYTREE_HANDLER if trees == [""] else dict.fromkeys(trees, PYTREE_HANDLER)
    if about.metrics and isinstance(handlers, dict) and _METRICS not in (*about.members, item):
        store.put(f"{_METRICS}/{_METRICS}", encode_metrics(about.metrics))
    for key, data in marker_files(handlers, about.created, time.time_ns(), about.custom, about.metrics).items():
        store.put(key, data)
    key, group = encode_group(form.zarr_format)
    # A tree in the directory itself has its group already.
    if form.storage == "objects" and (about.members or item) and key not in about.members:
        store.put(key, group)
