"""Local directories that an option names: the cache of a follower, and the place of a publisher's copy."""

from __future__ import annotations

from ckptcore.commit.location import LocationLike, absolute_location, shown_location
from ckptcore.errors import InvalidLocationError


def local_directory(option: str, directory: LocationLike) -> str:
    """Return the absolute path of a local directory, without links and with the home directory for ``~``.

    Args:
        option: the name of the option, for the error.
        directory: a path. The directory need not exist.

    Raises:
        InvalidLocationError: it is not a local path.
    """
    path = absolute_location(directory)
    if not path.startswith("/"):
        raise InvalidLocationError(
            f"{option}={shown_location(directory)!r}: expected a directory on a local disk, because its files are "
            "mapped, and found a URL; give the path of a local directory"
        )
    return path
