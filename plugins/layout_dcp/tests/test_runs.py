"""A `Checkpointer` finds the steps of runs of PyTorch programs, or its error says how to read them.

The files have the names that trainers use, and small contents.
`plugins/integrations/tests/trainers/test_runs_of_others.py` tests files written by the trainers themselves.
"""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptcore
from ckptcore.errors import InvalidLocationError
from ckptcore.step_names import StepNameFormat, StepNames

NAMES = {"StepNames": StepNames, "StepNameFormat": StepNameFormat}
"""Names for the code in error messages, which the tests evaluate."""


@pytest.mark.brings("run of files `ckpt_1000.pt` of `torch.save`", "torch", "refused")
@pytest.mark.parametrize("name", ["ckpt_{}.pt", "epoch_{}.pth", "model-{}.bin", "{}.pt", "net.{}.ckpt"])
def test_numbered_files_are_read_as_the_error_says(tmp_path, name):
    for step in ("0900", "1000"):
        torch.save({"step": int(step)}, tmp_path / name.format(step))
    torch.save({"step": 1}, tmp_path / "best.pt")
    with pytest.raises(InvalidLocationError, match=re.escape(name.format(1000))) as raised:
        ckptcore.Checkpointer(tmp_path)
    (way,) = re.findall(r"step_names=(StepNames\(read=\[.*?\]\))", str(raised.value))
    with ckptcore.Checkpointer(tmp_path, step_names=eval(way, NAMES)) as run:
        assert run.steps == (900, 1000)
        assert run.load() == {"step": 1000}
        run.save_blocking(1001, {"step": 1001})
        assert run.steps == (900, 1000, 1001)


@pytest.mark.brings("run of verl: `global_step_100/actor` with files of each rank", "torch", "refused")
def test_steps_of_verl_are_named(tmp_path):
    for step in (50, 100):
        for role in ("actor", "critic"):
            directory = tmp_path / f"global_step_{step}" / role
            directory.mkdir(parents=True)
            for rank in range(2):
                for kind in ("model", "optim", "extra_state"):
                    torch.save({"w": torch.ones(2)}, directory / f"{kind}_world_size_2_rank_{rank}.pt")
        torch.save({}, tmp_path / f"global_step_{step}" / "data.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    for opens in (ckptcore.Checkpointer, ckptcore.CheckpointReader):
        with pytest.raises(InvalidLocationError, match="global_step_100 has files of a checkpoint") as raised:
            opens(tmp_path)
    (part,) = re.findall(r"such as (\S+):", str(raised.value))
    assert ckptcore.load(tmp_path / part) is not None


TRAINERS = {
    "`ModelCheckpoint`": ("lightning", ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt", "last.ckpt"], (5, 10)),
    "`ModelCheckpoint(filename='model-{step:06d}')`": (
        "lightning",
        ["model-step=000005.ckpt", "model-step=000010.ckpt"],
        (5, 10),
    ),
    "`Trainer`": (
        "transformers",
        [f"checkpoint-{step}/{file}" for step in (5, 10) for file in ("model.safetensors", "optimizer.pt")],
        (5, 10),
    ),
    "`save_state`, as `checkpoint_0`": (
        "accelerate",
        [f"checkpoint_{step}/{file}" for step in (0, 1) for file in ("model.safetensors", "optimizer.bin")],
        (0, 1),
    ),
    "`save_state`, as `epoch_3`": ("accelerate", ["epoch_2/pytorch_model.bin", "epoch_3/pytorch_model.bin"], (2, 3)),
}


@pytest.mark.parametrize(
    "writer",
    [pytest.param(name, marks=pytest.mark.brings(f"run of {name}", TRAINERS[name][0], "same")) for name in TRAINERS],
)
def test_a_run_of_a_trainer_is_seen(tmp_path, writer):
    _, files, steps = TRAINERS[writer]
    for file in files:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        save = save_file if file.endswith(".safetensors") else torch.save
        save({"w": torch.ones(2)}, path)
    with ckptcore.Checkpointer(tmp_path) as run:
        assert run.steps == steps
        assert run.load()["w"].tolist() == [1, 1]
        run.save_blocking(steps[-1] + 1, {"w": torch.zeros(2)})
    assert ckptcore.CheckpointReader(tmp_path).latest == steps[-1] + 1


@pytest.mark.brings("run of `ModelCheckpoint(filename='{epoch}-{val_loss:.2f}')`", "lightning", "refused")
def test_names_by_a_metric_are_read_as_the_error_says(tmp_path):
    for name in ("epoch=09-val_loss=0.32.ckpt", "epoch=10-val_loss=0.05.ckpt"):
        torch.save({"name": name}, tmp_path / name)
    with pytest.raises(InvalidLocationError, match="epoch=10") as raised:
        ckptcore.CheckpointReader(tmp_path)
    (way,) = re.findall(r"step_names=(StepNames\(read=\[.*?\]\))", str(raised.value))
    reader = ckptcore.CheckpointReader(tmp_path, step_names=eval(way, NAMES))
    assert reader.steps == (9, 10)


@pytest.mark.brings("run of `ModelCheckpoint` with `last.ckpt` alone", "lightning", "refused")
def test_the_last_one_alone_is_loaded_as_the_error_says(tmp_path):
    torch.save({"global_step": 10}, tmp_path / "last.ckpt")
    with pytest.raises(InvalidLocationError, match="no whole number") as raised:
        ckptcore.Checkpointer(tmp_path)
    (way,) = re.findall(r"ckptcore\.load\('(.*?)'\)", str(raised.value))
    assert ckptcore.load(way) == {"global_step": 10}


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")
@pytest.mark.brings("run of torch.distributed.checkpoint with names such as `sft_10`", "torch", "same")
def test_a_run_of_dcp_with_a_prefix_is_seen(tmp_path):
    for step in (5, 10):
        dcp.save({"w": torch.full((2,), float(step))}, checkpoint_id=tmp_path / f"sft_{step}", no_dist=True)
    with ckptcore.Checkpointer(tmp_path) as run:
        assert run.steps == (5, 10)
        assert run.load()["w"].tolist() == [10, 10]


def test_files_of_one_checkpoint_are_not_steps(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "initial.pt")
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"state_rank_{rank}.pt")
    (tmp_path / "vocab_3.bin").write_bytes(b"words")
    assert ckptcore.CheckpointReader(tmp_path).latest is None
