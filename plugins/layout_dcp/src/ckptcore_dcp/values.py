"""Reader of values that torch.distributed.checkpoint stores, each as a torch.save item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ckptcore.model import Skeleton
from ckptcore.protocols import ReadStore
from ckptcore_dcp.item_reading import TemplateCache, undo_transforms
from ckptcore_dcp.metadata import DcpValue
from ckptcore_dcp.pickled_trees import Leaf, tree_of
from ckptcore_dcp.pickles import Places, read_pickle
from ckptcore_dcp.storages import StoredBytes, pickled_storages, zip_storages
from ckptcore_dcp.stored_tensors import StoredTensor
from ckptcore_dcp.zip_directories import Fetch
from ckptcore_dcp.zips import max_pickle_bytes, read_member, read_zip, torch_members

_Templates: TypeAlias = TemplateCache[None, None]
ItemProblem: TypeAlias = CorruptCheckpointError | UnsupportedLeafError
"""The reason why an item cannot be read."""

_NEAR_BYTES: Final = 1 << 16
"""Items at most this far apart are read in one request."""
_WINDOW_BYTES: Final = 8 << 20
"""Maximum size of one request, unless a single item is longer."""
_MAX_GROWTH: Final = 256
"""Maximum growth of an item when it is decompressed."""
_ALWAYS_ALLOWED_BYTES: Final = 1 << 26
"""Size that a decompressed item may always have, in bytes."""


@dataclass(frozen=True, slots=True)
class DecodedValue:
    """A value that was read.

    Attributes:
        skeleton: its containers, or a leaf.
        leaves: its leaves, in the order of the skeleton.
        key: the object that contains it.
        storages: storages of its tensors by key. None without tensors, and if a transform was
            applied to the item, because the storages then have no byte ranges in the object.
    """

    skeleton: Skeleton
    leaves: Sequence[Leaf]
    key: str
    storages: Mapping[str, StoredBytes] | None


def read_values(values: Mapping[str, DcpValue], store: ReadStore) -> Mapping[str, DecodedValue | ItemProblem]:
    """Read values. Neighbouring items share a request. No code in them is executed.

    Returns:
        Each value, or why it cannot be read: its item is missing or cut off, is not in the format of ``torch.save``,
        or has an unknown transform.

    Raises:
        CorruptCheckpointError: two items overlap.
    """
    templates: _Templates = TemplateCache()
    return {name: _try_to_decode(name, values[name], item, templates) for name, item in _stored_items(values, store)}


def _try_to_decode(
    name: str, value: DcpValue, item: bytes | ItemProblem, templates: _Templates
) -> DecodedValue | ItemProblem:
    if not isinstance(item, bytes):
        return item
    try:
        return _decode_item(name, value, item, templates)
    except (CorruptCheckpointError, UnsupportedLeafError) as error:
        return error


def read_value_items(values: Mapping[str, DcpValue], store: ReadStore) -> Mapping[str, bytes]:
    """Read the items of values, and undo their transforms. Does not check that each item is a ``torch.save`` file.

    Raises:
        CorruptCheckpointError: an item is cut off or missing, or two items overlap.
        UnsupportedLeafError: an unknown transform was applied to an item.
    """
    items: dict[str, bytes] = {}
    for name, item in _stored_items(values, store):
        if not isinstance(item, bytes):
            raise item
        items[name] = _without_transforms(name, values[name], item)
    return items


def _stored_items(values: Mapping[str, DcpValue], store: ReadStore) -> Iterator[tuple[str, bytes | ItemProblem]]:
    """Yield each name with its stored item, or with the error if it is unreadable. Nearby items share a request."""
    for group in _read_groups(values):
        path = values[group[0]].relative_path
        start = values[group[0]].offset
        stop = values[group[-1]].offset + values[group[-1]].length
        try:
            # The stated lengths are untrusted: request more than a window only if the bytes exist.
            last = start + _WINDOW_BYTES if stop - start <= _WINDOW_BYTES else store.size(path)
            data = store.get(path, start, min(stop, last))
        except ObjectNotFoundError as error:
            for name in group:
                yield (
                    name,
                    CorruptCheckpointError(
                        f"{path!r} is missing, which contains the value {name!r}: {error}; restore it from a copy, or "
                        "load another checkpoint",
                        key=path,
                    ),
                )
            continue
        for name in group:
            value = values[name]
            first = value.offset - start
            item = data[first : first + value.length]
            whole = len(item) == value.length
            yield (
                name,
                item
                if whole
                else CorruptCheckpointError(
                    f"{path!r} is cut off: it has {len(item)} of the {value.length} bytes of the value {name!r}; "
                    "restore it from a copy, or load another checkpoint",
                    key=path,
                    start=value.offset,
                    stop=value.offset + value.length,
                ),
            )


def _read_groups(values: Mapping[str, DcpValue]) -> Iterator[Sequence[str]]:
    """Group the names of nearby values, so that one request reads each group."""
    order = sorted(values, key=lambda name: (values[name].relative_path, values[name].offset))
    group: list[str] = []
    for name in order:
        value = values[name]
        if group:
            first, last = values[group[0]], values[group[-1]]
            room = value.offset - last.offset - last.length
            same = value.relative_path == last.relative_path
            if same and room < 0:
                # Limit expansion: a small file could list one large item as a thousand values.
                raise CorruptCheckpointError(
                    f"the values {group[-1]!r} and {name!r} overlap in {value.relative_path!r}",
                    key=value.relative_path,
                )
            if not same or room > _NEAR_BYTES or value.offset + value.length - first.offset > _WINDOW_BYTES:
                yield group
                group = []
        group.append(name)
    if group:
        yield group


def _decode_item(name: str, value: DcpValue, item: bytes, templates: _Templates) -> DecodedValue:
    key, start = value.relative_path, value.offset
    if value.transforms:
        item = _without_transforms(name, value, item)
        start = 0

    limit = max_pickle_bytes(value.length)
    known = templates.match(None, memoryview(item))
    if known is None or len(known[0]) > limit:
        pickle = _pickle_of_item(name, key, item, start, templates, limit)
    else:
        pickle = bytes(known[0])
    first = -1 if value.transforms else item.find(pickle)  # -1 if the pickle is compressed
    places = Places() if first >= 0 else None
    read, _ = read_pickle(pickle, key=key, places=places)
    skeleton, leaves = tree_of(read, key=key, limit=len(pickle) + 1024, places=places)
    arrays = [leaf for leaf in leaves if isinstance(leaf, StoredTensor)]
    if value.transforms or not arrays:
        return DecodedValue(skeleton, leaves, key, None)
    storages = pickled_storages(arrays, key=key, start=start + first, pickle=pickle)
    if any(array.pickled is None for array in arrays):
        fetch = _item_fetch(item, start)
        members = torch_members(read_zip(fetch, start, start + len(item), key=key))
        storages = {**zip_storages(members, fetch, key=key), **storages}
    return DecodedValue(skeleton, leaves, key, storages)


def _without_transforms(name: str, value: DcpValue, item: bytes) -> bytes:
    limit = max(_ALWAYS_ALLOWED_BYTES, _MAX_GROWTH * len(item))
    key = value.relative_path
    return undo_transforms(item, value.transforms, what=f"the value {name!r}", key=key, limit=limit)


def _item_fetch(item: bytes, start: int) -> Fetch:
    """Return a function that reads an item in memory by its offsets in the object."""
    return lambda first, last: item[max(first - start, 0) : max(last - start, 0)]


def _pickle_of_item(name: str, key: str, item: bytes, start: int, templates: _Templates, limit: int) -> bytes:
    """Return the verified pickle of an item that begins at `start`; at most `limit` bytes."""
    fetch = _item_fetch(item, start)
    members = torch_members(read_zip(fetch, start, start + len(item), key=key))
    if "data.pkl" not in members:
        raise CorruptCheckpointError(
            f"the value {name!r} in {key!r} was not written by torch.save: it has no data.pkl; restore it "
            "from a copy, or load another checkpoint",
            key=key,
        )
    pickle = read_member(fetch, members["data.pkl"], key=key, limit=limit)
    templates.add(None, memoryview(item), start, members, "data.pkl", None)
    return pickle
