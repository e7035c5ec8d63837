"""The safetensors layout: what it writes, Hugging Face tools open, and what they write, it reads.

The format (https://github.com/huggingface/safetensors): 8 bytes of little-endian length, a JSON header of that many bytes
``{name: {"dtype", "shape", "data_offsets"}, "__metadata__": {str: str}}``, then the elements, little endian, in C order, without
gaps. A checkpoint above a size is split into ``model-00001-of-00002.safetensors`` and so on, which
``model.safetensors.index.json`` lists: ``{"metadata": {"total_size": bytes}, "weight_map": {name: file}}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ckptcore.builtin.safetensors_header import FORMAT_DTYPES, TensorEntry, inspect_files
from ckptcore.errors import AtomicityError, CheckpointError, CorruptCheckpointError, PluginError
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ArraySegment, BytesSegment, ReadPlan, Receipt, Segment, TileRead, WritePlan
from ckptcore.model.tree import JSON, LEAF, Node, format_path
from ckptcore.planning import leaf_names
from ckptcore.protocols import Inspection, ReadStore, Snapshot, WriteStore
from ckptcore.runs import run_extent

__all__ = ["SafetensorsLayout"]

_METADATA: Final = "__metadata__"
_ALIGNMENT: Final = 64
_LARGE_ALIGNMENT: Final = 4096
"""Where elements begin in a large file, in bytes: a page, so that direct I/O needs no copy."""
_STEM: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)


class _KnownPlaces:
    """The places that were read from a state last: a load asks for the same ones several times. Any thread."""

    def __init__(self) -> None:
        self._last: tuple[TreeMetadata, JSON, Mapping[int, tuple[str, int]]] | None = None

    def places(self, tree: TreeMetadata, state: JSON) -> Mapping[int, tuple[str, int]]:
        """See `_places`."""
        last = self._last
        if last is None or last[0] is not tree or last[1] is not state:
            last = self._last = (tree, state, _places(tree, state))
        return last[2]


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """One ``model.safetensors``, or several with an index; of another name than ``model`` where a stem is given.

    What safetensors cannot name (complex128, int4, some float8) is stored as U8 with the bytes of an element as a last
    axis (none for one byte); times are stored as I64. Their dtype is in the root of the checkpoint.
    Tied arrays are stored under the first name; the header's metadata tells the others, as `safetensors.torch.save_model` does.

    Attributes:
        max_file_bytes: the most elements a file holds, in bytes, unless one array is larger.
        stem: what the names of files begin with, for software that looks for another one than ``model``: ``adapter_model`` for
            PEFT, ``diffusion_pytorch_model`` for diffusers.

    Raises:
        ValueError: for a stem that is no part of a name of a file.
    """

    max_file_bytes: int = 5_000_000_000
    stem: str = "model"
    _known: _KnownPlaces = field(default_factory=_KnownPlaces, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.stem, str) or not _STEM.fullmatch(self.stem):
            raise ValueError(
                f"SafetensorsLayout(stem={self.stem!r}): give ASCII letters, digits, '_', '-' and '.', the first of them neither "
                "'.' nor '-', such as 'model' or 'adapter_model'"
            )
        if self.stem.startswith("checkpoint."):
            raise ValueError(
                f"SafetensorsLayout(stem={self.stem!r}): names that begin with 'checkpoint.' are ckptcore's own; give another stem"
            )

    @property
    def name(self) -> str:
        """safetensors"""
        return "safetensors"

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse names that collide, whatever is done.

        Raises:
            NameCollisionError
        """
        _names(tree)

    def arrays_by_object(self, tree: TreeMetadata) -> Sequence[Sequence[int]]:
        """Arrays per file; wide elements first, so that every element lies aligned to its size."""
        arrays = [
            (leaf, record.spec)
            for leaf, record in enumerate(tree.leaves)
            if isinstance(record, ArrayRecord) and leaf not in tree.aliases
        ]
        files: list[list[int]] = [[]]
        room = self.max_file_bytes
        for leaf, spec in sorted(arrays, key=lambda array: -array[1].numpy_dtype.itemsize):
            nbytes = spec.nbytes
            if nbytes > room and files[-1]:
                files.append([])
                room = self.max_file_bytes
            files[-1].append(leaf)
            room -= nbytes
        return files

    def file_names(self, tree: TreeMetadata) -> Sequence[str]:
        """The names of the files that a tree is written to, without the index."""
        return _file_names(self.stem, len(self.arrays_by_object(tree)))

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the files whose arrays this process holds.

        Raises:
            AtomicityError: if this process holds a part of an array only, or some of the arrays of a file only.
        """
        plan = snapshot.plan
        items = _items_by_leaf(plan)
        files = self.arrays_by_object(plan.tree)
        file_names = _file_names(self.stem, len(files))
        own = [
            number
            for number, leaves in enumerate(files)
            if any(leaf in items for leaf in leaves) or (not leaves and plan.rank == 0)
        ]
        names = _names(plan.tree)
        for number in own:
            missing = [leaf for leaf in files[number] if leaf not in items]
            if missing:
                raise AtomicityError(
                    f"the safetensors layout writes each file from one process, and process {plan.rank} holds other arrays of "
                    f"{file_names[number]} than {names[missing[0]]!r}; gather them on one rank first, or use a layout that writes "
                    "from several processes"
                )
        leaf_column: list[int] = []
        file_column: list[int] = []
        offsets: list[int] = []
        for number in own:
            header: dict[str, JSON] = {_METADATA: _metadata(plan.tree, names, files[number])}
            position = 0
            segments: list[Segment] = []
            positions: list[int] = []
            for leaf in files[number]:
                of_leaf = items[leaf]
                spec = plan.items[of_leaf[0]].spec
                dtype, shape = _physical(spec)
                header[names[leaf]] = {
                    "dtype": dtype,
                    "shape": shape,
                    "data_offsets": [position, position + spec.nbytes],
                }
                positions.append(position)
                segments.extend(_segments(snapshot, of_leaf))
                position += spec.nbytes
            head = _encode_header(header, position)
            leaf_column.extend(files[number])
            file_column.extend([number] * len(positions))
            offsets.extend([len(head) + start for start in positions])
            store.write(file_names[number], [BytesSegment(head), *segments])
        return {"leaf": leaf_column, "file": file_column, "offset": offsets} if own else None

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Put together where the processes wrote arrays, and write the index where there are several files.

        Raises:
            CheckpointError: if a process wrote other files than these, because its layout has other options.
        """
        files = self.arrays_by_object(tree)
        file_names = _file_names(self.stem, len(files))
        states: list[Any] = [receipt.state for receipt in receipts if receipt.state is not None]
        _expect_files(file_names, files, receipts)
        offsets = {
            leaf: offset for state in states for leaf, offset in zip(state["leaf"], state["offset"], strict=True)
        }
        if len(files) > 1:
            names = _names(tree)
            weight_map = {names[leaf]: key for key, leaves in zip(file_names, files, strict=True) for leaf in leaves}
            index: JSON = {"metadata": {"total_size": tree.nbytes}, "weight_map": weight_map}
            store.put(f"{self.stem}.safetensors.index.json", json.dumps(index, indent=2).encode())
        return {
            "files": file_names,
            "leaf": [leaf for leaves in files for leaf in leaves],
            "file": [number for number, leaves in enumerate(files) for _ in leaves],
            "offset": [offsets[leaf] for leaves in files for leaf in leaves],
        }

    def read(self, plan: ReadPlan, buffers: Sequence[HostArray], store: ReadStore) -> Iterator[int]:
        """Read every box out of its array's bytes."""
        places = self._known.places(plan.tree, plan.state)
        reads = []
        for number, (item, buffer) in enumerate(zip(plan.items, buffers, strict=True)):
            place = places.get(item.leaf)
            if place is None:
                raise CorruptCheckpointError(f"the checkpoint does not say where leaf {item.leaf} is stored")
            key, offset = place
            record = plan.tree.leaves[item.leaf]
            assert isinstance(record, ArrayRecord)  # a plan has no other items
            tile = Box.whole(record.spec.shape)
            reads.append(TileRead(key, offset, tile, buffer.itemsize, ((number, item.box, buffer),)))
        yield from store.read_tiles(_shared_tiles(reads))

    def extents(self, tree: TreeMetadata, state: JSON) -> Iterator[tuple[int, str, int, int]]:
        """Where each array lies."""
        for leaf, (key, offset) in self._known.places(tree, state).items():
            record = tree.leaves[leaf]
            if isinstance(record, ArrayRecord):
                yield leaf, key, offset, offset + record.spec.nbytes

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """A file ``*.safetensors``, an index, or a directory that has one of them."""
        found = inspect_files(store, entry)
        if found is None:
            return None
        entries, metadata = found
        return _inspection(entries, metadata)


def _names(tree: TreeMetadata) -> dict[int, str]:
    arrays = {leaf: tree.paths[leaf] for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    return leaf_names(arrays, reserved=(_METADATA,))


def _metadata(tree: TreeMetadata, names: Mapping[int, str], leaves: Collection[int]) -> dict[str, JSON]:
    here = set(leaves)
    metadata: dict[str, JSON] = {
        names[alias]: names[target] for alias, target in tree.aliases.items() if target in here
    }
    metadata["format"] = "pt"  # Hugging Face loaders ask for it; it says nothing of who wrote the file
    return metadata


def _items_by_leaf(plan: WritePlan) -> dict[int, list[int]]:
    """By leaf the numbers of the items that together are all of it, in C order.

    Raises:
        AtomicityError: if this process does not hold all of an array.
        PluginError: if several items of one array are not runs of its elements.
    """
    items: dict[int, list[int]] = {}
    for number, item in enumerate(plan.items):
        items.setdefault(item.leaf, []).append(number)
    for leaf, numbers in items.items():
        found = [plan.items[number] for number in numbers]
        if sum(box.size for item in found for box in item.boxes) != found[0].spec.size:
            raise AtomicityError(
                "the safetensors layout writes whole arrays from one process, and this process holds a part of "
                f"{format_path(plan.tree.paths[leaf])}; gather it first or use a layout that writes from several processes"
            )
        if len(numbers) == 1:
            continue
        stop = 0
        for item in found:
            extent = run_extent(item.spec.shape, item.boxes[0]) if len(item.boxes) == 1 else None
            if extent is None or extent[0] != stop:
                raise PluginError(
                    f"{format_path(plan.tree.paths[leaf])} is given in {len(numbers)} pieces; expected runs of its elements, one "
                    f"behind the other, found {item.boxes[:3]} after element {stop}"
                )
            stop = extent[1]
    return items


def _segments(snapshot: Snapshot, items: Sequence[int]) -> list[ArraySegment]:
    """The elements of an array, a segment for each item of it."""
    whole = Box.whole(snapshot.plan.items[items[0]].spec.shape)
    return [
        _segment(snapshot, number, whole if len(items) == 1 else snapshot.plan.items[number].boxes[0])
        for number in items
    ]


def _segment(snapshot: Snapshot, item_number: int, box: Box) -> ArraySegment:
    item = snapshot.plan.items[item_number]

    def open_arrays() -> Sequence[tuple[Box, HostArray]]:
        return tuple(zip(item.boxes, snapshot.take(item_number), strict=True))

    def close_arrays() -> None:
        snapshot.release(item_number)

    return ArraySegment(box, item.spec.numpy_dtype.itemsize, open_arrays, close_arrays)


def _physical(spec: ArraySpec) -> tuple[str, list[int]]:
    """The dtype and shape that the header states for an array."""
    shape = list(spec.shape)
    if (known := FORMAT_DTYPES.get(spec.dtype)) is not None:
        return known, shape
    dtype = spec.numpy_dtype
    if dtype.kind in "mM":
        return "I64", shape
    return "U8", shape if dtype.itemsize == 1 else [*shape, dtype.itemsize]


def _encode_header(header: Mapping[str, JSON], data_bytes: int) -> bytes:
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    alignment = _LARGE_ALIGNMENT if data_bytes > 1 << 20 else _ALIGNMENT
    padded = -(-(8 + len(encoded)) // alignment) * alignment - 8
    return padded.to_bytes(8, "little") + encoded.ljust(padded)


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _places(tree: TreeMetadata, state: JSON) -> dict[int, tuple[str, int]]:
    """By leaf: the file and the offset of its first element, in bytes. The state may be hostile."""
    try:
        columns: Any = state  # what is caught below is what a hostile one raises
        files, leaves, numbers, offsets = (columns[name] for name in ("files", "leaf", "file", "offset"))
        places = {}
        for leaf, number, offset in zip(leaves, numbers, offsets, strict=True):
            if type(leaf) is not int or type(number) is not int or type(offset) is not int:
                raise TypeError("a number is expected")
            if not (0 <= leaf < len(tree.leaves) and 0 <= number and 0 <= offset):
                raise IndexError(f"leaf {leaf}, file {number}, offset {offset}")
            key = files[number]
            if not isinstance(key, str):
                raise TypeError("a file name is expected")
            places[leaf] = (key, offset)
        return places
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise CorruptCheckpointError(f"the safetensors layout cannot read where arrays are: {error}") from error


def _shared_tiles(reads: Sequence[TileRead]) -> list[TileRead]:
    """Put the targets of one array together, so that its bytes are read once."""
    tiles: dict[tuple[str, int], TileRead] = {}
    for read in reads:
        place = (read.key, read.offset)
        first = tiles.get(place)
        if first is None or (first.box, first.itemsize) != (read.box, read.itemsize):
            tiles[place if first is None else (read.key, -1 - len(tiles))] = read
        else:
            tiles[place] = TileRead(read.key, read.offset, read.box, read.itemsize, (*first.targets, *read.targets))
    return list(tiles.values())


def _expect_files(names: Sequence[str], files: Sequence[Sequence[int]], receipts: Sequence[Receipt]) -> None:
    """Make sure that all processes mean the same files: the options of a layout are no part of what they agree on."""
    file_of = {leaf: number for number, leaves in enumerate(files) for leaf in leaves}
    for receipt in receipts:
        state: Any = receipt.state or {"leaf": (), "file": ()}
        written = {record.key for record in receipt.objects}
        for leaf, number in zip(state["leaf"], state["file"], strict=True):
            if number != file_of[leaf] or names[number] not in written:
                raise CheckpointError(
                    f"process {receipt.rank} wrote {', '.join(sorted(written))}, where the leader expects its arrays in "
                    f"{names[file_of[leaf]]}: give SafetensorsLayout the same options in every process"
                )


def _inspection(entries: Sequence[TensorEntry], metadata: Mapping[str, JSON]) -> Inspection:
    files = sorted({entry.key for entry in entries})
    numbers = {key: number for number, key in enumerate(files)}
    skeleton = Node("dict", tuple([entry.name for entry in entries]), (LEAF,) * len(entries))
    state: JSON = {
        "files": files,
        "leaf": list(range(len(entries))),
        "file": [numbers[entry.key] for entry in entries],
        "offset": [entry.offset for entry in entries],
    }
    tree = TreeMetadata(skeleton, tuple([ArrayRecord(entry.spec) for entry in entries]))
    return Inspection(tree, state, "safetensors", dict(metadata))
