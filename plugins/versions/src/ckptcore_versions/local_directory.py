"""Directories on a local disk that a program gives, for files that are mapped."""

from __future__ import annotations

from ckptcore.commit.location import LocationLike, absolute_location
from ckptcore.errors import InvalidLocationError
from ckptcore.redaction import redacted_location


def local_directory(option: str, location: LocationLike) -> str:
    """Return the absolute path of a directory, with ``~`` expanded.

    Args:
        option: the name of the option, for the error.
        location: its value.

    Raises:
        InvalidLocationError: it is a URL of another storage, or no location.
    """
    path = absolute_location(location)
    if "://" in path:
        raise InvalidLocationError(
            f"{option}={redacted_location(path)!r}: expected a directory on a local disk, because its files are "
            "mapped; found a URL"
        )
    return path
