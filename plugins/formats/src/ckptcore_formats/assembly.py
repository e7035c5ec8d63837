"""Assembly of one tree from several torch.save files. The boxes of an array can be in different files."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from ckptcore_dcp.reading import (
    STORED,
    Column,
    Leaf,
    LocationColumns,
    ReadOnlyLayout,
    StorageIndex,
    StoredBytes,
    StoredTensor,
    TensorPart,
    check_bounds,
    leaf_record,
    read_torch_file,
)

from ckptcore.errors import CheckpointError, ChecksumError, CorruptCheckpointError, UnsupportedLeafError
from ckptcore.model import (
    JSON,
    LEAF,
    ArrayRecord,
    ArraySpec,
    Attribute,
    Box,
    Chunk,
    HostArray,
    Key,
    LeafRecord,
    Node,
    ReadItem,
    Skeleton,
    TreeMetadata,
    format_path,
    unreadable_leaf,
)
from ckptcore.model.tree import leaf_count
from ckptcore.planning import ChunkColumns, ChunkTable, natural_column
from ckptcore.protocols import ChunkIndex, Inspection, ReadStore

PLACES: Final = "places"
"""Key of the `LocationColumns` of whole tensors in the state."""
_FRAMEWORK: Final[Mapping[str, JSON]] = {"framework": "torch"}
_MAX_RUNS: Final = 1 << 12
"""Maximum number of C-order runs into which a tensor in another order is divided."""
_WEIGHTS: Final = re.compile(
    r".*\.safetensors(\.index\.json)?|(pytorch_model|adapter_model|diffusion_pytorch_model)"
    r"(-[0-9]+-of-[0-9]+|\.[A-Za-z0-9]+)?\.bin(\.index\.json)?|consolidated[.0-9]*\.pth|\.metadata",
    re.ASCII,
)
"""Pattern of file names of model weights. Does not match other files of a training, such as ``training_args.bin``."""
RESTORE: Final = "restore it from a copy, or load another checkpoint"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the tree of a torch.save file.

    Attributes:
        key: the object.
        skeleton, leaves: the tree of this part.
        storages: the storages of the object, as in `ckptcore_dcp.reading.TorchFile`.
    """

    key: str
    skeleton: Skeleton
    leaves: Sequence[Leaf]
    storages: Mapping[str, StoredBytes]

    @property
    def processes(self) -> int:
        """Number of processes that each hold a part of its tensors; 0 if no tensor is divided."""
        return max([leaf.processes for leaf in self.leaves if isinstance(leaf, TensorPart)], default=0)

    def items(self) -> Iterator[tuple[Key, Part]]:
        """Return the children by key; none for a leaf. The fields of an object have `Attribute` keys."""
        if not isinstance(self.skeleton, Node):
            return
        first = 0
        for key, child in zip(self.skeleton.keys, self.skeleton.children, strict=True):
            count = leaf_count(child)
            yield key, Part(self.key, child, self.leaves[first : first + count], self.storages)
            first += count

    def children(self) -> dict[Key, Part]:
        """Return the children by key, with the names of fields of an object as text."""
        return {key.name if isinstance(key, Attribute) else key: child for key, child in self.items()}

    def plain(self) -> Any:
        """Return the leaves in nested dicts and tuples."""
        if not isinstance(self.skeleton, Node):
            leaf = self.leaves[0]
            return leaf.values if isinstance(leaf, Column) else leaf
        values = {key: child.plain() for key, child in self.children().items()}
        return tuple(values.values()) if [*values] == [*range(len(values))] and self._is_sequence else values

    @property
    def _is_sequence(self) -> bool:
        return isinstance(self.skeleton, Node) and (
            self.skeleton.kind in ("list", "tuple") or (self.skeleton.kind == "object" and bool(self.skeleton.keys))
        )

    def of_leaf(self, leaf: Leaf) -> Part:
        """Return a part that consists of one leaf of this file."""
        return Part(self.key, LEAF, (leaf,), self.storages)

    @property
    def tensor(self) -> StoredTensor | None:
        """The tensor, if the part is a tensor; else None."""
        leaf = self.leaves[0] if not isinstance(self.skeleton, Node) else None
        return leaf if isinstance(leaf, StoredTensor) else None


class PartReader:
    """Reads torch.save files, and records their keys.

    Attributes:
        store: the files.
        keys: keys of the files read so far.
    """

    def __init__(self, store: ReadStore) -> None:
        """Start without files."""
        self.store = store
        self.keys: list[str] = []

    def find(self, key: str) -> Part | None:
        """Read a file. Return None if ``torch.save`` did not write it."""
        content = read_torch_file(self.store, key)
        if content is None:
            return None
        self.keys.append(key)
        return Part(key, content.skeleton, content.leaves, content.storages)

    def read(self, key: str) -> Part:
        """Read a file whose name says that ``torch.save`` wrote it.

        Raises:
            CorruptCheckpointError: it is not a torch.save file.
        """
        part = self.find(key)
        if part is None:
            raise CorruptCheckpointError(f"{key} is not a file of torch.save, in spite of its name: {RESTORE}", key=key)
        return part


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an array. Its elements are contiguous in a storage, in C order.

    Attributes:
        box: the box.
        storage: the storage.
        offset: position of the first element in the object, in bytes.
    """

    box: Box
    storage: StoredBytes
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """An array whose boxes are in several objects. Two such arrays are tied if they have the same pieces.

    Attributes:
        spec: the whole array.
        kind: kind of the leaf, as in `ArrayRecord`.
        pieces: the boxes.
    """

    spec: ArraySpec
    kind: str
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """A leaf that cannot be loaded, with the error that a load of it raises."""

    error: CheckpointError


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A part of the tree whose leaves have several sources.

    Attributes:
        skeleton: its containers.
        entries: one entry for each leaf of the skeleton; none of them has children.
    """

    skeleton: Skeleton
    entries: Sequence[Entry]


Entry: TypeAlias = "Part | Branch | Divided | Refused | str | list[Entry] | Mapping[Key, Entry]"
"""An entry of a tree. A mapping becomes a dict; text is a value."""


@dataclass(frozen=True, slots=True)
class Run:
    """All elements of a stored tensor. They are contiguous in one object, in C order.

    Attributes:
        spec: the dtype, and the number of elements as the only axis.
        kind: kind of the leaf, as in `ArrayRecord`.
        storage: the storage that contains them.
        offset: position of the first element in the object, in bytes.
    """

    spec: ArraySpec
    kind: str
    storage: StoredBytes
    offset: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.spec.shape[0]

    def piece(self, box: Box, start: int = 0) -> Piece:
        """Return the elements from `start` on as a box of an array."""
        return Piece(box, self.storage, self.offset + start * self.spec.numpy_dtype.itemsize)


def run_of(tensor: StoredTensor, storages: Mapping[str, StoredBytes], *, path: str) -> Run:
    """Return the elements of a tensor as a run.

    Args:
        tensor: the tensor, from a pickle.
        storages: the storages of its file.
        path: the array, for errors.

    Raises:
        CorruptCheckpointError: the elements are not in the file.
        UnsupportedLeafError: they are compressed, big endian or in another order.
    """
    storage = storages.get(tensor.storage)
    count = math.prod(tensor.shape)
    if storage is None:
        if count:
            raise CorruptCheckpointError(
                f"a part of {path} has no elements: the storage {tensor.storage[:80]!r} is missing; restore the "
                "checkpoint from a copy, or load another one"
            )
        return Run(ArraySpec((0,), tensor.dtype), tensor.kind, StoredBytes("", 0, 0), 0)
    check_bounds(tensor, storage.size, key=storage.key, path=path)
    if storage.compression != STORED or storage.big_endian or not tensor.is_contiguous:
        raise UnsupportedLeafError(
            f"{path} is divided over several files, and {storage.key} has its part compressed, big endian, or in "
            "another order than C: save the part after tensor.contiguous() with torch.save"
        )
    offset = storage.start + tensor.offset * tensor.itemsize
    return Run(ArraySpec((count,), tensor.dtype), tensor.kind, storage, offset)


def has_weights(names: Iterable[str]) -> bool:
    """Return True if one of these file names is that of model weights, which another layout reads."""
    return any(_WEIGHTS.fullmatch(name) for name in names)


def pieces_of_part(part: TensorPart, storages: Mapping[str, StoredBytes], *, path: str) -> Iterator[Piece]:
    """Yield the pieces of a tensor that one process saved. Views in another order than C are divided into runs.

    Raises:
        CorruptCheckpointError, UnsupportedLeafError: see `run_of`.
    """
    for box, tensor in zip(part.boxes, part.tensors, strict=True):
        for run, view in _runs(box, tensor, path):
            yield run_of(view, storages, path=path).piece(run)


def _runs(box: Box, tensor: StoredTensor, path: str) -> Iterator[tuple[Box, StoredTensor]]:
    """Divide a tensor into boxes whose elements are in C order without gaps."""
    left = [(box, tensor)]
    count = 1
    while left:
        within, view = left.pop()
        if view.is_contiguous:
            yield within, view
            continue
        axis = next(number for number, extent in enumerate(view.shape) if extent > 1)
        count += view.shape[axis] - 1
        if count > _MAX_RUNS:
            raise UnsupportedLeafError(
                f"{path} is divided over several files in another order than C: save the parts after "
                "tensor.contiguous()"
            )
        for index in range(view.shape[axis]):
            first = within.start[axis] + index
            shape = (*view.shape[:axis], 1, *view.shape[axis + 1 :])
            offset = view.offset + index * view.strides[axis]
            left.append((within.band(axis, first, first + 1), replace(view, shape=shape, offset=offset)))


def inspection_of(entry: Entry, writer: str, files: Collection[str]) -> Inspection:
    """Return the `Inspection` of a tree of entries. `AssembledLayout` reads the result.

    Args:
        entry: the tree.
        writer: the software that wrote the checkpoint.
        files: all objects of the checkpoint.
    """
    entries: list[tuple[Leaf, Part] | Divided | Refused] = []
    skeleton = _flatten(entry, entries)
    records = [_record(leaf) for leaf in entries]
    paths = TreeMetadata(skeleton, tuple(records)).paths
    columns, chunks = LocationColumns(), ChunkColumns()
    storages: dict[StoredBytes, int] = {}
    storage_of: list[int] = []
    aliases: dict[int, int] = {}
    first: dict[tuple[object, ...], int] = {}
    for number, leaf in enumerate(entries):
        if isinstance(leaf, tuple):
            value, part = leaf
            if isinstance(value, StoredTensor):
                path = format_path(paths[number])
                records[number] = columns.add(number, value, part.storages, key=part.key, path=path)
        elif isinstance(leaf, Divided):
            places = tuple([(piece.storage.key, piece.offset, piece.box) for piece in leaf.pieces])
            original = first.setdefault((leaf.spec, leaf.kind, places), number) if places else number
            if original != number:
                aliases[number] = original
                continue
            for piece in leaf.pieces:
                chunks.add(number, piece.storage.key, piece.offset, piece.box)
                storage_of.append(storages.setdefault(piece.storage, len(storages)))
    tree = TreeMetadata(skeleton, tuple(records), {**columns.aliases, **aliases})
    state: dict[str, JSON] = {
        **chunks.to_json(),
        "storage": storage_of,
        "storages": [[storage.key, storage.start, storage.stop, storage.crc] for storage in storages],
        PLACES: columns.to_json(),
    }
    return Inspection(tree, state, writer, files=files)


def _flatten(entry: Entry, entries: list[tuple[Leaf, Part] | Divided | Refused]) -> Skeleton:
    if isinstance(entry, Part):
        entries.extend((leaf, entry) for leaf in entry.leaves)
        return entry.skeleton
    if isinstance(entry, Branch):
        for leaf in entry.entries:
            _flatten(leaf, entries)
        return entry.skeleton
    if isinstance(entry, Divided | Refused):
        entries.append(entry)
        return LEAF
    if isinstance(entry, str):
        entries.append((entry, _NOWHERE))
        return LEAF
    if isinstance(entry, list):
        return Node("list", tuple(range(len(entry))), tuple([_flatten(child, entries) for child in entry]))
    return Node("dict", tuple(entry), tuple([_flatten(child, entries) for child in entry.values()]))


_NOWHERE: Final = Part("", LEAF, (), {})


def _record(leaf: tuple[Leaf, Part] | Divided | Refused) -> LeafRecord:
    if isinstance(leaf, tuple):
        return leaf_record(leaf[0])
    if isinstance(leaf, Refused):
        return unreadable_leaf(leaf.error)
    return ArrayRecord(leaf.spec, leaf.kind, notes=_FRAMEWORK)


_SLAB_BYTES: Final = 1 << 24
"""Maximum bytes per read while verifying a checksum."""


class _AssembledIndex(ChunkTable):
    """Index of an assembled tree. It has a table of pieces, and reads whole tensors as a `NativeReader`."""

    def __init__(self, tree: TreeMetadata, state: JSON) -> None:
        """Read the state that `inspection_of` built.

        It is untrusted, because a root can name this layout with any state.

        Raises:
            CorruptCheckpointError: the state does not fit the tree.
        """
        super().__init__(tree, state)
        columns: Any = state  # the errors of a hostile state are caught below
        try:
            self._places = StorageIndex(tree, columns[PLACES])
            self._storages: Sequence[tuple[str, int, int, int]] = [_storage(*row) for row in columns["storages"]]
            numbers = natural_column(columns["storage"], len(self._storages), len(columns["leaf"])).tolist()
        except (TypeError, KeyError, IndexError, ValueError, OverflowError) as error:
            raise CorruptCheckpointError(
                f"the root is corrupt: its state does not locate arrays in files of torch.save: {error!r}"
            ) from error
        self._storages_of: dict[int, set[int]] = {}
        for leaf, number in zip(columns["leaf"], numbers, strict=True):
            self._storages_of.setdefault(leaf, set()).add(number)
        self._verified: set[int] = set()

    def boxes(self, leaf: int, box: Box) -> Sequence[Chunk]:
        """See `ChunkIndex.boxes`. Whole tensors in storages have no chunks."""
        return () if leaf in self._places else tuple(super().boxes(leaf, box))

    def extents(self, leaf: int) -> Iterator[tuple[str, int, int]]:
        """See `ChunkIndex.extents`."""
        yield from self._places.extents(leaf)
        if leaf not in self._places:
            yield from super().extents(leaf)

    def unverified(self, leaf: int, store: ReadStore) -> Collection[str]:
        """Verify the CRC-32 of the storages of an array. Return the objects that have storages without a CRC-32.

        A storage can contain several arrays. So this method reads each storage as a whole, once per index.

        Raises:
            ChecksumError: a checksum differs.
        """
        if leaf in self._places:
            places: Any = self._places
            leaves: Collection[str] = places.unverified(leaf, store)
            return leaves
        unknown: set[str] = set()
        for number in self._storages_of.get(leaf, ()):
            key, start, stop, expected = self._storages[number]
            if not expected:
                unknown.add(key)
            elif number not in self._verified:
                _verify(store, key, start, stop, expected)
                self._verified.add(number)
        return unknown

    def check(self, leaves: Collection[int]) -> None:
        """See `ChunkIndex.check`."""
        super().check([leaf for leaf in leaves if leaf not in self._places])

    def reads(self, leaf: int, store: ReadStore) -> bool:
        """See `NativeReader.reads`."""
        return leaf in self._places

    def read(self, items: Sequence[ReadItem], buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """See `NativeReader.read`."""
        return self._places.read(items, buffers, store)


def _storage(key: object, start: object, stop: object, crc: object) -> tuple[str, int, int, int]:
    if type(key) is not str or type(start) is not int or type(stop) is not int or type(crc) is not int:
        raise TypeError("a storage is expected")
    if not 0 <= start <= stop < 1 << 62:
        raise ValueError("a storage has no valid range")
    return key, start, stop, crc


def _verify(store: ReadStore, key: str, start: int, stop: int, expected: int) -> None:
    checksum = 0
    for first in range(start, stop, _SLAB_BYTES):
        checksum = zlib.crc32(store.get(key, first, min(first + _SLAB_BYTES, stop)), checksum)
    if checksum != expected:
        raise ChecksumError(
            f"{key!r} is damaged in bytes {start} to {stop}: expected the CRC-32 {expected:08x}, found {checksum:08x}; "
            f"{RESTORE}",
            key=key,
            start=start,
            stop=stop,
        )


class AssembledLayout(ReadOnlyLayout):
    """A read-only layout whose `inspect` returns the result of `inspection_of`."""

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the index of the pieces and of the whole tensors."""
        return _AssembledIndex(tree, state)
