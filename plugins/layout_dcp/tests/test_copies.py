"""PyTorch loads its own checkpoints from copies that ckptcore made without changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import ckptcore

pytestmark = [
    # torch warns that it assumes a single process if there is no process group.
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning"),
]

GOLDEN = Path(__file__).parent / "golden"


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_torch_loads_a_copy(tmp_path: Path) -> None:
    state = {"w": torch.arange(100_000.0).reshape(100, 1000), "step": torch.tensor(7)}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "written", sync_files=False), no_dist=True)
    between = f"memory://{tmp_path.name}/checkpoint"
    ckptcore.copy(tmp_path / "written", between, verify="read-back")
    report = ckptcore.copy(between, tmp_path / "copy")
    assert report.sent_bytes == report.nbytes
    assert _files(tmp_path / "copy") == _files(tmp_path / "written")
    target = {"w": torch.zeros(100, 1000), "step": torch.tensor(0)}
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "copy"), no_dist=True)
    assert torch.equal(target["w"], state["w"])
    assert torch.equal(target["step"], state["step"])


@pytest.mark.parametrize("name", ["file_per_item", "hugging_face_shards", "nested", "two_processes", "zstd"])
def test_every_file_is_copied(name: str, tmp_path: Path) -> None:
    between = f"memory://{tmp_path.name}/{name}"
    ckptcore.copy(GOLDEN / name, between)
    ckptcore.copy(between, tmp_path / "copy")
    assert _files(tmp_path / "copy") == _files(GOLDEN / name)
