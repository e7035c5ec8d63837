"""Hidden names: those of directories beside a checkpoint in which saves of it are under way, or were when they died."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_hidden_name", "is_leftover_name", "is_save_of", "name_of_partial", "name_of_save"]

_HIDDEN: Final = re.compile(r"\.(.+)\.([0-9a-f]{16})\.ckptcore", re.DOTALL)
"""The name of what a save writes: the name of the checkpoint that it is to be, and the save id."""

_PARTIAL: Final = re.compile(r"\.(.+)\.partial\.ckptcore", re.DOTALL)


def is_hidden_name(name: str) -> bool:
    """Whether this is the name of a directory that is no checkpoint yet, or no more: of a save under way, a dead one, or a partial one."""
    return is_leftover_name(name) or _PARTIAL.fullmatch(name) is not None


def is_leftover_name(name: str) -> bool:
    """Whether this is the name of a directory in which a save is under way, or was when it died. One of sessions stays until they are deleted."""
    return _HIDDEN.fullmatch(name) is not None


def is_save_of(name: str, hidden: str) -> bool:
    """Return whether a directory is that of a save to `name`, or of a deletion of it."""
    matched = _HIDDEN.fullmatch(hidden)
    return matched is not None and matched[1] == name


def name_of_save(name: str, save_id: str) -> str:
    """The hidden directory in which a save to a name writes."""
    return f".{name}.{save_id}.ckptcore"


def name_of_partial(name: str) -> str:
    """The hidden directory in which sessions of a partial save to a name write."""
    return f".{name}.partial.ckptcore"
