"""The occupant of a location: a checkpoint, a claim, other files or nothing, and whether a save may replace it.

Directories with hidden names beside a checkpoint belong to saves that are running or were killed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ckptcore.commit.root import PARTIAL_KEY, ROOT_KEY, Claimed, Composite, PartialSave, Root
from ckptcore.commit.root_json import HEAD_BYTES, Head, decode_root, is_claim, is_partial, read_head, summarize_root
from ckptcore.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from ckptcore.protocols import StorageBackend

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

__all__ = [
    "ADMINISTRATION",
    "IsForeign",
    "Occupant",
    "Overwrite",
    "expect_no_nested",
    "find_debris",
    "find_occupant",
    "holds_members",
    "is_claimed_by",
    "is_hidden_name",
    "is_leftover_name",
    "is_save_of",
    "name_of_partial",
    "name_of_save",
    "none_is_foreign",
    "parse_root",
    "read_root",
    "refuse_inside",
    "refuse_to_replace",
    "remove_debris",
    "root_bytes",
]

Overwrite: TypeAlias = bool | Literal["non-atomic"]
"""True if a save replaces a checkpoint at its location atomically; "non-atomic" allows it on any storage."""

IsForeign: TypeAlias = "Callable[[Location], bool]"
"""Returns whether the directory at a location is a checkpoint that other software wrote."""

Occupant: TypeAlias = Literal["nothing", "claim", "checkpoint"]
"""The kind of occupant."""

_MOST_MEMBERS: Final = 1000
"""Directories to look into; a checkpoint has a handful."""


_SHOWN: Final = 5


def none_is_foreign(location: Location) -> bool:
    """Return False: see `IsForeign`."""
    return False


def refuse_to_replace(location: Location, overwrite: Overwrite, is_foreign: IsForeign = none_is_foreign) -> Occupant:
    """Check that a save may write to a location. Return what it replaces.

    Args:
        location: where.
        overwrite: whether a checkpoint is replaced.
        is_foreign: recognises checkpoints of other software; called if the location has files but no root.

    Raises:
        CheckpointExistsError: if it may not.
        InvalidLocationError: if no checkpoint can have its name.
        ValueError: if `overwrite` is none of its values.
    """
    if location.is_object:
        raise CheckpointExistsError(
            f"{location.display} is a file; a checkpoint is a directory: save to another location, or remove the file"
        )
    return find_occupant(location, root_bytes(location.store), overwrite, is_foreign)


def find_occupant(
    location: Location, root: bytes | None, overwrite: Overwrite, is_foreign: IsForeign = none_is_foreign
) -> Occupant:
    """Return what a save to a location replaces.

    Args:
        location: where.
        root: the bytes of the root; None if there is none.
        overwrite, is_foreign: as for `refuse_to_replace`.

    Raises:
        CheckpointExistsError, InvalidLocationError, ValueError: as by `refuse_to_replace`.
    """
    if is_hidden_name(location.name):
        raise InvalidLocationError(
            f"{location.display} has the name of a save that is not committed, which no load takes for a checkpoint and which saves remove; "
            "save to a name that does not begin with a dot"
        )
    if overwrite not in (True, False, "non-atomic"):
        raise ValueError(f"overwrite={overwrite!r}: expected True, False or 'non-atomic'")
    if root is not None:
        if is_partial(root):
            raise CheckpointExistsError(
                f"{location.display} is being filled by a partial save that is not finalized, and nothing replaces that: call "
                "ckptcore.partial(...).finalize, or ckptcore.delete, first"
            )
        # One that cannot be read counts as a checkpoint: it is replaced only when asked.
        occupant: Occupant = "claim" if is_claim(root) else "checkpoint"
    elif not (names := location.store.list_names()):
        return "nothing"
    elif _are_members(location.store, names) or is_foreign(location):
        occupant = "checkpoint"  # of several checkpointables, that lost its root; or of other software
    else:
        raise CheckpointExistsError(
            f"{location.display} holds files that are no checkpoint ({', '.join(names[:5])}), and they are not "
            "replaced; save to another location, or remove them"
        )
    if occupant == "checkpoint" and not overwrite:
        raise CheckpointExistsError(
            f"{location.display} holds a checkpoint already; save to another location, or pass overwrite=True"
        )
    expect_no_nested(location)
    return occupant


def holds_members(store: StorageBackend) -> bool:
    """Return True if a directory without a root has members of a checkpoint of several checkpointables."""
    return _are_members(store, store.list_names())


def _are_members(store: StorageBackend, names: Sequence[str]) -> bool:
    for entry in names[:_MOST_MEMBERS]:
        if not entry.endswith("/") or entry.startswith("."):
            continue
        try:
            head = _head(store, entry[:-1])
        except StorageError:
            continue
        if head is not None and head.role == "member":
            return True
    return False


def read_root(store: StorageBackend) -> Root | Composite | Claimed | PartialSave | None:
    """Return the root of a checkpoint; None if there is none.

    Raises:
        CorruptCheckpointError: if it or a part of it is not what was written.
        UnsupportedVersionError: if a newer version wrote it.
    """
    data = root_bytes(store)
    return None if data is None else parse_root(store, data)


def root_bytes(store: StorageBackend) -> bytes | None:
    """Return the bytes of a root, which differ between any two saves; None if there is none."""
    try:
        return store.get(ROOT_KEY)
    except ObjectNotFoundError:
        return None


def is_claimed_by(location: Location, save_id: str) -> bool:
    """Return True if the root at a location is the claim of a save. Never True with commits by rename."""
    data = root_bytes(location.store)
    return data is not None and is_claim(data) and summarize_root(data).save_id == save_id


def parse_root(store: StorageBackend, data: bytes, display: str = "") -> Root | Composite | Claimed | PartialSave:
    """Parse a root. Its parts are read from the storage.

    Args:
        store: the storage, opened at the checkpoint.
        data: the bytes of the root.
        display: the location, for errors; empty if the caller adds it to them.

    Raises:
        What `read_root` does.
    """

    def read_part(key: str, size: int) -> bytes:
        try:
            return store.get(key, 0, size)
        except ObjectNotFoundError as error:
            raise CorruptCheckpointError(f"{key}, a part of the root, is missing: {error}", key=key) from error

    try:
        return decode_root(data, read_part)
    except CorruptCheckpointError as error:
        if not display:
            raise
        raise type(error)(f"{display}: {error}", key=error.key, start=error.start, stop=error.stop) from error


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
    """Return the directories of nested checkpoints that are no members, stored files or exports of this one.

    Of each root only the head is read, unless a nested one may be a file that a member stores.
    """
    names = [key.removesuffix(f"/{ROOT_KEY}") for key in store.list() if key.endswith(f"/{ROOT_KEY}")]
    heads = {name: _head(store, name) for name in names}
    members = [name for name, head in heads.items() if head is not None and head.role == "member"]
    others = [
        name
        for name, head in heads.items()
        if head is not None and head.state == "committed" and head.role == "checkpoint"
    ]
    return [name for name in others if not any(_stores(store, member, name) for member in members)]


def _head(store: StorageBackend, name: str) -> Head | None:
    """Return the head of the root in a directory; None without a readable one."""
    try:
        return read_head(store.get(f"{name}/{ROOT_KEY}", 0, HEAD_BYTES))
    except ObjectNotFoundError:
        return None


def _stores(store: StorageBackend, member: str, name: str) -> bool:
    """Return whether the root in a directory is a file of a member: an object may save a checkpoint among its files."""
    if not name.startswith(f"{member}/"):
        return False

    def read_part(key: str, size: int) -> bytes:
        return store.get(f"{member}/{key}", 0, size)

    try:
        root = decode_root(store.get(f"{member}/{ROOT_KEY}"), read_part)
    except (CorruptCheckpointError, ObjectNotFoundError, UnsupportedVersionError):
        return True  # unknown: the member is removed as a whole
    return isinstance(root, Root) and f"{name.removeprefix(f'{member}/')}/{ROOT_KEY}" in root.objects


def find_debris(keys: Collection[str], kept: Collection[str]) -> Sequence[str]:
    """Return the keys of unneeded objects at a location, without those of nested checkpoints.

    Args:
        keys: all keys that exist, with those that a list may not show.
        kept: the keys of needed objects.
    """
    below = tuple([key.removesuffix(ROOT_KEY) for key in keys if key.endswith(f"/{ROOT_KEY}")])
    return sorted([key for key in keys if key not in kept and not key.startswith(below)])


def remove_debris(store: StorageBackend, kept: Collection[str]) -> None:
    """Remove all objects of a partial save but `kept`, its root and its session table. Needs the claim."""
    debris = find_debris(list(store.list()), {*kept, ROOT_KEY, PARTIAL_KEY})
    if debris:
        store.delete(debris)


ADMINISTRATION: Final = ".ckptcore"
"""The directory beside the steps that has the locks."""

_HIDDEN: Final = re.compile(r"\.(.+)\.([0-9a-f]{16})\.ckptcore", re.DOTALL)
"""The hidden directory of a save: the name of the checkpoint, and the save id."""

_PARTIAL: Final = re.compile(r"\.(.+)\.partial\.ckptcore", re.DOTALL)


def is_hidden_name(name: str) -> bool:
    """Return True if this is the name of the hidden directory of a save, a deletion or a partial save."""
    return is_leftover_name(name) or _PARTIAL.fullmatch(name) is not None


def is_leftover_name(name: str) -> bool:
    """Return True if this is the name of the hidden directory of a save or a deletion, running or killed."""
    return _HIDDEN.fullmatch(name) is not None


def is_save_of(name: str, hidden: str) -> bool:
    """Return whether a directory is that of a save to `name`, or of a deletion of it."""
    matched = _HIDDEN.fullmatch(hidden)
    return matched is not None and matched[1] == name


def name_of_save(name: str, save_id: str) -> str:
    """Return the name of the hidden directory of a save."""
    return f".{name}.{save_id}.ckptcore"


def name_of_partial(name: str) -> str:
    """Return the name of the hidden directory of a partial save."""
    return f".{name}.partial.ckptcore"
