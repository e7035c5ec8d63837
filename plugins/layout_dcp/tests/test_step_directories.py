"""Step directories with the structure of TorchTitan and xorl, written by torch.distributed.checkpoint."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptcore_dcp.directories import find_rank_files
from ckptcore_dcp.layouts import DcpLayout
from ckptcore_testing.layout_stores import DirectoryReadStore

import ckptcore
from ckptcore.errors import (
    CheckpointNotFoundError,
    CompositeCheckpointError,
    CorruptCheckpointError,
    UncommittedCheckpointError,
    UnsupportedLeafError,
)
from ckptcore.runtime import runtime_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def save(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def titan(step: int) -> dict[str, Any]:
    """Return a state like that of TorchTitan: weights and other stateful objects, by name."""
    moments = {f"state.layers.0.w.{name}": torch.full((3,), float(step)) for name in ("exp_avg", "exp_avg_sq", "step")}
    return {
        "tok_embeddings.weight": torch.full((2, 2), float(step)),
        "layers.0.w": torch.ones(3),
        "optimizer": {**moments, "param_groups.layers.0.w.lr": 0.1},
        "lr_scheduler": {"last_epoch": step},
        "dataloader": {"dp_rank_0": b"state"},
        "train_state": {"step": torch.tensor(step), "ntokens_seen": torch.tensor(10 * step)},
    }


@pytest.fixture
def titan_run(tmp_path: Path) -> Path:
    for step in (5, 10):
        save(titan(step), tmp_path / "checkpoint" / f"step-{step}")
    return tmp_path / "checkpoint"


@pytest.fixture
def xorl_step(tmp_path: Path) -> Path:
    """A step with checkpoints of the weights and the optimizer, a file of each process, and a file of the whole job."""
    step = tmp_path / "outputs" / "global_step_100"
    save({"q.weight": torch.arange(6.0).reshape(2, 3), "n": 7}, step / "model")
    save({"state": {"q.weight": {"exp_avg": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]}, step / "optimizer")
    (step / "extra_state").mkdir()
    for rank in range(2):
        torch.save(
            {"rng": torch.full((4,), rank, dtype=torch.uint8), "step": 100},
            step / "extra_state" / f"extra_state_rank_{rank}.pt",
        )
    torch.save({"lr_scheduler": {"last_epoch": 3}}, step / "scheduler.pt")
    (step / "tokenizer").mkdir()
    (step / "tokenizer" / "vocab.txt").write_text("a b")
    (step / "notes.txt").write_text("no checkpoint")
    (step / "broken.pt").write_bytes(b"no file of torch")
    return step


def test_a_step_of_torchtitan_is_one_tree(titan_run: Path) -> None:
    loaded = ckptcore.load(titan_run / "step-10")
    assert loaded["tok_embeddings.weight"].tolist() == [[10, 10], [10, 10]]
    assert loaded["optimizer"]["state.layers.0.w.exp_avg"].tolist() == [10, 10, 10]
    assert loaded["dataloader"] == {"dp_rank_0": b"state"} and int(loaded["train_state"]["step"]) == 10
    assert ckptcore.metadata(titan_run / "step-10").writer == "torch.distributed.checkpoint"


def test_an_error_for_a_directory_of_steps_says_how_to_load_one(titan_run: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as raised:
        ckptcore.load(titan_run)
    said = str(raised.value)
    assert "is not a checkpoint. Its names look like a directory of steps (step-5, step-10)" in said
    assert f"{titan_run}/step-10, or the newest with CheckpointReader('{titan_run}').load()" in said
    with pytest.raises(CheckpointNotFoundError, match="directory of steps"):
        ckptcore.load_checkpointables(titan_run)
    with ckptcore.CheckpointReader(titan_run) as reader:
        assert reader.steps == (5, 10)
        assert int(reader.load()["train_state"]["step"]) == 10


def test_errors_abbreviate_many_steps(tmp_path: Path) -> None:
    for step in range(100):
        (tmp_path / f"step{step}").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"\(step0, ..., step91, .*, step98, step99\)"):
        ckptcore.load(tmp_path)


def test_the_checkpointables_of_a_step_are_named_like_its_checkpoints(xorl_step: Path) -> None:
    with pytest.raises(CompositeCheckpointError, match=r"\(extra_state, model, optimizer, scheduler.pt\)"):
        ckptcore.load(xorl_step)
    loaded = ckptcore.load_checkpointables(xorl_step)
    assert list(loaded) == ["extra_state", "model", "optimizer", "scheduler.pt"]
    assert (
        loaded["model"]["q.weight"].tobytes() == np.arange(6, dtype=np.float32).tobytes() and loaded["model"]["n"] == 7
    )
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1}]
    assert loaded["scheduler.pt"] == {"lr_scheduler": {"last_epoch": 3}}
    ranks = loaded["extra_state"]
    assert list(ranks) == ["extra_state_rank_0.pt", "extra_state_rank_1.pt"]
    assert ranks["extra_state_rank_1.pt"]["rng"].tolist() == [1] * 4 and ranks["extra_state_rank_0.pt"]["step"] == 100


def test_one_checkpointable_is_loaded_by_name_and_by_location(xorl_step: Path) -> None:
    model = {"q.weight": torch.zeros(2, 3), "n": 0}
    loaded = ckptcore.load_checkpointables(xorl_step, {"model": model})
    assert torch.equal(loaded["model"]["q.weight"], torch.arange(6.0).reshape(2, 3))
    for name in ("model", "extra_state", "scheduler.pt"):
        ckptcore.load(xorl_step / name)
    assert ckptcore.load(xorl_step / "extra_state" / "extra_state_rank_1.pt")["step"] == 100


def test_metadata_of_several_checkpointables(xorl_step: Path) -> None:
    metadata = ckptcore.metadata(xorl_step)
    layouts = {name: told.layout for name, told in metadata.checkpointables.items()}
    assert layouts == {"extra_state": "torch", "model": "dcp", "optimizer": "dcp", "scheduler.pt": "torch"}
    assert not metadata.checkpointables.deleted and not metadata.checkpointables.unreadable and metadata.save_id is None


def test_a_reader_finds_steps_with_several_checkpointables(xorl_step: Path) -> None:
    shutil.copytree(xorl_step, xorl_step.parent / "global_step_200")
    with ckptcore.CheckpointReader(xorl_step.parent) as reader:
        assert reader.steps == (100, 200)
        assert reader.load_checkpointables(abstract=["model"])["model"]["n"] == 7
        assert reader.restored_step == 200
    with pytest.raises(CheckpointNotFoundError, match=r"directory of steps \(global_step_100, global_step_200\)"):
        ckptcore.load(xorl_step.parent)


def test_an_unfinished_step_is_not_found(xorl_step: Path) -> None:
    later = xorl_step.parent / "global_step_200"
    shutil.copytree(xorl_step, later)
    (later / "optimizer" / ".metadata").unlink()
    with pytest.raises(UncommittedCheckpointError, match=r"optimizer/__0_0.distcp .*optimizer/.metadata, .*missing"):
        ckptcore.load_checkpointables(later, ["model"])
    with ckptcore.CheckpointReader(xorl_step.parent) as reader:
        assert reader.steps == (100,) and reader.latest == 100


def test_several_checkpointables_are_verified_and_converted(xorl_step: Path, tmp_path: Path) -> None:
    assert not ckptcore.verify(xorl_step).problems
    ckptcore.copy(xorl_step, tmp_path / "ours", layout="safetensors")
    ours, theirs = ckptcore.load_checkpointables(tmp_path / "ours"), ckptcore.load_checkpointables(xorl_step)
    assert list(ours) == list(theirs) and ours["scheduler.pt"] == theirs["scheduler.pt"]
    assert ours["model"]["q.weight"].tobytes() == theirs["model"]["q.weight"].tobytes()


def test_step_directories_in_memory_are_found(xorl_step: Path) -> None:
    location = "memory://step-directories/step_1"
    context = ckptcore.Context()
    storage = runtime_of(context).registry.storage("memory")("memory://step-directories", _options())
    for path in sorted(xorl_step.rglob("*")):
        if path.is_file():
            storage.put(f"step_1/{path.relative_to(xorl_step)}", path.read_bytes())
    assert list(ckptcore.load_checkpointables(location, context=context)) == [
        "extra_state", "model", "optimizer", "scheduler.pt",
    ]  # fmt: skip


def _options() -> Any:
    from ckptcore.protocols import StorageOptions

    return StorageOptions()


@pytest.mark.system
@pytest.mark.slow
def test_the_command_line_reads_step_directories(xorl_step: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "ckptcore", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    told = run("inspect", str(xorl_step))
    assert all(name in told for name in ("extra_state", "model", "optimizer", "scheduler.pt", "q.weight"))
    assert [line.split()[0] for line in run("ls", str(xorl_step)).splitlines()] == [
        "extra_state", "model", "optimizer", "scheduler.pt",
    ]  # fmt: skip
    assert "100" in run("steps", str(xorl_step.parent))


def test_other_files_in_a_checkpoint_are_ignored(titan_run: Path) -> None:
    step = titan_run / "step-5"
    torch.save({"x": 1}, step / "extra_state_rank_0.pt")
    assert int(ckptcore.load(step)["train_state"]["step"]) == 5
    assert ckptcore.load(step / "extra_state_rank_0.pt") == {"x": 1}
    assert DcpLayout().inspect_composite(DirectoryReadStore(step)) is None


def test_files_of_ranks_are_found_if_none_is_missing() -> None:
    assert find_rank_files(["a_rank10.pt", *(f"a_rank{rank}.pt" for rank in range(10))]) == [
        f"a_rank{rank}.pt" for rank in range(11)
    ]
    assert find_rank_files(["rank_0.pt", "other.pt"]) is None
    assert find_rank_files(["a_rank_0.pt", "b_rank_1.pt"]) is None
    assert find_rank_files(["rank_00.pt"]) is None
    assert find_rank_files([]) is None
    with pytest.raises(CorruptCheckpointError, match="file of rank 1 is missing, but rank 2 has one .rank_2.pt."):
        find_rank_files(["rank_0.pt", "rank_2.pt"])
    with pytest.raises(CorruptCheckpointError, match="file of rank 0 is missing"):
        find_rank_files(["rank_999999999.pt"])


def test_a_directory_of_many_names_is_not_listed(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"d{number}x").mkdir()
    save({"w": torch.ones(1)}, tmp_path / "d1x")
    assert DcpLayout().inspect_composite(DirectoryReadStore(tmp_path)) is None


def test_unreadable_files_are_listed(xorl_step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptcore_dcp import torch_files

    def refused(*arguments: object, **options: object) -> object:
        raise UnsupportedLeafError("it holds a graph")

    monkeypatch.setattr(torch_files, "read_pickle", refused)
    metadata = ckptcore.metadata(xorl_step)
    assert list(metadata.checkpointables) == ["model", "optimizer"]
    assert metadata.checkpointables.unreadable.keys() == {"extra_state", "scheduler.pt"}
    assert ckptcore.load_checkpointables(xorl_step, ["model"])["model"]["n"] == 7


@pytest.mark.parametrize("name", ["adapter_model.bin", "diffusion_pytorch_model.bin"])
def test_weights_are_found_under_the_file_names_of_other_libraries(tmp_path: Path, name: str) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / name)
    torch.save({"step": 3}, tmp_path / "trainer.bin")
    assert ckptcore.load(tmp_path)["w"].tolist() == [0, 1, 2]
    torch.save({"w": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    assert ckptcore.load(tmp_path)["w"].tolist() == [0, 0, 0]
