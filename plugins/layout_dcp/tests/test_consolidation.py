"""Consolidation of torch.distributed.checkpoint checkpoints into Hugging Face directories."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

import ckptcore
from ckptcore.errors import CorruptCheckpointError
from plugins.layout_dcp.tests.consolidate_job import MAX_FILE_BYTES
from plugins.layout_dcp.tests.test_jobs import launch

FAST = ckptcore.Context(durability="none", memory=ckptcore.context.MemoryOptions(load_bytes=24 << 10))
"""A Context whose copies use pieces of 8 KiB."""


def read_as_transformers(directory: Path) -> dict[str, torch.Tensor]:
    """Read tensors like ``transformers.modeling_utils`` (4.57): each from the file that the index names."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        assert (directory / name).is_file()
        with safe_open(directory / name, "pt") as file:
            assert file.metadata()["format"] == "pt"
            tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118  # not a mapping
        assert all(torch.equal(tensors[key], tensor) for key, tensor in load_file(directory / name).items())
    assert set(tensors) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {path.name for path in directory.glob("*.safetensors")} == set(index["weight_map"].values())
    return tensors


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert equal names, dtypes, shapes and elements."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_one_process_converts_a_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 100), torch.nn.Linear(100, 3, dtype=torch.bfloat16))
    dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=str(tmp_path / "theirs"))
    ckptcore.copy(
        tmp_path / "theirs",
        tmp_path / "hf",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=15_000),
        subtree="model",
        context=FAST,
    )
    assert_equal(read_as_transformers(tmp_path / "hf"), model.state_dict())
    assert ckptcore.verify(tmp_path / "hf").ok


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_a_copy_verifies_items_that_fit_into_memory(tmp_path: Path) -> None:
    """The item of 400 kB is larger than the pieces of a copy. Its only checksum covers all of it."""
    tensor = torch.arange(100_000, dtype=torch.float32).reshape(1000, 100)
    dcp.save({"model": {"w": tensor}}, checkpoint_id=str(tmp_path / "theirs"))
    (path,) = (tmp_path / "theirs").glob("*.distcp")
    data = bytearray(path.read_bytes())
    assert zlib.crc32(tensor.numpy().tobytes()).to_bytes(4, "little") in data  # torch has stored the checksum
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    context = ckptcore.Context(durability="none", memory=ckptcore.context.MemoryOptions(load_bytes=500_000))
    with pytest.raises(CorruptCheckpointError, match="model/w"):
        ckptcore.copy(tmp_path / "theirs", tmp_path / "hf", subtree=(), context=context)
    assert not (tmp_path / "hf").exists()


def test_a_file_of_torch_save_is_converted(tmp_path: Path) -> None:
    """Converts tensors that are views of one storage, transposed, tied or tiny."""
    storage = torch.arange(20_000, dtype=torch.float32)
    state = {
        "row": storage[:9000].reshape(90, 100),
        "transposed": storage[9000:15_000].reshape(60, 100).T,
        "tied": storage[:9000].reshape(90, 100),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "half": torch.ones(7000, dtype=torch.bfloat16),
    }
    torch.save({"model": state, "epoch": 2}, tmp_path / "weights.pt")
    ckptcore.copy(
        tmp_path / "weights.pt",
        tmp_path / "hf",
        layout=ckptcore.SafetensorsLayout(max_file_bytes=40_000),
        subtree="model",
        context=FAST,
    )
    restored = read_as_transformers(tmp_path / "hf")
    loaded = ckptcore.load(tmp_path / "hf")
    assert set(restored) | {"tied"} == set(state)
    for name, tensor in state.items():
        assert torch.equal(restored.get(name, tensor), tensor)
        assert loaded[name].astype("float64").tolist() == tensor.double().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["torch", "ckptcore"])
def test_jobs_share_the_files(saver: str, tmp_path: Path) -> None:
    launch("consolidate_job.py", 4, f"save-{saver}", tmp_path)
    expected = torch.load(tmp_path / "expected.pt")
    source, alone = tmp_path / saver, tmp_path / "alone"
    ckptcore.copy(
        source, alone, layout=ckptcore.SafetensorsLayout(max_file_bytes=MAX_FILE_BYTES), subtree="model", context=FAST
    )
    assert_equal(read_as_transformers(alone), expected)
    for size in (2, 4):
        place = tmp_path / f"hf{size}"
        launch("consolidate_job.py", size, "consolidate", source, place)
        assert_equal(read_as_transformers(place), expected)
        assert ckptcore.verify(place).ok
        for path in alone.glob("model*"):
            assert (place / path.name).read_bytes() == path.read_bytes()
        amounts = [int(Path(f"{place}.{rank}.txt").read_text()) for rank in range(size)]
        assert all(amounts) and sum(amounts) == sum(tensor.nbytes for tensor in expected.values())
