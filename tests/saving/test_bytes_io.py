"""`io.BytesIO` in a state: saved as its bytes, also in objects with a state of their own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from ckptcore.errors import TreeMismatchError

SIZES = [0, 10, 100_000]
"""Empty; small enough for the root; and so large that it becomes an array."""


def content(size: int) -> bytes:
    return bytes(range(256)) * (size // 256) + b"\0" * (size % 256)


class Progress:
    """An object that keeps the result of ``torch.save`` in its state, like TorchTitan's."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob

    def state_dict(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        buffer.write(self.blob)
        return {"blob": buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.blob = state["blob"].read()


@pytest.mark.parametrize("layout", ["safetensors", "dcp", "zarr3", "ocdbt"])
@pytest.mark.parametrize("size", SIZES)
def test_a_buffer_comes_back(tmp_path: Path, layout: str, size: int) -> None:
    buffer = io.BytesIO(content(size))
    buffer.seek(3)  # bytes before the position are saved, too
    ckptcore.save(tmp_path / "x", {"buffer": buffer}, layout=layout)
    assert ckptcore.load(tmp_path / "x") == {"buffer": content(size)}
    for abstract in ({"buffer": io.BytesIO(b"other")}, ckptcore.abstract({"buffer": buffer})):
        loaded = ckptcore.load(tmp_path / "x", abstract)
        assert type(loaded["buffer"]) is io.BytesIO and loaded["buffer"].read() == content(size)
    target = {"buffer": io.BytesIO(b"other")}
    ckptcore.load_into(tmp_path / "x", target)
    assert target["buffer"].getvalue() == content(size)


@pytest.mark.parametrize("size", SIZES)
def test_an_object_gets_a_buffer_back(tmp_path: Path, size: int) -> None:
    ckptcore.save(tmp_path / "x", {"progress": Progress(content(size))})
    for other in (b"", content(50_000)):
        progress = Progress(other)
        ckptcore.load_into(tmp_path / "x", {"progress": progress})
        assert progress.blob == content(size)


def test_an_asynchronous_save_stores_the_buffer_as_it_was_at_the_call(tmp_path: Path) -> None:
    buffer = io.BytesIO(content(100_000))
    handle = ckptcore.save_async(tmp_path / "x", {"buffer": buffer})
    buffer.write(b"changed")
    buffer.truncate(20)
    handle.result()
    assert ckptcore.load(tmp_path / "x")["buffer"] == content(100_000)


def test_bytes_load_as_a_buffer_and_numbers_do_not(tmp_path: Path) -> None:
    ckptcore.save(tmp_path / "x", {"bytes": b"abc", "number": 3})
    assert ckptcore.load(tmp_path / "x", {"bytes": io.BytesIO(), "number": 0})["bytes"].read() == b"abc"
    with pytest.raises(TreeMismatchError, match="number: kind: bytes is requested, int is stored"):
        ckptcore.load(tmp_path / "x", {"bytes": b"", "number": io.BytesIO()})
