"""Accelerate with `CheckpointMixin`: kills and resumes, automatic names, hooks, and jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from ckptcore_integrations.accelerate import CheckpointMixin
from sklearn.datasets import load_digits

import ckptcore
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from plugins.integrations.tests.trainers.trainer_jobs import environment, kill_before_commit, run_job
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata causes this warning
torch.set_num_threads(1)
DIGITS = load_digits()


class Checkpointed(CheckpointMixin, Accelerator):
    """The Accelerator that the tests use."""


class Progress:
    """A registered object that records the loss and the data of each step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": json.dumps(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = json.loads(state["seen"])


class Run:
    """A training of a small network with dropout on images of digits.

    An epoch has 6 batches. Every 4th step is saved.
    """

    def __init__(self, directory: Path, kind: type[Accelerator] = Checkpointed, **options: Any) -> None:
        AcceleratorState._reset_state()
        PartialState._reset_state() if not torch.distributed.is_initialized() else None
        GradientState._reset_state()
        set_seed(0)
        self.project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, **options)
        self.accelerator: Any = kind(
            cpu=True,
            project_config=self.project,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True),
        )
        model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        rows = torch.utils.data.TensorDataset(
            torch.tensor(DIGITS.data[:96], dtype=torch.float32) / 16, torch.tensor(DIGITS.target[:96])
        )
        size = 16 // self.accelerator.num_processes
        # A loader draws a random number when an iteration begins. With its own generator, this does not change the
        # random numbers of the dropout.
        loader = torch.utils.data.DataLoader(rows, batch_size=size, shuffle=True, generator=torch.Generator())
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)

    def train(self, steps: int = 12) -> None:
        while len(self.progress.seen) < steps:
            self.loader.set_epoch(len(self.progress.seen) // 6)
            for images, labels in self.loader:
                loss = torch.nn.functional.cross_entropy(self.model(images), labels)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                self.progress.seen.append([loss.item(), labels.tolist()])
                if len(self.progress.seen) % 4 == 0:
                    self.accelerator.save_state()
        self.accelerator.wait_for_checkpoint()

    def resume(self) -> None:
        self.accelerator.load_state()


def assert_same(run: Run, other: Run) -> None:
    """Compare losses, order of data, weights, optimizer and schedule, bit for bit."""
    assert run.progress.seen == other.progress.seen
    parts = zip(run.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    assert all(torch.equal(left, right) for left, right in parts)
    left, right = run.optimizer.state_dict(), other.optimizer.state_dict()
    assert left["param_groups"] == right["param_groups"]
    for number, moments in left["state"].items():
        assert all(torch.equal(value, right["state"][number][name]) for name, value in moments.items())
    assert run.schedule.state_dict() == other.schedule.state_dict()


def kill_in_second_save(directory: Path) -> None:
    """Train, and kill this process in the second save, after its files are written and right before its commit."""
    kill_before_commit(directory / "checkpoints" / "checkpoint_0", directory / "written")
    Run(directory).train()


@pytest.mark.system
@pytest.mark.parametrize("in_background", [False, True], ids=["blocking", "background"])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, *, in_background: bool) -> None:
    program = f"import test_accelerate as t, pathlib; t.Checkpointed.save_in_background = {in_background}; "
    program += f"t.kill_in_second_save(pathlib.Path({str(tmp_path)!r}))"
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert "optimizer/model.safetensors" in (tmp_path / "written").read_text()  # the kill happened during the save

    resumed = Run(tmp_path)
    resumed.accelerator.save_in_background = in_background
    resumed.resume()
    assert len(resumed.progress.seen) == 4
    resumed.train()
    uninterrupted = Run(tmp_path / "other")
    uninterrupted.train()
    assert_same(uninterrupted, resumed)
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert all(ckptcore.verify(tmp_path / "checkpoints" / name).ok for name in names)


def test_the_limit_is_applied_after_the_commit(tmp_path: Path) -> None:
    run = Run(tmp_path, total_limit=2)
    run.train()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    run.project.iteration = 2
    with pytest.raises(ValueError, match="checkpoint_2 exists. Set .*project_configuration.iteration to the number"):
        run.accelerator.save_state()
    run.accelerator.project_configuration.iteration = 3
    assert run.accelerator.save_state().name == "checkpoint_3"
    assert ckptcore.verify(tmp_path / "checkpoints" / "checkpoint_3").ok


@pytest.mark.parametrize("kind", [Checkpointed, Accelerator], ids=["ours", "Accelerate's"])
@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("loaded", [None, 1], ids=["newest", "earlier"])
def test_automatic_numbers_continue_after_a_load(
    tmp_path: Path, kind: type[Accelerator], limit: int, loaded: int | None
) -> None:
    first = Run(tmp_path, kind)
    for _ in range(3):
        first.accelerator.save_state()
    run = Run(tmp_path, total_limit=limit)
    run.accelerator.load_state(None if loaded is None else tmp_path / "checkpoints" / f"checkpoint_{loaded}")
    for number in (3, 4):
        assert run.accelerator.save_state().name == f"checkpoint_{number}"
        kept = sorted(os.listdir(tmp_path / "checkpoints"))
        assert kept == [f"checkpoint_{number + 1 - limit + place}" for place in range(limit)]


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("in_background", [False, True], ids=["blocking", "background"])
def test_checkpoint_that_was_just_saved_is_never_deleted(tmp_path: Path, limit: int, *, in_background: bool) -> None:
    run = Run(tmp_path, total_limit=limit)
    run.accelerator.save_in_background = in_background
    run.project.iteration = 7
    run.accelerator.save_state()
    for number in (0, 1):
        run.project.iteration = number
        run.accelerator.save_state()
        run.accelerator.wait_for_checkpoint()
        # The checkpoint with the highest number is the newest sound one, so it is not deleted either.
        assert set(os.listdir(tmp_path / "checkpoints")) == {f"checkpoint_{number}", "checkpoint_7"}


def test_a_load_does_not_lower_a_number_that_was_set(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.accelerator.save_state()
    run.project.iteration = 20
    run.accelerator.load_state()
    assert run.accelerator.save_state().name == "checkpoint_20"


def test_loading_by_automatic_names_needs_no_project_directory(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    saved = run.accelerator.save_state()
    run.accelerator.project_configuration.project_dir = None
    run.accelerator.load_state(saved)
    assert run.accelerator.save_iteration == 1
    for call in (run.accelerator.save_state, run.accelerator.load_state):
        with pytest.raises(ValueError, match="project_dir"):
            call()
    with pytest.raises(ValueError, match=r"set ProjectConfiguration\(project_dir=...\)"):
        run.accelerator.save_state()
    run.accelerator.project_configuration.project_dir = str(tmp_path / "run")
    assert run.accelerator.save_state().name == "checkpoint_1"


def test_a_directory_of_accelerate_is_loaded(tmp_path: Path) -> None:
    Accelerated = type("Accelerated", (Accelerator,), {"wait_for_checkpoint": lambda self: None})
    run = Run(tmp_path, Accelerated)
    run.train(4)
    other = Run(tmp_path)
    other.resume()
    other.train()
    uninterrupted = Run(tmp_path / "other")
    uninterrupted.train()
    assert_same(uninterrupted, other)


def test_damage_is_an_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(4)
    file = tmp_path / "checkpoints" / "checkpoint_0" / "process" / "random_states_0.pkl"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run.train(8)
    with pytest.raises(CheckpointError, match="random_states_0.* or load another checkpoint"):
        run.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    run.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    assert len(run.progress.seen) == 8


def test_hooks_write_files_and_take_weights(tmp_path: Path) -> None:
    run = Run(tmp_path)
    seen: list[Any] = []

    def before_save(models: list[Any], weights: list[Any], directory: str) -> None:
        Path(directory, "adapter").mkdir()
        Path(directory, "adapter", "notes.txt").write_text(f"{len(models)} model, {len(weights.pop())} weights")

    def before_load(models: list[Any], directory: str) -> None:
        models.pop()
        seen.append(Path(directory, "adapter", "notes.txt").read_text())

    save, load = (
        run.accelerator.register_save_state_pre_hook(before_save),
        run.accelerator.register_load_state_pre_hook(before_load),
    )
    run.train(4)
    directory = tmp_path / "checkpoints" / "checkpoint_0"
    assert not (directory / "model").exists()
    run.accelerator.load_state()
    assert seen == ["1 model, 4 weights"]
    (directory / "adapter" / "notes.txt").write_text("changed")
    run.train(8)
    with pytest.raises(CheckpointError, match="'adapter/notes.txt' is damaged; load another checkpoint"):
        run.accelerator.load_state(directory)
    run.accelerator.load_state(directory.with_name("checkpoint_1"))
    assert len(seen) == 2
    save.remove()
    load.remove()


class Wrong:
    """A registered object whose state contains a lock."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock(), "deep": [print]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class WrongModel(torch.nn.Linear):
    """A model whose extra state is a lock."""

    def get_extra_state(self) -> Any:
        return threading.Lock()

    def set_extra_state(self, state: Any) -> None:
        pass


def test_objects_that_cannot_be_saved_are_refused_before_the_training(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(UnsupportedLeafError) as caught:
        run.accelerator.register_for_checkpointing(Progress(), Wrong())
    assert "in 'custom_checkpoint_2': lock" in str(caught.value)
    assert "in 'custom_checkpoint_2': deep[0]" in str(caught.value)
    with pytest.raises(UnsupportedLeafError, match="in 'model_1': _extra_state"):
        run.accelerator.prepare(WrongModel(2, 2))
    run.project.save_on_each_node = True
    with pytest.raises(NotImplementedError, match="save_on_each_node"):
        run.accelerator.prepare(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["MEGATRON_LM", "XLA"])
@pytest.mark.brings("Megatron-LM, XLA, `save_on_each_node`", "accelerate", "refused")
def test_kinds_of_training_that_are_refused(tmp_path: Path, kind: str) -> None:
    run = Run(tmp_path)
    run.accelerator.state.distributed_type = DistributedType[kind]
    with pytest.raises(NotImplementedError, match=f"does not support {kind}. Remove CheckpointMixin from the bases"):
        run.accelerator.prepare(torch.nn.Linear(2, 2))


def test_unsupported_options_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(NotImplementedError, match="safe_serialization.*Remove the argument"):
        run.accelerator.save_state(safe_serialization=False)
    run.accelerator.save_state()
    with pytest.raises(NotImplementedError, match="strict.*Remove the argument"):
        run.accelerator.load_state(strict=False)
    run.accelerator.load_state()
    run.project.save_on_each_node = True
    with pytest.raises(NotImplementedError, match="save_on_each_node. Remove CheckpointMixin from the bases of Check"):
        run.accelerator.save_state()
    plain = Run(tmp_path / "plain", Accelerator)
    plain.project.save_on_each_node = True
    plain.accelerator.save_state()
    plain.accelerator.load_state()


def resume_in_a_job(directory: Path) -> None:
    """Train 12 steps, and resume from the second of three saves. Runs in each process of a job."""
    run = Run(directory)
    run.train()
    other = Run(directory)
    other.accelerator.load_state(directory / "checkpoints" / "checkpoint_1")
    assert other.project.iteration == 3
    assert len(other.progress.seen) == 8
    other.train()
    assert_same(run, other)
    (directory / f"done-{other.accelerator.process_index}").write_text(json.dumps(other.progress.seen))
    torch.distributed.destroy_process_group()


@pytest.mark.system
def test_two_processes(tmp_path: Path) -> None:
    program = f"import test_accelerate as t, pathlib; t.resume_in_a_job(pathlib.Path({str(tmp_path)!r}))"
    assert run_job(program, 2, tmp_path) == [0, 0]
    first, second = (json.loads((tmp_path / f"done-{rank}").read_text()) for rank in range(2))
    assert first != second  # the processes train on different data
    assert list(ckptcore.load(tmp_path / "checkpoints" / "checkpoint_2" / "model")) == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]  # these are the names of the model without a wrapper


def test_the_program_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[4] / "docs" / "how-to" / "with-accelerate.md"
    module = page_module(page, "trainers")
    for block in code_blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            run_python(block, page, module)


def test_a_file_of_the_user_does_not_stop_the_next_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    run.project.automatic_checkpoint_naming = False
    for _ in range(2):
        run.accelerator.save_state(str(tmp_path / "state"))
        (tmp_path / "state/tokenizer.json").write_text("{}")
    assert "(tokenizer.json), which are deleted" in caplog.text  # the second save deletes the file
