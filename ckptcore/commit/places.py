"""Places on file systems: what is refused before anything is written.

File systems take some names for one, limit their length, and do not rename mount points.
"""

from __future__ import annotations

import errno
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from ckptcore.commit.names import ALL_FORMS, folded, merged_names, names_merged, too_long
from ckptcore.commit.target import name_of_save
from ckptcore.errors import AtomicityError, InvalidLocationError, NameCollisionError, StorageError, converts_errors
from ckptcore.protocols import DirectoryFeatures, PlaceLimits

if TYPE_CHECKING:
    from ckptcore.commit.location import Location


_ANY_SAVE: Final = "0" * 16
"""As long as every save id."""


def expect_place(location: Location, limits: PlaceLimits) -> None:
    """Refuse a location that no rename can reach: a mount point, or a name without room for the hidden directory.

    Raises:
        InvalidLocationError
    """
    if limits.is_mount_point:
        raise _is_mount_point(location)
    longest = name_of_save(location.name, _ANY_SAVE)
    if too_long([longest], limits.name_bytes) is not None:
        raise _too_long(location, limits.name_bytes)


def _is_mount_point(location: Location) -> InvalidLocationError:
    return InvalidLocationError(
        f"{location.display} is a mount point, and a checkpoint is a directory that is renamed when it is saved, "
        f"replaced or deleted: use a directory in it, such as {location.display.rstrip('/')}/checkpoint. Nothing was "
        "changed"
    )


def _too_long(location: Location, name_bytes: int | None) -> InvalidLocationError:
    further = len(name_of_save("", _ANY_SAVE))
    found = len(location.name.encode("utf-8", "surrogateescape"))
    limit = "fewer" if name_bytes is None else f"at most {name_bytes - further}"
    return InvalidLocationError(
        f"{location.display}: the name has {found} bytes, and this file system allows {limit}, because the directory "
        f"has a name with {further} more bytes while it is saved or deleted. Choose a shorter name. Nothing was changed"
    )


@converts_errors
def naming_place(location: Location) -> Iterator[None]:
    """Raise an error that names the location if a file system refuses a long name that it had not told to refuse."""
    try:
        yield
    except StorageError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise _too_long(location, None) from error


def refuse_other_spelling(location: Location, action: str) -> None:
    """Refuse a checkpoint whose name only the file system takes for the name of the location.

    Forms of Unicode are ignored: some file systems store another form than the one that they are given.

    Args:
        location: the location of a checkpoint that exists.
        action: what the caller does, such as ``"delete"``.

    Raises:
        NameCollisionError
        StorageError
    """
    if location.commits.claims_by_root:
        return  # the keys of objects are exact
    names = [entry.removesuffix("/") for entry in location.parent.list_names()]
    if location.name in names:
        return
    wanted = unicodedata.normalize("NFC", location.name)
    for name in names:
        if unicodedata.normalize("NFC", name) != wanted and folded(name, ALL_FORMS) == folded(location.name, ALL_FORMS):
            raise NameCollisionError(
                f"cannot {action} {location.display}: this file system treats the name as {name!r}, which exists. Use "
                f"another name, or {name!r} if you mean that. Nothing was changed"
            )


def no_exchange(location: Location) -> AtomicityError:
    """Return the error for a checkpoint that the file system cannot exchange for another one."""
    return AtomicityError(
        f"{location.display} holds a checkpoint, and this file system cannot exchange it for another one "
        "atomically; save to another location, or pass overwrite='non-atomic'. Nothing was changed"
    )


def expect_distinct(
    location: Location,
    name_bytes: int | None,
    features: DirectoryFeatures,
    is_one: Callable[[str, str], bool],
    keys: Callable[[], Iterable[str]],
) -> None:
    """Refuse keys that the file system takes for one, or that are too long for it. See `Transaction.expect_distinct`.

    Args:
        location: the location of the checkpoint.
        name_bytes: the most bytes of a name.
        features: what the file system was found to do.
        is_one: asks the file system itself about two keys, because each compares rare characters in its own way.
        keys: returns the keys.
    """
    if not features.merges and (name_bytes is None or name_bytes >= 255):
        return  # layouts write no longer names
    found = list(keys())
    if (name := too_long(found, name_bytes)) is not None:
        raise InvalidLocationError(
            f"cannot save to {location.display}: {name!r} is the name of a file or directory in it and has "
            f"{len(name.encode('utf-8', 'surrogateescape'))} bytes, but this file system allows {name_bytes}. Choose a "
            "shorter name, or save elsewhere. Nothing was written"
        )
    for first, second in merged_names(found, features.merges):
        if is_one(first, second):
            raise names_merged(location.display, first, second, "Nothing was written")
