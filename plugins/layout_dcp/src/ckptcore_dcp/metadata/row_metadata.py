"""What a ``.metadata`` says whose pickle was read with rows: columns, without an object for each chunk.

It says what `PickledMetadata` would say of the same pickle, or refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ckptcore.model import HostArray
from ckptcore_dcp.dtypes import spec_and_kind
from ckptcore_dcp.metadata.chunk_places import PlaceTable, keys_of_boxes, places_of_chunks
from ckptcore_dcp.metadata.chunk_rows import ChunkRows, ChunkTableColumns
from ckptcore_dcp.metadata.entries import DcpMetadata, DcpTensor, DcpValue
from ckptcore_dcp.metadata.pickled import PickledMetadata
from ckptcore_dcp.metadata.row_reading import Content, MetadataRows, Rows
from ckptcore_dcp.pickles import Value
from ckptcore_dcp.pickles.row_layouts import MOST_AXES
from ckptcore_dcp.pickles.rows import Row

__all__ = ["metadata_with_rows"]

_ROWS: Final = frozenset({Row})


def metadata_with_rows(value: Value, rows: MetadataRows, reader: PickledMetadata) -> DcpMetadata:
    """What a pickle says.

    Args:
        value: its value, with `Row` in the place of objects.
        rows: what these hold.
        reader: of the same file.

    Raises:
        CorruptCheckpointError: it says nothing, or there are rows where objects are looked for.
        UnsupportedLeafError: see `read_metadata`.
    """
    state = reader.state_of(value, "Metadata")
    places = _places(state.get("storage_data"), rows, reader)
    found = _Tensors(rows, reader)
    values: dict[str, DcpValue] = {}
    places_of_values = _values(places)
    for name, entry in reader.mapping(state.get("state_dict_metadata"), "state_dict_metadata").items():
        if type(name) is not str:
            reader.refuse("the name of an entry is no text")
        if entry.__class__ is Row:
            found.add_row(name, entry)
        elif reader.is_a(entry, "BytesStorageMetadata"):
            if name not in places_of_values:
                reader.refuse(f"nothing says where the value {name!r} is stored")
            values[name] = places_of_values[name]
        else:
            found.add(name, entry)
    save_id, checkpoint_id = reader.storage_meta(state.get("storage_meta"))
    paths = reader.paths(state.get("planner_data"))
    return DcpMetadata(found.tensors(places, places.without_offsets()), values, paths, save_id, checkpoint_id)


def _values(places: PlaceTable) -> Mapping[str, DcpValue]:
    """By name, the places without offsets: those of values, and of some tensors of one chunk."""
    files = list(places.files)
    return {
        name: DcpValue(
            files[places.file[row]], int(places.offset[row]), int(places.length[row]), places.transforms.get(row, ())
        )
        for name, row in places.without_offsets().items()
    }


def _places(listed: Value, rows: MetadataRows, reader: PickledMetadata) -> PlaceTable:
    """Where each part lies, in the order of the pickle."""
    numbers: list[int] = []
    single: dict[Any, Value] = {}
    single_at: list[int] = []
    for at, (index, info) in enumerate(reader.mapping(listed, "storage_data").items()):
        if index.__class__ is not Row:
            single[index] = info
            single_at.append(at)
            numbers.append(-1)
        elif index is info:
            numbers.append(index)
        else:
            reader.refuse("the place of a part is one of another part")
    column = np.fromiter(numbers, np.int64, len(numbers))
    others = list(reader.each_place(single))
    table = PlaceTable.empty(len(numbers), _most_axes(rows, [len(offset or ()) for _, offset, _ in others], reader))
    for row, (name, offset, place) in zip(single_at, others, strict=True):
        table.set(row, name, offset, place)
    for of, chosen, found in _located(rows, column, "places", reader):
        table.name[chosen] = _numbered(of, found, "fqn", table.names, reader, is_path=False)
        table.file[chosen] = _numbered(of, found, "relative_path", table.files, reader, is_path=True)
        table.axes[chosen] = of.numbers(found, "offsets.axes")
        table.offsets[chosen] = of.sizes(found, "offsets", table.offsets.shape[1])
        table.offset[chosen] = of.numbers(found, "offset")
        table.length[chosen] = of.numbers(found, "length")
    return table


def _numbered(
    rows: Rows, found: HostArray, name: str, known: dict[str, int], reader: PickledMetadata, *, is_path: bool
) -> HostArray:
    """Numbers for the texts of rows; the same one for the same text."""
    places, inverse = np.unique(rows.numbers(found, name), return_inverse=True)
    texts = [rows.texts[place] for place in places.tolist()]
    if is_path:
        for text in set(texts):
            reader.plain_path(text)
    numbers = np.array([known.setdefault(text, len(known)) for text in texts], np.int64)
    column: HostArray = numbers[inverse]
    return column


def _located(
    rows: MetadataRows, numbers: HostArray, content: Content, reader: PickledMetadata
) -> Iterator[tuple[Rows, HostArray, HostArray]]:
    """The rows among numbers, which have to be of one content."""
    (chosen,) = np.nonzero(numbers >= 0)
    for of, part, found in rows.located(numbers[chosen]):
        if of.content != content:
            reader.refuse(f"there are {of.content} where {content} are looked for")
        yield of, chosen[part], found


def _most_axes(rows: MetadataRows, others: Iterable[int], reader: PickledMetadata) -> int:
    """Of any size in a row, and of others, where these have no more than a row may have: each row gets as many."""
    most = max(others, default=0)
    if most > MOST_AXES:
        reader.refuse(f"a part has {most} axes, and rows have at most {MOST_AXES}")
    columns = [of.table.columns.get(f"{name}.axes") for of in rows.tables for name in ("offsets", "sizes", "size")]
    return max([most, *[int(column.max(initial=0)) for column in columns if column is not None]])


@dataclass(slots=True)
class _Tensors:
    """Tensors as they are collected.

    Attributes:
        rows, reader: see `metadata_with_rows`.
        names: of all of them.
        entry: the number of the row that a tensor with its chunk is; -1 where it is an object.
        kinds: dtype and whether it was trained.
        shapes: elements along each axis.
        counts: how many chunks are listed.
        chunks: for each of the chunks of objects the number of its row; -1 where it is an object too.
        boxes: of those that are objects, offsets and sizes.
    """

    rows: MetadataRows
    reader: PickledMetadata
    names: list[str] = field(default_factory=list)
    entry: list[int] = field(default_factory=list)
    kinds: list[tuple[str, bool]] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def add_row(self, name: str, number: int) -> None:
        """A tensor that is a row, as is its only chunk."""
        self.names.append(name)
        self.entry.append(number)
        self.kinds.append(("", False))
        self.shapes.append(())
        self.counts.append(1)
        self.chunks.append(number)

    def add(self, name: str, entry: Value) -> None:
        """A tensor that is an object; some of its chunks may be rows."""
        dtype, requires_grad, shape, listed = self.reader.tensor_of(name, entry)
        self.names.append(name)
        self.entry.append(-1)
        self.kinds.append((dtype, requires_grad))
        self.shapes.append(shape)
        self.counts.append(len(listed))
        if _ROWS.issuperset(map(type, listed)):
            self.chunks += listed  # type: ignore[arg-type]  # numbers, as just seen
            return
        for chunk in listed:
            if chunk.__class__ is Row:
                self.chunks.append(chunk)
            else:
                self.chunks.append(-1)
                self.boxes.append(self.reader.box(chunk))

    def tensors(self, places: PlaceTable, without_offsets: Mapping[str, int]) -> Mapping[str, DcpTensor]:
        """All of them, with those of their chunks that have a place; that of an only one may have no offsets."""
        entries = np.fromiter(self.entry, np.int64, len(self.entry))
        self._read_rows(entries)
        counts = np.array(self.counts, np.int64)
        owner = np.repeat(np.arange(len(counts)), counts)
        axes, offsets, sizes = self._boxes(entries[owner] >= 0)
        offsets, sizes = self._within(owner, axes, offsets, sizes)
        ranks = np.array([len(shape) for shape in self.shapes], np.int64)
        place = places_of_chunks(self.names, ranks, owner, offsets, places)
        for chunk in np.flatnonzero((place < 0) & (counts[owner] == 1)).tolist():
            place[chunk] = without_offsets.get(self.names[owner[chunk]], -1)
        keep = place >= 0
        keys = keys_of_boxes([owner[keep], *offsets[keep].T])
        if len(np.unique(keys)) < len(keys):
            # The first of those that are the same box.
            _, first = np.unique(keys_of_boxes([keys, *sizes[keep].T]), return_index=True)
            chosen = np.flatnonzero(keep)[np.sort(first)]
        else:
            chosen = np.flatnonzero(keep)
        at = place[chosen]
        transforms: dict[int, tuple[str, ...]] = {}
        if places.transforms:
            transforms = {
                row: places.transforms[there] for row, there in enumerate(at.tolist()) if there in places.transforms
            }
        columns = ChunkTableColumns(
            axes[chosen],
            offsets[chosen],
            sizes[chosen],
            places.file[at],
            places.offset[at],
            places.length[at],
            list(places.files),
            transforms,
        )
        bounds = np.searchsorted(owner[chosen], np.arange(len(counts) + 1)).tolist()
        return {
            name: DcpTensor(dtype, shape, ChunkRows(columns, start, stop), requires_grad)
            for name, (dtype, requires_grad), shape, start, stop in zip(
                self.names, self.kinds, self.shapes, bounds, bounds[1:], strict=False
            )
        }

    def _read_rows(self, entries: HostArray) -> None:
        """Fill in what tensors are that are rows."""
        kinds: dict[int, tuple[str, bool]] = {}
        possible: set[tuple[tuple[int, ...], str]] = set()
        for of, chosen, found in _located(self.rows, entries, "tensors", self.reader):
            axes = of.numbers(found, "size.axes").tolist()
            sizes = of.sizes(found, "size", max(axes)).tolist()
            for tensor, row, count, size in zip(chosen.tolist(), found.tolist(), axes, sizes, strict=True):
                properties = of.properties[row]
                kind = kinds.get(id(properties))
                if kind is None:
                    kind = kinds[id(properties)] = self.reader.properties(self.names[tensor], properties)
                self.kinds[tensor] = kind
                shape = self.shapes[tensor] = tuple(size[:count])
                if (shape, kind[0]) not in possible:
                    if not spec_and_kind(kind[0], shape)[0].is_possible:
                        self.reader.refuse(f"no memory has addresses for the tensor {self.names[tensor]!r}")
                    possible.add((shape, kind[0]))
            self.reader.take(len(found))

    def _boxes(self, is_entry: HostArray) -> tuple[HostArray, HostArray, HostArray]:
        """How many axes each chunk has, and its offsets and sizes."""
        chunks = np.fromiter(self.chunks, np.int64, len(self.chunks))
        most = _most_axes(self.rows, [max(len(start), len(size)) for start, size in self.boxes], self.reader)
        axes: HostArray = np.zeros(len(chunks), np.int64)
        offsets: HostArray = np.zeros((len(chunks), most), np.int64)
        sizes: HostArray = np.zeros((len(chunks), most), np.int64)
        parts: Sequence[tuple[Content, HostArray]] = [
            ("tensors", np.where(is_entry, chunks, -1)),
            ("chunks", np.where(is_entry, -1, chunks)),
        ]
        for content, numbers in parts:
            for of, chosen, found in _located(self.rows, numbers, content, self.reader):
                axes[chosen] = of.numbers(found, "offsets.axes")
                offsets[chosen] = of.sizes(found, "offsets", most)
                sizes[chosen] = of.sizes(found, "sizes", most)
                if (of.numbers(found, "sizes.axes") != axes[chosen]).any():
                    self.reader.refuse("a chunk has sizes for other axes than offsets")
        for row, (start, size) in zip(np.flatnonzero(chunks < 0).tolist(), self.boxes, strict=True):
            if len(start) != len(size):
                self.reader.refuse("a chunk has sizes for other axes than offsets")
            axes[row] = len(start)
            offsets[row, : len(start)] = start
            sizes[row, : len(size)] = size
        return axes, offsets, sizes

    def _within(
        self, owner: HostArray, axes: HostArray, offsets: HostArray, sizes: HostArray
    ) -> tuple[HostArray, HostArray]:
        """Offsets and sizes, for as many axes as any tensor has, which lie within their tensors."""
        most = max(map(len, self.shapes), default=0)
        ranks = np.array([len(shape) for shape in self.shapes], np.int64)
        shapes = np.array([(*shape, *[0] * (most - len(shape))) for shape in self.shapes], np.int64)
        if (axes != ranks[owner]).any():
            self.reader.refuse("a chunk has other axes than its tensor")
        offsets, sizes = offsets[:, :most], sizes[:, :most]
        shapes = shapes.reshape(len(self.shapes), most)[owner, : offsets.shape[1]]
        if (offsets + sizes > shapes).any():
            self.reader.refuse("a chunk lies outside of its tensor")
        return offsets, sizes
