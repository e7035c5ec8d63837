"""Storage of arrays: options and their rules, names, chunk shapes, and dtypes that replace those unknown to zarr."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, cast, get_args

import numpy as np

from ckptcore.errors import CorruptCheckpointError, NameCollisionError, UnsupportedKeyError, UnsupportedLeafError
from ckptcore.model import ArrayRecord, ArraySpec, Box, HostArray, TreeMetadata, TreePath, format_path
from ckptcore.planning import leaf_names
from ckptcore_orbax.zarr.array_files import parse_zarr2, parse_zarr3, zarr2_array, zarr3_array
from ckptcore_orbax.zarr.chunking import MAX_CHUNKS, read_chunk_shape, write_chunk_shape
from ckptcore_orbax.zarr.dtypes import stored_spec
from ckptcore_orbax.zarr.formats import ArrayFormat, Compression, CompressionName, encode_metadata

_RESERVED_NAMES: Final = frozenset(
    {
        "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "_strings.json", "array_metadatas", "checkpoint",
        "commit_success.txt", "manifest.ocdbt", "metadata", "orbax.checkpoint",
    }
)  # fmt: skip
"""Names of other files in the directory of arrays."""

_OTHER_METADATA: Final = frozenset({"_CHECKPOINT_DELETION", ".zarray", ".zgroup", ".zattrs", "zarr.json"})

_OF_ARRAYS: Final = ("/.zarray", "/zarr.json")

_INNER: Final = re.compile(
    r"(d/|ocdbt_(meta|data)/|ocdbt\.process_|array_metadatas/|(python|grain|tf)_[0-9]+/).*|metrics/(metrics|commit_success\.txt)|"
    r"descriptor/descriptor\.pbtxt",
    re.DOTALL,
)
"""Pattern of files in directories with fixed names: databases, metadata, and iterators of AXLearn."""

_MAX_BYTES: Final = 200
"""Maximum length of a path component in bytes. File systems allow 255; this leaves room for suffixes."""

_MAX_KEY_BYTES: Final = 1024
"""Maximum length of a name in bytes. Systems allow paths of 4096; this leaves room for the location and chunk keys."""


def orbax_files(keys: Sequence[str], members: Collection[str]) -> Collection[str]:
    """Return the keys of files that Orbax or AXLearn writes: metadata, arrays, databases, and all files in items.

    Args:
        keys: the keys of all files in the directory of a checkpoint.
        members: the names of its items.
    """
    arrays = {key.rpartition("/")[0] for key in keys if key.endswith(_OF_ARRAYS)}
    return [
        key
        for key in keys
        if key in _RESERVED_NAMES
        or key in _OTHER_METADATA
        or _INNER.fullmatch(key)
        or key.partition("/")[0] in members
        or any(key[:end] in arrays for end in _slashes(key))
    ]


def _slashes(key: str) -> Iterator[int]:
    return (index for index, character in enumerate(key) if character == "/")


def key_names(paths: Mapping[int, TreePath]) -> dict[int, str]:
    """Return the name of each leaf in a database, whose keys can contain any text.

    If the joined keys of several leaves are equal, no leaf gets the joined name. A reader that looks the name up then
    finds nothing, instead of the wrong array.

    Raises:
        NameCollisionError: two leaves would have the same name.
    """
    names = leaf_names(paths)
    joined = {leaf: ".".join(map(str, path)).rstrip("/") for leaf, path in paths.items()}
    shared = {text for text, count in Counter(joined.values()).items() if count > 1}
    for leaf, name in names.items():
        if not paths[leaf]:
            names[leaf] = ""  # the array is the whole tree
        elif name.rstrip("/") in shared or not name:
            names[leaf] = f"{name}\\"
    _check_unique(names, paths)
    return names


def directory_names(paths: Mapping[int, TreePath]) -> dict[int, str]:
    """Return the directory of each leaf: the name from `key_names`, escaped if some file systems do not support it.

    Raises:
        NameCollisionError: two leaves would have the same name.
    """
    names = key_names(paths)
    counts = Counter(name.replace("\\", "/").rstrip("/") for name in names.values())
    taken = set(names.values())
    for leaf, name in names.items():
        parts = name.split("/")
        if (
            name
            and (
                len(name.encode()) > _MAX_KEY_BYTES  # first, because all prefixes of a long name take much memory
                or any("/".join(parts[:count]) in taken for count in range(1, len(parts)))
                or counts[name.replace("\\", "/").rstrip("/")] > 1
                or parts[0] in _RESERVED_NAMES
                or parts[0].startswith("checkpoint.")
                or not all(map(_is_plain, parts))
            )
        ):
            names[leaf] = _escaped(name)
    _check_unique(names, paths)
    return names


def _is_plain(part: str) -> bool:
    return (
        part not in ("", ".", "..")
        and "\0" not in part
        and len(part.encode()) <= _MAX_BYTES
        and not part.startswith("ocdbt.process_")
        and part not in (".zarray", ".zgroup", "zarr.json")
    )


def _escaped(name: str) -> str:
    """Return a single path component that differs from all unescaped names."""
    safe = "".join([character if character not in "/\\%\0" else f"%{ord(character):02X}" for character in name])
    if len(safe.encode()) > _MAX_BYTES:
        digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        safe = f"{safe.encode()[: _MAX_BYTES - 40].decode('utf-8', 'ignore')}%{digest}"
    return f"%{safe}"


def _check_unique(names: Mapping[int, str], paths: Mapping[int, TreePath]) -> None:
    seen: dict[str, int] = {}
    for leaf, name in names.items():
        first = seen.setdefault(name, leaf)
        if first != leaf:
            raise NameCollisionError(
                f"{format_path(paths[first])} and {format_path(paths[leaf])} would both be stored as {name!r}; "
                "rename one of the keys. Nothing was written"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayOptions:
    """Storage options of an array.

    Attributes:
        chunk_bytes: target size of a read chunk, in bytes; None for one read chunk per write chunk.
        compression: compression of read chunks; None for no compression.
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
        storage: ``ocdbt``: chunks are values of a database; ``objects``: chunks are objects.
        default: options of every array, before rules are applied.
        rules: changes to the default options for selected arrays, applied in order.
        data_file_bytes: target size of a data file of a database, in bytes.
        item: name of the Orbax item, and of its directory, in a checkpoint of one tree.
        separate_nodes: store the nodes and the values of a database in different directories.
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


SESSION_WRITERS: Final = 2
"""Number of writers assumed for an array written in sessions. All numbers above 1 give the same chunk shape."""

_MAX_NAME_BYTES: Final = 64_000
"""Maximum name length in a database, whose keys have up to 65,535 bytes: leaves room for any chunk index."""

_MAX_BLOSC_BYTES: Final = (1 << 31) - 17
"""Maximum input of blosc in bytes, BLOSC_MAX_BUFFERSIZE."""


def array_names(tree: TreeMetadata, options: LayoutOptions) -> dict[int, str]:
    """Return a name for every leaf. Aliases and values have names too, because Orbax stores them as arrays.

    Raises:
        NameCollisionError: two leaves would have the same name.
        UnsupportedKeyError: a name is too long for a database.
    """
    paths = dict(enumerate(tree.paths))
    if options.storage != "ocdbt":
        return directory_names(paths)
    names = key_names(paths)
    for leaf, name in names.items():
        if len(name) > _MAX_NAME_BYTES // 4 and len(name.encode()) > _MAX_NAME_BYTES:
            raise UnsupportedKeyError(
                f"{format_path(paths[leaf])[:200]}... has a name of {len(name.encode())} bytes; OCDBT allows at most "
                f"{_MAX_NAME_BYTES}: shorten the keys. Nothing was written"
            )
    return names


def dimension_names(stored: ArraySpec, storage: Literal["ocdbt", "objects"]) -> Sequence[str] | None:
    """Return axis names of a zarr 3 array, such as ``axis0_512``; None in a database, which xarray cannot open.

    xarray cannot open a group if an array lacks names or one name has two lengths. The names depend
    only on the shape, so that arrays of equal shape share their metadata.
    """
    return [f"axis{axis}_{extent}" for axis, extent in enumerate(stored.shape)] if storage == "objects" else None


def stored_format(record: ArrayRecord, name: str, options: LayoutOptions, size: int) -> ArrayFormat:
    """Return the format of an array. All processes obtain the same result.

    Args:
        record: the array.
        name: name of the array.
        options: storage options of the checkpoint.
        size: number of processes that write the checkpoint.

    Raises:
        UnsupportedLeafError: the array cannot be stored with these options.
    """
    try:
        array = array_options(name, options.default, options.rules)
        return _format_of(record.spec, record.cuts, size, options.zarr_format, options.storage, array)
    except (UnsupportedLeafError, CorruptCheckpointError) as error:
        raise UnsupportedLeafError(f"{name}: {record.spec} cannot be stored: {error}. Nothing was written") from error


@functools.lru_cache(maxsize=1 << 12)
def _format_of(
    spec: ArraySpec,
    cuts: tuple[tuple[int, ...], ...] | None,
    size: int,
    zarr_format: Literal[2, 3],
    storage: Literal["ocdbt", "objects"],
    options: ArrayOptions,
) -> ArrayFormat:
    """Return one shared object per kind of array. A model has few kinds, and work per format is done once."""
    stored = stored_spec(spec, zarr_format)
    if options.compression is not None:
        from ckptcore_orbax.zarr.chunk_codec import expect_dtype  # delays the import of tensorstore

        expect_dtype(stored.dtype)
    if cuts is not None:
        cuts += ((),) * (len(stored.shape) - len(cuts))
    chunk = write_chunk_shape(stored, cuts, size)
    inner = chunk if options.chunk_bytes is None else read_chunk_shape(stored, chunk, cuts, options.chunk_bytes)
    if zarr_format == 2:
        made = zarr2_array(stored, inner, compression=options.compression)
    else:
        made = zarr3_array(
            stored,
            chunk,
            inner,
            checksum=options.checksum,
            compression=options.compression,
            dimension_names=dimension_names(stored, storage),
        )
    # Check with the reader: an array that it rejects as hostile must not be written, because it
    # could never be loaded.
    (parse_zarr2 if zarr_format == 2 else parse_zarr3)(encode_metadata(made), "the array")
    if options.compression is not None and options.compression.name == "blosc" and made.inner_bytes > _MAX_BLOSC_BYTES:
        raise UnsupportedLeafError(
            f"its chunks have {made.inner_bytes} bytes; blosc allows {_MAX_BLOSC_BYTES}; give a smaller chunk_bytes"
        )
    cells = prod([-(-extent // step) for extent, step in zip(stored.shape, inner, strict=True)])
    if cells > MAX_CHUNKS:
        raise UnsupportedLeafError(
            f"it would have {cells} chunks of {list(inner)} elements; at most {MAX_CHUNKS} can be read; give a "
            "larger chunk_bytes, or use shard boundaries that are multiples of a larger number"
        )
    return made


def stored_box(box: Box, stored: ArraySpec) -> Box:
    """Return a box in the stored array, which may have an additional axis for bytes."""
    if len(box.start) == len(stored.shape):
        return box
    return Box((*box.start, 0), (*box.stop, stored.shape[-1]))


def stored_view(array: HostArray, stored: ArraySpec) -> HostArray:
    """Return the elements of a box as stored. Returns `array` itself if the dtype is stored unchanged."""
    dtype = stored.numpy_dtype
    little = array.dtype.newbyteorder("<")
    if little == dtype.newbyteorder("<"):
        return array
    plain = np.ascontiguousarray(array, dtype=little).reshape(-1)
    shape = array.shape if array.ndim == len(stored.shape) else (*array.shape, stored.shape[-1])
    return plain.view(dtype).reshape(shape)
