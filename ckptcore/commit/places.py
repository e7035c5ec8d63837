"""Places on file systems: what is refused before anything is written, and new directories in which nothing is replaced.

File systems take some names for one, limit their length, and do not rename mount points.
"""

from __future__ import annotations

import errno
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from ckptcore.commit.names import folded, merged_names, too_long
from ckptcore.commit.root import new_save_id
from ckptcore.commit.subdirectory import AtomicSubdirectories, subdirectory
from ckptcore.commit.target import name_of_save
from ckptcore.errors import (
    AtomicityError,
    ConditionFailedError,
    InvalidLocationError,
    NameCollisionError,
    ObjectNotFoundError,
    StorageError,
)
from ckptcore.protocols import (
    IF_ABSENT,
    AtomicDirectories,
    DirectoryFeatures,
    NameForm,
    ObjectWriter,
    PutCondition,
    StorageBackend,
)

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

__all__ = [
    "NewDirectory",
    "expect_distinct",
    "expect_place",
    "naming_place",
    "no_exchange",
    "refuse_other_spelling",
]

_FORMS: Final[frozenset[NameForm]] = frozenset(("case", "accents", "trailing dots"))
_PROBE: Final = ".probe-names"


def expect_place(location: Location, directories: AtomicDirectories) -> None:
    """Refuse a location that no rename can reach: a mount point, or a name without room for the hidden directory.

    Raises:
        InvalidLocationError
        StorageError
    """
    limits = directories.limits(location.name)
    if limits.is_mount_point:
        raise _is_mount_point(location)
    longest = name_of_save(location.name, new_save_id())
    if too_long([longest], limits.name_bytes) is not None:
        raise _too_long(location, limits.name_bytes)


def _is_mount_point(location: Location) -> InvalidLocationError:
    return InvalidLocationError(
        f"{location.display} is a mount point, and a checkpoint is a directory that is renamed when it is saved, "
        f"replaced or deleted: use a directory in it, such as {location.display.rstrip('/')}/checkpoint. Nothing was "
        "changed"
    )


def _too_long(location: Location, name_bytes: int | None) -> InvalidLocationError:
    further = len(name_of_save("", new_save_id()))
    found = len(location.name.encode("utf-8", "surrogateescape"))
    limit = "fewer" if name_bytes is None else f"at most {name_bytes - further}"
    return InvalidLocationError(
        f"{location.display}: the name has {found} bytes, and this file system allows {limit}, because the directory "
        f"has a name with {further} more bytes while it is saved or deleted. Choose a shorter name. Nothing was changed"
    )


@contextmanager
def naming_place(location: Location) -> Iterator[None]:
    """Raise an error that names the location if a file system refuses a long name that it had not told to refuse."""
    try:
        yield
    except StorageError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise _too_long(location, None) from error


def refuse_other_spelling(location: Location) -> None:
    """Refuse to replace a checkpoint whose name only the file system takes for the name of the location.

    Forms of Unicode are ignored: some file systems store another form than the one that they are given.

    Raises:
        NameCollisionError
        StorageError
    """
    names = [entry.removesuffix("/") for entry in location.parent.list_names()]
    if location.name in names:
        return
    wanted = unicodedata.normalize("NFC", location.name)
    for name in names:
        if unicodedata.normalize("NFC", name) != wanted and folded(name, _FORMS) == folded(location.name, _FORMS):
            raise NameCollisionError(
                f"cannot save to {location.display}: the file system takes this name for {name!r}, which exists and "
                f"would be replaced. Save to another name, or to {name!r} if it is meant. Nothing was written"
            )


def no_exchange(location: Location) -> AtomicityError:
    """Return the error for a checkpoint that the file system cannot exchange for another one."""
    return AtomicityError(
        f"{location.display} holds a checkpoint, and this file system cannot exchange it for another one "
        "atomically; save to another location, or pass overwrite='non-atomic'. Nothing was changed"
    )


def expect_distinct(
    location: Location,
    store: StorageBackend,
    features: DirectoryFeatures,
    keys: Callable[[], Iterable[str]],
) -> None:
    """Refuse keys that the file system takes for one, or that are too long for it. See `Transaction.expect_distinct`.

    Args:
        location: the location of the checkpoint.
        store: the storage, opened at a hidden directory of this process.
        features: what the file system was found to do.
        keys: returns the keys.
    """
    name_bytes = store.limits(_PROBE).name_bytes if isinstance(store, AtomicDirectories) else None
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
        if _is_one(store, first, second):
            raise _merged(location.display, first, second, "Nothing was written")


def _is_one(store: StorageBackend, first: str, second: str) -> bool:
    """Ask the file system itself, because each compares rare characters in its own way."""
    inside = subdirectory(store, _PROBE)
    inside.put(first, b"")
    try:
        inside.size(second)
    except ObjectNotFoundError:
        return False
    finally:
        if isinstance(store, AtomicDirectories):
            store.delete_directory(_PROBE)
    return True


def _merged(display: str, first: str, second: str, end: str) -> NameCollisionError:
    look_alike = unicodedata.normalize("NFC", first) == unicodedata.normalize("NFC", second)
    names = " and ".join(map(ascii if look_alike else repr, (first, second)))
    return NameCollisionError(
        f"cannot save to {display}: this file system takes the names {names} for one, so one would "
        f"have the values of the other. Rename one of them, or save to another file system. {end}"
    )


class NewDirectory(AtomicSubdirectories):
    """A new hidden directory, as a storage: no object replaces another one, under whichever name it is found."""

    def __init__(self, location: Location, hidden: str) -> None:
        """Open the hidden directory of a save to a location."""
        super().__init__(location.parent, hidden)
        self._display = location.display

    def put(self, key: str, data: bytes, *, condition: PutCondition | None = None) -> str:
        """See `StorageBackend`. Replaces nothing without a condition."""
        if condition is not None:
            return super().put(key, data, condition=condition)
        try:
            return super().put(key, data, condition=IF_ABSENT)
        except ConditionFailedError as error:
            raise self._exists(key) from error

    def open_writer(self, key: str, size: int | None = None) -> ObjectWriter:
        """See `StorageBackend`. Replaces nothing."""
        try:
            return super().open_new(key, size)
        except ConditionFailedError as error:
            raise self._exists(key) from error

    def _exists(self, key: str) -> NameCollisionError:
        fold = folded(key, _FORMS)
        with suppress(StorageError):
            for other in self.list():
                if other != key and folded(other, _FORMS) == fold:
                    return _merged(self._display, other, key, "Nothing was committed")
        return NameCollisionError(
            f"cannot save to {self._display}: {key!r} was written already, perhaps by another process of the job, or "
            "the file system takes another name for it. Nothing was committed"
        )
