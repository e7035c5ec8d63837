"""The layout `safetensors`.

The format (https://github.com/huggingface/safetensors): 8 bytes of little-endian length, a JSON header of that many
bytes ``{name: {"dtype", "shape", "data_offsets"}, "__metadata__": {str: str}}``, then the elements, little endian, in C
order, without gaps. A checkpoint above `max_file_bytes` is split into ``model-00001-of-00002.safetensors`` and so on,
which ``model.safetensors.index.json`` lists: ``{"metadata": {"total_size": bytes}, "weight_map": {name: file}}``. A
process writes a file if it has all elements of all arrays of the file. If no process has all elements, the arrays of
that file are stored in slices instead.

Slices have the form of torch.distributed.checkpoint's ``HuggingFaceStorageWriter(save_distributed=True)``, so that
torch.distributed.checkpoint can load them (torch 2.13.0, hf_storage.py). The file names are ``shard-<process, from
1>-<stem>-<number>-of-<files of the process>.safetensors``. Each is a plain safetensors file in which a tensor is a box
of the array with the same name. ``DCP_SHARDING_INFO`` in its metadata is the JSON ``{name: {"saved_offsets": [...]}}``:
the start of each box.

In a partial save, the file names of a session contain the number of its first process, counted from 1, such as
``model-session-00001.safetensors``. The total number of files is not known while they are written. Readers that use the
index accept any names.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

from ckptcore.builtin.safetensors_files import (
    METADATA,
    PART,
    PART_VERSION,
    SHARDING,
    encode_file,
    file_names,
    header_entry,
)
from ckptcore.errors import CheckpointError, PluginError, UnsupportedLeafError
from ckptcore.io.elements import flat_range
from ckptcore.model.arrays import ArraySpec, Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import ArraySegment, BytesSegment, Receipt, Segment, WritePlan
from ckptcore.model.tree import JSON, format_path
from ckptcore.planning import ChunkColumns, ChunkTable, leaf_names
from ckptcore.protocols import (
    ChunkIndex,
    InspectedComposite,
    Inspection,
    Layout,
    LayoutCapabilities,
    ReadStore,
    Snapshot,
    WriteStore,
)

_STEM: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"


@dataclass(frozen=True, slots=True)
class SafetensorsLayout(Layout):
    """One ``model.safetensors``, or several files with an index.

    Dtypes that safetensors lacks (complex128, int4, some float8) are stored as U8. The bytes of an element are then a
    last axis, which is omitted if an element has one byte. datetime64 and timedelta64 are stored as I64. The root of
    the checkpoint records the real dtypes. Tied arrays are stored under the first name. The metadata of the header
    lists the other names, as `safetensors.torch.save_model` does.

    Attributes:
        max_file_bytes: maximum size of the elements in a file, in bytes. A larger array has a separate file.
        stem: the stem of file names, for software that does not expect ``model``. PEFT expects ``adapter_model``,
            diffusers expects ``diffusion_pytorch_model``.
        metadata: entries to add to the ``__metadata__`` of every file, names and values as str. An entry ``format``
            replaces ``"format": "pt"``.
        standalone: True for files that are used without their root, such as the files that `ckptcore.copy` writes for a
            subtree. False: the metadata of each file says that it is part of a checkpoint. Loads then refuse a
            directory that has lost its root.

    Raises:
        ValueError: the stem is not allowed in file names; the metadata is not a mapping of str to str; or the metadata
            has a reserved name, ``DCP_SHARDING_INFO`` or ``__ckptcore__``.
    """

    capabilities = LayoutCapabilities(sessions=True)

    max_file_bytes: int = 5_000_000_000
    stem: str = "model"
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    standalone: bool = field(default=False, kw_only=True)
    _tag: str = field(default="", repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.stem, str) or not re.fullmatch(_STEM, self.stem):
            raise ValueError(
                f"SafetensorsLayout(stem={self.stem!r}): use ASCII letters, digits, '_', '-' and '.', and do not start "
                "with '.' or '-': such as 'model' or 'adapter_model'"
            )
        if self.stem.startswith("checkpoint."):
            raise ValueError(
                f"SafetensorsLayout(stem={self.stem!r}): names that begin with 'checkpoint.' are reserved for "
                "ckptcore's own files; use another stem"
            )
        object.__setattr__(self, "metadata", dict(self.metadata))  # the caller may change its mapping while a save runs
        for name, text in self.metadata.items():
            if not isinstance(name, str) or not isinstance(text, str) or name in (SHARDING, PART):
                raise ValueError(
                    f"SafetensorsLayout(metadata={{{name!r}: {text!r}}}): names and values must be str, and the names "
                    f"{SHARDING} and {PART} are reserved; use another name, or json.dumps(...) of the value"
                )

    @property
    def name(self) -> str:
        """The name "safetensors"."""
        return "safetensors"

    def check(self, tree: TreeMetadata, size: int) -> None:
        """Refuse trees in which several arrays would get the same name.

        Raises:
            NameCollisionError
        """
        _names(tree)

    def arrays_by_object(self, tree: TreeMetadata) -> Sequence[Sequence[int]]:
        """Return the arrays of each file, wide elements first, so that every element is aligned to its size."""
        arrays = [
            (-record.spec.numpy_dtype.itemsize, leaf, prod(record.spec.shape))
            for leaf, record in tree.arrays.items()
            if leaf not in tree.aliases
        ]
        files: list[list[int]] = [[]]
        room = self.max_file_bytes
        for itemsize, leaf, size in sorted(arrays):
            nbytes = -itemsize * size
            if nbytes > room and files[-1]:
                files.append([])
                room = self.max_file_bytes
            files[-1].append(leaf)
            room -= nbytes
        return files

    def file_names(self, tree: TreeMetadata) -> Sequence[str]:
        """Return the names of the files of a tree, without the index."""
        return self._file_names(len(self.arrays_by_object(tree)))

    def _file_names(self, count: int) -> Sequence[str]:
        return file_names(f"{self.stem}.{self._tag}" if self._tag else self.stem, count)

    def with_own_names(self, tag: str) -> SafetensorsLayout:
        """Return a layout with file names such as ``model.<tag>.safetensors``. An index lists even a single file."""
        return replace(self, _tag=tag)

    @property
    def index_name(self) -> str | None:
        """The name of the index if file names have a tag (see `with_own_names`); otherwise None."""
        return self._index_key if self._tag else None

    @property
    def _index_key(self) -> str:
        return f"{self.stem}.safetensors.index.json"

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write each file if this process has all of its elements. Write boxes of the remaining arrays as slices."""
        plan = snapshot.plan
        items = _items_by_leaf(plan)
        files = self.arrays_by_object(plan.tree)
        keys = self._file_names(len(files))
        if plan.session is not None:
            keys = file_names(f"{self.stem}-session-{plan.session + 1:05d}", len(files))
        names, records = _names(plan.tree), plan.tree.arrays
        own = _own_files(plan, files)
        if self._tag and items.keys() - {leaf for number in own for leaf in files[number]}:
            raise UnsupportedLeafError(
                "overwrite='keep-other-files' replaces a checkpoint by an index of its files, and safetensors has no "
                "index for arrays that several processes write in slices: save with the layout dcp, to another "
                "location, or with overwrite='with-other-files', which deletes the other files too"
            )
        leaf_column: list[int] = []
        file_column: list[int] = []
        offsets: list[int] = []

        def objects() -> Iterator[tuple[str, Sequence[Segment]]]:
            for number in own:
                leaves = files[number]
                tensors = [(names[leaf], records[leaf]) for leaf in leaves]
                head, starts = encode_file(self._metadata_of(plan.tree, names, leaves), tensors)
                leaf_column.extend(leaves)
                file_column.extend([number] * len(leaves))
                offsets.extend(starts)
                segments = [segment for leaf in leaves for segment in _segments(snapshot, items.pop(leaf, ()))]
                yield keys[number], [BytesSegment(head), *segments]

        store.write_many(objects())
        # The remaining items belong to files for which no process has all elements.
        left = [number for numbers in items.values() for number in numbers]
        if not own and not left and plan.session is None:
            return None
        state: dict[str, JSON] = {"leaf": leaf_column, "file": file_column, "offset": offsets}
        if plan.session is not None:
            state["files"], state["name"] = keys, [names[leaf] for leaf in leaf_column]
        if left:
            state["slices"] = self._write_slices(snapshot, left, names, store).to_json()
        return state

    def _metadata_of(self, tree: TreeMetadata, names: Mapping[int, str], leaves: Collection[int]) -> dict[str, JSON]:
        """Return the metadata of a file: aliases of its leaves with the names of their arrays, and the user's entries.

        An entry of the user replaces any other entry of the same name, as in `safetensors.torch.save_model`.
        """
        here = set(leaves)
        metadata: dict[str, JSON] = {
            names[alias]: names[target] for alias, target in tree.aliases.items() if target in here
        }
        if not self.standalone:
            metadata[PART] = PART_VERSION
        metadata["format"] = "pt"  # Hugging Face loaders require it, whatever software wrote the file
        return {**metadata, **self.metadata}

    def _write_slices(
        self, snapshot: Snapshot, items: Sequence[int], names: Mapping[int, str], store: WriteStore
    ) -> ChunkColumns:
        """Write some items of a plan, given by their numbers, as slices into files of this process."""
        plan = snapshot.plan
        files = _files_of_slices(plan, items, self.max_file_bytes)
        releases = _Releases(snapshot, files)
        columns = ChunkColumns()

        def objects() -> Iterator[tuple[str, Sequence[Segment]]]:
            for number, slices in enumerate(files, start=1):
                key = f"shard-{plan.rank + 1:05d}-{self.stem}-{number:05d}-of-{len(files):05d}.safetensors"
                tensors: list[tuple[str, ArrayRecord]] = []
                begins: dict[str, JSON] = {}
                for part in slices:
                    item = plan.items[part.item]
                    # Packed elements are stored as bytes, because torch's reader of slices (hf_storage.py, torch
                    # 2.13.0) lacks their dtypes and expects shapes in the same unit as the offsets.
                    record = ArrayRecord(ArraySpec(part.box.shape, item.spec.dtype))
                    added_axes = len(header_entry(record)[1]) - len(part.box.start)
                    tensors.append((names[item.leaf], record))
                    begins[names[item.leaf]] = {"saved_offsets": [*part.box.start, *[0] * added_axes]}
                leaves = [plan.items[part.item].leaf for part in slices]
                metadata = self._metadata_of(plan.tree, names, leaves)
                metadata[SHARDING] = json.dumps(begins, separators=(",", ":"))
                head, starts = encode_file(metadata, tensors)
                for part, leaf, start in zip(slices, leaves, starts, strict=True):
                    columns.add(leaf, key, start, part.box)
                segments = [
                    ArraySegment(
                        part.box,
                        plan.items[part.item].spec.numpy_dtype.itemsize,
                        partial(_some_boxes, snapshot, part.item, part.positions),
                        partial(releases.release, part.item),
                    )
                    for part in slices
                ]
                yield key, [BytesSegment(head), *segments]

        store.write_many(objects())
        return columns

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Merge the columns of all processes. Write an index, unless there is only one file and it has the usual name.

        If arrays are in slices, no index is written.

        Raises:
            CheckpointError: a process wrote different files, because its layout has different options.
        """
        states: list[Any] = [receipt.state for receipt in receipts if receipt.state is not None]
        # If one state is from a session, treat all as such: a damaged state without files must fail here, or the
        # checkpoint would lack its arrays.
        sessions = states if any("files" in state for state in states) else []
        offsets = {
            leaf: offset for state in states for leaf, offset in zip(state["leaf"], state["offset"], strict=True)
        }
        divided = [state["slices"] for state in states if "slices" in state]
        slices = ChunkColumns.merged(divided, tree, offsets) if divided else {}
        has_slices = bool(slices.get("leaf"))
        key_of: dict[int, str] = {}
        for state in sessions:
            key_of.update(zip(state["leaf"], [state["files"][file] for file in state["file"]], strict=True))
        if not sessions:
            files = self.arrays_by_object(tree)
            keys = list(self._file_names(len(files)))
            _expect_files(keys, files, receipts)
            for key, leaves in zip(keys, files, strict=True):
                # If an array is in slices, no process wrote its file.
                key_of.update({leaf: key for leaf in leaves if leaf in offsets or not has_slices})
        keys = list(dict.fromkeys(key_of.values()))
        if not key_of and not has_slices:
            keys = list(self.file_names(tree))  # one file without arrays
            if sessions:  # not written yet: a session cannot know that no other session has arrays
                store.put(keys[0], encode_file(self._metadata_of(tree, {}, ()), ())[0])
        if not has_slices and keys != file_names(self.stem, 1):
            names = {leaf: name for state in sessions for leaf, name in zip(state["leaf"], state["name"], strict=True)}
            names = names or _names(tree)
            index: JSON = {
                "metadata": {"total_size": tree.nbytes},
                "weight_map": {names[leaf]: key for leaf, key in key_of.items()},
            }
            store.put(self._index_key, json.dumps(index, indent=2).encode())
        numbers = {key: number for number, key in enumerate(keys)}
        columns: dict[str, JSON] = {
            "files": keys,
            "leaf": list(key_of),
            "file": [numbers[key] for key in key_of.values()],
            "offset": [offsets[leaf] for leaf in key_of],
        }
        return {**columns, "slices": slices} if has_slices else columns

    @property
    def session_options(self) -> str:
        """The stem of file names."""
        return f"stem {self.stem!r}"

    def names_written(self, tree: TreeMetadata) -> Mapping[int, str]:
        """Return the names of all arrays, because headers contain every name."""
        return _names(tree)

    def renumbered(self, state: JSON, leaves: Sequence[int]) -> JSON:
        """Replace the columns of leaf numbers."""
        columns: Any = state  # the caller handles the errors of a hostile state
        result = {**columns, "leaf": [leaves[leaf] for leaf in columns["leaf"]]}
        if "slices" in columns:
            result["slices"] = {**columns["slices"], "leaf": [leaves[leaf] for leaf in columns["slices"]["leaf"]]}
        return result

    def index(self, tree: TreeMetadata, state: JSON) -> ChunkIndex:
        """Return the table of arrays and slices."""
        return ChunkTable(tree, state)

    def inspect(self, store: ReadStore, entry: str | None) -> Inspection | None:
        """Inspect a file of any name, an index, or a directory with a file ``*.safetensors`` or an index."""
        from ckptcore.builtin.safetensors_directories import inspect_files  # only for files of other software

        return inspect_files(store, entry)

    def inspect_composite(self, store: ReadStore) -> InspectedComposite | None:
        """Inspect the directory of a pipeline of diffusers."""
        from ckptcore.builtin.safetensors_directories import inspect_pipeline  # only for files of other software

        return inspect_pipeline(store)


def _names(tree: TreeMetadata) -> dict[int, str]:
    paths = tree.paths
    return leaf_names({leaf: paths[leaf] for leaf in tree.arrays}, reserved=(METADATA,))


def _items_by_leaf(plan: WritePlan) -> dict[int, list[int]]:
    """Return the numbers of the items of each leaf. If an array has several items, they are in C order.

    Raises:
        PluginError: several items of one array are not adjacent runs of its elements.
    """
    items: dict[int, list[int]] = {}
    for number, item in enumerate(plan.items):
        items.setdefault(item.leaf, []).append(number)
    for leaf, numbers in items.items():
        if len(numbers) == 1:
            continue
        stop = 0
        for item in [plan.items[number] for number in numbers]:
            extent = flat_range(item.spec.shape, item.boxes[0]) if len(item.boxes) == 1 else None
            if extent is None or extent[0] != stop:
                raise PluginError(
                    f"the plan divides {format_path(plan.tree.paths[leaf])} into {len(numbers)} items; expected "
                    f"adjacent runs of its elements, found {item.boxes[:3]} after element {stop}"
                )
            stop = extent[1]
    return items


def _own_files(plan: WritePlan, files: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of the files for which this process has all elements.

    The leader writes files without elements. In a session, the first process of the session writes such a file if it
    contains arrays.
    """
    # The elements of each array that this process lacks.
    arrays = plan.tree.arrays
    lacked = {leaf: prod(arrays[leaf].spec.shape) for leaves in files for leaf in leaves}
    has_elements = {leaf for leaf, size in lacked.items() if size}
    for item in plan.items:
        for box in item.boxes:
            lacked[item.leaf] -= box.size
    own = []
    for number, leaves in enumerate(files):
        first = plan.rank == (plan.session or 0) and (leaves or plan.session is None)
        if first if has_elements.isdisjoint(leaves) else not any(map(lacked.__getitem__, leaves)):
            own.append(number)
    return own


def _segments(snapshot: Snapshot, items: Sequence[int]) -> list[ArraySegment]:
    """Return the elements of an array, one segment for each item; none if the array is empty."""
    segments = []
    for number in items:
        item = snapshot.plan.items[number]
        if item.spec.size:
            box = item.boxes[0] if len(items) > 1 or len(item.boxes) == 1 else Box.whole(item.spec.shape)
            open_arrays = partial(_boxes_with_arrays, snapshot, number)
            release = partial(snapshot.release, number)
            segments.append(ArraySegment(box, item.spec.numpy_dtype.itemsize, open_arrays, release))
        else:
            snapshot.release(number)
    return segments


def _boxes_with_arrays(snapshot: Snapshot, number: int) -> Sequence[tuple[Box, HostArray]]:
    """Return the boxes of an item with their elements."""
    return tuple(zip(snapshot.plan.items[number].boxes, snapshot.take(number), strict=True))


def _some_boxes(snapshot: Snapshot, number: int, positions: Sequence[int]) -> Sequence[tuple[Box, HostArray]]:
    """Return some boxes of an item, by their positions, with their elements."""
    boxes = _boxes_with_arrays(snapshot, number)
    return [boxes[position] for position in positions]


def _expect_files(names: Sequence[str], files: Sequence[Sequence[int]], receipts: Sequence[Receipt]) -> None:
    """Check that all processes use the same files, because jobs do not compare the options of layouts."""
    file_of = {leaf: number for number, leaves in enumerate(files) for leaf in leaves}
    for receipt in receipts:
        state: Any = receipt.state or {"leaf": (), "file": ()}
        written = {record.key for record in receipt.objects}
        for leaf, number in zip(state["leaf"], state["file"], strict=True):
            if number != file_of[leaf] or names[number] not in written:
                raise CheckpointError(
                    f"process {receipt.rank} wrote {', '.join(sorted(written))}, but the leader expects its arrays "
                    f"in {names[file_of[leaf]]}. Pass SafetensorsLayout the same options in every process"
                )


_TOGETHER_BYTES: Final = 256 << 20
"""Approximate size of a group of arrays that have several separate boxes each, in bytes. Groups are written one after
the other, because an array stays in memory until its last box is written."""


class _Slice(NamedTuple):
    """A box of an array, stored as one tensor of a file.

    Attributes:
        item: the number of the item.
        positions: the positions of the boxes of the item that form this box.
        box: the box.
    """

    item: int
    positions: Sequence[int]
    box: Box


def _files_of_slices(plan: WritePlan, items: Sequence[int], max_file_bytes: int) -> list[list[_Slice]]:
    """Divide slices into files: at most one slice of each array per file, wide elements first for alignment."""
    order = sorted(items, key=lambda number: -plan.items[number].spec.numpy_dtype.itemsize)
    cut = [_slices(plan, number) for number in order]
    files = _fill_files(plan, [slices[0] for slices in cut if len(slices) == 1], max_file_bytes)
    several = [slices for slices in cut if len(slices) > 1]
    while several:
        together: list[list[_Slice]] = []
        nbytes = 0
        while several and (not together or nbytes < min(_TOGETHER_BYTES, max_file_bytes)):
            together.append(several.pop(0))
            nbytes += sum(_nbytes(plan, part) for part in together[-1])
        for number in range(max(map(len, together))):
            layer = [slices[number] for slices in together if number < len(slices)]
            files.extend(_fill_files(plan, layer, max_file_bytes))
    return files


def _fill_files(plan: WritePlan, slices: Sequence[_Slice], max_file_bytes: int) -> list[list[_Slice]]:
    files: list[list[_Slice]] = []
    room = 0
    leaves: set[int] = set()
    for part in slices:
        nbytes, leaf = _nbytes(plan, part), plan.items[part.item].leaf
        if not files or nbytes > room or leaf in leaves:
            files.append([])
            room = max_file_bytes
            leaves = set()
        files[-1].append(part)
        leaves.add(leaf)
        room -= nbytes
    return files


def _nbytes(plan: WritePlan, part: _Slice) -> int:
    return part.box.size * plan.items[part.item].spec.numpy_dtype.itemsize


def _slices(plan: WritePlan, number: int) -> list[_Slice]:
    """Return slices for the boxes of an item that are not empty: a single slice if together they form a box."""
    item = plan.items[number]
    filled = [position for position, box in enumerate(item.boxes) if box.size]
    if not filled:
        # An array without elements is still stored, as one empty tensor.
        return [] if item.spec.size else [_Slice(number, (0,), item.boxes[0])]
    boxes = [item.boxes[position] for position in filled]
    start = tuple(map(min, zip(*[box.start for box in boxes], strict=True)))
    stop = tuple(map(max, zip(*[box.stop for box in boxes], strict=True)))
    union = Box(start, stop)
    if union.size == sum([box.size for box in boxes]):  # boxes of an item do not overlap
        return [_Slice(number, tuple(filled), union)]
    return [_Slice(number, (position,), item.boxes[position]) for position in filled]


class _Releases:
    """Releases an item after the last of its slices. Thread-safe."""

    def __init__(self, snapshot: Snapshot, files: Sequence[Sequence[_Slice]]) -> None:
        self._snapshot = snapshot
        self._left = Counter([part.item for slices in files for part in slices])
        self._lock = threading.Lock()

    def release(self, item: int) -> None:
        with self._lock:
            self._left[item] -= 1
            last = self._left[item] == 0
        if last:
            self._snapshot.release(item)
