"""Sharded strategies of Lightning with models that are hard to resume, on any number of processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from ckptcore_integrations.lightning import CkptcoreFSDPStrategy, CkptcoreModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptcore
from ckptcore import Context
from ckptcore.errors import CheckpointError
from ckptcore.events import Event
from plugins.integrations.tests.trainers.lightning_program import run_job, same

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns about CPUs, workers, loggers and its own functions

STEPS = 6


class FSDPOnCPU(CkptcoreFSDPStrategy):
    """An FSDP strategy on the CPU. Lightning would pass the index of a GPU as the device."""

    def _setup_model(self, model: Any) -> Any:
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        self._reset_optimizers_and_schedulers()
        return wrapped


class Parts(lightning.LightningModule):  # type: ignore[misc]  # without types here
    """A model without a scheduler. One layer is frozen, one is not used, and one is used from the 4th step on."""

    automatic = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused, self.late, self.frozen = (torch.nn.Linear(8, 8) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.save_hyperparameters({"root": Path("/data"), "loss": torch.nn.functional.mse_loss})
        self.losses: list[float] = []

    def layers(self) -> Any:
        """Return all layers."""
        return self.used, self.unused, self.late, self.frozen

    def forward(self, rows: Any, step: int) -> Any:
        """Return the loss of some rows."""
        rows = self.frozen(self.used(rows))
        return (self.late(rows) if step >= 3 else rows).square().mean()

    def training_step(self, batch: Any, number: int) -> Any:
        """Record the loss."""
        loss = self(batch[0], self.global_step)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TwoOptimizers(Parts):
    """A model with manual optimization and two optimizers. The second optimizer begins later. FSDP 1 refuses this."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        """Step the first optimizer, and from the 4th batch on also the second."""
        first, second = self.optimizers()
        loss = self(batch[0], 3)
        self.losses.append(float(loss))
        self.manual_backward(loss)
        first.step()
        if number >= 3:
            second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        """Return two optimizers, each for a part of the parameters."""
        return (
            torch.optim.AdamW(self.used.parameters(), lr=1e-2),
            torch.optim.SGD([*self.late.parameters(), *self.unused.parameters()], lr=1e-2, momentum=0.9),
        )


MODELS: dict[str, Any] = {"parts": Parts, "two optimizers": TwoOptimizers}


def build(kind: str, model: str, size: int, directory: Path, *callbacks: Any, **options: Any) -> Any:
    """Return a Trainer that saves every second step, and its module."""
    made = MODELS[model]
    if kind == "fsdp":
        strategy: Any = FSDPOnCPU()
    else:
        strategy = CkptcoreModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)

        def configure_model(self: Any) -> None:
            for layer in self.layers():
                if not isinstance(layer.weight, DTensor):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        made = type("ShardedModel", (made,), {"configure_model": configure_model})
    every = 2 if model == "parts" else 1  # Lightning counts a step of each optimizer, so the last number is odd
    options = {"filename": "{step}", "every_n_train_steps": every, "save_top_k": -1, "save_last": "link", **options}
    run = lightning.Trainer(
        max_epochs=1,
        callbacks=[ModelCheckpoint(directory, **options), *callbacks],
        devices=size,
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    return run, made()


def batches() -> Any:
    """Return batches that are equal on all processes, so that the result does not depend on their number."""
    rows = torch.rand(STEPS * 4, 8, generator=torch.Generator().manual_seed(1))
    return StatefulDataLoader(TensorDataset(rows), batch_size=4)


def train(kind: str, model: str, size: int, directory: Path) -> None:
    """Train, and write the losses."""
    run, module = build(kind, model, size, directory / "whole")
    run.fit(module, batches())
    assert len(module.losses) == STEPS
    (directory / "losses.json").write_text(json.dumps(module.losses))


def resume(kind: str, model: str, size: int, directory: Path, ckpt_path: str = "step=2.ckpt") -> None:
    """Resume, and compare the losses and the last checkpoint with those of the whole run."""
    run, module = build(kind, model, size, directory / f"rest{size}")
    run.fit(module, batches(), ckpt_path=str(directory / "whole" / ckpt_path))
    losses = json.loads((directory / "losses.json").read_text())
    assert module.losses == losses[2:], (module.losses, losses)


def assert_same_last(directory: Path, size: int) -> None:
    """Compare the last checkpoint of a resumed run with that of the whole run."""
    parts = (f"rest{size}", "whole")
    ours, theirs = (ckptcore.load(directory / part / "last.ckpt", framework="torch") for part in parts)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert same(ours[name], theirs[name]), name


class SavesShards(lightning.Callback):  # type: ignore[misc]  # without types here
    """A callback that saves copies of the weights, like a callback for averages."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the copies."""
        checkpoint["copies"] = dict(checkpoint["state_dict"])


def refuse(kind: str, directory: Path) -> None:
    """Check that unsupported resumes and saves are refused, and load weights for a validation."""
    run, module = build(kind, "parts", 2, directory / "weights", save_weights_only=True)
    run.fit(module, batches())
    run, module = build(kind, "parts", 2, directory / "other")
    with pytest.raises(CheckpointError, match="has only the model, as save_weights_only=True saves it"):
        run.fit(module, batches(), ckpt_path=str(directory / "weights" / "last.ckpt"))
    run, module = build(kind, "parts", 2, directory / "other", SavesShards())
    with pytest.raises(CheckpointError, match="copies: a callback or the module saves sharded tensors"):
        run.fit(module, batches())
    assert module.losses == []


def whole_and_rest(kind: str, model: str, directory: Path) -> None:
    """Train, resume in the same job of two ranks, and check that unsupported resumes are refused."""
    train(kind, model, 2, directory)
    resume(kind, model, 2, directory)
    if model == "parts" and kind == "model parallel":
        refuse(kind, directory)


def kill(kind: str, directory: Path) -> None:
    """Train, and kill this process in the third save, which is the second save with a link."""
    saves = []

    def observe(event: Event) -> None:
        if event.phase == "write" and saves.append(event.location) is None and len(saves) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    run, module = build(kind, "parts", 2, directory / "killed")
    run.strategy._checkpoint_context = Context(observers=[observe])
    run.fit(module, batches())


def resume_killed(kind: str, size: int, directory: Path) -> None:
    """Resume from the last checkpoint of a killed run, and compare."""
    run, module = build(kind, "parts", size, directory / "killed")
    run.fit(module, batches(), ckpt_path="last")
    losses = json.loads((directory / "losses.json").read_text())
    assert module.losses == losses[4:]


def job(call: str, size: int, status: int = 0) -> None:
    """Call a function of this module in a job."""
    run_job(call, "test_lightning_sharded", size, status)


@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("fsdp", "parts"),
        pytest.param("model parallel", "parts", marks=pytest.mark.slow),
        ("model parallel", "two optimizers"),
    ],
)
@pytest.mark.brings("sharded: frozen, unused and late parameters, no scheduler, two optimizers", "lightning", "same")
@pytest.mark.brings("sharded: tensors of callbacks that are sharded", "lightning", "refused")
@pytest.mark.brings("sharded: a resume from a checkpoint of `save_weights_only`", "lightning", "refused")
def test_sharded_models_resume_with_all_parameters(tmp_path: Path, kind: str, model: str) -> None:
    job(f"whole_and_rest({kind!r}, {model!r}, Path({str(tmp_path)!r}))", 2)
    assert_same_last(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(
    ("kind", "model"), [("fsdp", "parts"), ("model parallel", "parts"), ("model parallel", "two optimizers")]
)
def test_sharded_models_resume_on_other_numbers_of_processes(tmp_path: Path, kind: str, model: str) -> None:
    job(f"train({kind!r}, {model!r}, 2, Path({str(tmp_path)!r}))", 2)
    for size in (4, 1):
        job(f"resume({kind!r}, {model!r}, {size}, Path({str(tmp_path)!r}))", size)
        assert_same_last(tmp_path, size)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("kind", ["fsdp", "model parallel"])
def test_a_killed_sharded_run_resumes(tmp_path: Path, kind: str) -> None:
    job(f"train({kind!r}, 'parts', 2, Path({str(tmp_path)!r}))", 2)
    job(f"kill({kind!r}, Path({str(tmp_path)!r}))", 2, status=-signal.SIGKILL)
    job(f"resume_killed({kind!r}, 4, Path({str(tmp_path)!r}))", 4)
