"""Note of a run's near directory: where the newest steps are, before they are uploaded to the directory of the run.

Runs with two tiers write it, and ``ckptcore steps`` and the viewer show it.
"""

from __future__ import annotations

import json
from typing import Any, Final

from ckptcore.commit.names import INTERNAL_DIRECTORY
from ckptcore.errors import ObjectNotFoundError
from ckptcore.protocols import StorageBackend

_KEY: Final = f"{INTERNAL_DIRECTORY}/near.json"
_MAX_BYTES: Final = 1 << 16


def read_near_note(store: StorageBackend) -> str | None:
    """Return the near directory of a run as text; None if the run has none, or if the note is damaged.

    Only show it: whoever may write to the directory may have changed it.

    Raises:
        StorageError
    """
    try:
        note: Any = json.loads(store.get(_KEY, 0, _MAX_BYTES))
    except (ObjectNotFoundError, ValueError, RecursionError):
        return None
    near = note.get("near") if isinstance(note, dict) else None
    return near if isinstance(near, str) else None


def write_near_note(store: StorageBackend, near: str) -> None:
    """Note the near directory of a run. Writes nothing if it is noted already.

    Args:
        store: the directory of the run.
        near: the near directory, without secrets.

    Raises:
        StorageError
    """
    data = json.dumps({"near": near}).encode("ascii")
    if len(data) <= _MAX_BYTES and read_near_note(store) != near:
        store.put(_KEY, data)
