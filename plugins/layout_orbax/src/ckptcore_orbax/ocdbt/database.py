"""Reads databases: the keys of the newest version, and the locations of their values."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Self

from ckptcore.errors import CorruptCheckpointError, ObjectNotFoundError
from ckptcore.protocols import ReadStore
from ckptcore_orbax.ocdbt.cursor import ByteRange
from ckptcore_orbax.ocdbt.frame import HEAD_BYTES, MANIFEST_MAGIC, frame_length
from ckptcore_orbax.ocdbt.manifest import Manifest, Version, decode_manifest
from ckptcore_orbax.ocdbt.node import LeafNode, Node, NodeReference, ValueLocation, decode_node

_MANIFEST: Final = "manifest.ocdbt"
_NUMBERED: Final = re.compile(r"manifest\.[0-9a-f]{16}")
_TRIES: Final = 5
"""Attempts to read the newest numbered manifest, which a writer may remove after it was listed."""

_HEAD: Final = 1 << 16
"""Size of the first read, in bytes. Manifests have about 100 bytes, or 10,000 after years of new versions."""

_MAX_MANIFEST_BYTES: Final = 1 << 28
_MAX_NODE_BYTES: Final = 1 << 31
_CACHE_BYTES: Final = 256 << 20
"""Memory limit of the node cache, in bytes. The last node read is always cached."""

_MAX_VISITS: Final = 64
"""Limit of visits to one node per listing. A tree whose nodes refer to the same few nodes
repeatedly could have more keys than can be listed.
"""


class Database:
    """The newest version of a database at the time of opening. Thread-safe.

    Nodes are read on demand. The length of a data file is checked only when a value in it is read.
    """

    def __init__(self, store: ReadStore, version: Version) -> None:
        """Create a reader of a version; see `open`."""
        self._store = store
        self._version = version
        self._lock = threading.Lock()
        self._nodes: OrderedDict[NodeReference, tuple[Node, int]] = OrderedDict()
        self._node_bytes = 0

    @classmethod
    def open(cls, store: ReadStore, directory: str) -> Self:
        """Read the manifest.

        Args:
            store: the store with the database.
            directory: key of its directory in the store, or empty.

        Raises:
            ObjectNotFoundError: there is no manifest.
            CorruptCheckpointError: the manifest is damaged, or no numbered manifest exists.
            UnsupportedVersionError: the manifest has a newer format.
        """
        base = f"{directory.removesuffix('/')}/" if directory else ""
        manifest = _read_manifest(store, base, _MANIFEST)
        version = manifest.newest or _read_numbered(store, base, manifest)
        return cls(store, version)

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self._version.statistics.num_keys

    def get(self, key: bytes) -> ValueLocation | None:
        """Return the location of the value of a key, or None if the key does not exist.

        Raises:
            CorruptCheckpointError: a node is damaged or missing.
            UnsupportedVersionError: a node has a newer format.
            StorageError: a node cannot be read.
        """
        reference = self._version.root
        if reference is None:
            return None
        prefix = low = b""
        high: bytes | None = None
        while True:
            node = self._node(reference)
            self._check_bounds(node, reference, prefix, low, high)
            if not key.startswith(prefix):
                return None
            relative = key[len(prefix) :]
            if isinstance(node, LeafNode):
                entry = bisect_left(node.keys, relative)
                if entry == len(node.keys) or node.keys[entry] != relative:
                    return None
                return next(node.values(entry, entry + 1))
            entry = bisect_right(node.keys, relative) - 1
            if entry < 0:
                return None
            if entry + 1 < len(node.keys):
                high = prefix + node.keys[entry + 1]
            low = prefix + node.keys[entry]
            reference = node.children[entry]
            prefix = low[: len(prefix) + node.prefixes[entry]]

    def range(self, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, ValueLocation]]:
        """Yield the keys in the half-open range from `start` to `stop`, ascending, with their locations.

        Raises errors like `get`, during iteration.
        """
        if self._version.root is None:
            return
        visits: Counter[NodeReference] = Counter()
        # Stack of nodes to visit: location, shared prefix, bounds of the keys.
        todo: list[tuple[NodeReference, bytes, bytes, bytes | None]] = [(self._version.root, b"", b"", None)]
        while todo:
            reference, prefix, low, high = todo.pop()
            visits[reference] += 1
            if visits[reference] > _MAX_VISITS:
                raise _node_range(reference).damage_error(f"the tree leads to it more than {_MAX_VISITS} times")
            node = self._node(reference)
            self._check_bounds(node, reference, prefix, low, high)
            first = _first_at_least(node.keys, prefix, start)
            end = len(node.keys) if stop is None else _first_at_least(node.keys, prefix, stop)
            if isinstance(node, LeafNode):
                keys = node.keys[first:end]
                yield from zip(map(prefix.__add__, keys) if prefix else keys, node.values(first, end), strict=True)
                continue
            # The child before `first` can also contain keys from `start` on, although its first key
            # is smaller.
            for entry in range(end - 1, max(first - 1, 0) - 1, -1):
                own = prefix + node.keys[entry]
                after = prefix + node.keys[entry + 1] if entry + 1 < len(node.keys) else high
                todo.append((node.children[entry], own[: len(prefix) + node.prefixes[entry]], own, after))

    def read(self, value: ValueLocation) -> bytes:
        """Return the bytes of a value.

        Raises:
            CorruptCheckpointError: the file of the value is missing or too short.
            StorageError: the file cannot be read.
        """
        if value.inline is not None:
            return value.inline
        return _read_range(self._store, ByteRange("value", value.file, value.offset, value.offset + value.length))

    def _node(self, reference: NodeReference) -> Node:
        with self._lock:
            known = self._nodes.get(reference)
            if known is not None:
                self._nodes.move_to_end(reference)
                return known[0]
        byte_range = _node_range(reference)
        if reference.length > _MAX_NODE_BYTES:
            raise byte_range.damage_error(
                f"its reference states {reference.length} bytes, expected at most {_MAX_NODE_BYTES}"
            )
        node = decode_node(_read_range(self._store, byte_range), reference, byte_range)
        nbytes = node.memory_bytes
        with self._lock:
            if reference not in self._nodes:
                self._nodes[reference] = node, nbytes
                self._node_bytes += nbytes
            while self._node_bytes > _CACHE_BYTES and len(self._nodes) > 1:
                _, (_, freed) = self._nodes.popitem(last=False)
                self._node_bytes -= freed
        return node

    @staticmethod
    def _check_bounds(node: Node, reference: NodeReference, prefix: bytes, low: bytes, high: bytes | None) -> None:
        """Reject keys outside the parent's bounds: `range` would find them and `get` would not."""
        first, last = prefix + node.keys[0], prefix + node.keys[-1]
        if first < low or (high is not None and last >= high):
            raise _node_range(reference).damage_error(
                f"its keys {first[:80]!r} to {last[:80]!r} are not within the bounds in its parent, {low[:80]!r} and "
                f"{'the end' if high is None else repr(high[:80])}"
            )


def _first_at_least(keys: Sequence[bytes], prefix: bytes, bound: bytes) -> int:
    """Return the index of the first key that is at least `bound`. All keys begin with `prefix`."""
    if bound.startswith(prefix):
        return bisect_left(keys, bound[len(prefix) :])
    return 0 if bound < prefix else len(keys)


def _node_range(reference: NodeReference) -> ByteRange:
    return ByteRange("B+tree node", reference.file.path, reference.offset, reference.offset + reference.length)


def _read_range(store: ReadStore, byte_range: ByteRange) -> bytes:
    try:
        data = store.get(byte_range.key, byte_range.start, byte_range.stop)
    except ObjectNotFoundError as error:
        raise CorruptCheckpointError(
            f"{byte_range} cannot be read: the object is missing; "
            "restore the checkpoint from a copy, or load another one",
            key=byte_range.key,
        ) from error
    if len(data) != byte_range.stop - byte_range.start:
        raise byte_range.damage_error(f"the object ends after {len(data)} bytes of it")
    return data


def _read_manifest(store: ReadStore, base: str, name: str) -> Manifest:
    key = base + name
    data = store.get(key, 0, _HEAD)
    if len(data) == _HEAD:
        size = store.size(key)
        byte_range = ByteRange("manifest", key, 0, size)
        stated = frame_length(data[:HEAD_BYTES], MANIFEST_MAGIC, byte_range)
        if stated != size or size > _MAX_MANIFEST_BYTES:
            raise byte_range.damage_error(
                f"it states {stated} bytes, expected {size}, and at most {_MAX_MANIFEST_BYTES}"
            )
        data += store.get(key, _HEAD, size)
    return decode_manifest(data, base, ByteRange("manifest", key, 0, len(data)))


def _read_numbered(store: ReadStore, base: str, manifest: Manifest) -> Version:
    for tries_left in range(_TRIES - 1, -1, -1):
        newest = max(filter(_NUMBERED.fullmatch, store.list_names(base)), default=None)
        if newest is None:
            break
        try:
            numbered = _read_manifest(store, base, newest)
        except ObjectNotFoundError:
            if tries_left:
                continue
            raise
        if numbered.newest is None or numbered.uuid != manifest.uuid:
            raise CorruptCheckpointError(
                f"the OCDBT manifest {base}{newest} does not belong to the database that {base}{_MANIFEST} describes; "
                "restore the checkpoint from a copy, or load another one",
                key=base + newest,
            )
        return numbered.newest
    raise CorruptCheckpointError(
        f"the OCDBT manifest {base}{_MANIFEST} refers to numbered manifests, but none exists: expected "
        f"{base}manifest.<16 hex digits>; restore the checkpoint from a copy, or load another one",
        key=base + _MANIFEST,
    )
