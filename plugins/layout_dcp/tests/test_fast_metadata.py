"""The fast reader of ``.metadata`` returns the same result as the plain reader, for any bytes."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ckptcore_dcp.metadata import DcpMetadata, read_metadata
from ckptcore_dcp.metadata.fast import CHUNKS, ITEM_RANGES, TENSORS, FastObjectReader
from ckptcore_dcp.metadata.reading import read_fast, read_opcodes
from ckptcore_dcp.metadata.row_templates import RowTemplate
from ckptcore_dcp.pickles import CompactObject, read_pickle
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as theirs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckptcore.errors import CheckpointError, CorruptCheckpointError
from plugins.layout_dcp.tests.state_dicts import VERSION

_DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def _copied(text: str) -> str:
    """Return an equal text as another object. A pickle stores both, instead of a reference to the first."""
    return "".join(list(text))


def _tensors(
    count: int, chunks: int, axes: int, *, shared: bool, step: int = 1000, seed: int = 0
) -> tuple[theirs.Metadata, int]:
    """Return metadata of tensors with this many chunks along their first axis, and the total number of chunks."""
    chance = random.Random(seed)
    entries: dict[str, Any] = {}
    places: list[tuple[theirs.MetadataIndex, _StorageInfo]] = []
    properties = theirs.TensorProperties(dtype=torch.float32)
    position = 0
    for number in range(count):
        name = f"model.layers.{number}.weight"
        shape = torch.Size((chunks * step, *range(2, 1 + axes))) if axes else torch.Size(())
        listed = []
        for chunk in range(chunks):
            offsets = torch.Size((chunk * step, *[0] * (axes - 1))) if axes else torch.Size(())
            listed.append(
                theirs.ChunkStorageMetadata(offsets, torch.Size((step, *shape[1:])) if axes else torch.Size(()))
            )
            text = name if shared else _copied(name)
            path = f"__{chunk % 3}_0.distcp"
            length = chance.choice((100, 3000, 70_000, 1 << 33))
            places.append((theirs.MetadataIndex(text, offsets, chunk), _StorageInfo(path, position, length)))
            position += length
        own = properties if shared else theirs.TensorProperties(dtype=_DTYPES[number * 3 // count])
        entries[name] = theirs.TensorStorageMetadata(own, shape, listed)
    chance.shuffle(places)
    for number in range(count):
        entries[f"value.{number}"] = theirs.BytesStorageMetadata()
        places.append((theirs.MetadataIndex(f"value.{number}"), _StorageInfo("__0_0.distcp", number, 12)))
    paths: dict[str, tuple[str, ...]] = {name: tuple(name.split(".")) for name in entries}
    return theirs.Metadata(entries, paths, dict(places), theirs.StorageMeta("here", "id"), *VERSION), count * chunks


def _plain(data: bytes) -> DcpMetadata:
    return read_opcodes(data, key=".metadata")


def _fast(data: bytes) -> tuple[DcpMetadata, int]:
    """Read without falling back to the plain reader. Also return how many objects the fast reader read."""
    reader = FastObjectReader(data)
    objects = 0

    def read(stack: list[Any], position: int, memo: list[Any]) -> int | None:
        nonlocal objects
        before = stack[:-1]
        stop = reader.read(stack, position, memo)
        if stop is not None:
            objects += _count([value for value in stack if value not in before])
        return stop

    read_pickle(data, key=".metadata", objects=read)
    return read_fast(data, key=".metadata"), objects


def _count(values: Sequence[Any]) -> int:
    """Return the number of objects that values of the fast reader stand for. Columns of a dict are key and value."""
    objects = [value for value in values if isinstance(value, CompactObject)]
    names = [value[0] for value in objects]
    if names == [CHUNKS]:
        return len(objects[0][1][0])
    if names and names[0] in (ITEM_RANGES, TENSORS):
        return len(objects[0][1]) * (2 if names[0] == ITEM_RANGES else 1)
    return len(objects)


def _outcome(read: Callable[[], DcpMetadata]) -> DcpMetadata | tuple[type, str]:
    try:
        return read()
    except CheckpointError as error:
        return type(error), str(error)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("count", "chunks", "axes"), [(3, 300, 2), (300, 1, 2), (60, 8, 1), (100, 1, 0), (20, 20, 5)])
def test_most_objects_of_torch_are_read_fast(count: int, chunks: int, axes: int, shared: bool) -> None:
    metadata, total = _tensors(count, chunks, axes, shared=shared)
    data = pickle.dumps(metadata, protocol=4)
    decoded, objects = _fast(data)
    assert decoded == _plain(data)
    assert list(decoded.tensors) == list(_plain(data).tensors) and decoded.names == _plain(data).names
    assert objects > 2.6 * total, "most of the chunks and of their places, of two objects each, are read fast"


@settings(deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 20),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from((1, 100, 70_000)),
    st.integers(0, 99),
)
def test_any_tensors_are_read_equally(count: int, chunks: int, axes: int, shared: bool, step: int, seed: int) -> None:
    metadata, _ = _tensors(count, chunks if axes else 1, axes, shared=shared, step=step, seed=seed)
    data = pickle.dumps(metadata, protocol=4)
    assert _fast(data)[0] == _plain(data)


def test_both_readers_agree_on_flipped_bits() -> None:
    chance = random.Random(7)
    outcomes = set()
    for count, chunks in ((2, 20), (25, 1)):
        metadata, _ = _tensors(count, chunks, 2, shared=False)
        good = pickle.dumps(metadata, protocol=4)
        expected = _plain(good)
        for _ in range(60):
            data = bytearray(good)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            outcome = _outcome(lambda data=data: read_metadata(bytes(data), key=".metadata"))  # type: ignore[misc]
            assert outcome == _outcome(lambda data=data: _plain(bytes(data)))  # type: ignore[misc]
            outcomes.add("error" if isinstance(outcome, tuple) else "same" if outcome == expected else "other")
    assert outcomes == {"error", "same", "other"}


def test_both_readers_agree_on_inserted_and_replaced_opcodes() -> None:
    chance = random.Random(8)
    metadata, _ = _tensors(12, 5, 2, shared=True)
    good = pickle.dumps(metadata, protocol=4).replace(b"\x95" + b"\0" * 8, b"")
    marks = [place for place in range(len(good)) if good[place] in b"ubae)(\x94"]
    for _ in range(110):
        place = chance.choice(marks)
        opcode = bytes([chance.choice(b"012N)]}(tuae\x85\x86\x94R.")])
        data = good[:place] + opcode + good[place + chance.choice((0, 1)) :]
        outcome = _outcome(lambda data=data: read_metadata(data, key=".metadata"))  # type: ignore[misc]
        assert outcome == _outcome(lambda data=data: _plain(data))  # type: ignore[misc]


def _twice(metadata: theirs.Metadata) -> None:
    """Duplicate the chunks."""
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, theirs.TensorStorageMetadata):
            entry.chunks += [theirs.ChunkStorageMetadata(each.offsets, each.sizes) for each in entry.chunks]


def _empty_ones(metadata: theirs.Metadata) -> None:
    """Add empty chunks with the same offsets as other chunks."""
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, theirs.TensorStorageMetadata):
            entry.chunks += [
                theirs.ChunkStorageMetadata(each.offsets, torch.Size((0, each.sizes[1]))) for each in entry.chunks
            ]


def _left_out(metadata: theirs.Metadata) -> None:
    """Remove the locations of some chunks."""
    for index in list(metadata.storage_data)[::3]:
        if index.offset is not None:
            del metadata.storage_data[index]


def _without_offsets(metadata: theirs.Metadata) -> None:
    """Remove the offsets from the locations of tensors."""
    metadata.storage_data = {theirs.MetadataIndex(index.fqn): info for index, info in metadata.storage_data.items()}


def _of_no_directory(metadata: theirs.Metadata) -> None:
    """Refer to a file outside of the checkpoint."""
    for number, info in enumerate(metadata.storage_data.values()):
        if number == 40:
            info.relative_path = "../x"


def _outside(metadata: theirs.Metadata) -> None:
    """Move a chunk outside of its tensor."""
    entry = list(metadata.state_dict_metadata.values())[1]
    entry.chunks[-1].sizes = torch.Size((1 << 20, 1 << 20))


def _transformed(metadata: theirs.Metadata) -> None:
    """Add transforms to items."""
    for number, info in enumerate(metadata.storage_data.values()):
        if number % 5 == 2:
            info.transform_descriptors = ["stream.zstd/1"]


def _of_many_axes(metadata: theirs.Metadata) -> None:
    """Replace a tensor by one with more axes than the fast reader supports."""
    shape = torch.Size([1] * 20)
    chunk = theirs.ChunkStorageMetadata(torch.Size([0] * 20), shape)
    properties = theirs.TensorProperties(dtype=torch.int16)
    metadata.state_dict_metadata["deep"] = theirs.TensorStorageMetadata(properties, shape, [chunk])
    metadata.storage_data[theirs.MetadataIndex("deep", chunk.offsets, 0)] = _StorageInfo("__0_0.distcp", 0, 9)


def _shared_list(metadata: theirs.Metadata) -> None:
    """Make two tensors share one list of chunks."""
    first, second, *_ = metadata.state_dict_metadata.values()
    second.chunks = first.chunks


@pytest.mark.parametrize("chunks", [1, 9])
@pytest.mark.parametrize(
    "change",
    [
        _twice,
        _empty_ones,
        _left_out,
        _without_offsets,
        _of_no_directory,
        _outside,
        _transformed,
        _of_many_axes,
        _shared_list,
    ],
)
def test_both_readers_agree_on_unusual_metadata(change: Callable[[theirs.Metadata], None], chunks: int) -> None:
    metadata, _ = _tensors(40, chunks, 2, shared=False)
    change(metadata)
    data = pickle.dumps(metadata, protocol=4)
    outcome = _outcome(lambda: read_metadata(data, key=".metadata"))
    assert outcome == _outcome(lambda: _plain(data))


def test_memo_entries_with_explicit_numbers() -> None:
    metadata, _ = _tensors(30, 4, 2, shared=True)
    data = pickle.dumps(metadata, protocol=3)
    assert read_metadata(data, key=".metadata") == _plain(data)


def test_a_size_shared_by_a_tensor_and_its_chunk() -> None:
    metadata, _ = _tensors(30, 6, 2, shared=True)
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, theirs.TensorStorageMetadata):
            entry.size = entry.chunks[-1].sizes = torch.Size(entry.chunks[-1].sizes)
            entry.chunks = entry.chunks[-1:]
            entry.chunks[0].offsets = torch.Size((0, 0))
    data = pickle.dumps(metadata, protocol=4)
    assert read_metadata(data, key=".metadata") == _plain(data)


def test_batches_of_a_large_pickle_become_columns() -> None:
    metadata, total = _tensors(3, 2000, 2, shared=True)
    data = pickle.dumps(metadata, protocol=4)
    reader = FastObjectReader(data)
    values = 0

    def read(stack: list[Any], position: int, memo: list[Any]) -> int | None:
        nonlocal values
        stop = reader.read(stack, position, memo)
        values += stop is not None
        return stop

    read_pickle(data, key=".metadata", objects=read)
    assert data.count(b"\x95") > 5, "frames begin within objects"
    assert values <= total / 1000 * 2 + 2, "each batch of 1000 chunks or places is one value"


def test_bytes_that_contain_rows_are_no_rows() -> None:
    metadata, _ = _tensors(40, 5, 2, shared=True)
    metadata.mcore_data = {"own": pickle.dumps(metadata, protocol=4)}  # type: ignore[attr-defined]  # Megatron sets it
    data = pickle.dumps(metadata, protocol=4)
    assert _fast(data)[0] == _plain(data)


def test_rows_that_refer_to_a_later_memo_entry_are_refused() -> None:
    metadata, _ = _tensors(6, 50, 2, shared=True)
    data = pickle.dumps(metadata, protocol=4)
    at = data.rindex(b"j", 0, data.rindex(b"storage_meta") - 200)
    changed = data[: at + 1] + b"\xff\xff\x00\x00" + data[at + 5 :]
    outcome = _outcome(lambda: read_metadata(changed, key=".metadata"))
    assert outcome == _outcome(lambda: _plain(changed)) and isinstance(outcome, tuple)


def test_tensors_of_one_chunk_count_against_the_bytes_of_the_file() -> None:
    metadata, _ = _tensors(63, 1, 1, shared=True)
    for number in range(63):
        del metadata.state_dict_metadata[f"value.{number}"]  # so that the last tensors become columns
    first, second, third, *_ = metadata.state_dict_metadata.values()
    chunk = first.chunks[0]  # type: ignore[union-attr]  # a tensor
    counts = range(0, 100_000, 20)
    for count in counts:
        first.chunks = second.chunks = third.chunks = [chunk] * count  # type: ignore[union-attr]  # tensors
        data = pickle.dumps(metadata, protocol=4)
        if len(data) < 3 * count + 60:
            break
    assert 3 * count <= len(data) < 3 * count + 60, "the three tensors fit, and all 63 do not"
    for read in (read_opcodes, read_fast):
        with pytest.raises(CorruptCheckpointError, match="more chunks and transforms than it has bytes"):
            read(data, key=".metadata")


def test_opcodes_that_may_begin_rows_are_read_in_pieces() -> None:
    data = b")" * (4 << 20)
    tracemalloc.start()
    try:
        FastObjectReader(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data)


def _shared_chunks(count: int) -> theirs.Metadata:
    """Return metadata of a tensor of 64 axes, whose chunks are one object, and of as many places."""
    shape = torch.Size([1] * 63 + [2 * count])
    chunk = theirs.ChunkStorageMetadata(torch.Size([0] * 64), torch.Size([1] * 64))
    properties = theirs.TensorProperties(dtype=torch.float32)
    places = {theirs.MetadataIndex("w", chunk.offsets, number): _StorageInfo("a", 0, 1) for number in range(count)}
    return theirs.Metadata(
        {"w": theirs.TensorStorageMetadata(properties, shape, [chunk] * count)}, {}, places, None, *VERSION
    )


def _one_wide_tensor(count: int) -> theirs.Metadata:
    """Return metadata of a tensor of 64 axes and many without axes, with short names."""
    properties = theirs.TensorProperties(dtype=torch.float32)
    entries: dict[str, Any] = {}
    places: dict[theirs.MetadataIndex, _StorageInfo] = {}
    for number in range(count):
        axes = 0 if number else 64
        chunk = theirs.ChunkStorageMetadata(torch.Size([0] * axes), torch.Size([1] * axes))
        entries[f"{number:x}"] = theirs.TensorStorageMetadata(properties, chunk.sizes, [chunk])
        places[theirs.MetadataIndex(f"{number:x}", chunk.offsets)] = _StorageInfo("a", 0, 1)
    return theirs.Metadata(entries, {}, places, None, *VERSION)


@pytest.mark.parametrize("read", [read_opcodes, read_fast])
@pytest.mark.parametrize("made", [_shared_chunks, _one_wide_tensor])
def test_sizes_of_many_axes_take_limited_memory(
    made: Callable[[int], theirs.Metadata], read: Callable[..., DcpMetadata]
) -> None:
    metadata = made(4000)
    missing = 64 * 4000 - len(pickle.dumps(metadata, protocol=4))
    metadata.mcore_data = b"x" * missing  # type: ignore[attr-defined]  # so that no limit is exceeded
    data = pickle.dumps(metadata, protocol=4)
    tracemalloc.start()
    try:
        read(data, key=".metadata")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 48 * len(data), "a pickle of empty dicts takes more"


def _path_runs(data: bytes) -> list[int]:
    """Return the numbers of names and paths that the fast reader read in each step."""
    reader = FastObjectReader(data)
    runs: list[int] = []

    def read(stack: list[Any], position: int, memo: list[Any]) -> int | None:
        is_items = not stack
        stop = reader.read(stack, position, memo)
        if is_items and stop is not None:
            runs.append(len(stack) // 2)
        return stop

    read_pickle(data, key=".metadata", objects=read)
    return runs


def test_each_batch_of_paths_is_read_in_one_step() -> None:
    metadata, _ = _tensors(2500, 1, 1, shared=True)
    data = pickle.dumps(metadata, protocol=4)
    assert _path_runs(data) == [1000] * 5, "each tensor and each value has a path"
    assert read_fast(data, key=".metadata").paths == _plain(data).paths == dict(metadata.planner_data)


@pytest.mark.parametrize(
    "path", [("a",), ("a", "é"), ("a", 1), (), tuple("abcdefghijklmnopqrstuvw"), ("\ud800", "b"), ("w" * 300, "v")]
)
def test_both_readers_agree_on_unusual_paths(path: tuple[str | int, ...]) -> None:
    metadata, _ = _tensors(40, 1, 1, shared=True)
    for name in list(metadata.planner_data)[::7]:
        metadata.planner_data[name] = path
    data = pickle.dumps(metadata, protocol=4)
    assert _outcome(lambda: read_metadata(data, key=".metadata")) == _outcome(lambda: _plain(data))


def test_one_long_path_among_short_ones_takes_limited_memory() -> None:
    paths: dict[str, tuple[str, ...]] = {f"{number:x}": (str(number % 10),) for number in range(100_000)}
    paths["long"] = tuple("abcdefghijklmno")
    data = pickle.dumps(theirs.Metadata({}, paths, {}, None, *VERSION), protocol=4)
    tracemalloc.start()
    try:
        assert read_fast(data, key=".metadata").paths == paths
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 48 * len(data)


def test_objects_of_more_shapes_than_templates_are_read() -> None:
    metadata, _ = _tensors(3, 300, 5, shared=False, step=1)
    chance = random.Random(3)
    places: dict[theirs.MetadataIndex, _StorageInfo] = {}
    for index, info in metadata.storage_data.items():
        size = torch.Size([chance.choice((1, 300, 70_000, 1 << 40)) for _ in range(5)])
        places[theirs.MetadataIndex(index.fqn, size, index.index)] = info
    metadata.storage_data = places
    data = pickle.dumps(metadata, protocol=4)
    assert _fast(data)[0] == _plain(data)


def _overlapping_paths(count: int, ends: Sequence[bytes]) -> bytes:
    """Return a pickle whose second name contains the beginnings of many paths: each a long text that goes on to an end.

    The bytes around them are a dict of names and paths.
    """
    chance = random.Random(0)
    places = np.cumsum([7 * count, *map(len, ends)]).tolist()
    begins = [
        b"\x85\x94X" + (chance.choice(places[:-1]) - 7 * number - 7).to_bytes(4, "little") for number in range(count)
    ]
    text = b"".join([*begins, *ends])
    return (
        b"\x80\x04}\x94(\x8c\x01a\x94h\x01\x85\x94X" + len(text).to_bytes(4, "little") + text + b"\x94h\x01\x85\x94u."
    )


def test_rows_that_overlap_take_limited_memory() -> None:
    data = _overlapping_paths(100_000, [b"\x94(" + b"h\x01" * 16 + b"t\x94"])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            read_fast(data, key=".metadata")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 48 * len(data)


def test_rows_of_many_shapes_take_limited_work(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    steps = [b"".join([chance.choice((b"h\x01", b"j\x01\0\0\0")) for _ in range(16)]) for _ in range(500)]
    data = _overlapping_paths(10_000, [b"\x94(" + step + b"t\x94" for step in steps])
    compared = []
    match = RowTemplate.match

    def counted(row: RowTemplate, padded: Any, at: Any, *limits: int) -> Any:
        compared.append(len(at))
        return match(row, padded, at, *limits)

    monkeypatch.setattr(RowTemplate, "match", counted)
    with pytest.raises(CheckpointError):
        read_fast(data, key=".metadata")
    assert 10_000 < sum(compared) <= len(data) + 16, "each template is compared with each place that is left"


def test_a_class_that_is_created_again_and_again_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = b"torch.distributed.checkpoint.metadata", b"ChunkStorageMetadata"
    data = b"\x80\x04]\x94(\x8c" + bytes([len(module)]) + module + b"\x94\x8c" + bytes([len(name)]) + name + b"\x94"
    for entry in range(3, 243, 3):
        data += b"h\x01h\x02\x93\x94h" + bytes([entry]) + b")\x81\x94}\x94(h\x01Nub"
    searches = []
    search = FastObjectReader._starts_after

    def counted(reader: FastObjectReader, entry: int) -> Any:
        searches.append(entry)
        return search(reader, entry)

    monkeypatch.setattr(FastObjectReader, "_starts_after", counted)
    with pytest.raises(CheckpointError, match="found list of 162"):
        read_fast(data + b"e.", key=".metadata")
    assert searches == [3]


@pytest.mark.parametrize("garbage", [b"\0", b"\xff", b"N", b"0"])
def test_a_byte_between_two_rows_is_not_skipped(garbage: bytes) -> None:
    metadata, _ = _tensors(6, 2, 1, shared=True)
    good = pickle.dumps(metadata, protocol=4)
    created = b")\x81\x94}\x94("
    classes = {
        good[found.start() : found.start() + 2] for found in re.finditer(rb"h." + re.escape(created), good, re.DOTALL)
    }
    damaged = []
    for reference in classes:
        begins = [found.start() for found in re.finditer(re.escape(reference + created), good)]
        for begin, stop in itertools.pairwise(begins):
            number = re.search(rb"(K.|M..|J....|\x8a\x05.{5})ub$", good[begin:stop], re.DOTALL)
            if number is not None:
                # The last bytes of the number look like the reference to the class, and the header of a FRAME.
                longer = b"\x8a\x08" + reference + b"\x95" + bytes(5) + b"ub" + garbage
                damaged.append(good[: begin + number.start()] + longer + good[stop + 2 :])
    assert len(damaged) > 10
    for data in damaged:
        outcome = _outcome(lambda data=data: read_metadata(data, key=".metadata"))  # type: ignore[misc]
        assert outcome == _outcome(lambda data=data: _plain(data)) and isinstance(outcome, tuple)  # type: ignore[misc]
