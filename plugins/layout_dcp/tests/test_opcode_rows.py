"""Opcodes encoded as rows of an array have the same bytes as opcodes encoded one by one, and `pickle` reads them."""

from __future__ import annotations

import pickle

import numpy as np
from ckptcore_dcp.metadata import ChunkRows, DcpChunk, DcpChunkColumns, DcpMetadata, DcpTensor, write_metadata
from ckptcore_dcp.metadata.writing import (
    bytes_field,
    encode_rows,
    number_field,
    reference_field,
    size_fields,
)
from ckptcore_dcp.pickles import Call, Global, read_pickle
from hypothesis import given
from hypothesis import strategies as st

_NUMBERS = st.integers(0, 1 << 62) | st.sampled_from(
    [0, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, -1, -(1 << 40)]
)
_COUNTS = st.integers(0, 1 << 62)
_SIZES = st.lists(st.integers(0, 1 << 40) | st.integers(0, 300), max_size=6).map(tuple)


@given(st.lists(_NUMBERS, min_size=1))
def test_pickle_reads_rows_of_numbers(numbers: list[int]) -> None:
    rows, begins = encode_rows(
        [bytes_field(b"\x80\x04"), number_field(np.array(numbers, np.int64)), bytes_field(b".")], len(numbers)
    )
    assert [pickle.loads(rows[begins[row] : begins[row + 1]]) for row in range(len(numbers))] == numbers


@given(st.lists(_SIZES, min_size=1))
def test_rows_of_sizes_are_read(sizes: list[tuple[int, ...]]) -> None:
    most = max(map(len, sizes))
    padded = np.array([(*size, *[7] * (most - len(size))) for size in sizes], np.int64).reshape(len(sizes), most)
    fields = size_fields(np.array([len(size) for size in sizes]), padded, b"\x80\x04ctorch\nSize\n")
    rows, begins = encode_rows([*fields, bytes_field(b".")], len(sizes))
    for row, size in enumerate(sizes):
        made, _ = read_pickle(rows[begins[row] : begins[row + 1]], key="row")
        assert isinstance(made, Call) and made.function == Global("torch", "Size") and made.arguments == (size,)


def test_rows_of_memo_references() -> None:
    rows, begins = encode_rows([reference_field(np.array([0, 255, 256, 1 << 20]))], 4)
    assert rows == b"h\0h\xffj\0\1\0\0j\0\0\x10\0"
    assert begins.tolist() == [0, 2, 4, 9, 14]


def test_more_rows_than_one_batch() -> None:
    numbers = np.arange(20_000)
    rows, begins = encode_rows([number_field(numbers)], len(numbers))
    assert pickle.loads(b"\x80\x04](" + rows + b"e.") == numbers.tolist() and begins[-1] == len(rows)


@given(st.data())
def test_columns_and_single_chunks_give_the_same_file(data: st.DataObject) -> None:
    tensors: dict[str, DcpTensor] = {}
    for name in data.draw(st.lists(st.text(max_size=3), unique=True, max_size=5)):
        axes = data.draw(st.integers(0, 5))
        numbers = st.tuples(*[st.integers(0, 70_000)] * axes)
        chunk = st.builds(
            DcpChunk,
            numbers,
            numbers,
            st.sampled_from(["__0_0.distcp", "__1_0.distcp"]),
            _COUNTS,
            _COUNTS,
            st.sampled_from([(), ("stream.zstd/1",)]),
        )
        chunks = data.draw(st.lists(chunk, max_size=4))
        tensors[name] = DcpTensor(
            data.draw(st.sampled_from(["float32", "int8"])), (1 << 20,) * axes, chunks, data.draw(st.booleans())
        )
    columns = DcpChunkColumns.of([chunk for tensor in tensors.values() for chunk in tensor.chunks])
    rows: dict[str, DcpTensor] = {}
    start = 0
    for name, tensor in tensors.items():
        stop = start + len(tensor.chunks)
        rows[name] = DcpTensor(tensor.dtype, tensor.shape, ChunkRows(columns, start, stop), tensor.requires_grad)
        assert list(rows[name].chunks) == list(tensor.chunks)
        start = stop
    assert write_metadata(DcpMetadata(rows, {})) == write_metadata(DcpMetadata(tensors, {}))
