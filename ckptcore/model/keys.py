"""Keys of objects: the rules that every storage holds them to, because they may come from a hostile file."""

from __future__ import annotations

from typing import Final

from ckptcore.errors import InvalidLocationError

__all__ = ["check_directory_key", "check_key"]

_NO_NAMES: Final = frozenset({"", ".", ".."})


def check_key(key: str) -> str:
    """The key itself, if it names an object below a directory: relative, with ``/`` between its parts.

    A storage may refuse more: what none of its objects can be named.

    Raises:
        InvalidLocationError: for an absolute or empty key, an empty, ``.`` or ``..`` part, a NUL character.
    """
    if not _NO_NAMES.isdisjoint(key.split("/")):
        raise InvalidLocationError(
            f"the key {key[:200]!r} has an empty, '.' or '..' part; expected a relative key such as 'directory/name'. "
            "If it comes from a checkpoint, that checkpoint is damaged or hostile"
        )
    if "\0" in key:
        raise InvalidLocationError(
            f"the key {key[:200]!r} has the character '\\0', which no name can have. "
            "If it comes from a checkpoint, that checkpoint is damaged or hostile"
        )
    return key


def check_directory_key(key: str) -> str:
    """The key of a directory without the ``/`` it may end in; the empty key is the directory that was opened.

    Raises:
        InvalidLocationError: as `check_key`.
    """
    if not key:
        return key
    return check_key(key.removesuffix("/"))
