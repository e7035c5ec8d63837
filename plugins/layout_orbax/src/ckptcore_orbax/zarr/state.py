"""What the root keeps of arrays, or an inspection finds: their names and formats, and where their bytes are."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, Literal

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import JSON, ArrayRecord, TreeMetadata, format_path
from ckptcore_orbax.zarr.dtypes import stored_spec
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.version2 import parse_zarr2
from ckptcore_orbax.zarr.version3 import parse_zarr3

__all__ = ["DIGEST_BYTES", "ArraysState", "Extents", "StoredName", "array_prefix"]

DIGEST_BYTES: Final = 8
"""Bytes of the xxh3_64 of a chunk's elements."""


def array_prefix(name: str) -> str:
    """What the keys of an array begin with; an array that is the whole tree has no name."""
    return f"{name}/" if name else ""


@dataclass(frozen=True, slots=True)
class StoredName:
    """An array of a checkpoint.

    Attributes:
        name: its name in the store.
        form: how it is stored.
    """

    name: str
    form: ArrayFormat

    @property
    def prefix(self) -> str:
        """What the keys of its metadata and chunks begin with."""
        return array_prefix(self.name)


@dataclass(frozen=True, slots=True)
class Extents:
    """Where arrays that are stored directly lie in data files, a column for each thing; bytes, half-open."""

    files: Sequence[str] = ()
    leaf: Sequence[int] = ()
    file: Sequence[int] = ()
    start: Sequence[int] = ()
    stop: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraysState:
    """Where the arrays of a tree are.

    Attributes:
        directory: of everything below, within the checkpoint; empty where it is the checkpoint.
        storage: whether chunks are the values of a database or objects of their own.
        missing: what a chunk that is not there means: an error, or elements that all are the fill value.
        source: who wrote it: this layout, so that the root has checksums of all bytes and read chunks follow each other
            in C order; or other software.
        arrays: by leaf.
        extents: where those of this layout lie.
        digests: by leaf, the xxh3_64 of the elements of each read chunk, where tensorstore decodes them: in C order of
            the chunks, and within one of its read chunks.
        embedded: by leaf, the elements of arrays that stand in a file which was read.
    """

    directory: str
    storage: Literal["ocdbt", "objects"]
    missing: Literal["error", "fill"]
    source: Literal["ckptcore", "other"]
    arrays: Mapping[int, StoredName]
    extents: Extents = field(default_factory=Extents)
    digests: Mapping[int, bytes] = field(default_factory=dict)
    embedded: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What the keys of all objects begin with."""
        return f"{self.directory}/" if self.directory else ""

    def to_json(self) -> JSON:
        """The state as JSON: documents of formats that many arrays share are there once."""
        numbers: dict[int, int] = {}
        documents: list[JSON] = []
        texts: dict[str, int] = {}
        column: list[int] = []
        for stored in self.arrays.values():
            number = numbers.get(id(stored.form))
            if number is None:
                text = json.dumps([stored.form.zarr_format, stored.form.document], sort_keys=True)
                number = texts.setdefault(text, len(documents))
                if number == len(documents):
                    documents.append([stored.form.zarr_format, dict(stored.form.document)])
                numbers[id(stored.form)] = number
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
                encoded[name] = {str(leaf): base64.b64encode(data).decode("ascii") for leaf, data in table.items()}
        return encoded

    @classmethod
    def from_json(cls, encoded: JSON, tree: TreeMetadata) -> ArraysState:
        """The inverse of `to_json`; the JSON may be hostile.

        Raises:
            CorruptCheckpointError: if it is no state of this tree.
        """
        try:
            return _decode(encoded, tree)
        except CorruptCheckpointError:
            raise
        except UnsupportedLeafError as error:
            raise CorruptCheckpointError(f"the layout cannot read where arrays are: {error}") from error
        except (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptCheckpointError(f"the layout cannot read where arrays are: {error!r}") from error


def _decode(encoded: Any, tree: TreeMetadata) -> ArraysState:
    if encoded["version"] != 1:
        raise CorruptCheckpointError(f"the layout knows version 1 of its state, found {str(encoded['version'])[:40]}")
    directory, storage, missing, source = (encoded[name] for name in ("directory", "storage", "missing", "source"))
    if storage not in ("ocdbt", "objects") or missing not in ("error", "fill") or source not in ("ckptcore", "other"):
        raise ValueError(f"storage {storage!r}, missing {missing!r}, source {source!r}")
    _expect_text(directory)
    formats = [_format(document) for document in encoded["formats"]]
    arrays: dict[int, StoredName] = {}
    for leaf, name, number in zip(encoded["leaf"], encoded["name"], encoded["format"], strict=True):
        record = tree.leaves[_natural(leaf)]
        form = formats[_natural(number)]
        if not isinstance(record, ArrayRecord):
            raise TypeError(f"leaf {leaf} is no array")
        if form.spec != record.spec and form.spec != stored_spec(record.spec, form.zarr_format):
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[leaf])} is {record.spec}, and is stored as {form.spec}: what describes the "
                "arrays is damaged: load another checkpoint"
            )
        arrays[leaf] = StoredName(_expect_text(name), form)
    extents = Extents()
    if (found := encoded.get("extents")) is not None:
        columns = [list(map(_natural, found[name])) for name in ("leaf", "file", "start", "stop")]
        extents = Extents(list(map(_expect_text, found["files"])), *columns)
        for leaf, file, start, stop in zip(*columns, strict=True):
            if leaf not in arrays or file >= len(extents.files) or start > stop:
                raise ValueError(f"leaf {leaf} in file {file} from {start} to {stop}")
    digests, embedded = (
        {_natural(int(leaf)): base64.b64decode(data, validate=True) for leaf, data in encoded.get(name, {}).items()}
        for name in ("digests", "embedded")
    )
    for leaf, digest in digests.items():
        form = arrays[leaf].form
        if len(digest) != prod(form.grid) * prod(form.inner_grid) * DIGEST_BYTES:
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[leaf])} is said to be {form.spec}, which does not agree with its "
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


def _format(described: Any) -> ArrayFormat:
    version, document = described
    if version not in (2, 3) or not isinstance(document, dict):
        raise ValueError(f"a format {str(described)[:80]}")
    parse = parse_zarr3 if version == 3 else parse_zarr2
    return parse(json.dumps(document).encode(), "the state of the layout")


def _expect_text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{str(found)[:80]!r} where text is expected")
    found.encode()  # what UTF-8 has no bytes for is no name
    return found


def _natural(found: Any) -> int:
    if type(found) is not int or found < 0:
        raise ValueError(f"{str(found)[:80]!r} where a count is expected")
    return found
