"""Files that an object wrote, loaded as bytes without the object."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptcore
from ckptcore import select
from ckptcore.errors import CorruptCheckpointError, TreeMismatchError
from tests.composites.objects import Files


class _Position:
    def __init__(self, position: int) -> None:
        self.position = position

    def save(self, directory: Path) -> None:
        (directory / "position").write_text(str(self.position))

    def load(self, directory: Path) -> None:
        self.position = int((directory / "position").read_text())


def test_files_are_returned_as_bytes(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"data": _Position(7), "w": np.ones(2)})
    assert ckptcore.load(tmp_path / "c" / "data") == {"position": b"7"}
    assert ckptcore.load_checkpointables(tmp_path / "c", ["data"]) == {"data": {"position": b"7"}}


def test_files_cannot_be_loaded_as_a_tree(tmp_path: Path) -> None:
    ckptcore.save_checkpointables(tmp_path / "c", {"data": _Position(7)})
    target = {"w": np.zeros(2)}
    with pytest.raises(TreeMismatchError, match="files of an object"):
        ckptcore.load(tmp_path / "c" / "data", target)
    with pytest.raises(TreeMismatchError, match="files of an object"):
        ckptcore.load_into(tmp_path / "c" / "data", target)
    assert target["w"].tolist() == [0, 0]
    with pytest.raises(TreeMismatchError, match="files of an object"):
        ckptcore.load(tmp_path / "c" / "data", select=select.names("position"))


@pytest.mark.parametrize("content", [b"0123", b"0123456789 and more"])
def test_a_file_of_another_size_is_an_error(content: bytes, tmp_path: Path) -> None:
    """Sizes are checked even if the checkpoint has no checksums."""
    context = ckptcore.Context(io=ckptcore.context.IOOptions(checksums=False))
    ckptcore.save_checkpointables(tmp_path / "c", {"files": Files({"a": b"0123456789"})}, context=context)
    (tmp_path / "c" / "files" / "a").write_bytes(content)
    told = f"a in .* has {len(content)} bytes instead of 10"
    with pytest.raises(CorruptCheckpointError, match=told):
        ckptcore.load(tmp_path / "c" / "files")
    with pytest.raises(CorruptCheckpointError, match=told):
        ckptcore.load_checkpointables(tmp_path / "c", ["files"])
    with pytest.raises(CorruptCheckpointError, match=told):
        ckptcore.load_checkpointables(tmp_path / "c", into={"files": Files()})
