"""`newest_sound` on steps that plain Trainers saved, also with PEFT, FSDP and DeepSpeed: sound, damaged and unknown."""

from __future__ import annotations

import inspect
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from ckptcore_integrations.trainer_steps import delete_old_steps, steps_of
from ckptcore_integrations.transformers import newest_sound
from torch.distributed.fsdp import fully_shard

import ckptcore
from ckptcore.commit import root_json
from ckptcore.errors import CheckpointError
from plugins.integrations.tests.trainers import test_transformers as plain
from plugins.integrations.tests.trainers.trainer_jobs import run_job

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses this property
RANKS = 2


class Process:
    """The attributes of an Accelerator that Accelerate's functions for FSDP use."""

    num_processes, process_index, is_main_process, is_fsdp2 = 1, 0, True, True

    def wait_for_everyone(self) -> None:
        """Return at once, because the job has one process."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a plain Trainer."""
    directory = tmp_path_factory.mktemp("plain")
    plain.trainer(directory, plain.Observed, plain.tokens, max_steps=8).train()
    return directory


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a plain Trainer with two adapters."""

    def task() -> Any:
        model, rows = plain.tokens()
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["value"]))
        return model, rows

    directory = tmp_path_factory.mktemp("adapted")
    plain.trainer(directory, plain.Observed, task, max_steps=8).train()
    return directory


NAMES_RANKS = "use_dcp" in inspect.signature(save_fsdp_model).parameters
"""True if this version of Accelerate can write a file for each rank, without DCP."""


@pytest.fixture(scope="module")
def sharded(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with the files that Accelerate writes with FSDP 2: whole, sharded, and one file for each rank."""
    directory = tmp_path_factory.mktemp("sharded")
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(64, 64)
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        for kind, by_rank in (("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", False), ("SHARDED_STATE_DICT", True)):
            if by_rank and not NAMES_RANKS:
                continue
            options = {"use_dcp": not by_rank} if NAMES_RANKS else {}
            run = directory / (f"{kind}-by-rank" if by_rank else kind)
            shutil.copytree(trained, run)
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
            for step in run.iterdir():
                (step / "model.safetensors").unlink()
                (step / "optimizer.pt").unlink()
                save_fsdp_model(plugin, Process(), model, str(step), **options)
                save_fsdp_optimizer(plugin, Process(), optimizer, model, str(step), **options)
    finally:
        torch.distributed.destroy_process_group()
    return directory


@pytest.fixture(scope="module")
def by_deepspeed(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with files like those of DeepSpeed with ZeRO 3. `test_steps_of_deepspeed_itself` uses real files."""
    run: Path = tmp_path_factory.mktemp("deepspeed") / "run"
    shutil.copytree(trained, run)
    for step in run.iterdir():
        for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
            (step / name).unlink()
        tag = step.name.replace("checkpoint-", "global_step")
        (step / "latest").write_text(tag)
        (step / tag).mkdir()
        for rank in range(RANKS):
            shutil.copy(step / "rng_state.pth", step / f"rng_state_{rank}.pth")
            for name in (f"zero_pp_rank_{rank}_mp_rank_00_model", f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim"):
                torch.save({"module": torch.ones(100)}, step / tag / f"{name}_states.pt")
        (step / "rng_state.pth").unlink()
        (step / "zero_to_fp32.py").write_text("print()")
    return run


def copied(source: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a copy of a directory, and its newest step."""
    if source.name.endswith("-by-rank") and not NAMES_RANKS:
        pytest.skip("Accelerate before 1.15 writes no files by rank")
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run", tmp_path / "run" / "checkpoint-8"


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def assert_damage(source: Path, tmp_path: Path, name: str, *changes: Callable[[Path], None]) -> None:
    """Damage a file or directory of the newest step, which was sound, and expect the previous step."""
    run, newest = copied(source, tmp_path)
    assert newest_sound(run) == str(newest)
    for change in changes:
        target = newest / name
        shutil.rmtree(newest)
        shutil.copytree(source / "checkpoint-8", newest)
        change(target)
        assert newest_sound(run) == str(run / "checkpoint-4"), f"{change.__name__} {name}"


@pytest.mark.brings("steps of the plain Trainer with PEFT, FSDP, DeepSpeed: `newest_sound`", "transformers", "same")
@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_config.json", "other/adapter_model.safetensors", "optimizer.pt"]
)
def test_adapters(adapted: Path, tmp_path: Path, name: str) -> None:
    changes = [remove] if name.endswith(".json") else [remove, truncate]
    assert_damage(adapted, tmp_path, name, *changes)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("FULL_STATE_DICT", "pytorch_model_fsdp.bin"),
        ("FULL_STATE_DICT", "optimizer.bin"),
        ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0/__0_0.distcp"),
        ("SHARDED_STATE_DICT", "pytorch_model_fsdp_0/.metadata"),
        ("SHARDED_STATE_DICT", "optimizer_0/__0_0.distcp"),
        ("SHARDED_STATE_DICT-by-rank", "pytorch_model_fsdp_0_rank0.bin"),
        ("SHARDED_STATE_DICT-by-rank", "optimizer_0_rank0.bin"),
    ],
)
def test_fsdp(sharded: Path, tmp_path: Path, kind: str, name: str) -> None:
    changes = [remove] if name.endswith(".metadata") else [remove, truncate, flip]
    assert_damage(sharded / kind, tmp_path, name, *changes)


@pytest.mark.parametrize(
    "name",
    [
        "latest",
        "global_step8",
        "global_step8/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "global_step8/zero_pp_rank_1_mp_rank_00_model_states.pt",
        "global_step8/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "rng_state_1.pth",
        "trainer_state.json",
    ],
)
def test_deepspeed(by_deepspeed: Path, tmp_path: Path, name: str) -> None:
    states = name.endswith((".pt", ".pth"))
    assert_damage(by_deepspeed, tmp_path, name, *([remove, truncate, flip] if states else [remove]))


def train_with_deepspeed(directory: str, stage: int) -> None:
    """Train with the plain Trainer and DeepSpeed. Runs in each process of a job."""
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    config = {"zero_optimization": {"stage": stage}, "optimizer": optimizer, **sizes}
    options: dict[str, Any] = {"max_steps": 8, "per_device_train_batch_size": 8, "deepspeed": config}
    plain.trainer(Path(directory), plain.Observed, plain.tokens, **options).train()


@pytest.mark.system
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_steps_of_deepspeed_itself(tmp_path: Path, stage: int) -> None:
    program = f"import test_trainer_steps as t; t.train_with_deepspeed({str(tmp_path / 'source')!r}, {stage})"
    assert run_job(program, RANKS, tmp_path, DS_ACCELERATOR="cpu") == [0, 0]
    run, newest = copied(tmp_path / "source", tmp_path)
    assert newest_sound(run) == str(newest)
    for path in sorted((newest / "global_step8").iterdir()):
        content = path.read_bytes()
        for change in (remove, truncate):
            change(path)
            assert newest_sound(run) == str(run / "checkpoint-4"), f"{change.__name__} {path.name}"
            path.write_bytes(content)
    assert newest_sound(run) == str(newest)


def test_a_missing_rank_is_damage(sharded: Path, tmp_path: Path) -> None:
    run, newest = copied(sharded / "SHARDED_STATE_DICT-by-rank", tmp_path)
    for kind in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.copy(newest / f"{kind}_rank0.bin", newest / f"{kind}_rank1.bin")
    (newest / "rng_state.pth").rename(newest / "rng_state_0.pth")
    shutil.copy(newest / "rng_state_0.pth", newest / "rng_state_1.pth")
    assert newest_sound(run) == str(newest)
    (newest / "pytorch_model_fsdp_0_rank1.bin").unlink()
    assert newest_sound(run) == str(run / "checkpoint-4")


def test_steps_with_other_formats_of_files_are_sound(trained: Path, tmp_path: Path) -> None:
    run, newest = copied(trained, tmp_path)
    torch.save({"w": torch.ones(2)}, newest / "pytorch_model.bin")  # Transformers 4 with save_safetensors=False
    (newest / "model.safetensors").unlink()
    assert newest_sound(run) == str(newest)
    for number in (1, 2):  # weights in several files
        torch.save({"w": torch.ones(2)}, newest / f"pytorch_model-0000{number}-of-00002.bin")
    index = {"weight_map": {name: f"pytorch_model-0000{name}-of-00002.bin" for name in "12"}}
    (newest / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (newest / "pytorch_model.bin").unlink()
    (run / "tmp-checkpoint-12").mkdir()
    (newest / "notes.bin").write_bytes(b"of the user")
    assert newest_sound(run) == str(newest)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):  # as with save_only_model
        (newest / name).unlink()
    assert newest_sound(run) == str(newest)
    (newest / "pytorch_model-00002-of-00002.bin").unlink()
    assert newest_sound(run) == str(run / "checkpoint-4")


def unknown_weights(step: Path) -> None:
    (step / "model.safetensors").rename(step / "weights.msgpack")


def unknown_optimizer(step: Path) -> None:
    (step / "optimizer.pt").rename(step / "rank0-of-1-optimizer.pt")  # a file of FSDP on XLA


def unknown_directory(step: Path) -> None:
    (step / "model.safetensors").unlink()
    (step / "iter_0000008").mkdir()  # a directory of Megatron-LM


def unreadable(step: Path) -> None:
    (step / "optimizer.pt").unlink()
    # The error of a loop of links differs from that of a missing file, like the error of a failing mount.
    (step / "optimizer.pt").symlink_to("optimizer.pt")


def old_pickle(step: Path) -> None:
    torch.save({"w": torch.ones(2)}, step / "optimizer.pt", _use_new_zipfile_serialization=False)


def newer_version(step: Path) -> None:
    for path in list(step.iterdir()):
        path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root_json, "FORMAT_VERSION", 99)
        ckptcore.save(step, {"w": torch.ones(2)}, metadata={"files": {}})


@pytest.mark.brings("steps with unknown files: `newest_sound`", "transformers", "refused")
@pytest.mark.parametrize(
    "change", [unknown_weights, unknown_optimizer, unknown_directory, unreadable, old_pickle, newer_version]
)
def test_what_cannot_be_judged_is_an_error_with_ways_on(
    trained: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    run, newest = copied(trained, tmp_path)
    change(newest)
    with pytest.raises(CheckpointError, match="cannot tell whether this step is complete") as caught:
        newest_sound(run)
    assert str(caught.value).startswith(str(newest))
    assert f"pass resume_from_checkpoint={str(newest)!r}" in str(caught.value)
    assert "move the directory away" in str(caught.value)
    newest.rename(tmp_path / "elsewhere")
    assert newest_sound(run) == str(run / "checkpoint-4")


def test_a_run_with_an_unknown_step_deletes_nothing(trained: Path, tmp_path: Path) -> None:
    run, newest = copied(trained, tmp_path)
    unknown_weights(newest)
    plain.trainer(run, plain.Checkpointed, plain.tokens, max_steps=4, save_total_limit=1).train()
    assert set(os.listdir(run)) == {"checkpoint-4", "checkpoint-8"}
    assert (newest / "weights.msgpack").exists()


def test_a_step_of_a_plain_trainer_is_replaced_only_by_a_commit(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, newest = copied(trained, tmp_path)
    before = (newest / "model.safetensors").read_bytes()

    def fail(*arguments: Any, **options: Any) -> None:
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ckptcore, "save_checkpointables", fail)
        with pytest.raises(CheckpointError, match="full"):
            plain.trainer(run, plain.Checkpointed, plain.tokens, max_steps=8, save_steps=8).train()
    assert newest_sound(run) == str(newest)
    assert (newest / "model.safetensors").read_bytes() == before
    plain.trainer(run, plain.Checkpointed, plain.tokens, max_steps=8, save_steps=8).train()
    assert set(os.listdir(run)) == {"checkpoint-4", "checkpoint-8"}
    assert ckptcore.verify(newest).ok


def test_steps_with_low_numbers_are_old(tmp_path: Path) -> None:
    for step in (2, 10, 9, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (0, 1000 - step))
    (tmp_path / "tmp-checkpoint-1").mkdir()
    assert list(steps_of(tmp_path)) == [2, 9, 10, 100]
    delete_old_steps(str(tmp_path / "checkpoint-10"), 2, kept=[str(tmp_path / "checkpoint-2"), None])
    assert list(steps_of(tmp_path)) == [2, 10, 100]


def test_damage_is_logged(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, newest = copied(trained, tmp_path)
    (newest / "scheduler.pt").unlink()
    with caplog.at_level(logging.WARNING):
        newest_sound(run)
    assert f"{newest} is skipped: the state of the scheduler is missing" in caplog.text
