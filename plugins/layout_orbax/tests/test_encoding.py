"""Encoders stop when a write ends or fails: afterwards they read no memory of the snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
from ckptcore_orbax import OcdbtLayout, Zarr3Layout
from ckptcore_orbax.zarr import writing
from ckptcore_orbax.zarr.chunk_codec import EncodingChunk, ReadErrors

import ckptcore
from ckptcore import Context
from ckptcore.errors import UnsupportedLeafError
from ckptcore.io.snapshot import ViewedSnapshot
from ckptcore.model import Ready, Segment
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.descriptions import describe_part


class _FullStore:
    """A `ckptcore.protocols.WriteStore` on which every write fails."""

    address = None

    def put(self, key: str, data: bytes) -> None:
        raise OSError("the disk is full")

    def write(self, key: str, segments: Sequence[Segment]) -> None:
        raise OSError("the disk is full")

    def write_many(self, objects: Iterable[tuple[str, Sequence[Segment]]]) -> None:
        for key, segments in objects:
            self.write(key, segments)


@pytest.mark.parametrize("layout", [OcdbtLayout(compression="zstd"), Zarr3Layout(compression="zstd")], ids=str)
def test_a_failed_write_waits_for_the_end_of_all_encoders(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "ENCODED_FILE_BYTES", 1)  # write the first chunk while others are being encoded
    begun: list[object] = []
    ended: list[object] = []
    begin, settle, result = EncodingChunk.__init__, EncodingChunk.settle, EncodingChunk.result

    def noted_begin(chunk: EncodingChunk, *arguments: Any) -> None:
        begin(chunk, *arguments)
        begun.append(chunk)

    def noted_settle(chunk: EncodingChunk) -> None:
        settle(chunk)
        ended.append(chunk)

    def noted_result(chunk: EncodingChunk) -> bytes:
        data = result(chunk)
        ended.append(chunk)
        return data

    monkeypatch.setattr(EncodingChunk, "__init__", noted_begin)
    monkeypatch.setattr(EncodingChunk, "settle", noted_settle)
    monkeypatch.setattr(EncodingChunk, "result", noted_result)
    arrays = [np.full((1024, 1024), number) for number in range(12)]  # 96 MiB, of which 64 MiB are encoded at a time
    description = describe_part("", list(arrays), layout, runtime_of(Context()).registry, rank=0, size=1)
    plan = description.plan(0, 1, "0" * 16)
    with pytest.raises(OSError, match="full") as raised:
        layout.write(ViewedSnapshot(plan, lambda number: [Ready(arrays[number])]), _FullStore())
    assert raised.value.__traceback__ is not None  # the traceback keeps the frames of the write alive
    assert len(begun) > 2 and set(begun) == set(ended)


def _no_dtype(name: str) -> None:
    raise ValueError(f'No TensorStore data type with name: "{name}"')


def test_dtypes_that_tensorstore_lacks_are_refused_before_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of tensorstore lack some dtypes. Uncompressed arrays do not need tensorstore."""
    monkeypatch.setattr(tensorstore, "dtype", _no_dtype)
    state = {"packed": np.arange(3, dtype=np.float32).astype(ml_dtypes.float8_e3m4)}
    with pytest.raises(UnsupportedLeafError, match=r"pip install --upgrade tensorstore, or save with compression=None"):
        ckptcore.save(tmp_path / "c", state, layout=OcdbtLayout(compression="zstd", chunk_bytes=1000))
    assert list(tmp_path.iterdir()) == []
    ckptcore.save(tmp_path / "c", state, layout=OcdbtLayout(compression=None))
    assert ckptcore.load(tmp_path / "c")["packed"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "text", ['FAILED_PRECONDITION: "data_type": Unsupported data type: "int2"', 'Unsupported zarr dtype: "int2"']
)
def test_a_dtype_that_tensorstore_lacks_is_not_reported_as_damage(text: str) -> None:
    error = ReadErrors("packed").error(text)
    assert isinstance(error, UnsupportedLeafError) and "pip install --upgrade tensorstore" in str(error)
