"""`verify` compares the checksums that torch stores, and lists files without checksums. torch writes the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckptcore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, object]:
    """Return tensors with all kinds of views, tied tensors, and NumPy arrays, whose bytes are in the pickle."""
    whole, flat = torch.randn(100, 10), torch.randn(1000)
    return {
        "whole": whole,
        "tied": whole,
        "part": flat[10:20],
        "transposed": torch.randn(300, 400).t(),
        "array": np.arange(5),
        "number": np.float32(2),
    }


def flip(path: Path, content: bytes) -> None:
    """Change one bit in the middle of some bytes of a file."""
    data = bytearray(path.read_bytes())
    data[data.index(content) + len(content) // 2] ^= 1
    path.write_bytes(data)


def bytes_of(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.contiguous().numpy().tobytes()
    return content


def test_a_file_of_torch_save_is_sound(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    report = ckptcore.verify(tmp_path / "a.pt")
    assert (report.state, report.unverified, report.objects) == ("sound", (), 1)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("whole", lambda tensor: bytes_of(tensor)),
        ("part", lambda tensor: bytes_of(tensor)),
        ("transposed", lambda tensor: bytes_of(tensor.t())),
    ],
)
def test_damage_in_any_kind_of_view_is_found(
    tmp_path: Path, name: str, stored: Callable[[torch.Tensor], bytes]
) -> None:
    values = state()
    torch.save(values, tmp_path / "a.pt")
    tensor = values[name]
    assert isinstance(tensor, torch.Tensor)
    flip(tmp_path / "a.pt", stored(tensor))
    (problem,) = ckptcore.verify(tmp_path / "a.pt").problems
    assert name in problem.arrays
    assert "CRC-32" in problem.message
    assert "504b0708" not in problem.message  # the signature of the record after the bytes


def test_a_file_without_checksums_is_only_complete(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state(), tmp_path / "none.pt")
    finally:
        torch.serialization.set_crc32_options(computes)
    for name in ("legacy.pt", "none.pt"):
        report = ckptcore.verify(tmp_path / name)
        assert (report.state, report.unverified) == ("complete", (name,))


def test_items_of_dcp_have_checksums_but_their_metadata_has_none(tmp_path: Path) -> None:
    values = state()
    save_dcp(values, checkpoint_id=tmp_path / "a", no_dist=True)
    report = ckptcore.verify(tmp_path / "a")
    assert (report.state, report.unverified, report.objects) == ("complete", (".metadata",), 2)
    tensor = values["transposed"]
    assert isinstance(tensor, torch.Tensor)
    flip(tmp_path / "a" / "__0_0.distcp", bytes_of(tensor.t()))
    (problem,) = ckptcore.verify(tmp_path / "a").problems
    assert problem.arrays == ("transposed",)
