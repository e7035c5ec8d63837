"""Marking a checkpoint as one of Orbax's: the files that stand in its directory beside those of its items."""

from __future__ import annotations

import time
from typing import Final

from ckptcore.protocols import About, WriteStore
from ckptcore_tensorstore.orbax import PYTREE_HANDLER, encode_metrics, marker_files

__all__ = ["mark_checkpoint"]

_METRICS: Final = "metrics"
"""The item in which Orbax's managers of steps look for metrics; a checkpointable of this name comes first."""


def mark_checkpoint(about: About, item: str, store: WriteStore) -> None:
    """Write what Orbax looks for in the directory of a checkpoint.

    Args:
        about: what is said of it.
        item: the directory of the tree, where it is one tree; empty where the tree lies in that of the checkpoint.
        store: at the directory.
    """
    trees = [name for name, kind in about.members.items() if kind == "tree"] if about.members else [item]
    handlers = PYTREE_HANDLER if trees == [""] else dict.fromkeys(trees, PYTREE_HANDLER)
    if about.metrics and isinstance(handlers, dict) and _METRICS not in (*about.members, item):
        store.put(f"{_METRICS}/{_METRICS}", encode_metrics(about.metrics))
    for key, data in marker_files(handlers, about.created, time.time_ns(), about.custom, about.metrics).items():
        store.put(key, data)
