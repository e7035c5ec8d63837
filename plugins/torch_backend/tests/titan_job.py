"""A job that saves a tree as TorchTitan does: every entry is an object with `state_dict` and `load_state_dict`.

``torchrun --nproc-per-node N titan_job.py TASK DIRECTORY``: TASK is ``save`` or ``load``.
"""

from __future__ import annotations

import io
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptcore

STEPS = 3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def meet(place: int) -> None:
    """Assert with a collective that all ranks are in the same method of the same object."""
    places: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(places, place)
    assert set(places) == {place}, f"the ranks are in different methods: {places}"


class ModelWrapper(Stateful):
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        meet(1)
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        meet(2)
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


class OptimizersContainer(torch.optim.Optimizer, Stateful):
    """An optimizer that contains other optimizers. It saves their states by names of parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1) for part in model.children()]
        super().__init__(list(model.parameters()), {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]  # TorchTitan does this
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        meet(3)
        parts = [get_optimizer_state_dict(self.model, inner, options=FLAT) for inner in self.optimizers]
        return {name: value for part in parts for name, value in part.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        meet(4)
        for optimizer in self.optimizers:
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state_dict, options=FLAT)


class SchedulersContainer(Stateful):
    def __init__(self, optimizers: OptimizersContainer) -> None:
        self.schedulers = [torch.optim.lr_scheduler.StepLR(inner, 1, 0.5) for inner in optimizers.optimizers]

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.load_state_dict(dict(state_dict))


class Dataloader(Stateful):
    """A data loader. Each rank saves its position as bytes under a separate key."""

    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": pickle.dumps({"place": self.place}), "world_size": dist.get_world_size()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = pickle.loads(state_dict[f"dp_rank_{dist.get_rank()}"])["place"]


class TrainState(Stateful):
    def __init__(self) -> None:
        self.step, self.losses, self.seconds = 0, list[float](), 0.0

    def state_dict(self) -> dict[str, Any]:
        losses = io.BytesIO()
        torch.save(self.losses, losses)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": losses, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"].item()
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"])
        self.seconds = state_dict["seconds"]


def tree(seed: int) -> dict[str, Any]:
    """Return a tree of objects. Every second rank has another order of keys."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.Linear(10, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = OptimizersContainer(model)
    made = {
        "model": ModelWrapper(model),
        "optimizer": optimizers,
        "lr_scheduler": SchedulersContainer(optimizers),
        "dataloader": Dataloader(),
        "train_state": TrainState(),
    }
    return made if dist.get_rank() % 2 == 0 else dict(reversed(made.items()))


def train(made: dict[str, Any]) -> None:
    """Run a training step. All ranks use the same batch, so that the loss does not depend on their number."""
    made["dataloader"].place += 10 + dist.get_rank()
    batch = torch.arange(8.0).reshape(2, 4)
    loss = made["model"].model(batch).square().mean()
    loss.backward()
    made["optimizer"].step()
    for optimizer in made["optimizer"].optimizers:
        optimizer.zero_grad()
    for scheduler in made["lr_scheduler"].schedulers:
        scheduler.step()
    made["train_state"].step += 1
    made["train_state"].losses.append(loss.item())
    made["train_state"].seconds = 0.25 * (1 + dist.get_rank())  # differs between ranks


def save(directory: Path, layout: str) -> None:
    made = tree(0)
    for _ in range(STEPS):
        train(made)
    context = ckptcore.Context(
        job=ckptcore.context.JobOptions(replicas=ckptcore.context.ReplicaOptions(objects="lowest_rank"))
    )
    ckptcore.save(directory / layout, made, layout=layout, context=context)
    for _ in range(STEPS):
        train(made)
    if dist.get_rank() == 0:
        torch.save(made["train_state"].losses, directory / f"{layout}.losses")


def load(directory: Path, layout: str) -> None:
    made = tree(1)
    if layout == "dcp":
        train(made)  # load into used objects
    ckptcore.load_into(directory / layout, made)
    if dist.get_rank() == 0:
        shutil.rmtree(directory / layout)  # the load ended on all ranks
    state = made["train_state"]
    assert (state.step, state.seconds, made["lr_scheduler"].schedulers[0].last_epoch) == (STEPS, 0.25, STEPS)
    assert made["dataloader"].place == STEPS * (10 + dist.get_rank())
    for _ in range(STEPS):
        train(made)
    expected = torch.load(directory / f"{layout}.losses")
    torch.testing.assert_close(torch.tensor(state.losses), torch.tensor(expected))
    assert len(expected) == 2 * STEPS


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        for name in ("safetensors", "dcp"):
            {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]), name)
    finally:
        dist.destroy_process_group()
