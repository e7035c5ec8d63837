"""The metadata of a directory of steps as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ckptcore.commit.holding import ADMINISTRATION
from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.model.tree import JSON
from ckptcore.protocols import StorageBackend

__all__ = ["read_directory_metadata", "write_directory_metadata"]

_KEY: Final = f"{ADMINISTRATION}/metadata.json"
_MAX_BYTES: Final = 1 << 24


def read_directory_metadata(store: StorageBackend) -> dict[str, JSON]:
    """What was written; nothing where nothing was.

    Raises:
        CorruptCheckpointError: if it is no JSON object.
    """
    try:
        data = store.get(_KEY, 0, _MAX_BYTES)
    except ObjectNotFoundError:
        return {}
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{_KEY} cannot be read: {error}; write it again, or remove it", key=_KEY
        ) from error
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{_KEY} is no JSON object; write it again, or remove it", key=_KEY)
    return found


def write_directory_metadata(store: StorageBackend, metadata: Mapping[str, JSON]) -> None:
    """Write it, in place of what was there; nothing where the same is there.

    Raises:
        ValueError: if it is no JSON, or longer than 16 MiB.
    """
    try:
        data = json.dumps(dict(metadata), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata= must be JSON, with str keys and finite numbers: {error}") from error
    if not _has_str_keys(metadata):
        raise ValueError("metadata= must be JSON, with str keys; it would come back changed")
    if len(data) > _MAX_BYTES:
        raise ValueError(f"metadata= has {len(data)} bytes as JSON; at most {_MAX_BYTES} can be kept with a directory")
    try:
        is_there = read_directory_metadata(store) == json.loads(data)
    except CorruptCheckpointError:
        is_there = False  # what is damaged is written again
    if not is_there:
        store.put(_KEY, data)


def _has_str_keys(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _has_str_keys(child) for key, child in value.items())
    return all(map(_has_str_keys, value)) if isinstance(value, list | tuple) else True
