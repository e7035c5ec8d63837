"""Names in a directory of checkpoints: the hidden names of ckptcore, and names that a file system refuses or merges.

File systems treat some different names as equal, limit their length, and do not rename mount points.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Final, Literal

from ckptcore.errors import AtomicityError, InvalidLocationError, NameCollisionError, StorageError, converts_errors
from ckptcore.protocols import DirectoryFeatures, NameForm, PlaceLimits

if TYPE_CHECKING:
    from ckptcore.commit.location import Location

INTERNAL_DIRECTORY: Final = ".ckptcore"
"""The directory of locks, uploads and metadata within a directory of steps."""

_HIDDEN: Final = re.compile(r"\.(.+)\.([0-9a-f]{16}|partial|replaced)\.ckptcore", re.DOTALL)
"""The name of a hidden directory: the name of the checkpoint, and the save id, "partial" or "replaced"."""


def is_hidden_name(name: str) -> bool:
    """Return True for the name of the hidden directory of a save, a deletion or a partial save."""
    return _HIDDEN.fullmatch(name) is not None


def is_leftover_name(name: str) -> bool:
    """Return True for the name of the hidden directory of a save or a deletion, running or killed."""
    matched = _HIDDEN.fullmatch(name)
    return matched is not None and matched[2] != "partial"


def is_save_of(name: str, hidden: str) -> bool:
    """Return True if a hidden directory belongs to a save to `name`, or to a deletion of `name`."""
    matched = _HIDDEN.fullmatch(hidden)
    return matched is not None and matched[2] != "partial" and matched[1] == name


def saved_to(hidden: str) -> str | None:
    """Return the name of the checkpoint that a hidden directory belongs to; None for other names."""
    matched = _HIDDEN.fullmatch(hidden)
    return None if matched is None else matched[1]


def replaced_by(hidden: str) -> str | None:
    """Return the name of the checkpoint that a save with two renames set aside as `hidden`; None for other names."""
    matched = _HIDDEN.fullmatch(hidden)
    return matched[1] if matched is not None and matched[2] == "replaced" else None


def name_of_save(name: str, save_id: str) -> str:
    """Return the name of the hidden directory of a save."""
    return f".{name}.{save_id}.ckptcore"


def save_of_hidden(hidden: str) -> str:
    """Return the save id in the name of a hidden directory. Return the whole name if it has no save id.

    Lease names contain this result instead of the full hidden name, which could make them too long for the file system.
    """
    matched = _HIDDEN.fullmatch(hidden)
    return hidden if matched is None or matched[2] in ("partial", "replaced") else matched[2]


def name_of_partial(name: str) -> str:
    """Return the name of the hidden directory of a partial save."""
    return f".{name}.partial.ckptcore"


def name_of_replaced(name: str) -> str:
    """Return the hidden name that a checkpoint has between the two renames of a save that replaces it."""
    return f".{name}.replaced.ckptcore"


ALL_FORMS: Final[frozenset[NameForm]] = frozenset(("case", "accents", "trailing dots"))
"""The differences between names that some file systems ignore."""


def folded(name: str, merges: Collection[NameForm]) -> str:
    """Return a text that is equal for two names if the file system may treat them as equal.

    File systems differ in rare characters, so a file system may still distinguish two names with equal texts.
    """
    if "accents" in merges:
        name = _normalized("NFKD", name)
    if "case" in merges:
        name = name.casefold()
        if "accents" in merges:
            name = _normalized("NFKD", name)
    return (name.rstrip(". ") or name) if "trailing dots" in merges else name


def _normalized(form: Literal["NFC", "NFKD"], name: str) -> str:
    import unicodedata  # plain saves and loads do not need it

    return unicodedata.normalize(form, name)


def merged_names(keys: Iterable[str], merges: Collection[NameForm]) -> Iterator[tuple[str, str]]:
    """Yield pairs of keys, or of directories on their paths, that the file system may treat as equal."""
    if not merges:
        return
    known: dict[str, str] = {}
    folds: dict[str, str] = {"": ""}  # by path, because keys share directories
    for key in keys:
        path = fold = ""
        for name in key.split("/"):
            above, path = fold, f"{path}/{name}" if path else name
            if (fold := folds.get(path, "")) == "":
                fold = folds[path] = f"{above}/{folded(name, merges)}"
                first = known.setdefault(fold, path)
                if first != path:
                    yield first, path


def too_long(keys: Iterable[str], name_bytes: int | None) -> str | None:
    """Return the first name in the paths of keys that is too long for the file system; None if there is none."""
    if name_bytes is None:
        return None
    for key in keys:
        if len(key) * 4 > name_bytes:  # fast path: a character has at most 4 bytes in UTF-8
            for name in key.split("/"):
                if len(name.encode("utf-8", "surrogateescape")) > name_bytes:
                    return name
    return None


def names_merged(display: str, first: str, second: str, end: str) -> NameCollisionError:
    """Return the error for two names that the file system treats as equal. It shows similar names with escapes."""
    look_alike = _normalized("NFC", first) == _normalized("NFC", second)
    names = " and ".join(map(ascii if look_alike else repr, (first, second)))
    return NameCollisionError(
        f"cannot save to {display}: this file system treats the names {names} as equal, so one would "
        f"overwrite the other. Rename one of them, or save to another file system. {end}"
    )


def existing_name(display: str, key: str, others: Iterable[str]) -> NameCollisionError:
    """Return the error for a key that already exists in a new directory.

    If the file system may treat one of `others` as equal to the key, the error shows both.
    """
    fold = folded(key, ALL_FORMS)
    for other in others:
        if other != key and folded(other, ALL_FORMS) == fold:
            return names_merged(display, other, key, "Nothing was committed")
    return NameCollisionError(
        f"cannot save to {display}: the layout wrote {key} twice, perhaps from several processes, or the file system "
        "treats another name as equal. Nothing was committed. Save with another layout, or to another file system"
    )


_ANY_SAVE: Final = "0" * 16
"""A text with the length of a save id."""


def expect_place(location: Location, limits: PlaceLimits) -> None:
    """Refuse a location that no rename can reach.

    It is a mount point, or a name so long that the name of its hidden directory exceeds the limit of the file system.

    Raises:
        InvalidLocationError
    """
    if limits.is_mount_point:
        raise InvalidLocationError(
            f"{location.display} is a mount point, and a checkpoint is a directory that is renamed when it is saved, "
            f"replaced or deleted: use a directory in it, such as {location.display.rstrip('/')}/checkpoint. Nothing "
            "was changed"
        )
    longest = name_of_save(location.name, _ANY_SAVE)
    if too_long([longest], limits.name_bytes) is not None:
        raise _too_long(location, limits.name_bytes)


def _too_long(location: Location, name_bytes: int | None) -> InvalidLocationError:
    further = len(name_of_save("", _ANY_SAVE))
    nbytes = len(location.name.encode("utf-8", "surrogateescape"))
    limit = "fewer" if name_bytes is None else f"at most {name_bytes - further}"
    return InvalidLocationError(
        f"{location.display}: the name has {nbytes} bytes, and this file system allows {limit}, because the directory "
        f"has a name with {further} more bytes while it is saved or deleted. Choose a shorter name. Nothing was changed"
    )


@converts_errors
def naming_place(location: Location) -> Iterator[None]:
    """Raise an error that names the location if a file system refuses a name that is within its stated limit."""
    try:
        yield
    except StorageError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise _too_long(location, None) from error


def refuse_other_spelling(location: Location, action: str) -> None:
    """Refuse a location if the file system finds a checkpoint with another name there, such as ``Run`` for ``run``.

    Unicode forms (NFC, NFD) of one name do not count as other names, because some file systems change the form.

    Args:
        location: the location of a checkpoint that exists.
        action: what the caller does, such as ``"delete"``.

    Raises:
        NameCollisionError
        StorageError
    """
    if location.commit_method.claims_by_root:
        return  # the keys of objects are exact
    names = [entry.removesuffix("/") for entry in location.parent.list_names()]
    if location.name in names:
        return
    wanted = _normalized("NFC", location.name)
    for name in names:
        if _normalized("NFC", name) != wanted and folded(name, ALL_FORMS) == folded(location.name, ALL_FORMS):
            raise NameCollisionError(
                f"cannot {action} {location.display}: this file system treats the name as {name!r}, which exists. Use "
                f"another name, or {name!r} if you mean that. Nothing was changed"
            )


def no_exchange(location: Location) -> AtomicityError:
    """Return the error for a checkpoint that the file system cannot exchange for another checkpoint."""
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
    """Refuse keys that the file system treats as equal, or that are too long for it. See `Transaction.expect_distinct`.

    Args:
        location: the location of the checkpoint.
        name_bytes: maximum length of a name in bytes; None if it is unknown.
        features: what the file system supports.
        is_one: tests on the file system itself whether two keys are one name, because file systems differ in rare
            characters.
        keys: returns the keys.
    """
    if not features.merges and (name_bytes is None or name_bytes >= 255):
        return  # no layout writes names of more than 255 bytes
    written = list(keys())
    if (name := too_long(written, name_bytes)) is not None:
        raise InvalidLocationError(
            f"cannot save to {location.display}: {name!r} is the name of a file or directory in it and has "
            f"{len(name.encode('utf-8', 'surrogateescape'))} bytes, but this file system allows {name_bytes}. Choose a "
            "shorter name, or save elsewhere. Nothing was written"
        )
    for first, second in merged_names(written, features.merges):
        if is_one(first, second):
            raise names_merged(location.display, first, second, "Nothing was written")
