"""Keys of objects that are files, or could be: the rules of all storages, and that a file can have the name."""

from __future__ import annotations

import os
from typing import Final

from ckptcore import model
from ckptcore.errors import InvalidLocationError

__all__ = ["check_directory_key", "check_key"]

_FORBIDDEN: Final = "\\:" if os.name == "nt" else ""


def check_key(key: str) -> str:
    """The key itself, if it names an object below a directory: relative, with ``/`` between its parts.

    Raises:
        InvalidLocationError: for an absolute or empty key, an empty, ``.`` or ``..`` part, a NUL character, a character
            no file name can have, and on Windows a backslash or colon.
    """
    model.check_key(key)
    for character in _FORBIDDEN:
        if character in key:
            raise InvalidLocationError(
                f"the key {key[:200]!r} has the character {character!r}, which no name can have. "
                "If it comes from a checkpoint, that checkpoint is damaged or hostile"
            )
    if not key.isascii():
        try:
            os.fsencode(key)
        except UnicodeEncodeError as error:
            raise InvalidLocationError(
                f"the key {key[:200]!r} has a character that no name can have. "
                "If it comes from a checkpoint, that checkpoint is damaged or hostile"
            ) from error
    return key


def check_directory_key(key: str) -> str:
    """The key of a directory without the ``/`` it may end in; the empty key is the directory that was opened.

    Raises:
        InvalidLocationError: as `check_key`.
    """
    if not key:
        return key
    return check_key(key.removesuffix("/"))
