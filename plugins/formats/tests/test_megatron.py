"""Checkpoints of Megatron (``torch_dist``): tensors and ``common.pt`` as one state."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptcore
from ckptcore.errors import CheckpointError

GOLDEN = Path(__file__).parent / "golden" / "megatron" / "torch_dist"
COMMON = {"args", "checkpoint_version", "content_metadata", "iteration", "optimizer", "opt_param_scheduler"}


def test_the_golden_is_one_state() -> None:
    loaded = ckptcore.load(GOLDEN)
    with np.load(f"{GOLDEN}.npz") as expected:
        for key in expected.files:
            array = loaded[key].view(np.int16) if loaded[key].dtype.name == "bfloat16" else loaded[key]
            assert (array.dtype, array.shape) == (expected[key].dtype, expected[key].shape)
            assert array.tobytes() == expected[key].tobytes(), key
        assert set(loaded) == {*expected.files, *COMMON, "rng_state/shard_0_2", "rng_state/shard_1_2"}
    assert (loaded["iteration"], loaded["args"]["hidden_size"], loaded["checkpoint_version"]) == (7, 6, 3.0)
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95), "step": 7}]
    assert list(loaded["opt_param_scheduler"]["table"]) == [0, 1, 2, 3]
    assert loaded["rng_state/shard_1_2"][0][0]["seed"] == 1


def test_a_copy_contains_tensors_and_common_state(tmp_path: Path) -> None:
    assert ckptcore.verify(GOLDEN).left_out == ()
    ckptcore.copy(GOLDEN, tmp_path / "c", layout="safetensors")
    loaded = ckptcore.load(tmp_path / "c")
    assert loaded["iteration"] == 7 and loaded["decoder.layers.weight"][3, 5] == 23


def test_the_common_file_of_other_software_is_not_merged(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "c")
    (tmp_path / "c" / "metadata.json").write_text('{"name": "mine"}')
    assert COMMON.isdisjoint(ckptcore.load(tmp_path / "c"))
    assert ckptcore.verify(tmp_path / "c").left_out == ("common.pt",)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", None], ids=["empty", "cut off", "a list"])
def test_a_damaged_common_file_leaves_the_tensors_readable(content: bytes | None, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "c")
    path = tmp_path / "c" / "common.pt"
    if content is None:
        torch.save([1], path)
    else:
        path.write_bytes(content)
    assert ckptcore.load(tmp_path / "c", select=ckptcore.select.names("norm.weight"))["norm.weight"].shape == (3,)
    with pytest.raises(CheckpointError, match=r"common\.pt"):
        ckptcore.load(tmp_path / "c")
    assert not ckptcore.verify(tmp_path / "c").ok


def test_only_a_name_in_both_parts_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "c")
    torch.save({"norm.weight": 3, "iteration": 8}, tmp_path / "c" / "common.pt")
    with pytest.raises(CheckpointError, match=r"'norm\.weight' is in common\.pt and in \.metadata"):
        ckptcore.load(tmp_path / "c")
    assert ckptcore.load(tmp_path / "c", select=ckptcore.select.names("iteration")) == {"iteration": 8}
    assert ckptcore.load(tmp_path / "c" / "common.pt")["norm.weight"] == 3  # the remedy


def test_goldens_are_small_and_contain_no_local_paths() -> None:
    golden = Path(__file__).parent / "golden"
    files = [path for path in golden.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 700_000
    for path in files:
        assert path.stat().st_size < 100_000
        assert path.suffix == ".py" or not any(place in path.read_bytes() for place in (b"/home/", b"/work/", b"/tmp/"))
