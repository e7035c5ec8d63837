"""Errors of decoding with tensorstore. After an error, no operation of the load continues."""

from __future__ import annotations

import threading
import traceback
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import tensorstore
from ckptcore_orbax import Zarr3Layout
from ckptcore_orbax.zarr.array_files import parse_zarr3
from ckptcore_orbax.zarr.state import ArraysState, ZarrArray
from ckptcore_testing.layout_stores import DirectoryReadStore

from ckptcore.errors import CorruptCheckpointError
from ckptcore.model import LEAF, ArrayRecord, ArraySpec, Box, Node, ReadItem, TreeMetadata


def _write(directory: Path, name: str, elements: np.ndarray) -> ZarrArray:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(directory / name)},
        "metadata": {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 16]}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1}},
            ],
        },
    }
    array = tensorstore.open(spec, create=True, dtype=elements.dtype.name, shape=elements.shape).result()
    array.write(elements).result()
    return ZarrArray(name, parse_zarr3((directory / name / "zarr.json").read_bytes(), name))


# With "error" tensorstore reads the chunks. With "fill" ckptcore reads them, and decodes them in memory.
@pytest.mark.parametrize("missing", ["error", "fill"])
def test_no_buffer_of_the_caller_changes_after_an_error(missing: Literal["error", "fill"], tmp_path: Path) -> None:
    """The caller may reuse its buffers after the error."""
    random = np.random.default_rng(0)
    names = [f"array{number}" for number in range(10)]
    elements = random.integers(1, 16, 1 << 22, np.int32)
    stored = {leaf: _write(tmp_path, name, elements) for leaf, name in enumerate(names)}
    spec = ArraySpec(elements.shape, "int32")
    tree = TreeMetadata(Node("dict", tuple(names), (LEAF,) * len(names)), (ArrayRecord(spec),) * len(names))
    state = ArraysState(directory="", storage="objects", missing=missing, source="other", arrays=stored)
    chunk = tmp_path / names[0] / "c" / "0"
    chunk.write_bytes(chunk.read_bytes()[:100])
    index = Zarr3Layout().index(tree, state.to_json())
    items = [ReadItem(leaf, Box.whole(spec.shape)) for leaf in stored]
    buffers = [np.zeros(spec.shape, np.int32) for _ in names]
    with pytest.raises(CorruptCheckpointError, match="array0") as raised:
        list(DirectoryReadStore(tmp_path).read_boxes(index, items, buffers))
    held = [buffer[:: 1 << 16].copy() for buffer in buffers]
    # Read the other arrays. The threads of tensorstore run the operations in order, so if the failed load had left
    # operations, they would run before this read.
    intact, others = items[1:], [np.zeros(spec.shape, np.int32) for _ in names[1:]]
    list(DirectoryReadStore(tmp_path).read_boxes(index, intact, others))
    assert all(np.array_equal(other, elements) for other in others)
    assert raised.traceback  # keeps the objects of the load alive
    for buffer, before in zip(buffers, held, strict=True):
        assert np.array_equal(buffer[:: 1 << 16], before)


def test_errors_reference_no_objects_of_tensorstore(tmp_path: Path) -> None:
    """At the exit of the interpreter, objects of tensorstore in an error of a daemon thread would abort the process."""
    elements = np.arange(1 << 10, dtype=np.int32)
    stored = _write(tmp_path, "array", elements)
    tree = TreeMetadata(Node("dict", ("array",), (LEAF,)), (ArrayRecord(ArraySpec(elements.shape, "int32")),))
    state = ArraysState(directory="", storage="objects", missing="fill", source="other", arrays={0: stored})
    chunk = tmp_path / "array" / "c" / "0"
    chunk.write_bytes(chunk.read_bytes()[:10])
    errors: list[BaseException] = []

    def read() -> None:
        index = Zarr3Layout().index(tree, state.to_json())
        buffer = np.zeros(elements.shape, np.int32)
        try:
            list(DirectoryReadStore(tmp_path).read_boxes(index, [ReadItem(0, Box.whole(elements.shape))], [buffer]))
        except CorruptCheckpointError as error:
            errors.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join()
    held = []
    error: BaseException | None = errors[0]
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for value in frame.f_locals.values():
                parts = [value, *[getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]]
                held += [type(part).__name__ for part in parts if type(part).__module__.startswith("tensorstore")]
        error = error.__cause__
    assert held == []
