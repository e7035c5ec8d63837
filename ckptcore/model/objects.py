"""Objects (files) of a checkpoint: keys, sizes and block checksums."""

from __future__ import annotations

from typing import Final, NamedTuple

from ckptcore.errors import InvalidLocationError

__all__ = ["BLOCK_BYTES", "CHECKSUM_ALGORITHM", "CHECKSUM_BYTES", "ObjectRecord", "check_directory_key", "check_key"]

BLOCK_BYTES: Final = 1 << 20
"""Bytes that one checksum covers; the last block of an object may be shorter."""

CHECKSUM_ALGORITHM: Final = "xxh3_64"
"""The algorithm of new checksums: XXH3 with 64 bits and seed 0."""

CHECKSUM_BYTES: Final = 8
"""Bytes of one checksum in `ObjectRecord.checksums`."""

_NO_NAMES: Final = frozenset({"", ".", ".."})


class ObjectRecord(NamedTuple):
    """An object of a checkpoint.

    Attributes:
        key: its name within the checkpoint, with ``/`` between directories.
        size: its bytes.
        checksums: the checksum of each block of `BLOCK_BYTES`, in order, each a little-endian uint64; empty if there
            are none.
    """

    key: str
    size: int
    checksums: bytes = b""

    @property
    def blocks(self) -> int:
        """The number of blocks of the object."""
        return -(-self.size // BLOCK_BYTES)


def check_key(key: str) -> str:
    """Return a key if it names an object below a directory: relative, with ``/`` between its parts.

    Keys may come from a hostile file. A storage may refuse further keys that none of its objects can have.

    Raises:
        InvalidLocationError: the key is absolute or empty, or has an empty, ``.`` or ``..`` part, a NUL character or a
            surrogate that represents no byte of a file name.
    """
    if not _NO_NAMES.isdisjoint(key.split("/")):
        raise InvalidLocationError(
            f"the key {key[:200]!r} has an empty, '.' or '..' part; expected a relative key such as 'directory/name'. "
            "If it comes from a checkpoint, that checkpoint is damaged or hostile"
        )
    try:
        if "\0" not in key and (key.isascii() or key.encode("utf-8", "surrogateescape")):
            return key
    except UnicodeEncodeError:
        pass  # the error below
    raise InvalidLocationError(
        f"the key {key[:200]!r} has a character that is not valid in names. "
        "If it comes from a checkpoint, that checkpoint is damaged or hostile"
    )


def check_directory_key(key: str) -> str:
    """Return the key of a directory without a trailing ``/``. The empty key is the directory of the storage.

    Raises:
        InvalidLocationError: see `check_key`.
    """
    return check_key(key.removesuffix("/")) if key else key
