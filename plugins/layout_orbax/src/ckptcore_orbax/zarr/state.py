"""State of the arrays of a checkpoint in its root, or from an inspection: names, formats and locations."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, ArrayRecord, Box, HostArray, TreeMetadata, format_path
from ckptcore_orbax.zarr.array_files import parse_zarr2, parse_zarr3
from ckptcore_orbax.zarr.dtypes import stored_spec
from ckptcore_orbax.zarr.formats import ArrayFormat

DIGEST_BYTES: Final = 8
"""Length of the xxh3_64 of a read chunk's elements, in bytes."""


def array_prefix(name: str) -> str:
    """Return the prefix of the keys of an array. An array that is the whole tree has no name."""
    return f"{name}/" if name else ""


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """An array of a checkpoint.

    Attributes:
        name: name of the array in the store.
        format: format in which the array is stored.
    """

    name: str
    format: ArrayFormat

    @property
    def prefix(self) -> str:
        """Prefix of the keys of its metadata and chunks."""
        return array_prefix(self.name)


@dataclass(frozen=True, slots=True)
class BoxRead:
    """A box of an array, and its destination.

    Attributes:
        number: number of the requested item.
        box: the box, in elements as stored.
        buffer: destination: C-contiguous, with the stored dtype and the box's shape.
    """

    number: int
    box: Box
    buffer: HostArray


@dataclass(frozen=True, slots=True)
class Extents:
    """Byte ranges of uncompressed arrays in data files, as columns. Ranges are half-open.

    Attributes:
        files: keys of the data files.
        leaf, file, start, stop: for each range, its array, the position of its data file in `files`,
            and its bytes there.
    """

    files: Sequence[str] = ()
    leaf: Sequence[int] = ()
    file: Sequence[int] = ()
    start: Sequence[int] = ()
    stop: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraysState:
    """Storage of the arrays of a tree.

    Attributes:
        directory: common directory in the checkpoint; empty for the checkpoint itself.
        storage: ``ocdbt``: chunks are values of a database; ``objects``: chunks are objects.
        missing: meaning of a missing chunk: an error, or elements that equal the fill value.
        source: the writer. ``ckptcore``: the root has checksums of all bytes, and read chunks are in C
            order; ``other``: other software, without these guarantees.
        arrays: name and format of each array, by leaf.
        extents: byte ranges of uncompressed arrays in data files of this layout; empty for other
            software.
        digests: by leaf, the xxh3_64 of the elements of each encoded read chunk: in C order of the
            write chunks, then of the read chunks in each.
        embedded: by leaf, the elements of arrays that a metadata file contains, or the key of that file and the byte
            range of the elements in it.
    """

    directory: str
    storage: Literal["ocdbt", "objects"]
    missing: Literal["error", "fill"]
    source: Literal["ckptcore", "other"]
    arrays: Mapping[int, ZarrArray]
    extents: Extents = field(default_factory=Extents)
    digests: Mapping[int, bytes] = field(default_factory=dict)
    embedded: Mapping[int, bytes | tuple[str, int, int]] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """Prefix of the keys of all objects."""
        return f"{self.directory}/" if self.directory else ""

    def to_json(self) -> JSON:
        """Return the state as JSON. Documents shared by many arrays are stored once."""
        numbers: dict[int, int] = {}
        documents: list[JSON] = []
        texts: dict[str, int] = {}
        column: list[int] = []
        for stored in self.arrays.values():
            number = numbers.get(id(stored.format))
            if number is None:
                text = json.dumps([stored.format.zarr_format, stored.format.document], sort_keys=True)
                number = texts.setdefault(text, len(documents))
                if number == len(documents):
                    documents.append([stored.format.zarr_format, dict(stored.format.document)])
                numbers[id(stored.format)] = number
            column.append(number)
        encoded: dict[str, JSON] = {
            "version": 1,
            "directory": self.directory,
            "storage": self.storage,
            "missing": self.missing,
            "source": self.source,
            "formats": documents,
            "leaf": list(self.arrays),
            "name": [stored.name for stored in self.arrays.values()],
            "format": column,
        }
        if self.extents.files:
            extents = self.extents
            encoded["extents"] = {
                "files": extents.files,
                "leaf": extents.leaf,
                "file": extents.file,
                "start": extents.start,
                "stop": extents.stop,
            }
        for name, table in (("digests", self.digests), ("embedded", self.embedded)):
            if table:
                encoded[name] = {
                    str(leaf): base64.b64encode(data).decode("ascii") if isinstance(data, bytes) else data
                    for leaf, data in table.items()
                }
        return encoded

    @classmethod
    def from_json(cls, encoded: JSON, tree: TreeMetadata) -> ArraysState:
        """Decode the result of `to_json`, which may be hostile.

        Raises:
            CorruptCheckpointError: it is not a state of this tree.
        """
        try:
            return _decode(encoded, tree)
        except CorruptCheckpointError:
            raise
        except UnsupportedLeafError as error:
            raise CorruptCheckpointError(f"the root is corrupt: its state does not locate arrays: {error}") from error
        except (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptCheckpointError(f"the root is corrupt: its state does not locate arrays: {error!r}") from error


def _decode(encoded: Any, tree: TreeMetadata) -> ArraysState:
    if encoded["version"] != 1:
        raise CorruptCheckpointError(f"the layout reads version 1 of its state, found {str(encoded['version'])[:40]}")
    directory, storage, missing, source = (encoded[name] for name in ("directory", "storage", "missing", "source"))
    if storage not in ("ocdbt", "objects") or missing not in ("error", "fill") or source not in ("ckptcore", "other"):
        raise ValueError(f"storage {storage!r}, missing {missing!r}, source {source!r}")
    _expect_text(directory)
    formats = [_parse_format(document) for document in encoded["formats"]]
    arrays: dict[int, ZarrArray] = {}
    for leaf, name, number in zip(encoded["leaf"], encoded["name"], encoded["format"], strict=True):
        record = tree.leaves[_natural(leaf)]
        format = formats[_natural(number)]
        if not isinstance(record, ArrayRecord):
            raise TypeError(f"leaf {leaf} is not an array")
        if format.spec != record.spec and format.spec != stored_spec(record.spec, format.zarr_format):
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[leaf])} is {record.spec}, but stored as {format.spec}: the metadata is "
                "damaged: load another checkpoint"
            )
        arrays[leaf] = ZarrArray(_expect_text(name), format)
    extents = Extents()
    if (table := encoded.get("extents")) is not None:
        columns = [list(map(_natural, table[name])) for name in ("leaf", "file", "start", "stop")]
        extents = Extents(list(map(_expect_text, table["files"])), *columns)
        for leaf, file, start, stop in zip(*columns, strict=True):
            if leaf not in arrays or file >= len(extents.files) or start > stop:
                raise ValueError(f"leaf {leaf} in file {file} from {start} to {stop}")
    digests = {
        _natural(int(leaf)): base64.b64decode(data, validate=True) for leaf, data in encoded.get("digests", {}).items()
    }
    embedded = {_natural(int(leaf)): _embedded(data) for leaf, data in encoded.get("embedded", {}).items()}
    for leaf, digest in digests.items():
        format = arrays[leaf].format
        if len(digest) != prod(format.grid) * prod(format.inner_grid) * DIGEST_BYTES:
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[leaf])} is {format.spec}, which does not match its "
                f"{len(digest) // DIGEST_BYTES} checksums of chunks; the metadata is damaged: load another checkpoint"
            )
    return ArraysState(
        directory=directory,
        storage=storage,
        missing=missing,
        source=source,
        arrays=arrays,
        extents=extents,
        digests=digests,
        embedded=embedded,
    )


def _embedded(encoded: Any) -> bytes | tuple[str, int, int]:
    if isinstance(encoded, str):
        return base64.b64decode(encoded, validate=True)
    key, start, stop = encoded
    return _expect_text(key), _natural(start), _natural(stop)


def _parse_format(described: Any) -> ArrayFormat:
    version, document = described
    if version not in (2, 3) or not isinstance(document, dict):
        raise ValueError(f"a format {str(described)[:80]}")
    parse = parse_zarr3 if version == 3 else parse_zarr2
    return parse(json.dumps(document).encode(), "the state of the layout")


def _expect_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:80]!r} is not text")
    value.encode()  # a name must be valid UTF-8
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:80]!r} is not a valid count")
    return value
