"""Storage options of arrays: chunk size, compression and checksums, with rules for selected arrays."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from ckptcore_orbax.zarr.formats import Compression, CompressionName

_MIN_CHUNK_BYTES: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOptions:
    """Storage options of an array.

    Attributes:
        chunk_bytes: target size of a read chunk, in bytes; None: one read chunk per write chunk.
        compression: compression of read chunks; None: uncompressed.
        checksum: store the CRC32C of each read chunk, if the format supports it.
    """

    chunk_bytes: int | None
    compression: Compression | None
    checksum: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRule:
    """Options for the arrays that match a pattern. An option that is None keeps its current value.

    Attributes:
        pattern: pattern for array names, with ``*`` and ``?`` as in `fnmatch`: ``params.*.embedding``.
        chunk_bytes: see `ArrayOptions`; 0: one read chunk per write chunk.
        compression: name of a compression: ``zstd``, ``gzip`` or ``blosc``, also with a level as in
            ``zstd:3``, or ``none``.
        checksum: see `ArrayOptions`.
    """

    pattern: str
    chunk_bytes: int | None = None
    compression: str | None = None
    checksum: bool | None = None

    def __post_init__(self) -> None:
        """Validate the options early."""
        check_chunk_bytes(self.chunk_bytes)
        if self.compression is not None:
            parse_compression(self.compression)

    def matches(self, array: str) -> bool:
        """Return whether the pattern matches an array name."""
        return fnmatch.fnmatchcase(array, self.pattern)

    def apply(self, options: ArrayOptions) -> ArrayOptions:
        """Return the options of a matching array."""
        chunk_bytes = options.chunk_bytes if self.chunk_bytes is None else self.chunk_bytes or None
        compression = options.compression if self.compression is None else parse_compression(self.compression)
        checksum = options.checksum if self.checksum is None else self.checksum
        return ArrayOptions(chunk_bytes=chunk_bytes, compression=compression, checksum=checksum)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """Storage options of all arrays of a checkpoint.

    Attributes:
        zarr_format: 2 or 3.
        storage: whether chunks are values of a database or objects.
        default: options of every array before the rules.
        rules: changes of these options for selected arrays, applied in order.
        data_file_bytes: target size of a data file of a database, in bytes.
        item: Orbax item name, which is the directory, for a checkpoint of one tree.
        separate_nodes: the nodes and the values of a database are in different directories.
    """

    zarr_format: Literal[2, 3]
    storage: Literal["ocdbt", "objects"]
    default: ArrayOptions
    rules: Sequence[ArrayRule]
    data_file_bytes: int
    item: str
    separate_nodes: bool

    @property
    def description(self) -> str:
        """Description of the options that must be equal in all processes: all but the size of data files."""
        separate = " with nodes apart" if self.separate_nodes else ""
        rules = ", ".join(map(repr, self.rules))
        return f"zarr {self.zarr_format} as {self.storage}{separate} in {self.item!r}, {self.default}, rules [{rules}]"


def check_chunk_bytes(chunk_bytes: int | None) -> None:
    """Raise ValueError unless `chunk_bytes` is None or a natural number."""
    if chunk_bytes is not None and (type(chunk_bytes) is not int or chunk_bytes < 0):
        raise ValueError(f"chunk_bytes={chunk_bytes!r}: expected a number of bytes, 0 or None for no limit")


def parse_compression(name: str | None) -> Compression | None:
    """Return the compression with a name, or None for None and ``none``.

    Names are ``zstd``, ``gzip`` and ``blosc``, also with a level as in ``zstd:3``.

    Raises:
        ValueError: the name is unknown, or the codec does not have the level.
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


def array_options(array: str, options: ArrayOptions, rules: Sequence[ArrayRule]) -> ArrayOptions:
    """Return the options of an array: the general options, changed by every matching rule in order."""
    for rule in rules:
        if rule.matches(array):
            options = rule.apply(options)
    return options
