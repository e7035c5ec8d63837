"""Inspection of checkpoints written by other software: all kinds of Orbax checkpoints, and AXLearn's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ckptcore.errors import CompositeCheckpointError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import (
    JSON,
    ArrayRecord,
    Box,
    LeafRecord,
    ReadItem,
    TreeMetadata,
    ValueRecord,
    format_path,
    unreadable_leaf,
)
from ckptcore.protocols import InspectedComposite, Inspection, MemberKind, ReadStore
from ckptcore_orbax.ocdbt.database import Database
from ckptcore_orbax.ocdbt.node import ValueLocation
from ckptcore_orbax.orbax.axlearn import find_axlearn
from ckptcore_orbax.orbax.composites import Composite, find_composite
from ckptcore_orbax.orbax.items import Item, arrays_directory, find_file, find_item
from ckptcore_orbax.orbax.markers import METADATA_FILE
from ckptcore_orbax.orbax.trees import OrbaxTree, TreeLeaf, scalar_record, tree_of_names
from ckptcore_orbax.zarr.array_files import parse_zarr2, parse_zarr3, zarr2_array
from ckptcore_orbax.zarr.chunk_index import ZarrIndex
from ckptcore_orbax.zarr.chunk_locations import DatabaseCache, open_database
from ckptcore_orbax.zarr.formats import ArrayFormat
from ckptcore_orbax.zarr.state import ArraysState, ZarrArray, array_prefix

_MANIFEST: Final = "manifest.ocdbt"
_MAX_CUTS: Final = 4096
"""Maximum number of chunk boundaries per axis that count as shard boundaries.

A larger number comes from small read chunks.
"""

_Problem = CorruptCheckpointError | UnsupportedLeafError
"""The reason why an array cannot be read."""

_PARSERS: Final[Mapping[str, Callable[[bytes, str], ArrayFormat]]] = {"zarr.json": parse_zarr3, ".zarray": parse_zarr2}


@dataclass(frozen=True, slots=True)
class _UninspectedTree:
    """A tree whose arrays have not been inspected yet.

    Attributes:
        item: the item, with metadata of its arrays.
        tree: its tree.
        missing: whether a missing chunk is an error, or consists of the fill value.
        custom, metrics, created: metadata of the enclosing checkpoint.
    """

    item: Item
    tree: OrbaxTree
    missing: Literal["error", "fill"]
    custom: Mapping[str, JSON]
    metrics: Mapping[str, float]
    created: str | None


def inspect_composite(store: ReadStore) -> InspectedComposite | None:
    """Recognise an Orbax checkpoint of several items, or of one named item."""
    composite = find_composite(store)
    if composite is None:
        return None
    kinds: dict[str, MemberKind] = {
        name: "files" if kind == "other" else "tree" for name, kind in composite.members.items()
    }
    return InspectedComposite(
        kinds, composite.writer, composite.custom, composite.metrics, composite.created, composite.default_tree
    )


def inspect_tree(store: ReadStore, layout: str, databases: DatabaseCache) -> Inspection | None:
    """Inspect a checkpoint of one tree, or the default tree of a composite. None if it has another layout.

    Raises:
        CompositeCheckpointError: the checkpoint is a composite without a tree, or with several
            trees and no default tree.
        CorruptCheckpointError: a metadata file is invalid, or the tree is listed but missing.
        UncommittedCheckpointError: the save did not finish.
    """
    composite = find_composite(store)
    if composite is not None and composite.default_tree is None:
        names = list(composite.members)
        raise CompositeCheckpointError(
            f"the checkpoint has several items ({', '.join(names)}), and not exactly one tree: use "
            "load_checkpointables, or load one by its own location",
            names,
        )
    directory = composite.default_tree if composite is not None and composite.default_tree is not None else ""
    if composite is not None and directory in composite.lost:
        others = ", ".join([name for name in composite.members if name not in composite.lost])
        raise CorruptCheckpointError(
            f"{directory!r} is listed in {METADATA_FILE}, but its directory is missing or empty: restore it from a "
            f"copy; or load what exists by name ({others or 'nothing'})",
            key=directory,
        )
    if (_MANIFEST in store.list_names(arrays_directory(store, directory))) != (layout == "ocdbt"):
        return None
    tree = _find(store, directory, composite, databases)
    if tree is None or _layout_of(tree) != layout:
        return None
    return _inspection(tree, store, databases)


def inspect_file(store: ReadStore, name: str, databases: DatabaseCache) -> Inspection | None:
    """Inspect a file of Flax. None if it is another file.

    Raises:
        CorruptCheckpointError: it is damaged or incomplete.
    """
    item = find_file(store, name)
    if item is None or item.tree is None:
        return None
    return _inspection(_UninspectedTree(item, item.tree, item.missing, {}, {}, None), store, databases)


def _find(
    store: ReadStore, directory: str, composite: Composite | None, databases: DatabaseCache
) -> _UninspectedTree | None:
    item = find_item(store, directory)
    if item is None:
        step = find_axlearn(store)
        if step is None:
            return None
        item = Item("tree", "", step.tree, step.writer, zarr_format=2, custom=step.custom)
        return _UninspectedTree(item, step.tree, "fill", step.custom, {}, None)
    tree = item.tree
    if tree is None:
        tree = tree_of_names(_array_names(open_database(item.directory, store, databases)), f"{directory}/{_MANIFEST}")
    custom = {**(composite.custom if composite is not None else {}), **item.custom}
    metrics = composite.metrics if composite is not None else {}
    created = composite.created if composite is not None else None
    return _UninspectedTree(item, tree, item.missing, custom, metrics, created or item.created)


def _array_names(database: Database) -> Iterator[str]:
    for key, _ in database.range():
        name, _, last = key.decode("utf-8", "replace").rpartition("/")
        if last in _PARSERS:
            yield name


def _layout_of(tree: _UninspectedTree) -> str:
    if tree.item.database:
        return "ocdbt"
    return "zarr3" if tree.item.zarr_format == 3 else "zarr"


def _inspection(uninspected: _UninspectedTree, store: ReadStore, databases: DatabaseCache) -> Inspection:
    item = uninspected.item
    leaves = uninspected.tree.leaves
    stored = _stored_arrays(uninspected, store, databases)
    records: list[LeafRecord] = []
    scalars: list[int] = []
    arrays: dict[int, ZarrArray] = {}
    embedded: dict[int, bytes | tuple[str, int, int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.value is not None:
            records.append(leaf.value)
            continue
        if leaf.is_embedded and leaf.spec is not None:
            format = zarr2_array(leaf.spec, tuple([max(1, extent) for extent in leaf.spec.shape]), compression=None)
            arrays[number] = ZarrArray(leaf.name, format)
            if leaf.embedded is not None:
                embedded[number] = leaf.embedded.astype(leaf.embedded.dtype.newbyteorder("<")).tobytes()
            elif leaf.extent is not None:
                embedded[number] = leaf.extent
        else:
            found_array = stored[number]
            if not isinstance(found_array, ZarrArray):
                records.append(unreadable_leaf(found_array))
                continue
            arrays[number] = found_array
        format = arrays[number].format
        records.append(_array_record(item, leaf, format))
        if leaf.value_type == "scalar":
            scalars.append(number)
    state = ArraysState(
        directory=item.directory,
        storage="ocdbt" if item.database else "objects",
        missing=uninspected.missing,
        source="other",
        arrays=arrays,
        embedded=embedded,
    )
    tree = TreeMetadata(uninspected.tree.skeleton, tuple(records))
    values = _scalars(tree, state, scalars, store, databases)
    if values:
        left = {number: array for number, array in arrays.items() if number not in values}
        records = [values.get(number, record) for number, record in enumerate(records)]
        tree = TreeMetadata(uninspected.tree.skeleton, tuple(records))
        state = ArraysState(
            directory=state.directory,
            storage=state.storage,
            missing=state.missing,
            source="other",
            arrays=left,
            embedded={number: data for number, data in embedded.items() if number in left},
        )
    return Inspection(tree, state.to_json(), item.writer, uninspected.custom, uninspected.metrics, uninspected.created)


_FRAMEWORKS: Final = {"jax.Array": "jax", "np.ndarray": "numpy"}
"""Frameworks by Orbax's names of the types of arrays."""


def _array_record(item: Item, leaf: TreeLeaf, format: ArrayFormat) -> ArrayRecord:
    record = item.record(leaf, format.spec)
    if (framework := _FRAMEWORKS.get(leaf.value_type)) is not None:
        record = record._replace(notes={"framework": framework, **record.notes})
    if all(count <= 1 for count in format.grid) or max(format.grid) > _MAX_CUTS:
        return record
    cuts = tuple(
        [tuple(range(step, extent, step)) for extent, step in zip(format.spec.shape, format.chunk, strict=True)]
    )
    return ArrayRecord(record.spec, record.kind, cuts, record.notes)


def _stored_arrays(
    tree: _UninspectedTree, store: ReadStore, databases: DatabaseCache
) -> Mapping[int, ZarrArray | _Problem]:
    """Return the name and the format of each leaf that is a stored array, or why it cannot be read."""
    item = tree.item
    numbers = [number for number, leaf in enumerate(tree.tree.leaves) if leaf.value is None and not leaf.is_embedded]
    names = [tree.tree.leaves[number].name for number in numbers]
    documents = [
        name for name in _PARSERS if item.zarr_format is None or (name == "zarr.json") == (item.zarr_format == 3)
    ]
    prefix = f"{item.directory}/" if item.directory else ""
    formats: Sequence[ArrayFormat | _Problem | None]
    if item.database:
        formats = _in_database(names, documents, open_database(item.directory, store, databases), store)
    else:
        formats = _in_objects([f"{prefix}{array_prefix(name)}" for name in names], documents, store)
    made: dict[int, ZarrArray | _Problem] = {}
    for number, name, format in zip(numbers, names, formats, strict=True):
        spec = tree.tree.leaves[number].spec
        if format is None:
            made[number] = CorruptCheckpointError(
                f"it is in the tree, but its array {name!r} is missing; the checkpoint is incomplete: restore it from "
                "a copy, or load another one",
                key=None if item.database else f"{prefix}{array_prefix(name)}{documents[-1]}",
            )
        elif isinstance(format, _Problem):
            made[number] = format
        elif spec is not None and spec != format.spec:
            made[number] = CorruptCheckpointError(
                f"{name!r} is {spec} in the tree, but stored as {format.spec}; the checkpoint is damaged: load another "
                "one"
            )
        else:
            made[number] = ZarrArray(name, format)
    return made


def _parse(document: str, data: bytes, key: str) -> ArrayFormat | _Problem:
    try:
        return _PARSERS[document](data, key)
    except (CorruptCheckpointError, UnsupportedLeafError) as error:
        return error


def _in_database(
    names: Sequence[str], documents: Sequence[str], database: Database, store: ReadStore
) -> Sequence[ArrayFormat | _Problem | None]:
    """Return the array formats in a database, from the first document found per array, in one batch."""
    locations: list[tuple[str, ValueLocation] | None] = []
    for name in names:
        keys = [(document, f"{array_prefix(name)}{document}".encode("utf-8", "replace")) for document in documents]
        values = ((document, database.get(key)) for document, key in keys)
        locations.append(next(((document, value) for document, value in values if value is not None), None))
    apart = [
        (value.file, value.offset, value.offset + value.length)
        for _, value in filter(None, locations)
        if value.inline is None
    ]
    read = iter(store.get_many(apart))
    formats: list[ArrayFormat | _Problem | None] = []
    for name, entry in zip(names, locations, strict=True):
        if entry is None:
            formats.append(None)
            continue
        document, value = entry
        data = next(read) if value.inline is None else value.inline
        if data is None:
            error = CorruptCheckpointError(
                f"the metadata of {name!r} is missing: there is no object {value.file!r}; restore the checkpoint "
                "from a copy, or load another one",
                key=value.file,
            )
            formats.append(error)
            continue
        formats.append(_parse(document, data, f"{name}/{document}"))
    return formats


def _in_objects(
    directories: Sequence[str], documents: Sequence[str], store: ReadStore
) -> Sequence[ArrayFormat | _Problem | None]:
    """Return the array formats in directories, from the first document found per array."""
    formats: list[ArrayFormat | _Problem | None] = [None] * len(directories)
    for document in documents:
        left = [number for number, format in enumerate(formats) if format is None]
        contents = store.get_many([(f"{directories[number]}{document}", 0, None) for number in left])
        for number, data in zip(left, contents, strict=True):
            if data is not None:
                formats[number] = _parse(document, data, f"{directories[number]}{document}")
    return formats


def _scalars(
    tree: TreeMetadata, state: ArraysState, numbers: Sequence[int], store: ReadStore, databases: DatabaseCache
) -> dict[int, ValueRecord]:
    """Read Python numbers that are stored as arrays. A number that cannot be read becomes an unreadable leaf."""
    try:
        return _read_scalars(tree, state, numbers, store, databases)
    except (CorruptCheckpointError, UnsupportedLeafError) as error:
        if len(numbers) == 1:
            return {numbers[0]: unreadable_leaf(error)}
        return {
            leaf: record
            for number in numbers
            for leaf, record in _scalars(tree, state, [number], store, databases).items()
        }


def _read_scalars(
    tree: TreeMetadata, state: ArraysState, numbers: Sequence[int], store: ReadStore, databases: DatabaseCache
) -> dict[int, ValueRecord]:
    if not numbers:
        return {}
    specs = [state.arrays[number].format.spec for number in numbers]
    for number, spec in zip(numbers, specs, strict=True):
        if spec.shape:
            raise CorruptCheckpointError(
                f"{format_path(tree.paths[number])} is a number in the tree, but stored as {spec}; the checkpoint "
                "is damaged: load another one"
            )
    buffers = [np.empty((), spec.numpy_dtype) for spec in specs]
    items = [ReadItem(number, Box((), ())) for number in numbers]
    for _ in store.read_boxes(ZarrIndex(tree, state, databases), items, buffers):
        pass
    return {
        number: scalar_record(buffer, state.arrays[number].name)
        for number, buffer in zip(numbers, buffers, strict=True)
    }
