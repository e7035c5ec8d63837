"""Accelerate with `CheckpointMixin`: random states, workers of data loaders, FSDP, and changed numbers of processes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    set_seed,
)
from ckptcore_integrations.accelerate import CheckpointMixin
from ckptcore_integrations.random_states import WithRandomState

import ckptcore
from ckptcore.errors import CheckpointError
from plugins.integrations.tests.trainers.trainer_jobs import run_job

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata causes this warning
torch.set_num_threads(1)


class Checkpointed(CheckpointMixin, Accelerator):
    """The Accelerator that the tests use."""


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """A dataset of rows with noise from the generators of NumPy and PyTorch."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(4) + float(np.random.rand())


class Rows(Augmented):
    """A dataset without noise. Without workers, Accelerate would draw the noise one batch ahead."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Network(torch.nn.Module):
    """A network that has a layer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)
        self.unused = torch.nn.Linear(3, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.dropout(torch.relu(self.first(rows)), 0.2))


class Run:
    """A training of a small network on noisy rows, in a job of any size."""

    def __init__(self, kind: type[Accelerator] = Checkpointed, dataset: Any = None, workers: int = 0, fsdp: int = 0):
        AcceleratorState._reset_state()
        PartialState._reset_state() if not torch.distributed.is_initialized() else None
        GradientState._reset_state()
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        set_seed(0)
        data = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=fsdp, state_dict_type="FULL_STATE_DICT") if fsdp else None
        unused = [DistributedDataParallelKwargs(find_unused_parameters=True)]
        self.accelerator: Any = kind(cpu=True, dataloader_config=data, fsdp_plugin=plugin, kwargs_handlers=unused)
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rows = torch.arange(96.0)[:, None].expand(96, 4)
        self.dataset = dataset or (WithRandomState(Augmented()) if workers else Rows(rows))
        loader = torch.utils.data.DataLoader(
            self.dataset, batch_size=4, shuffle=True, num_workers=workers, generator=torch.Generator()
        )
        if fsdp == 1:  # the optimizer needs the parameters of the wrapped model
            model = self.accelerator.prepare(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            self.model, self.optimizer, self.loader = model, *self.accelerator.prepare(optimizer, loader)
        else:
            self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def train(self, steps: int) -> list[list[float]]:
        """Train some batches. Return for each batch the loss and the sum of its rows."""
        seen = []
        batches = iter(self.loader)
        for _ in range(steps):
            rows = next(batches)
            loss = self.model(rows).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append([loss.item(), rows.sum().item()])
        self.batches = batches
        return seen

    def go_on(self, steps: int) -> list[list[float]]:
        """Train more batches of the same epoch."""
        seen = []
        for rows in (next(self.batches) for _ in range(steps)):
            loss = self.model(rows).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append([loss.item(), rows.sum().item()])
        return seen


@pytest.mark.brings("`StatefulDataLoader` with workers and augmentation, in `WithRandomState`", "accelerate", "same")
def test_augmentations_of_workers_continue_bit_for_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(workers=2)
    run.train(5)
    run.accelerator.save_state(tmp_path / "5")
    expected = run.go_on(4)
    other = Run(workers=2)
    other.accelerator.require_random_states = True
    other.accelerator.load_state(tmp_path / "5")
    assert other.train(4) == expected
    assert "workers" not in caplog.text


def test_unsaved_random_states_of_workers_give_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(dataset=Augmented(), workers=2)
    with caplog.at_level(logging.WARNING):
        run.accelerator.save_state(tmp_path / "0")
        run.accelerator.save_state(tmp_path / "1")
    assert caplog.text.count("data loader 0 has 2 workers, whose random generators are not saved") == 1
    assert "DataLoader(WithRandomState(dataset), ...)" in caplog.text  # the test above follows this advice
    with pytest.raises(TypeError, match="WithRandomState.*Let its state_dict include"):
        WithRandomState(WithRandomState(Augmented()))


@pytest.mark.parametrize("change", ["missing", "damaged", "of another library"])
@pytest.mark.parametrize("kind", [Accelerator, Checkpointed], ids=["Accelerate's", "ours"])
def test_random_states_that_cannot_be_applied(
    tmp_path: Path, change: str, kind: type[Accelerator], caplog: pytest.LogCaptureFixture
) -> None:
    first = Run(kind)
    if kind is Checkpointed:
        if change != "of another library":
            pytest.skip("checksums detect this change")
        random = first.accelerator._save_process

        def save(directory: str) -> None:
            random(directory)
            torch.save({"step": 3}, Path(directory, "random_states_0.pkl"))

        first.accelerator._save_process = save
    first.accelerator.save_state(tmp_path / "c")
    if kind is Accelerator:
        file = tmp_path / "c" / "random_states_0.pkl"
        file.unlink()
        if change == "damaged":
            file.write_bytes(b"x")
        elif change != "missing":
            torch.save({"step": 3}, file)
    run = Run()
    with caplog.at_level(logging.WARNING):
        run.accelerator.load_state(tmp_path / "c")
    assert "random numbers do not continue as they would have: process 0: random_states_0.pkl" in caplog.text
    run.accelerator.require_random_states = True
    with pytest.raises(CheckpointError, match="set Checkpointed.require_random_states = False"):
        run.accelerator.load_state(tmp_path / "c")
    run.accelerator.require_random_states = False
    run.accelerator.load_state(tmp_path / "c")


def save_in_a_job(directory: str, fsdp: int) -> None:
    """Train, save, continue, resume from the save, and compare. Runs in each process of a job."""
    run = Run(fsdp=fsdp)
    run.train(3)
    run.accelerator.step = 3
    run.accelerator.save_state(directory)
    expected = run.go_on(2)
    other = Run(fsdp=fsdp)
    other.accelerator.require_random_states = True
    other.accelerator.load_state(directory)
    assert other.train(2) == expected
    rank = run.accelerator.process_index
    Path(f"{directory}.{rank}.json").write_text(json.dumps([type(run.model).__name__, expected]))


def load_in_a_job(directory: str, again: str, fsdp: int) -> None:
    """Load a checkpoint, and save it elsewhere. Runs in each process of a job."""
    run = Run(fsdp=fsdp)
    run.accelerator.load_state(directory)
    assert run.accelerator.step == 3
    run.accelerator.save_state(again)


def job(directory: Path, size: int, call: str) -> None:
    program = "import logging, test_accelerate_states as t, trainer_jobs\nlogging.basicConfig()\n"
    program += f"with trainer_jobs.fsdp_on_cpus(): t.{call}\n"
    assert run_job(program + "t.torch.distributed.destroy_process_group()", size, directory) == [0] * size


def assert_same(first: Path, other: Path) -> None:
    for name in ("model", "optimizer"):
        left, right = ckptcore.load(first / name, framework="torch"), ckptcore.load(other / name, framework="torch")
        if name == "optimizer":
            left, right = left["state"], right["state"]
        assert left.keys() == right.keys()
        for key, value in left.items():
            parts = value if isinstance(value, dict) else {"": value}
            for part, tensor in parts.items():
                assert torch.equal(tensor, right[key][part] if part else right[key])


@pytest.mark.brings("DDP and FSDP 1 and 2; another number of processes", "accelerate", "same")
@pytest.mark.system
@pytest.mark.parametrize(
    ("fsdp", "size", "others"),
    [
        (0, 2, [1]),
        (1, 2, [1]),
        (2, 2, [1]),
        pytest.param(0, 2, [4], marks=pytest.mark.slow),
        pytest.param(1, 4, [2], marks=pytest.mark.slow),
        pytest.param(2, 2, [4], marks=pytest.mark.slow),
        pytest.param(2, 4, [2], marks=pytest.mark.slow),
    ],
)
def test_another_number_of_processes(
    tmp_path: Path, fsdp: int, size: int, others: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    saved = tmp_path / "saved"
    job(tmp_path, size, f"save_in_a_job({str(saved)!r}, {fsdp})")
    name, _ = json.loads(Path(f"{saved}.0.json").read_text())
    assert name == ["DistributedDataParallel", "FullyShardedDataParallel", "FSDPNetwork"][fsdp]
    for other in others:
        again = tmp_path / f"by-{other}"
        if other > 1:
            job(tmp_path, other, f"load_in_a_job({str(saved)!r}, {str(again)!r}, {fsdp})")
            assert_same(saved, again)
            said = (tmp_path / f"errors-{other - 1}").read_text()
            missing = f"{saved} has no state of process {other - 1}: its data loaders"
            assert (missing in said) == (other > size)
        else:
            run = Run()
            with caplog.at_level(logging.WARNING):
                run.accelerator.load_state(saved)
            assert run.accelerator.step == 3
            stored = ckptcore.load(saved / "model", framework="torch")
            assert all(torch.equal(tensor, stored[key]) for key, tensor in run.model.state_dict().items())
            states = ckptcore.load(saved / "optimizer", framework="torch")["state"]
            assert len(run.optimizer.optimizer.state) == len(states)
            assert "no state of process" not in caplog.text  # process 0 has a saved state
            assert len(run.train(2)) == 2  # the training continues within the epoch


@pytest.mark.system
def test_one_process_is_continued_by_two(tmp_path: Path) -> None:
    run = Run()
    run.train(3)
    run.accelerator.step = 3
    run.accelerator.save_state(tmp_path / "saved")
    job(tmp_path, 2, f"load_in_a_job({str(tmp_path / 'saved')!r}, {str(tmp_path / 'again')!r}, 0)")
    assert_same(tmp_path / "saved", tmp_path / "again")
    assert "has no state of process 1: its data loaders" in (tmp_path / "errors-1").read_text()
    assert "random numbers" not in (tmp_path / "errors-0").read_text()
