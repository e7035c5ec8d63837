"""The layout `safetensors`.

The format (https://github.com/huggingface/safetensors): 8 bytes of little-endian length, a JSON header of that many
bytes ``{name: {"dtype", "shape", "data_offsets"}, "__metadata__": {str: str}}``, then the elements, little endian, in C
order, without gaps. A checkpoint above `max_file_bytes` is split into ``model-00001-of-00002.safetensors`` and so on,
which ``model.safetensors.index.json`` lists: ``{"metadata": {"total_size": bytes}, "weight_map": {name: file}}``. A
process writes a file if it has all elements of all arrays in it. If no process has, all arrays of that file are stored
in slices instead (see `safetensors_writing`).

In a partial save, the file names of a session contain the number of its first process, counted from 1, such as
``model-session-00001.safetensors``, because the total number of files is not known while they are written. Readers that
use the index accept any names.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Final

from ckptcore.builtin.safetensors_writing import (
    METADATA,
    PART,
    SHARDING,
    aligned_header,
    file_metadata,
    file_names,
    header_entry,
    write_slices,
)
from ckptcore.errors import CheckpointError, PluginError, UnsupportedLeafError
from ckptcore.io.elements import flat_range
from ckptcore.model.arrays import Box, HostArray
from ckptcore.model.metadata import ArrayRecord, TreeMetadata
from ckptcore.model.transfer import (
    ArraySegment,
    BytesSegment,
    Receipt,
    Segment,
    WritePlan,
)
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

_STEM_CHARACTERS: Final = frozenset("_.-" + string.ascii_letters + string.digits)
_MAX_STEM_CHARACTERS: Final = 128


@dataclass(frozen=True, slots=True)
class SafetensorsLayout(Layout):
    """One ``model.safetensors``, or several files with an index.

    Dtypes that safetensors lacks (complex128, int4, some float8) are stored as U8 with the bytes of an element as a
    last axis (no axis for one byte), and datetime64 and timedelta64 as I64. The root of the checkpoint records their
    dtypes. Tied arrays are stored under the first name; the metadata of the header lists the others, as
    `safetensors.torch.save_model` does.

    Attributes:
        max_file_bytes: maximum size of the elements in a file, in bytes. A larger array has a separate file.
        stem: the stem of file names, for software that expects another one than ``model``: ``adapter_model`` for PEFT,
            ``diffusion_pytorch_model`` for diffusers.
        metadata: entries to add to the ``__metadata__`` of every file, names and values as str. An entry ``format``
            replaces ``"format": "pt"``.
        standalone: True for files that are handed on without their root, as `ckptcore.copy` with a subtree writes
            them. Other files say in their metadata that they are part of a checkpoint, and a directory of them that
            has lost its root is refused.

    Raises:
        ValueError: the stem is not allowed in file names, or metadata is not a mapping of str to str, or has a
            reserved name, ``DCP_SHARDING_INFO`` or ``__ckptcore__``.
    """

    capabilities = LayoutCapabilities(sessions=True)

    max_file_bytes: int = 5_000_000_000
    stem: str = "model"
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    standalone: bool = field(default=False, kw_only=True)
    _tag: str = field(default="", repr=False, kw_only=True)

    def __post_init__(self) -> None:
        stem = self.stem
        if (
            not (isinstance(stem, str) and 0 < len(stem) <= _MAX_STEM_CHARACTERS and _STEM_CHARACTERS.issuperset(stem))
            or stem[0] in ".-"
        ):
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
        """Refuse trees in which names collide.

        Raises:
            NameCollisionError
        """
        _names(tree)

    def arrays_by_object(self, tree: TreeMetadata) -> Sequence[Sequence[int]]:
        """Return the arrays of each file, wide elements first, so that every element is aligned to its size."""
        arrays = [
            (-record.spec.numpy_dtype.itemsize, leaf, prod(record.spec.shape))
            for leaf, record in enumerate(tree.leaves)
            if isinstance(record, ArrayRecord) and leaf not in tree.aliases
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
        return file_names(f"{self.stem}.{self._tag}" if self._tag else self.stem, len(self.arrays_by_object(tree)))

    def with_own_names(self, tag: str) -> SafetensorsLayout:
        """Return a layout for files such as ``model.<tag>.safetensors``, which an index lists even if there is one."""
        return replace(self, _tag=tag)

    @property
    def index_name(self) -> str | None:
        """The index, if files have names of their own."""
        return self._index_key if self._tag else None

    @property
    def _index_key(self) -> str:
        return f"{self.stem}.safetensors.index.json"

    def write(self, snapshot: Snapshot, store: WriteStore) -> JSON:
        """Write the files of which this process has all elements. Write its boxes of other arrays as slices."""
        plan = snapshot.plan
        items = _items_by_leaf(plan)
        files = self.arrays_by_object(plan.tree)
        keys: Sequence[str] = self.file_names(plan.tree)
        if plan.session is not None:
            keys = file_names(f"{self.stem}-session-{plan.session + 1:05d}", len(files))
        names = _names(plan.tree)
        own = _own_files(plan, items, files)
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
                about = file_metadata(plan.tree, names, files[number], self.metadata, standalone=self.standalone)
                header: dict[str, JSON] = {METADATA: about}
                position = 0
                segments: list[Segment] = []
                positions: list[int] = []
                for leaf in files[number]:
                    record = _array_record(plan.tree, leaf)
                    dtype, shape = header_entry(record)
                    nbytes = record.spec.nbytes
                    header[names[leaf]] = {
                        "dtype": dtype,
                        "shape": shape,
                        "data_offsets": [position, position + nbytes],
                    }
                    positions.append(position)
                    segments.extend(_segments(snapshot, items.pop(leaf, ())))
                    position += nbytes
                head = aligned_header(header, position)
                leaf_column.extend(files[number])
                file_column.extend([number] * len(positions))
                offsets.extend([len(head) + start for start in positions])
                yield keys[number], [BytesSegment(head), *segments]

        store.write_many(objects())
        left = [number for numbers in items.values() for number in numbers]
        if not own and not left and plan.session is None:
            return None
        state: dict[str, JSON] = {"leaf": leaf_column, "file": file_column, "offset": offsets}
        if plan.session is not None:
            state["files"], state["name"] = keys, [names[leaf] for leaf in leaf_column]
        if left:
            slices = write_slices(
                snapshot,
                left,
                names,
                store,
                stem=self.stem,
                max_file_bytes=self.max_file_bytes,
                metadata=self.metadata,
                standalone=self.standalone,
            )
            state["slices"] = slices.to_json()
        return state

    def finish(self, tree: TreeMetadata, receipts: Sequence[Receipt], store: WriteStore) -> JSON:
        """Merge the columns of all processes. Write the index if there are several files, and no slices.

        Raises:
            CheckpointError: a process wrote different files, because its layout has different options.
        """
        if any(isinstance(receipt.state, dict) and "files" in receipt.state for receipt in receipts):
            return _finish_sessions(tree, receipts, self, store)
        files = self.arrays_by_object(tree)
        keys = list(self.file_names(tree))
        states: list[Any] = [receipt.state for receipt in receipts if receipt.state is not None]
        _expect_files(keys, files, receipts)
        offsets = {
            leaf: offset for state in states for leaf, offset in zip(state["leaf"], state["offset"], strict=True)
        }
        slices = ChunkColumns()
        for state in states:
            if "slices" in state:
                slices.extend(state["slices"], tree, offsets)
        if slices:
            # Drop the files with an array that is in slices: no process wrote them.
            written = [number for number, leaves in enumerate(files) if leaves and offsets.keys() >= set(leaves)]
            files, keys = [files[number] for number in written], [keys[number] for number in written]
        elif len(files) > 1 or self._tag:
            names = _names(tree)
            weight_map = {names[leaf]: key for key, leaves in zip(keys, files, strict=True) for leaf in leaves}
            index: JSON = {"metadata": {"total_size": tree.nbytes}, "weight_map": weight_map}
            store.put(self._index_key, json.dumps(index, indent=2).encode())
        state = {
            "files": keys,
            "leaf": [leaf for leaves in files for leaf in leaves],
            "file": [number for number, leaves in enumerate(files) for _ in leaves],
            "offset": [offsets[leaf] for leaves in files for leaf in leaves],
        }
        return {**state, "slices": slices.to_json()} if slices else state

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


def _finish_sessions(
    tree: TreeMetadata, receipts: Sequence[Receipt], layout: SafetensorsLayout, store: WriteStore
) -> JSON:
    """Combine the columns of sessions, and write the index. Without arrays, write one empty file.

    The index lists the names in the files. As in any save, there is no index if arrays are in slices.
    """
    states: list[Any] = [receipt.state for receipt in receipts]
    locations: dict[int, tuple[str, int, str]] = {}
    for state in states:
        columns = zip(state["leaf"], state["file"], state["offset"], state["name"], strict=True)
        locations.update({leaf: (state["files"][file], offset, name) for leaf, file, offset, name in columns})
    slices = ChunkColumns()
    for state in states:
        if "slices" in state:
            slices.extend(state["slices"], tree, locations)
    keys = list(dict.fromkeys([key for key, _, _ in locations.values()]))
    if not slices and locations:
        weight_map = {name: key for key, _, name in locations.values()}
        index: JSON = {"metadata": {"total_size": tree.nbytes}, "weight_map": weight_map}
        store.put(f"{layout.stem}.safetensors.index.json", json.dumps(index, indent=2).encode())
    elif not slices:
        keys = [f"{layout.stem}.safetensors"]
        about = file_metadata(tree, {}, (), layout.metadata, standalone=layout.standalone)
        store.put(keys[0], aligned_header({METADATA: about}, 0))
    numbers = {key: number for number, key in enumerate(keys)}
    state = {
        "files": keys,
        "leaf": list(locations),
        "file": [numbers[key] for key, _, _ in locations.values()],
        "offset": [offset for _, offset, _ in locations.values()],
    }
    return {**state, "slices": slices.to_json()} if slices else state


def _names(tree: TreeMetadata) -> dict[int, str]:
    arrays = {leaf: tree.paths[leaf] for leaf, record in enumerate(tree.leaves) if isinstance(record, ArrayRecord)}
    return leaf_names(arrays, reserved=(METADATA,))


def _items_by_leaf(plan: WritePlan) -> dict[int, list[int]]:
    """Return the numbers of the items of each leaf. Several items of an array are in C order.

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


def _own_files(plan: WritePlan, items: Mapping[int, Sequence[int]], files: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of the files of which this process has all elements.

    Files without elements belong to the leader; in a session to its first process, if they contain arrays.
    """
    held = {
        leaf: sum([box.size for number in numbers for box in plan.items[number].boxes])
        for leaf, numbers in items.items()
    }
    own = []
    for number, leaves in enumerate(files):
        sizes = [(leaf, size) for leaf in leaves if (size := prod(_array_record(plan.tree, leaf).spec.shape))]
        whole = all(held.get(leaf) == size for leaf, size in sizes)
        first = plan.rank == (plan.session or 0) and (leaves or plan.session is None)
        if whole if sizes else first:
            own.append(number)
    return own


def _array_record(tree: TreeMetadata, leaf: int) -> ArrayRecord:
    record = tree.leaves[leaf]
    assert isinstance(record, ArrayRecord)  # plans have no other items
    return record


def _segments(snapshot: Snapshot, items: Sequence[int]) -> list[ArraySegment]:
    """Return the elements of an array, one segment for each item; none if the array is empty."""
    plan = snapshot.plan
    segments = []
    for number in items:
        item = plan.items[number]
        if item.spec.size:
            box = Box.whole(item.spec.shape) if len(items) == 1 else item.boxes[0]
            open_arrays = partial(_boxes_with_arrays, snapshot, number)
            release = partial(snapshot.release, number)
            segments.append(ArraySegment(box, item.spec.numpy_dtype.itemsize, open_arrays, release))
        else:
            snapshot.release(number)
    return segments


def _boxes_with_arrays(snapshot: Snapshot, number: int) -> Sequence[tuple[Box, HostArray]]:
    return tuple(zip(snapshot.plan.items[number].boxes, snapshot.take(number), strict=True))


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
