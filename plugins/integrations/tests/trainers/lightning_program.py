"""Parts of the tests with Lightning: a classifier, a Trainer, and functions that start processes and jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from ckptcore_testing.servers import free_port
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

torch.set_num_threads(1)
warnings.filterwarnings("ignore", module="lightning|torch")

DIGITS = load_digits()


class Digits(lightning.LightningModule):  # type: ignore[misc]  # without types here
    """A classifier with dropout and batch normalization. Records the loss and the labels of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            torch.nn.Dropout(),
            torch.nn.Linear(32, 10),
        )
        self.seen: list[tuple[float, list[int]]] = []

    def training_step(self, batch: Any, number: int) -> Any:
        """Return the loss."""
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        self.seen.append((float(loss), labels.tolist()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a schedule."""
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Sharded(Digits):
    """The classifier, sharded by FSDP2."""

    def configure_model(self) -> None:
        """Shard the layers."""
        for layer in (self.net[0], self.net[4]):
            if not isinstance(layer.weight, DTensor):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class RandomState(lightning.Callback):  # type: ignore[misc]  # without types here
    """A callback that saves the state of PyTorch's random generator, which Lightning does not save."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator."""
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until training starts, because Lightning draws random numbers in between."""
        self.loaded = state["torch"]

    def on_train_batch_start(self, *_: Any) -> None:
        """Restore the state once."""
        if (loaded := self.__dict__.pop("loaded", None)) is not None:
            torch.set_rng_state(loaded)


def loader() -> StatefulDataLoader:
    """Return a loader with 6 shuffled batches in an epoch. It can resume within an epoch."""
    rows = TensorDataset(torch.tensor(DIGITS.data[:96], dtype=torch.float32) / 16, torch.tensor(DIGITS.target[:96]))
    return StatefulDataLoader(rows, batch_size=16, shuffle=True, num_workers=0)


def trainer(directory: Path, *, max_steps: int = 12, keep: int = 2, last: Any = True, **options: Any) -> Any:
    """Return a Trainer that saves every 4th step."""
    checkpoints = ModelCheckpoint(
        directory, every_n_train_steps=4, save_top_k=keep, monitor="step", mode="max", save_last=last, filename="{step}"
    )
    return lightning.Trainer(
        max_steps=max_steps,
        callbacks=[checkpoints, RandomState()],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # Lightning does not restore the position of its sampler
        **options,
    )


def fit(run: Any, module: Any = None, **options: Any) -> Any:
    """Train, and return the module."""
    lightning.seed_everything(1, verbose=False)
    module = module or Digits()
    run.fit(module, loader(), **options)
    return module


def same(left: Any, right: Any) -> bool:
    """Return True if nested values are equal. Tensors are compared bit for bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def start(call: str, module: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start a process that calls a function of a module of this directory."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", f"import {module} as t; from pathlib import Path; t.{call}"],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def run_job(call: str, module: str, size: int, status: int = 0) -> None:
    """Call a function of a module of this directory in a job of Lightning. All ranks must end with `status`."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(call, module, LOCAL_RANK=str(rank), **address) for rank in range(size)]
    errors = [rank.communicate(timeout=240)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [status] * size, "\n".join(errors)
