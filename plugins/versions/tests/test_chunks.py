"""The table of the chunks of a delta."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest
from ckptcore_testing import strategies
from ckptcore_testing.hostile_json import tampered
from ckptcore_versions.checksums import CRC32
from ckptcore_versions.chunks import (
    MAX_CHUNK_BYTES,
    ArrayChunks,
    ChunkSizes,
    DeltaTable,
    chunk_shape,
    chunks_of,
    grid_of,
)
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, Node, TreeMetadata, ValueRecord
from ckptcore.planning import ChunkTable, uncovered


def tree_of(*specs: ArraySpec) -> TreeMetadata:
    names = tuple(f"array {number}" for number in range(len(specs)))
    return TreeMetadata(Node("dict", names, (LEAF,) * len(specs)), tuple([ArrayRecord(spec) for spec in specs]))


def table(spec: ArraySpec, boxes: list[Box], cell: tuple[int, ...], size: int = 20) -> dict[str, Any]:
    """Return the state of an array whose chunks all have the same encoded size; every third chunk is equal."""
    sizes = ChunkSizes()
    number = 0
    for box in boxes:
        of_box = []
        for _ in chunks_of(box, cell):
            of_box.append(0 if number % 3 == 2 else size)
            number += 1
        sizes.add(0, "object", box, cell, 0, of_box)
    state: dict[str, Any] = sizes.to_json()
    return state


# --- the division into chunks


@pytest.mark.parametrize(
    ("shape", "dtype", "cell"),
    [
        ((384, 384), "bfloat16", (32, 384)),
        ((1536, 384), "bfloat16", (64, 384)),
        ((4096, 4096), "bfloat16", (256, 512)),
        ((14336, 4096), "bfloat16", (256, 512)),
        ((2048, 2048), "bfloat16", (64, 2048)),
        ((5632, 4096), "bfloat16", (176, 512)),
        ((128, 2048, 768), "bfloat16", (1, 128, 768)),
        ((30_522, 384), "bfloat16", (340, 384)),
        ((384,), "bfloat16", (384,)),
        ((1_000_003,), "float32", (62501,)),
        ((), "float32", ()),
        ((0, 7), "float32", (0, 7)),
        ((5, 70_000), "float32", (1, 35_000)),
        ((3,), "S900000", (1,)),
    ],
)
def test_arrays_are_divided_so_that_shards_are_whole_chunks(
    shape: tuple[int, ...], dtype: str, cell: tuple[int, ...]
) -> None:
    assert chunk_shape(ArraySpec(shape, dtype)) == cell


@given(spec=strategies.specs(max_dims=3, max_side=3000))
def test_chunks_are_small_and_cover_their_array(spec: ArraySpec) -> None:
    cell = chunk_shape(spec)
    itemsize = spec.numpy_dtype.itemsize
    assert prod(cell) * itemsize <= 256 << 10 or prod(cell) == 1
    if spec.size and prod(grid_of(Box.whole(spec.shape), cell)) < 2000:
        assert uncovered(spec, chunks_of(Box.whole(spec.shape), cell)) is None


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("extent", [384, 1536, 3072, 12_288])
def test_shards_of_usual_numbers_of_processes_begin_at_a_chunk(extent: int, count: int) -> None:
    cell = chunk_shape(ArraySpec((extent, 4096), "bfloat16"))
    assert (extent // count) % cell[0] == 0


@given(data=st.data())
def test_the_grid_of_a_box_has_its_chunks(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes(max_dims=3, max_side=9))
    box = data.draw(strategies.boxes(shape))
    cell = tuple([data.draw(st.integers(1, 12)) for _ in shape])
    chunks = chunks_of(box, cell)
    if box.size:
        assert prod(grid_of(box, cell)) == len(chunks)
        assert uncovered(ArraySpec(box.shape, "int8"), [chunk.relative(box.start) for chunk in chunks]) is None
        for chunk, axis in itertools.product(chunks, range(len(shape))):
            assert chunk.start[axis] // cell[axis] == (chunk.stop[axis] - 1) // cell[axis]


# --- reading the table


@given(data=st.data())
def test_the_chunks_within_a_box_are_those_that_intersect_it(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes(max_dims=3, max_side=9).filter(lambda shape: prod(shape) > 0))
    spec = ArraySpec(shape, "complex128")
    boxes = [box for box in data.draw(strategies.partitions(shape)) if box.size]
    cell = tuple([data.draw(st.integers(1, 12)) for _ in shape])
    (chunks,) = DeltaTable(table(spec, boxes, cell)).arrays(tree_of(spec)).values()
    stored = chunks.within(Box.whole(shape))
    position = 0
    for chunk in stored:
        assert (chunk.start, chunk.stop) == (position, position + 20)
        position = chunk.stop
    assert position == chunks.nbytes
    everything = [chunk for box in boxes for chunk in chunks_of(box, cell)]
    assert [chunk.box for chunk in stored] == [box for number, box in enumerate(everything) if number % 3 != 2]
    wanted = data.draw(strategies.boxes(shape))
    assert chunks.within(wanted) == [chunk for chunk in stored if chunk.box.intersect(wanted) is not None]


def test_the_columns_of_raw_chunks_are_those_of_the_encoded_bytes() -> None:
    spec = ArraySpec((10, 8), "float32")
    delta = DeltaTable(table(spec, [Box((0, 0), (5, 8)), Box((5, 0), (10, 8))], (2, 4)))
    tree = delta.encoded_tree(tree_of(spec))
    (record,) = tree.leaves
    assert isinstance(record, ArrayRecord)
    index = ChunkTable(tree, delta.columns(), CRC32)
    index.check([0])
    chunks = list(index.boxes(0, Box.whole(record.spec.shape)))
    assert len(chunks) == delta.arrays(tree_of(spec))[0].nbytes // 20 == 8
    assert [chunk.box.start for chunk in chunks] == [(20 * number,) for number in range(8)]
    assert sorted(chunk.offset for chunk in chunks) == [24 * number for number in range(8)]


def test_a_shard_of_several_arrays_is_one_range_of_an_object() -> None:
    """Objects have the chunks of all arrays stripe by stripe."""
    specs = [ArraySpec((48, 100), "float32"), ArraySpec((240,), "float64"), ArraySpec((), "int64")]
    sizes = ChunkSizes()
    sizes.add(0, "object", Box((0, 0), (48, 100)), (4, 50), 0, [30] * 24)
    sizes.add(1, "object", Box((0,), (240,)), (20,), 0, [15] * 12)
    sizes.add(2, "object", Box((), ()), (), 0, [17])
    delta = DeltaTable(sizes.to_json())
    index = ChunkTable(delta.encoded_tree(tree_of(*specs)), delta.columns(), CRC32)
    arrays = delta.arrays(tree_of(*specs))
    third = [(0, Box((16, 0), (32, 100))), (1, Box((80,), (160,)))]
    ranges = [
        (chunk.offset, chunk.offset + chunk.box.size + CRC32.nbytes)
        for leaf, box in third
        for encoded in arrays[leaf].within(box)
        for chunk in index.boxes(leaf, Box((encoded.start,), (encoded.stop,)))
    ]
    nbytes = sum(stop - start for start, stop in ranges)
    assert len(ranges) == 8 + 4
    assert max(stop for _, stop in ranges) - min(start for start, _ in ranges) == nbytes
    assert [stored.offsets.min() for boxes in delta.boxes.values() for stored in boxes] == [0, 68, 87]


def test_arrays_that_did_not_change_have_no_encoded_bytes() -> None:
    specs = [ArraySpec((4,), "int8"), ArraySpec((6,), "int8"), ArraySpec((0, 3), "int8")]
    sizes = ChunkSizes()
    sizes.add(0, "object", Box((0,), (4,)), (4,), 0, [0])
    sizes.add(1, "object", Box((0,), (6,)), (6,), 0, [12])
    delta = DeltaTable(sizes.to_json())
    assert delta.encoded == [1]
    assert delta.encoded_tree(tree_of(*specs)).paths == (("array 1",),)
    arrays = delta.arrays(tree_of(*specs))
    assert [chunks.nbytes for chunks in arrays.values()] == [0, 12, 0]
    assert [chunks.is_complete for chunks in arrays.values()] == [False, True, True]


def test_columns_of_several_processes_are_joined() -> None:
    spec = ArraySpec((4, 3), "int8")
    first, second, both = ChunkSizes(), ChunkSizes(), ChunkSizes()
    first.add(0, "a", Box((0, 0), (2, 3)), (2, 3), 0, [11])
    second.add(0, "b", Box((2, 0), (4, 3)), (2, 3), 0, [15])
    both.extend(first.to_json())
    both.extend(second.to_json())
    chunks = DeltaTable(both.to_json()).arrays(tree_of(spec))[0]
    assert [(chunk.box.start, chunk.stop - chunk.start) for chunk in chunks.within(Box((0, 0), (4, 3)))] == [
        ((0, 0), 11),
        ((2, 0), 15),
    ]


# --- hostile tables


def _state(**columns: Any) -> dict[str, Any]:
    return {**table(ArraySpec((10, 8), "float32"), [Box((0, 0), (10, 8))], (5, 8)), **columns}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "unknown leaf": (_state(leaf=[7]), "are in no box"),
    "huge leaf": (_state(leaf=[2**80]), "damaged"),
    "unknown file": (_state(file=[1]), "numbers from 0 to 0"),
    "no files": (_state(files=[3]), "file names"),
    "negative start": (_state(box=[-1, 0, 10, 8]), "found -1"),
    "outside": (_state(box=[0, 0, 11, 8], bytes=[20, 20, 20]), "do not cover it exactly"),
    "empty box": (_state(box=[0, 0, 0, 8]), "a box from"),
    "box to the left": (_state(box=[5, 0, 2, 8]), "a box from"),
    "gap": (_state(box=[0, 0, 9, 8]), "do not cover it exactly"),
    "chunks of nothing": (_state(chunk=[0, 8]), "a box from"),
    "too few chunks": (_state(bytes=[20]), "expected 2 chunks or more"),
    "too many chunks": (_state(bytes=[20, 20, 20]), "expected 2 chunks, found 3"),
    "many tiny chunks": (_state(chunk=[1, 1]), "expected 80 chunks or more"),
    "chunks without end": (_state(box=[0, 0, 2**60, 2**60], chunk=[1, 1]), "chunks or more"),
    "chunk with more bytes than elements": (_state(bytes=[20, 170]), "at most 169 bytes"),
    "chunk shorter than its head": (_state(bytes=[20, 9]), "less than 10 bytes"),
    "text": (_state(bytes=["20", 20]), "whole numbers"),
    "boolean": (_state(bytes=[20, True]), "whole numbers"),
    "other axes": (_state(axes=[1]), "different lengths"),
    "no such axis": (_state(axis=[2]), "axis 2"),
    "many axes": (_state(axes=[65]), "numbers from 0 to 64"),
    "axes of another array": (_state(axes=[1], box=[0, 10], chunk=[5]), "expected boxes with 2 axes"),
    "twice": (
        table(ArraySpec((10, 8), "float32"), [Box((0, 0), (10, 8)), Box((5, 0), (10, 8))], (5, 8)),
        "do not cover it exactly",
    ),
    "huge chunks": (
        table(ArraySpec((1 << 20,), "float32"), [Box((0,), (1 << 20,))], (1 << 20,)),
        f"at most {MAX_CHUNK_BYTES} bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_table_is_refused(name: str) -> None:
    state, message = HOSTILE[name]
    spec = ArraySpec((1 << 20,), "float32") if name == "huge chunks" else ArraySpec((10, 8), "float32")
    with pytest.raises(CorruptCheckpointError, match=message):
        DeltaTable(state).arrays(tree_of(spec))


def test_the_array_of_a_damaged_table_is_named() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"array 0'\] \(float32\[10, 8\]\)"):
        DeltaTable(_state(box=[0, 0, 9, 8])).arrays(tree_of(ArraySpec((10, 8), "float32")))


def test_chunks_of_a_leaf_without_an_array_are_refused() -> None:
    delta = DeltaTable(_state())
    with pytest.raises(CorruptCheckpointError, match="leaves that are not arrays"):
        delta.arrays(TreeMetadata(LEAF, (ValueRecord("int", 1),)))


def test_a_tampered_table_raises_no_other_error() -> None:
    specs = [ArraySpec((10, 8), "float32"), ArraySpec((6,), "int8")]
    sizes = ChunkSizes()
    sizes.add(0, "object", Box((0, 0), (10, 8)), (5, 8), 0, [20, 0])
    sizes.add(1, "object", Box((0,), (6,)), (6,), 0, [12])
    for state in tampered(sizes.to_json(), 3000):
        try:
            delta = DeltaTable(state)
            ChunkTable(delta.encoded_tree(tree_of(*specs)), delta.columns(), CRC32).check(range(len(delta.encoded)))
            for chunks in delta.arrays(tree_of(*specs)).values():
                chunks.within(Box.whole(chunks.spec.shape))
        except CorruptCheckpointError:
            continue


def test_an_array_without_elements_has_no_boxes() -> None:
    assert ArrayChunks(ArraySpec((0, 3), "int8"), ()).within(Box((0, 0), (0, 3))) == []
    assert np.prod(chunk_shape(ArraySpec((0, 3), "int8"))) == 0
