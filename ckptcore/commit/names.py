"""Names that a file system takes for one, and names that are too long for it."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from ckptcore.errors import NameCollisionError
from ckptcore.protocols import NameForm

ALL_FORMS: Final[frozenset[NameForm]] = frozenset(("case", "accents", "trailing dots"))
"""The differences between names that some file systems ignore."""


def folded(name: str, merges: Collection[NameForm]) -> str:
    """Return a text that is equal for two names if the file system may take them for one.

    File systems differ in rare characters, so names with equal texts may be different names nevertheless.
    """
    if "accents" in merges:
        name = unicodedata.normalize("NFKD", name)
    if "case" in merges:
        name = name.casefold()
        if "accents" in merges:
            name = unicodedata.normalize("NFKD", name)
    return (name.rstrip(". ") or name) if "trailing dots" in merges else name


def merged_names(keys: Iterable[str], merges: Collection[NameForm]) -> Iterator[tuple[str, str]]:
    """Yield pairs of keys, or of directories on their paths, that the file system may take for one."""
    if not merges:
        return
    known: dict[str, str] = {}
    folds: dict[str, str] = {"": ""}
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
    """Return the first name on the paths of keys that has more bytes than the file system allows; None without one."""
    if name_bytes is None:
        return None
    for key in keys:
        if len(key) * 4 > name_bytes:  # most are so short that nothing needs to be counted
            for name in key.split("/"):
                if len(name.encode("utf-8", "surrogateescape")) > name_bytes:
                    return name
    return None


def names_merged(display: str, first: str, second: str, end: str) -> NameCollisionError:
    """Return the error for two names that the file system treats as equal. Look-alikes are shown by code points."""
    look_alike = unicodedata.normalize("NFC", first) == unicodedata.normalize("NFC", second)
    names = " and ".join(map(ascii if look_alike else repr, (first, second)))
    return NameCollisionError(
        f"cannot save to {display}: this file system treats the names {names} as equal, so one would "
        f"overwrite the other. Rename one of them, or save to another file system. {end}"
    )


def existing_name(display: str, key: str, others: Iterable[str]) -> NameCollisionError:
    """Return the error for a key that exists already in a new directory, with the other name of it if there is one."""
    fold = folded(key, ALL_FORMS)
    for other in others:
        if other != key and folded(other, ALL_FORMS) == fold:
            return names_merged(display, other, key, "Nothing was committed")
    return NameCollisionError(
        f"cannot save to {display}: the layout wrote {key} twice, perhaps from several processes, or the file system "
        "treats another name as equal. Nothing was committed. Save with another layout, or to another file system"
    )
