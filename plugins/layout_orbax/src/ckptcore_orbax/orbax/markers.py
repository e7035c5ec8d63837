"""Files that mark a directory as an Orbax checkpoint and describe its contents."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ckptcore.model import JSON
from ckptcore.protocols import CheckpointInfo, WriteStore
from ckptcore_orbax.orbax.json_files import encode_json, expect_object, expect_text, expect_type, parse_json, unexpected
from ckptcore_orbax.zarr.documents import encode_group
from ckptcore_orbax.zarr.stored_arrays import LayoutOptions

INDICATOR_FILE: Final = "orbax.checkpoint"
"""Empty file that marks a checkpoint of Orbax version 1."""

METADATA_FILE: Final = "_CHECKPOINT_METADATA"

COMMIT_FILE: Final = "commit_success.txt"
"""Marks a complete save on object stores; its content is not used."""

DELETION_FILE: Final = "_CHECKPOINT_DELETION"
"""Names a member that is being deleted. Readers ignore this member."""

PYTREE_HANDLER: Final = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
"""Class name of Orbax's handler for trees. It is written as text and never imported."""

_FIELDS: Final = frozenset(
    {
        "item_handlers", "metrics", "performance_metrics", "init_timestamp_nsecs", "commit_timestamp_nsecs",
        "custom_metadata",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """The contents of `_CHECKPOINT_METADATA`.

    Attributes:
        handlers: handler class of each member, by name; a single name if this directory itself contains
            one tree; None if not stated.
        metrics: the user's metrics, unchanged.
        created: start time of the save, or its end if the file states only that; ISO 8601 in UTC, or
            None.
        custom: the user's metadata, and members of the file that are unknown here.
    """

    handlers: Mapping[str, str] | str | None = None
    metrics: Mapping[str, JSON] = field(default_factory=dict)
    created: str | None = None
    custom: Mapping[str, JSON] = field(default_factory=dict)


def parse_checkpoint_file(data: bytes, key: str) -> CheckpointFile:
    """Parse `_CHECKPOINT_METADATA`, which may be hostile. Orbax sometimes leaves an empty file.

    Raises:
        CorruptCheckpointError: the file is invalid.
    """
    if not data:
        return CheckpointFile()
    document = expect_object(parse_json(data, key), key, "the file")
    handler_names = document.get("item_handlers")
    handlers: Mapping[str, str] | str | None = None
    if isinstance(handler_names, dict):
        handlers = {name: expect_text(value, key, "the name of a handler") for name, value in handler_names.items()}
    elif handler_names is not None:
        handlers = expect_text(handler_names, key, "item_handlers")
    custom = dict(expect_object(document.get("custom_metadata") or {}, key, "custom_metadata"))
    for name, value in document.items():
        if name not in _FIELDS:
            custom.setdefault(name, value)
    started = document.get("init_timestamp_nsecs") or document.get("commit_timestamp_nsecs")
    metrics = expect_object(document.get("metrics") or {}, key, "metrics")
    return CheckpointFile(handlers, metrics, None if started is None else _time_of(started, key), custom)


def marker_files(
    handlers: Mapping[str, str] | str,
    created: str,
    committed: int,
    custom: Mapping[str, JSON],
    metrics: Mapping[str, float],
) -> dict[str, bytes]:
    """Return the marker files of a checkpoint, by name.

    Args:
        handlers: the handler of each member: `PYTREE_HANDLER` for a tree. Members that Orbax cannot load
            are omitted. A single name if the directory itself contains the tree, which only version 0
            supports.
        created: start time of the save, ISO 8601.
        committed: completion time, in nanoseconds since 1970.
        custom, metrics: the user's metadata.
    """
    started = datetime.datetime.fromisoformat(created)
    since = started - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    indicator = {} if isinstance(handlers, str) else {INDICATOR_FILE: b""}
    return {
        **indicator,
        METADATA_FILE: encode_json(
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
    """Return the file ``metrics/metrics``, which Orbax's step managers read."""
    return encode_json(dict(metrics))


def _time_of(nanoseconds: JSON, key: str) -> str:
    number = expect_type(nanoseconds, int, key, "a time")
    if not 0 <= number < 1 << 63:
        raise unexpected(key, "a time in nanoseconds since 1970", number)
    time = datetime.datetime.fromtimestamp(number // 1_000_000 / 1000, datetime.UTC)
    return time.isoformat(timespec="milliseconds")


_METRICS: Final = "metrics"
"""Item in which Orbax's step managers look for metrics. A checkpointable of this name has priority."""


def write_marker_files(
    info: CheckpointInfo, options: LayoutOptions, other_handlers: Mapping[str, str], store: WriteStore
) -> None:
    """Write the files by which Orbax and zarr readers recognise a checkpoint directory.

    Args:
        info: the checkpoint.
        options: how its arrays are stored.
        other_handlers: class names of Orbax's handlers, by member, for members that are not trees.
        store: the directory.
    """
    item = options.item
    trees = [name for name, kind in info.members.items() if kind == "tree"] if info.members else [item]
    handlers = PYTREE_HANDLER if trees == [""] else {**dict.fromkeys(trees, PYTREE_HANDLER), **other_handlers}
    if info.metrics and isinstance(handlers, dict) and _METRICS not in (*info.members, item):
        store.put(f"{_METRICS}/{_METRICS}", encode_metrics(info.metrics))
    for key, data in marker_files(handlers, info.created, time.time_ns(), info.custom, info.metrics).items():
        store.put(key, data)
    key, group = encode_group(options.zarr_format)
    # A tree in the directory itself already has its group.
    if options.storage == "objects" and (info.members or item) and key not in info.members:
        store.put(key, group)
