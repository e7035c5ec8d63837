"""Options of arrays: how they are cut, compressed and checked, for all of them and for those that a rule names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from ckptcore_orbax.zarr.formats import Compression, CompressionName

__all__ = ["ArrayOptions", "ArrayRule", "Form", "check_chunk_bytes", "options_of", "parse_compression"]

_LEAST_CHUNK_BYTES: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOptions:
    """How an array is stored.

    Attributes:
        chunk_bytes: what a read chunk aims at, in bytes; None: a read chunk is what one process writes.
        compression: how read chunks are compressed; None: not at all.
        checksum: whether each read chunk is stored with its CRC32C, where the format has that.
    """

    chunk_bytes: int | None
    compression: Compression | None
    checksum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRule:
    """Options for the arrays that a pattern names; what is None stays as it is for all.

    Attributes:
        pattern: of the name of the array, with ``*`` and ``?`` as `fnmatch` has them: ``params.*.embedding``.
        chunk_bytes: see `ArrayOptions`; 0: the whole of what one process writes.
        compression: the name of a compression: ``zstd``, ``zstd:3``, ``blosc``, or ``none``.
        checksum: see `ArrayOptions`.
    """

    pattern: str
    chunk_bytes: int | None = None
    compression: str | None = None
    checksum: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense, where it is written down."""
        check_chunk_bytes(self.chunk_bytes)
        if self.compression is not None:
            parse_compression(self.compression)

    def names(self, array: str) -> bool:
        """Whether it is about the array of this name."""
        return fnmatch.fnmatchcase(array, self.pattern)

    def applied(self, options: ArrayOptions) -> ArrayOptions:
        """The options of an array that it names."""
        chunk_bytes = options.chunk_bytes if self.chunk_bytes is None else self.chunk_bytes or None
        compression = options.compression if self.compression is None else parse_compression(self.compression)
        checksum = options.checksum if self.checksum is None else self.checksum
        return ArrayOptions(chunk_bytes=chunk_bytes, compression=compression, checksum=checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the arrays of a checkpoint are stored, apart from what they are.

    Attributes:
        zarr_format: 2 or 3.
        storage: whether chunks are the values of a database or objects of their own.
        options: of every array.
        rules: other options for some.
        data_file_bytes: what a data file of a database aims at, in bytes.
        item: the directory of a tree that is the whole checkpoint, which is its name in Orbax.
    """

    zarr_format: Literal[2, 3]
    storage: Literal["ocdbt", "objects"]
    options: ArrayOptions
    rules: Sequence[ArrayRule]
    data_file_bytes: int
    item: str

    @property
    def agreed(self) -> str:
        """What all processes of a save must have alike, for a person to compare: all but the size of data files."""
        rules = ", ".join(map(repr, self.rules))
        return f"zarr {self.zarr_format} as {self.storage} in {self.item!r}, {self.options}, rules [{rules}]"


def check_chunk_bytes(chunk_bytes: int | None) -> None:
    """Raises: ValueError"""
    if chunk_bytes is not None and (type(chunk_bytes) is not int or chunk_bytes < 0):
        raise ValueError(f"chunk_bytes={chunk_bytes!r}: expected a number of bytes, 0 or None for no limit")


def parse_compression(name: str | None) -> Compression | None:
    """The compression of a name, ``zstd``, ``zstd:3`` (with a level), ``blosc``; None for None and ``none``.

    Raises:
        ValueError
    """
    if name is None or name == "none":
        return None
    kind, _, level = name.partition(":")
    if kind not in get_args(CompressionName) or (level and not level.lstrip("-").isdigit()):
        raise ValueError(
            f"compression={name!r}: expected one of {', '.join(get_args(CompressionName))}, or one with a level such "
            "as 'zstd:3'"
        )
    return Compression(cast("CompressionName", kind), int(level) if level else None)


def options_of(array: str, options: ArrayOptions, rules: Sequence[ArrayRule]) -> ArrayOptions:
    """The options of an array: those of all, changed by every rule that names it, in order."""
    for rule in rules:
        if rule.names(array):
            options = rule.applied(options)
    return options
