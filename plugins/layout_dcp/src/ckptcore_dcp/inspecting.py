"""Inspection of torch.distributed.checkpoint checkpoints written by other software.

There are three forms (torch 2.13.0, filesystem.py and hf_storage.py): ``.metadata`` with the files
that it lists; one ``__<rank>.metadata`` per process, if processes saved without communicating; and
safetensors shards (see `hf_shards`).

Inspection does not locate the elements within items, because that needs a request for each item.
For items of torch 2.13 with a tensor below 4 GiB the position follows from the length. The members,
all in ``archive/``, are ``data.pkl`` and small constants, then ``data/0`` with the elements,
``version`` and ``.data/serialization_id``. The bytes of each member begin at a multiple of 64 in
the item. So the part after the elements has ``873 - nbytes % 64`` bytes, and the elements begin at
``offset + length - 873 - nbytes // 64 * 64``. Other versions have other tails, so a reader that
uses this rule must verify it: after the elements comes the data descriptor ``PK\\x07\\x08``,
CRC-32, `nbytes`, `nbytes`, in fields of 4 bytes.

The strategy ``torch_dist`` of megatron-core (0.16.1, ``dist_checkpointing/strategies``) writes the
tensors and objects of all processes with torch.distributed.checkpoint, under their own keys, and the
rest of the state with ``torch.save``, into ``common.pt``. ``metadata.json`` names the strategy.
Megatron merges both parts when it loads them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ckptcore.errors import CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import (
    JSON,
    LEAF,
    PLAIN_ARRAY,
    ArrayRecord,
    HostArray,
    LeafRecord,
    Node,
    Skeleton,
    TreeMetadata,
    ValueRecord,
    unreadable_leaf,
)
from ckptcore.model.tree import leaf_count
from ckptcore.protocols import Inspection, ReadStore
from ckptcore_dcp.chunk_index import add_locations
from ckptcore_dcp.directories import WRITER, find_dcp_files, missing_metadata, unfinished
from ckptcore_dcp.hf_shards import inspect_shards
from ckptcore_dcp.metadata import (
    DcpChunk,
    DcpMetadata,
    DcpPath,
    DcpTensor,
    DcpTensors,
    DcpValue,
    ranges_of,
    read_metadata,
)
from ckptcore_dcp.names import tree_of_names
from ckptcore_dcp.pickled_trees import leaf_record
from ckptcore_dcp.storages import LocationColumns
from ckptcore_dcp.stored_tensors import record_of_tensor
from ckptcore_dcp.torch_files import read_torch_file
from ckptcore_dcp.values import DecodedValue, ItemProblem, read_value_items, read_values

_COMMON: Final = "common.pt"
_CONFIG: Final = "metadata.json"
_OF_COMMON: Final = "torch"
"""The strategy of megatron-core that always writes ``common.pt``, even if it contains no values."""
_MAX_CONFIG: Final = 1 << 16


def with_common(
    metadata: DcpMetadata, store: ReadStore, names: Sequence[str]
) -> tuple[DcpMetadata, Mapping[str, DecodedValue]]:
    """Return the metadata, and the values in ``common.pt`` of a Megatron directory; no values for other directories.

    A name that is also in the metadata becomes a leaf that cannot be loaded. If ``common.pt`` is missing or cannot be
    read, it becomes a leaf that cannot be loaded.

    Args:
        metadata: the tensors.
        store: the files.
        names: the names in the directory.
    """
    config = _config_of_megatron(store) if _CONFIG in names else {}
    if not config or (_COMMON not in names and config.get("common_backend") != _OF_COMMON):
        return metadata, {}
    try:
        if _COMMON not in names:
            raise CorruptCheckpointError(
                f"{_COMMON}, in which {_CONFIG} says the rest of the state is, is missing: restore it from a copy",
                key=_COMMON,
            )
        common = read_torch_file(store, _COMMON)
        if common is None or not isinstance(common.skeleton, Node) or common.skeleton.kind != "dict":
            raise CorruptCheckpointError(
                f"{_COMMON} is not a dict in a file of torch.save: restore it from a copy", key=_COMMON
            )
    except (CorruptCheckpointError, UnsupportedLeafError) as error:
        return replace(metadata, unreadable={**metadata.unreadable, _COMMON: unreadable_leaf(error)}), {}
    counts = [leaf_count(child) for child in common.skeleton.children]
    bounds = itertools.pairwise([0, *itertools.accumulate(counts)])
    values = {
        str(key): DecodedValue(child, common.leaves[first:last], _COMMON, common.storages)
        for key, child, (first, last) in zip(common.skeleton.keys, common.skeleton.children, bounds, strict=True)
    }
    both = [name for name in metadata.names if name in values]
    refused = {
        name: unreadable_leaf(
            UnsupportedLeafError(
                f"{name!r} is in {_COMMON} and in .metadata: load {_COMMON} by its own path for the first one"
            )
        )
        for name in both
    }
    metadata = replace(
        metadata,
        tensors={name: tensor for name, tensor in metadata.tensors.items() if name not in refused},
        values={name: value for name, value in metadata.values.items() if name not in refused},
        unreadable={**metadata.unreadable, **refused},
    )
    return metadata, {name: value for name, value in values.items() if name not in refused}


def _config_of_megatron(store: ReadStore) -> Mapping[str, object]:
    """Return the content of ``metadata.json``; empty if other software than Megatron wrote it."""
    try:
        config: Any = json.loads(store.get(_CONFIG, 0, _MAX_CONFIG))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) and "sharded_backend" in config else {}


_METADATA: Final = ".metadata"
_PICKLE: Final = b"\x80"
"""The first byte of a pickle of protocol 2 or later."""


def inspect_dcp(store: ReadStore, entry: str | None) -> Inspection | None:
    """Inspect a directory with ``.metadata``, with one metadata file per rank, or with safetensors shards.

    `entry` may also name ``.metadata`` itself. See `_find_metadata` and `with_common`.
    """
    if entry is not None and entry != _METADATA:
        return None
    names = store.list_names("")
    result = _find_metadata(store, names)
    if isinstance(result, DcpMetadata):
        metadata, common = with_common(result, store, names)
        inspection = _inspection(metadata, {**read_values(metadata.values, store), **common})
        return inspection._replace(files={value.key for value in common.values()})
    return result


def inspect_entries(store: ReadStore, entry: str | None) -> Inspection | None:
    """Inspect a directory with ``.metadata``, or with one metadata file per rank, as a flat dict of its entries.

    Each value is the bytes of its item. ``custom`` has the keys that lead to each entry, if the
    metadata has them (``paths``), and the ids of the save (``checkpoint_id``, ``save_id``). See `_find_metadata`.
    """
    if entry is not None and entry != _METADATA:
        return None
    metadata = _find_metadata(store, store.list_names(""))
    if not isinstance(metadata, DcpMetadata):
        return None
    items = read_value_items(metadata.values, store)
    values = {
        name: DecodedValue(LEAF, (item,), metadata.values[name].relative_path, None) for name, item in items.items()
    }
    paths: dict[str, JSON] = {name: list(path) for name, path in (metadata.paths or {}).items()}
    custom: dict[str, JSON] = {"paths": paths, "checkpoint_id": metadata.checkpoint_id, "save_id": metadata.save_id}
    return _inspection(replace(metadata, paths=None), values)._replace(custom=custom)


def _find_metadata(store: ReadStore, names: Sequence[str]) -> DcpMetadata | Inspection | None:
    """Read the metadata of a directory with these names, or inspect its safetensors shards.

    If ranks saved without communicating, a value that several ranks saved is taken from the lowest
    rank, and the chunks of a tensor are merged. Returns None for other directories.

    Raises:
        UncommittedCheckpointError: there are data files without metadata.
        CorruptCheckpointError: the metadata cannot be read, or the metadata of one rank is missing.
    """
    metadata_keys, files = find_dcp_files(names)
    if not metadata_keys:
        if files:
            raise unfinished(store, "", files[0])
        return inspect_shards(store, names)
    parts: list[DcpMetadata] = []
    for key in metadata_keys:
        data = store.get(key)
        if data[:1] != _PICKLE and not files:
            return None  # other software uses this file name too
        parts.append(read_metadata(data, key=key))
    if (absent := missing_metadata(names)) is not None:
        raise CorruptCheckpointError(
            f"{absent} is missing, in which a process lists what it saved ({metadata_keys[-1]} is here): restore it "
            "from a copy, or load another checkpoint",
            key=absent,
        )
    metadata = parts[0] if len(parts) == 1 else _merge_ranks(parts, metadata_keys)
    others: dict[str, Sequence[str]] = {file: () for file in files if file not in metadata.files}
    return replace(metadata, unlisted={**metadata.unlisted, **others})


def _merge_ranks(parts: Sequence[DcpMetadata], keys: Sequence[str]) -> DcpMetadata:
    """Merge the metadata of processes that saved without communicating.

    An entry that two processes list differently cannot be loaded.
    """
    tensors: dict[str, DcpTensor] = {}
    chunks: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], DcpChunk]] = {}
    values: dict[str, DcpValue] = {}
    paths: dict[str, DcpPath] = {}
    unreadable: dict[str, ValueRecord] = {}
    for part, key in zip(parts, keys, strict=True):
        unreadable.update(part.unreadable)
        for name, tensor in part.tensors.items():
            first = tensors.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape) or name in values:
                error = CorruptCheckpointError(
                    f"{key} lists {name!r} as {tensor.dtype}{list(tensor.shape)}, but the file of another process "
                    "lists something else: the processes saved different states. Load the files of one rank with torch",
                    key=key,
                )
                unreadable[name] = unreadable_leaf(error)
                continue
            known = chunks.setdefault(name, {})
            for chunk in tensor.chunks:
                known.setdefault((chunk.offsets, chunk.sizes), chunk)
        for name, value in part.values.items():
            if name in tensors:
                error = CorruptCheckpointError(
                    f"{key} lists {name!r} as a value, but the file of another process lists it as a tensor", key=key
                )
                unreadable[name] = unreadable_leaf(error)
                continue
            values.setdefault(name, value)
        paths.update(part.paths or {})
    united = {
        name: DcpTensor(tensor.dtype, tensor.shape, tuple(chunks[name].values()), tensor.requires_grad)
        for name, tensor in tensors.items()
        if name not in unreadable
    }
    values = {name: value for name, value in values.items() if name not in unreadable}
    known_paths = paths if all(part.paths is not None for part in parts) else None
    listed = frozenset().union(*[part.files for part in parts])
    unlisted = {file: names for part in parts for file, names in part.unlisted.items()}
    return DcpMetadata(
        united, values, known_paths, parts[0].save_id, parts[0].checkpoint_id, unreadable, listed, unlisted
    )


def _inspection(metadata: DcpMetadata, values: Mapping[str, DecodedValue | ItemProblem]) -> Inspection:
    decoded = {name: value for name, value in values.items() if isinstance(value, DecodedValue)}
    entries: dict[str, Skeleton] = dict.fromkeys(metadata.names, LEAF)
    entries.update({name: value.skeleton for name, value in decoded.items()})
    unreadable = {
        **metadata.unreadable,
        **{name: unreadable_leaf(value) for name, value in values.items() if not isinstance(value, DecodedValue)},
    }
    skeleton, order = tree_of_names(entries, metadata.paths)
    locations = LocationColumns()
    leaves: list[LeafRecord] = []
    stored = DcpTensors.of(metadata.tensors)
    heads = stored.heads
    tensors: dict[str, int] = {}
    for name in order:
        head = heads.get(name)
        if head is not None:
            tensors[name] = len(leaves)
            leaves.append(record_of_tensor(head[0], head[1]))
            continue
        if name in unreadable:
            leaves.append(unreadable[name])
            continue
        value = decoded[name]
        for leaf in value.leaves:
            if value.storages is None:
                leaves.append(leaf_record(leaf))
            else:
                leaves.append(locations.add(len(leaves), leaf, value.storages, key=value.key, path=name))
    names, numbers = list(tensors), list(tensors.values())
    chunks = InspectedChunks(numbers, names, stored)
    if composed := chunks.composed([leaves[number] for number in numbers]):
        refused = {names[number]: unreadable_leaf(UnsupportedLeafError(_COMPOSED)) for number in composed}
        plain = {name: tensor for name, tensor in stored.items() if name not in refused}
        return _inspection(replace(metadata, tensors=plain, unreadable={**metadata.unreadable, **refused}), values)
    for number in chunks.divided:
        dtype, shape, _ = heads[names[number]]
        if (cuts := chunks.cuts(number, shape)) is not None:
            leaves[numbers[number]] = record_of_tensor(dtype, shape)._replace(cuts=cuts)
    tree = TreeMetadata(skeleton, tuple(leaves), locations.aliases)
    return Inspection(tree, add_locations(chunks.to_json(), locations), WRITER, unused=metadata.unlisted)


_COMPOSED: Final = (
    "an instance of a tensor subclass, of which torch.distributed.checkpoint pickles the class: load the checkpoint "
    "with it, and save the state with ckptcore, which saves the inner tensors"
)


def _itemsize(record: LeafRecord) -> int:
    """Return the bytes per element; 0 for dtypes that may pack several elements into a byte."""
    if not isinstance(record, ArrayRecord) or record.kind != PLAIN_ARRAY:
        return 0
    return record.spec.numpy_dtype.itemsize


class InspectedChunks:
    """Chunks of each tensor. Skips empty chunks, which a process may write if it holds no part of a tensor."""

    def __init__(self, leaves: Sequence[int], names: Sequence[str], tensors: DcpTensors) -> None:
        """Collect the chunks of named tensors. `leaves` has the leaf number of each of them, ascending."""
        numbers = np.fromiter(map(tensors.numbers.__getitem__, names), np.int64, len(names))
        counts = np.diff(tensors.bounds)[numbers]
        columns = tensors.columns.take(ranges_of(tensors.bounds[numbers], counts))
        within = np.arange(columns.sizes.shape[1]) < columns.axes[:, None]
        (rows,) = np.nonzero(((columns.sizes > 0) | ~within).all(axis=1))
        owner: HostArray = np.repeat(np.arange(len(names)), counts)
        if len(rows) < len(columns.axes):
            columns, within, owner = columns.take(rows), within[rows], owner[rows]
        self._columns = columns
        self._within = within
        self._owner = owner
        self._leaf: HostArray = np.array(leaves, np.int64)[owner]
        self._bounds: Sequence[int] = np.searchsorted(owner, np.arange(len(names) + 1)).tolist()
        self._starts: Sequence[Sequence[int]] = columns.offsets.T.tolist()
        self._stops: Sequence[Sequence[int]] = (columns.offsets + columns.sizes).T.tolist()

    def composed(self, records: Sequence[LeafRecord]) -> Sequence[int]:
        """Return the numbers of tensors whose items have fewer bytes than their elements.

        An item is the output of ``torch.save``, so it is longer than its elements unless it is compressed. A shorter
        item contains a tensor subclass: it has the shape of the whole tensor, but stores smaller inner tensors.
        """
        if not len(self._owner):
            return ()
        sizes = np.where(self._within, self._columns.sizes, 1).prod(axis=1)
        of_kinds = {id(record): _itemsize(record) for record in {id(record): record for record in records}.values()}
        itemsizes = np.array([of_kinds[id(record)] for record in records], np.int64)  # many tensors share a record
        is_short = self._columns.length < sizes * itemsizes[self._owner]
        is_short[list(self._columns.transforms)] = False
        numbers: list[int] = np.unique(self._owner[is_short]).tolist()
        return numbers

    @property
    def divided(self) -> Sequence[int]:
        """The numbers of tensors of several chunks."""
        numbers: list[int] = np.flatnonzero(np.diff(self._bounds) > 1).tolist()
        return numbers

    def cuts(self, number: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
        """Return the grid cuts of a tensor with this shape, or None if there are none. See `cuts_of`."""
        first, last = self._bounds[number], self._bounds[number + 1]
        cuts: list[tuple[int, ...]] = []
        for axis, extent in enumerate(shape):
            bounds = {*self._starts[axis][first:last], *self._stops[axis][first:last]}
            cuts.append(tuple(sorted(bounds.difference((0, extent)))))
        return tuple(cuts) if any(cuts) else None

    def to_json(self) -> JSON:
        """Return the state that `ckptcore_dcp.chunk_index.dcp_index` reads."""
        columns = self._columns
        used, file = np.unique(columns.file, return_inverse=True)
        both = np.concatenate([self._within, self._within], axis=1)
        return {
            "content": "items",
            "files": [columns.files[number] for number in used.tolist()],
            "leaf": self._leaf.tolist(),
            "file": file.tolist(),
            "offset": columns.offset.tolist(),
            "nbytes": columns.length.tolist(),
            "box": np.concatenate([columns.offsets, columns.offsets + columns.sizes], axis=1)[both].tolist(),
            "transforms": {str(row): list(names) for row, names in columns.transforms.items()},
        }
