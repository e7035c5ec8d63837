"""Nested checkpoints: saves into the directory of another checkpoint, and removals that would include one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckptcore.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    UnsupportedVersionError,
)
from ckptcore.locations import Location
from ckptcore.protocols import StorageBackend
from ckptcore.roots.root import ROOT_KEY, Claimed, Composite, PartialSave, Root
from ckptcore.roots.root_json import decode_root

__all__ = ["expect_no_nested", "refuse_inside"]

_SHOWN: Final = 5


def refuse_inside(location: Location) -> None:
    """Refuse a location whose parent directory is a checkpoint or a claim. One small request.

    Raises:
        InvalidLocationError
    """
    try:
        location.parent.size(ROOT_KEY)
    except ObjectNotFoundError:
        return
    above = location.display.rstrip("/").rpartition("/")[0]
    raise InvalidLocationError(
        f"cannot save to {location.display}: it is inside {above}, which is a checkpoint or an unfinished save. A "
        "checkpoint owns its directory: save outside it. Nothing was written"
    )


def expect_no_nested(location: Location) -> None:
    """Refuse to remove a checkpoint that has another one in its directory. Lists the directory.

    Raises:
        CheckpointExistsError
        StorageError
    """
    names = _nested(location.store)
    if names:
        inside = ", ".join([f"{location.display.rstrip('/')}/{name}" for name in names[:_SHOWN]])
        raise CheckpointExistsError(
            f"{location.display} has another checkpoint in its directory ({inside}), which would be removed with it: "
            "move or delete that one first. Nothing was changed"
        )


def _nested(store: StorageBackend) -> Sequence[str]:
    """Return the directories of nested checkpoints that are no members, stored files or exports of this one."""
    names = [key.removesuffix(f"/{ROOT_KEY}") for key in store.list() if key.endswith(f"/{ROOT_KEY}")]
    roots = {name: root for name in names if (root := _committed(store, name)) is not None}
    members = {name: root for name, root in roots.items() if isinstance(root, Root) and root.member}
    stored = {f"{name}/{key}" for name, root in members.items() for key in root.objects}
    others = [name for name in roots if name not in members and f"{name}/{ROOT_KEY}" not in stored]
    own = _committed(store, "") if others else None
    # Exports into the directory of their save began with it.
    created = own.created if isinstance(own, Root | Composite) else None
    return [name for name in others if created is None or getattr(roots[name], "created", None) != created]


def _committed(store: StorageBackend, name: str) -> object | None:
    """Return the root of a committed checkpoint, or None."""
    prefix = f"{name}/" if name else ""

    def read_part(key: str, size: int) -> bytes:
        return store.get(f"{prefix}{key}", 0, size)

    try:
        root = decode_root(store.get(f"{prefix}{ROOT_KEY}"), read_part)
    except (CorruptCheckpointError, ObjectNotFoundError):
        return None
    except UnsupportedVersionError as newer:
        return newer
    return None if isinstance(root, Claimed | PartialSave) else root
