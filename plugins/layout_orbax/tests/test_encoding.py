"""After a write has ended, even by an error, no encoder reads memory of the snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from ckptcore_orbax import OcdbtLayout, Zarr3Layout
from ckptcore_orbax.zarr import chunk_encoding, writing
from ckptcore_orbax.zarr.chunk_codec import EncodingChunk

from ckptcore import Context
from ckptcore.io.snapshot import ViewedSnapshot
from ckptcore.model import Ready, Segment
from ckptcore.protocols import Layout
from ckptcore.runtime import runtime_of
from ckptcore.saving.parts import describe_part


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
def test_nothing_is_encoded_once_a_write_has_failed(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_encoding, "_STARTED_BYTES", 1)
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
    arrays = [np.full((64, 64), number) for number in range(12)]
    description = describe_part("", list(arrays), layout, runtime_of(Context()).registry, rank=0, size=1)
    (plan,) = description.plans(0, 1, "0" * 16)
    with pytest.raises(OSError, match="full") as raised:
        layout.write(ViewedSnapshot(plan, lambda number: [Ready(arrays[number])]), _FullStore())
    assert raised.value.__traceback__ is not None  # keeps its frames alive
    assert len(begun) > 2 and set(begun) == set(ended)
