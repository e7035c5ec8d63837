"""Directories of torch_checkpointing: goldens, a directory that it writes here, and damaged ones."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import ckptcore
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError, UnsupportedLeafError

GOLDEN = Path(__file__).parent / "golden" / "torch_checkpointing"
WHOLE = np.arange(35, dtype=np.float32).reshape(7, 5)


@pytest.mark.parametrize("name", ["plain", "resharded"])
def test_a_golden_is_one_tree_of_all_processes(name: str, tmp_path: Path) -> None:
    loaded = ckptcore.load(GOLDEN / name)
    assert list(loaded) == ["model", "rng", "step"]
    assert all(np.array_equal(loaded["model"][key], WHOLE) for key in ("w", "c", "r"))
    assert loaded["model"]["n"]["plain"].tolist() == [1, 1, 1]
    assert (loaded["step"], loaded["rng"]) == (7, {0: {"seed": 0}, 1: {"seed": 1}})
    metadata = ckptcore.metadata(GOLDEN / name)
    assert (metadata.layout, metadata.writer) == ("torch-checkpointing", "torch_checkpointing")
    assert ckptcore.verify(GOLDEN / name).ok
    ckptcore.copy(GOLDEN / name, tmp_path / "copy", layout="dcp")
    assert np.array_equal(ckptcore.load(tmp_path / "copy")["model"]["c"], WHOLE)


def test_a_new_directory_of_a_manager_loads(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(
        CheckpointManager.Config(
            items={"model": ItemSpec(resharder=DefaultResharder())},
            save=SyncCheckpointSaverConfig(),
            storage_config=storage,
        )
    )
    manager.save(str(tmp_path / "step_1"), {"model": model.state_dict(), "step": 3})
    manager.close()
    loaded = ckptcore.load(tmp_path / "step_1", framework="torch")
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert loaded["step"] == 3


def test_errors_name_damaged_files(tmp_path: Path) -> None:
    directory = tmp_path / "c"

    def copied() -> Path:
        shutil.rmtree(directory, ignore_errors=True)
        return Path(shutil.copytree(GOLDEN / "resharded", directory))

    for missing in ("model_1.pt", "rng_0.pt"):
        (copied() / missing).unlink()
        with pytest.raises(CorruptCheckpointError, match=f"{missing} is missing"):
            ckptcore.load(directory)
    metadata = pickle.loads((GOLDEN / "resharded" / "metadata.pkl").read_bytes())
    for damaged in (b"", b"\x80\x04.", pickle.dumps([]), pickle.dumps({**metadata, "world_size": -1})):
        (copied() / "metadata.pkl").write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.pkl"):
            ckptcore.load(directory)
    (copied() / "metadata.pkl").write_bytes(pickle.dumps({**metadata, "world_size": 3}))
    with pytest.raises(CorruptCheckpointError, match="model_2.pt is missing"):
        ckptcore.load(directory)


def test_the_error_for_an_item_in_another_layout_names_its_file(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "resharded", tmp_path / "c"))
    metadata = pickle.loads((directory / "metadata.pkl").read_bytes())
    layout = {"file_path": "weights_0.safetensors", "serialization_format": {"type": "SafetensorsSerialization"}}
    metadata["metadata"]["ema"] = {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: layout, 1: None}}
    (directory / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedLeafError, match="load weights_0.safetensors by its own path"):
        ckptcore.load(directory)
    assert ckptcore.load(directory, select=~ckptcore.select.names("ema"))["step"] == 7


def test_files_of_epochs_are_no_checkpoint(tmp_path: Path) -> None:
    for epoch in range(3):
        torch.save({"w": torch.ones(2) * epoch}, tmp_path / f"model_{epoch}.pt")
    with pytest.raises(CheckpointNotFoundError, match="separate files"):
        ckptcore.load(tmp_path)
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"of": "the user"}))
    with pytest.raises(CheckpointNotFoundError, match="separate files"):
        ckptcore.load(tmp_path)


def test_a_save_keeps_files_whose_names_alone_look_like_items(tmp_path: Path) -> None:
    for name in ("actor_0.pt", "critic_0.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointExistsError, match=r"actor_0\.pt"):
        ckptcore.save(tmp_path, {"w": np.ones(2)}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor_0.pt", "critic_0.pt"]


def test_deeply_nested_metadata_is_refused(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "resharded", tmp_path / "c"))
    nested: list[Any] = ["x"]
    for _ in range(60):
        nested = [nested, nested]
    item = {"rank_to_layout_info": {0: {"file_path": nested}}}
    for hostile in ({"world_size": 2, "metadata": {"model": item}}, {"world_size": nested, "metadata": {}}):
        (directory / "metadata.pkl").write_bytes(pickle.dumps(hostile))
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.pkl"):
            ckptcore.load(directory)
