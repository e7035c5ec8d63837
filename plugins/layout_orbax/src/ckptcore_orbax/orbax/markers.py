"""The files that make a directory a checkpoint of Orbax, and say what it holds and when it was saved."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptcore.model import JSON
from ckptcore.protocols import CheckpointInfo, WriteStore
from ckptcore_orbax.orbax.documents import corrupt, encode_document, expect, object_of, parse_document, text_of
from ckptcore_orbax.zarr.documents import encode_group
from ckptcore_orbax.zarr.options import Form

__all__ = [
    "COMMIT_FILE",
    "INDICATOR_FILE",
    "METADATA_FILE",
    "PYTREE_HANDLER",
    "RECORD_FILE",
    "ROOT_METADATA_FILE",
    "CheckpointFile",
    "encode_metrics",
    "marker_files",
    "parse_checkpoint_file",
    "parse_root_metadata",
    "write_marker_files",
]

INDICATOR_FILE: Final = "orbax.checkpoint"
"""Empty; says that this is a checkpoint of version 1."""

METADATA_FILE: Final = "_CHECKPOINT_METADATA"

COMMIT_FILE: Final = "commit_success.txt"
"""Says on object stores that the save is complete; its text means nothing."""

RECORD_FILE: Final = "_CHECKPOINT_DELETION"
"""Names the member whose deletion began: it is not there any more."""

ROOT_METADATA_FILE: Final = "metadata/_ROOT_METADATA"
"""In a directory of steps: metadata of the user's for all of them."""

PYTREE_HANDLER: Final = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
"""What Orbax takes a tree with. It is a name in a file: nothing is imported by it."""

_FIELDS: Final = frozenset(
    {
        "item_handlers", "metrics", "performance_metrics", "init_timestamp_nsecs", "commit_timestamp_nsecs",
        "custom_metadata",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """What `_CHECKPOINT_METADATA` says.

    Attributes:
        handlers: the class that took each member, by name; a single name where the checkpoint is one tree, lying in
            this directory itself; None where nothing is said.
        metrics: the user's, as they are.
        created: when the save began, ISO 8601 in UTC, or None.
        custom: metadata of the user's.
    """

    handlers: Mapping[str, str] | str | None = None
    metrics: Mapping[str, JSON] = field(default_factory=dict)
    created: str | None = None
    custom: Mapping[str, JSON] = field(default_factory=dict)


def parse_checkpoint_file(data: bytes, key: str) -> CheckpointFile:
    """What `_CHECKPOINT_METADATA` says; it may be hostile. Orbax leaves an empty one behind at times: it says nothing.

    Raises:
        CorruptCheckpointError
    """
    if not data:
        return CheckpointFile()
    document = object_of(parse_document(data, key), key, "the file")
    said = document.get("item_handlers")
    handlers: Mapping[str, str] | str | None = None
    if isinstance(said, dict):
        handlers = {name: text_of(value, key, "the name of a handler") for name, value in said.items()}
    elif said is not None:
        handlers = text_of(said, key, "item_handlers")
    custom = dict(object_of(document.get("custom_metadata") or {}, key, "custom_metadata"))
    for name, value in document.items():
        if name not in _FIELDS:
            custom.setdefault(name, value)
    began = document.get("init_timestamp_nsecs") or document.get("commit_timestamp_nsecs")
    metrics = object_of(document.get("metrics") or {}, key, "metrics")
    return CheckpointFile(handlers, metrics, None if began is None else _time_of(began, key), custom)


def parse_root_metadata(data: bytes, key: str) -> Mapping[str, JSON]:
    """The metadata of the user's for a directory of steps.

    Raises:
        CorruptCheckpointError
    """
    document = object_of(parse_document(data, key), key, "the file")
    return object_of(document.get("custom_metadata") or {}, key, "custom_metadata")


def marker_files(
    handlers: Mapping[str, str] | str,
    created: str,
    committed: int,
    custom: Mapping[str, JSON],
    metrics: Mapping[str, float],
) -> dict[str, bytes]:
    """The files that stand in the directory of a checkpoint, by name.

    Args:
        handlers: the handler of each member: `PYTREE_HANDLER` for a tree. A member that is left out is one that Orbax
            does not know how to load. One name where the checkpoint is a tree that lies in the directory itself, which
            only version 0 has.
        created: when the save began, ISO 8601.
        committed: when it is complete, in nanoseconds since 1970.
        custom, metrics: the user's.
    """
    began = datetime.datetime.fromisoformat(created)
    since = began - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    indicator = {} if isinstance(handlers, str) else {INDICATOR_FILE: b""}
    return {
        **indicator,
        METADATA_FILE: encode_document(
            {
                "item_handlers": handlers if isinstance(handlers, str) else dict(handlers),
                "metrics": dict(metrics),
                "performance_metrics": {},
                "init_timestamp_nsecs": (since // datetime.timedelta(microseconds=1)) * 1000,
                "commit_timestamp_nsecs": committed,
                "custom_metadata": dict(custom),
            }
        ),
        COMMIT_FILE: b"Checkpoint commit was successful",
    }


def encode_metrics(metrics: Mapping[str, float]) -> bytes:
    """The file ``metrics/metrics``, in which Orbax's managers of steps look for them."""
    return encode_document(dict(metrics))


def _time_of(nanoseconds: JSON, key: str) -> str:
    number = expect(nanoseconds, int, key, "a time")
    if not 0 <= number < 1 << 63:
        raise corrupt(key, "a time in nanoseconds since 1970", number)
    time = datetime.datetime.fromtimestamp(number // 1_000_000 / 1000, datetime.UTC)
    return time.isoformat(timespec="milliseconds")


_METRICS: Final = "metrics"
"""The item in which Orbax's managers of steps look for metrics; a checkpointable of this name comes first."""


def write_marker_files(info: CheckpointInfo, form: Form, store: WriteStore) -> None:
    """Write what Orbax and readers of zarr look for in the directory of a checkpoint.

    Args:
        info: what the save says about it.
        form: how its arrays are stored.
        store: at the directory.
    """
    item = form.item
    trees = [name for name, kind in info.members.items() if kind == "tree"] if info.members else [item]
    handlers = PYTREE_HANDLER if trees == [""] else dict.fromkeys(trees, PYTREE_HANDLER)
    if info.metrics and isinstance(handlers, dict) and _METRICS not in (*info.members, item):
        store.put(f"{_METRICS}/{_METRICS}", encode_metrics(info.metrics))
    for key, data in marker_files(handlers, info.created, time.time_ns(), info.custom, info.metrics).items():
        store.put(key, data)
    key, group = encode_group(form.zarr_format)
    # A tree in the directory itself has its group already.
    if form.storage == "objects" and (info.members or item) and key not in info.members:
        store.put(key, group)
