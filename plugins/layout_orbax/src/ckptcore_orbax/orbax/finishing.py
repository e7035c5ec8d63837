"""The leader's part of a save: writes the database or array metadata, and the files that Orbax reads."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from ckptcore.errors import CheckpointError
from ckptcore.model import (
    JSON,
    ArrayRecord,
    ArraySpec,
    BytesSegment,
    HostArray,
    Receipt,
    TreeMetadata,
    ValueRecord,
    name_of_dtype,
)
from ckptcore.protocols import WriteStore
from ckptcore_orbax.crc32c import CRC32C
from ckptcore_orbax.ocdbt.encoding import ValueRanges, encode_database
from ckptcore_orbax.ocdbt.node import ValueLocation
from ckptcore_orbax.ocdbt.paths import NODES, VALUES
from ckptcore_orbax.orbax.item_files import item_files
from ckptcore_orbax.orbax.trees import value_array
from ckptcore_orbax.zarr.array_files import zarr2_array, zarr3_array
from ckptcore_orbax.zarr.chunking import unflatten_index
from ckptcore_orbax.zarr.documents import enclosing_groups, encode_group
from ckptcore_orbax.zarr.dtypes import ZarrFormat
from ckptcore_orbax.zarr.formats import encode_metadata
from ckptcore_orbax.zarr.state import DIGEST_BYTES, ArraysState, Extents, ZarrArray
from ckptcore_orbax.zarr.stored_arrays import (
    SESSION_WRITERS,
    LayoutOptions,
    array_names,
    dimension_names,
    stored_format,
)

_INLINE_BYTES: Final = 1 << 14
"""Maximum length of a value in a node of the database. Longer values, which are lists of numbers, are in a separate
file."""


@dataclass(frozen=True, slots=True)
class _ReceiptChunks:
    """The chunks of one process, as columns.

    Attributes:
        files: keys of the data files.
        leaf, chunk: array of each chunk, and number of the chunk in the grid.
        file, offset, length: position in `files` of the data file that contains the chunk, and byte
            range in it. Empty if chunks are objects.
        digested_leaf, digested_chunk: array and number of each chunk that has digests.
        digest: the digests of the chunks in `digested_chunk`, one after another.
    """

    files: Sequence[str]
    leaf: Sequence[int]
    chunk: Sequence[int]
    file: Sequence[int]
    offset: Sequence[int]
    length: Sequence[int]
    digested_leaf: Sequence[int]
    digested_chunk: Sequence[int]
    digest: bytes

    @classmethod
    def of(cls, receipt: Receipt) -> _ReceiptChunks:
        state: Any = receipt.state
        return cls(
            files=state["files"],
            leaf=state["leaf"],
            chunk=state["chunk"],
            file=state["file"],
            offset=state["offset"],
            length=state["length"],
            digested_leaf=state["digested_leaf"],
            digested_chunk=state["digested_chunk"],
            digest=base64.b64decode(state["digest"]),
        )


def finish_arrays(tree: TreeMetadata, receipts: Sequence[Receipt], options: LayoutOptions, store: WriteStore) -> JSON:
    """Write the metadata of arrays, the database if there is one, and the files that Orbax reads.

    Returns the state that the root of the checkpoint stores: the arrays and their byte ranges.

    Raises:
        CheckpointError: processes wrote with different options, so their chunks do not form one array.
    """
    _check_options(receipts, options)
    names = array_names(tree, options)
    in_sessions = any(receipt.state["session"] is not None for receipt in receipts)  # type: ignore[index,call-overload]  # see `write_arrays`
    size = SESSION_WRITERS if in_sessions else len(receipts)
    directory = str(receipts[0].state["directory"])  # type: ignore[index,call-overload]  # see `write_arrays`
    prefix = f"{directory}/" if directory else ""
    arrays: dict[int, ZarrArray] = {}
    for leaf, record in enumerate(tree.leaves):
        if not isinstance(record, ArrayRecord):
            continue
        target = tree.aliases.get(leaf)
        made = stored_format(record, names[leaf], options, size) if target is None else arrays[target].format
        arrays[leaf] = ZarrArray(names[leaf], made)
    chunks = [_ReceiptChunks.of(receipt) for receipt in receipts]
    data_files, columns = _chunk_columns(chunks)
    small = {
        leaf: _small_array(names[leaf], array, options)
        for leaf, record in enumerate(tree.leaves)
        if isinstance(record, ValueRecord) and (array := value_array(record)) is not None
    }
    if options.storage == "ocdbt":
        _write_database(
            arrays, _chunk_ranges(tree, arrays, data_files, columns), small, receipts, options, prefix, store
        )
    else:
        _write_documents(arrays, small, options.zarr_format, prefix, store)
    shapes = {leaf: (stored.format.chunk, stored.format.inner) for leaf, stored in arrays.items()}
    database, zarr3 = options.storage == "ocdbt", options.zarr_format == 3
    files = item_files(tree, shapes, use_ocdbt=database, use_zarr3=zarr3)
    store.write_many((f"{prefix}{key}", [BytesSegment(data)]) for key, data in files.items())
    state = ArraysState(
        directory=directory,
        storage=options.storage,
        missing="error",
        source="ckptcore",
        arrays=arrays,
        extents=_extents(arrays, data_files, columns),
        digests=_digests(arrays, chunks),
    )
    return state.to_json()


def _check_options(receipts: Sequence[Receipt], options: LayoutOptions) -> None:
    for receipt in receipts:
        description = receipt.state.get("options") if isinstance(receipt.state, Mapping) else None
        if description != options.description:
            raise CheckpointError(
                f"rank {receipt.rank} wrote arrays with other options than rank 0: expected {options.description}, "
                f"found {description or 'another layout'}; give every rank the same layout with the same options"
            )


def _small_array(name: str, array: HostArray, options: LayoutOptions) -> tuple[ZarrArray, bytes]:
    """Return a small value as the array that Orbax stores for it, and its only chunk."""
    spec = ArraySpec(array.shape, name_of_dtype(array.dtype))
    chunk = tuple([max(1, extent) for extent in array.shape])
    little = array.astype(array.dtype.newbyteorder("<")).tobytes()
    if options.zarr_format == 2:
        return ZarrArray(name, zarr2_array(spec, chunk, compression=None)), little
    checksum = options.default.checksum
    names = dimension_names(spec, options.storage)
    made = zarr3_array(spec, chunk, chunk, checksum=checksum, dimension_names=names)
    return ZarrArray(name, made), little + (CRC32C.encode(CRC32C.of(memoryview(little))) if checksum else b"")


def _write_database(
    arrays: Mapping[int, ZarrArray],
    ranges: ValueRanges,
    small: Mapping[int, tuple[ZarrArray, bytes]],
    receipts: Sequence[Receipt],
    options: LayoutOptions,
    prefix: str,
    store: WriteStore,
) -> None:
    """Merge the chunks of all processes into one database by reference, without copying elements."""
    unique = hashlib.blake2b(json.dumps([_receipt_id(receipt) for receipt in receipts]).encode(), digest_size=16)
    nodes, large = (NODES, VALUES) if options.separate_nodes else ("d", "d")
    node_file, value_file = f"{nodes}/{unique.hexdigest()}", f"{large}/{unique.hexdigest()}.values"
    values, value_bytes = _value_locations(small, value_file)
    if value_bytes:
        store.write(f"{prefix}{value_file}", [BytesSegment(value_bytes)])
    database = encode_database(
        _database_entries(arrays, small, values),
        ranges,
        uuid=unique.digest(),
        node_file=node_file,
        created_ns=time.time_ns(),
    )
    if database.nodes:
        store.write(f"{prefix}{node_file}", [BytesSegment(database.nodes)])
    store.put(f"{prefix}manifest.ocdbt", database.manifest)


def _value_locations(
    small: Mapping[int, tuple[ZarrArray, bytes]], file: str
) -> tuple[Mapping[int, ValueLocation], bytes]:
    """Return the location of each value, by leaf, and the content of the file with values too long for the database."""
    locations: dict[int, ValueLocation] = {}
    parts: list[bytes] = []
    position = 0
    for leaf, (_, data) in small.items():
        if len(data) <= _INLINE_BYTES:
            locations[leaf] = _inline(data)
            continue
        locations[leaf] = ValueLocation(None, file, position, len(data))
        parts.append(data)
        position += len(data)
    return locations, b"".join(parts)


def _receipt_id(receipt: Receipt) -> list[JSON]:
    """Return values unique to a receipt. File names are not enough, because a tree may have no arrays."""
    state: Any = receipt.state
    return [state["save_id"], state["name"], receipt.rank]


def _database_entries(
    arrays: Mapping[int, ZarrArray], small: Mapping[int, tuple[ZarrArray, bytes]], values: Mapping[int, ValueLocation]
) -> Iterator[tuple[bytes, ValueLocation]]:
    """Yield the keys of metadata and small values with their values, unordered."""
    documents: dict[int, bytes] = {}
    for stored in [*arrays.values(), *(stored for stored, _ in small.values())]:
        document = documents.setdefault(id(stored.format), encode_metadata(stored.format))
        yield f"{stored.prefix}{stored.format.metadata_key}".encode(), _inline(document)
    for leaf, (stored, data) in small.items():
        if data:
            yield f"{stored.prefix}{stored.format.chunk_key((0,) * len(stored.format.chunk))}".encode(), values[leaf]


def _chunk_columns(chunks: Sequence[_ReceiptChunks]) -> tuple[Sequence[str], HostArray]:
    """Return the data files of all processes, and columns of all chunks in them.

    The columns, of shape (5, chunks), are the array, the number of the chunk, the position of its file, and its offset
    and length there.
    """
    files: list[str] = []
    columns = [np.empty((5, 0), np.int64)]
    for part in chunks:
        if len(part.offset):  # otherwise chunks are objects
            file = np.asarray(part.file, np.int64) + len(files)
            columns.append(np.array([part.leaf, part.chunk, file, part.offset, part.length], np.int64))
        files.extend(part.files)
    return files, np.concatenate(columns, axis=1)


def _chunk_ranges(
    tree: TreeMetadata, arrays: Mapping[int, ZarrArray], files: Sequence[str], columns: HostArray
) -> ValueRanges:
    """Return the keys and locations of all chunks, array by array."""
    shared: dict[int, list[int]] = {}
    for alias, target in tree.aliases.items():
        shared.setdefault(target, []).append(alias)
    leaves, chunks, numbers, offsets, lengths = columns
    order = np.lexsort((chunks, leaves))
    # Millions of chunks share few formats, so the last part of a key is computed once per format
    # and chunk.
    endings: dict[int, dict[int, bytes]] = {}
    keys: list[bytes] = []
    rows = [np.empty(0, np.int64)]
    for of_array in np.split(order, np.flatnonzero(np.diff(leaves[order])) + 1) if len(order) else ():
        leaf = int(leaves[of_array[0]])
        format = arrays[leaf].format
        known = endings.setdefault(id(format), {})
        own = chunks[of_array].tolist()
        for chunk in own:
            if chunk not in known:
                known[chunk] = format.chunk_key(unflatten_index(chunk, format.grid)).encode()
        for name in (leaf, *shared.get(leaf, ())):
            prefix = arrays[name].prefix.encode()
            keys += [prefix + known[chunk] for chunk in own]
            rows.append(of_array)
    taken = np.concatenate(rows)
    return ValueRanges(keys, files, numbers[taken], offsets[taken], lengths[taken])


def _inline(data: bytes) -> ValueLocation:
    return ValueLocation(data, "", 0, len(data))


def _write_documents(
    arrays: Mapping[int, ZarrArray],
    small: Mapping[int, tuple[ZarrArray, bytes]],
    zarr_format: ZarrFormat,
    prefix: str,
    store: WriteStore,
) -> None:
    """Write zarr groups, the metadata of every array, and small values as objects."""
    described = [*arrays.values(), *(stored for stored, _ in small.values())]

    def objects() -> Iterator[tuple[str, bytes]]:
        key, group = encode_group(zarr_format)
        for path in enclosing_groups([stored.name for stored in described]):
            yield f"{path}/{key}" if path else key, group
        for stored in described:
            yield f"{stored.prefix}{stored.format.metadata_key}", encode_metadata(stored.format)
        for stored, data in small.values():
            if data:
                yield f"{stored.prefix}{stored.format.chunk_key((0,) * len(stored.format.chunk))}", data

    store.write_many((f"{prefix}{key}", [BytesSegment(data)]) for key, data in objects())


def _extents(arrays: Mapping[int, ZarrArray], files: Sequence[str], columns: HostArray) -> Extents:
    """Return the byte range of each uncompressed array in each data file, from its first chunk to its last."""
    leaf, _, file, start, length = columns
    kept = np.isin(leaf, [number for number, stored in arrays.items() if stored.format.direct])
    leaf, file, start, stop = leaf[kept], file[kept], start[kept], (start + length)[kept]
    if not len(leaf):
        return Extents(files)
    order = np.lexsort((leaf, file))
    leaf, file, start, stop = leaf[order], file[order], start[order], stop[order]
    first = np.flatnonzero(np.diff(leaf, prepend=-1) | np.diff(file, prepend=-1))
    starts, stops = np.minimum.reduceat(start, first), np.maximum.reduceat(stop, first)
    return Extents(files, leaf[first].tolist(), file[first].tolist(), starts.tolist(), stops.tolist())


def _digests(arrays: Mapping[int, ZarrArray], chunks: Sequence[_ReceiptChunks]) -> dict[int, bytes]:
    digests: dict[int, bytearray] = {}
    for part in chunks:
        position = 0
        for leaf, chunk in zip(part.digested_leaf, part.digested_chunk, strict=True):
            format = arrays[leaf].format
            nbytes = prod(format.inner_grid) * DIGEST_BYTES
            whole = digests.setdefault(leaf, bytearray(prod(format.grid) * nbytes))
            whole[chunk * nbytes : (chunk + 1) * nbytes] = part.digest[position : position + nbytes]
            position += nbytes
    return {leaf: bytes(whole) for leaf, whole in digests.items()}
