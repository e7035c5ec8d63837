"""A real Trainer of TorchTitan on the CPU: a language model of the pixels of scikit-learn's digits."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

torch.set_num_threads(1)

# TorchTitan supports only accelerators. Make it use the CPU, without a communication library that needs Triton.
sys.modules["torchtitan.distributed.minimal_async_ep"] = MagicMock()
from torchtitan.tools import utils

utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
    current_device=lambda: 0,
    empty_cache=lambda: None,
    get_device_name=lambda _: "cpu",
    get_device_properties=lambda _: types.SimpleNamespace(total_memory=2**30),
    memory_stats=lambda _: {},
    reset_peak_memory_stats=lambda: None,
    set_device=lambda _: None,
    synchronize=lambda: None,
)

from ckptcore_integrations.torchtitan import CkptcoreManager
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.configs import DebugConfig, TrainingConfig
from torchtitan.distributed import utils as distributed
from torchtitan.models.common import Embedding, Linear
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.trainer import Trainer

import ckptcore
from ckptcore import Context
from ckptcore.errors import CheckpointError, UnsupportedLeafError
from ckptcore.events import Event
from tests.ownership.killed_owner import leave_lease

distributed.set_pg_timeouts = lambda **_: None  # the original needs an unreleased version of PyTorch

PIXELS = torch.tensor(load_digits().data[:96], dtype=torch.int64)
INIT: Any = {"weight": torch.nn.init.xavier_normal_, "bias": torch.nn.init.zeros_}


class Digits(IterableDataset):  # type: ignore[type-arg]
    """A dataset of images as tokens, one image after another. Each rank has its own images. Can resume in an epoch."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.position = rank, size, 0

    def __iter__(self) -> Any:
        while True:
            row = PIXELS[(self.position * self.size + self.rank) * 7 % len(PIXELS)]
            self.position += 1
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position."""
        self.position = state["position"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]  # without types here
    """The loader of the images."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]  # without types here
        """The configuration, without options."""

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **kwargs: Any) -> None:
        rows = Digits(dp_rank, dp_world_size)
        super().__init__(rows, dp_rank, dp_world_size, batch_size=local_batch_size)


class Tokenizer(BaseTokenizer):  # type: ignore[misc]  # without types here
    """A tokenizer that does nothing, because pixels are already tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]  # without types here
        """The configuration, without options."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = None


class Model(BaseModel):  # type: ignore[misc]  # without types here
    """A model that predicts the next pixel."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):  # type: ignore[misc]  # without types here
        """The configuration, without options."""

        def update_from_config(self, **kwargs: Any) -> None:
            """Ignore the configuration."""

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            """Return the number of parameters and the number of operations."""
            return sum(parameter.numel() for parameter in model.parameters()), 1

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = Embedding.Config(num_embeddings=17, embedding_dim=16, param_init=INIT).build()
        self.hidden = Linear.Config(in_features=16, out_features=32, param_init=INIT).build()
        self.head = Linear.Config(in_features=32, out_features=17, param_init=INIT).build()

    def forward(self, tokens: Any) -> Any:
        """Return the logits."""
        hidden = torch.nn.functional.dropout(torch.relu(self.hidden(self.embed(tokens))), 0.1)
        return self.head(hidden)


class WithUnused(Model):
    """A model with an unused layer, and a layer that is used only from the 6th step on."""

    @dataclass(kw_only=True, slots=True)
    class Config(Model.Config):
        """The configuration, without options."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.unused = Linear.Config(in_features=5, out_features=3, param_init=INIT).build()
        self.late = Linear.Config(in_features=16, out_features=32, param_init=INIT).build()
        self.trainer: list[Any] = []

    def forward(self, tokens: Any) -> Any:
        """Return the logits."""
        embedded = self.embed(tokens)
        hidden = self.hidden(embedded) + (self.late(embedded) if self.trainer[0].step >= 6 else 0)
        return self.head(torch.relu(hidden))


class Adapter(StateDictAdapter):  # type: ignore[misc]  # without types here
    """An adapter that adds a prefix to names for Hugging Face."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the prefix."""
        return {f"model.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Remove the prefix."""
        return {name.removeprefix("model."): value for name, value in hf_state_dict.items()}


def parallelize(model: Any, *, parallel_dims: Any, **kwargs: Any) -> Any:
    """Shard the model."""
    return fully_shard(model, mesh=parallel_dims.get_mesh(["dp_shard"]))


class Recorded(Trainer):  # type: ignore[misc]  # without types here
    """A Trainer that records the data and the loss of each step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]  # without types here
        """The configuration, with the options of `Trainer`."""

    def forward_backward_step(self, **kwargs: Any) -> Any:
        """Record the data and the loss. Seed the dropout, which TorchTitan does not save."""
        torch.manual_seed(self.step)  # an earlier seed would have no effect, because a new loader draws a number
        loss = super().forward_backward_step(**kwargs)
        images = kwargs["input_dict"]["input"].sum(1).tolist()
        self.__dict__.setdefault("seen", []).append((self.step, float(loss.detach()), images))
        return loss


class Killed(CkptcoreManager):
    """A manager that kills the process in the second save, after its files are written and before its commit."""

    @dataclass(kw_only=True, slots=True)
    class Config(CkptcoreManager.Config):
        """The configuration, with the options of `CkptcoreManager`."""

    @staticmethod
    def _kill(event: Event) -> None:
        if event.phase == "write" and event.step == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    context = Context(observers=[_kill])


def build(
    folder: Path,
    manager: type = CkptcoreManager,
    *,
    steps: int = 12,
    adapter: Any = Adapter,
    model: type = Model,
    **options: Any,
) -> Any:
    """Return a Trainer that saves every 4th step."""
    given = {"enable": True, "interval": 4, "last_save_model_only": False, **options}
    return Recorded.Config(
        model_spec=ModelSpec(
            name="digits",
            flavor="tiny",
            model=model.Config(),  # type: ignore[attr-defined]
            parallelize_fn=parallelize,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=adapter,
        ),
        hf_assets_path="",
        dump_folder=str(folder),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=1e-2, implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=12),
        training=TrainingConfig(local_batch_size=4, seq_len=63, steps=steps, disable_cuda_graphs=True),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=manager.Config(**given),  # type: ignore[attr-defined]
        loss=CrossEntropyLoss.Config(),
        debug=DebugConfig(seed=1),
    ).build()


def run_refused(folder: Path, report: Path) -> None:
    """Train with a state that cannot be saved. Report the error and the number of trained steps."""
    trainer = build(folder)
    trainer.checkpointer.states["others"] = {"lock": threading.Lock(), "deep": [print]}
    message = ""
    try:
        trainer.train()
    except UnsupportedLeafError as error:
        message = str(error)
    report.write_text(json.dumps({"steps": len(getattr(trainer, "seen", [])), "message": message}))
    trainer.close()
    torch.distributed.destroy_process_group()


def run_remedies(folder: Path, report: Path) -> None:
    """Follow the remedies in errors about options. Report the errors, and the steps and states that are then loaded."""
    messages = []

    def refuse(call: Any) -> None:
        try:
            call()
        except (CheckpointError, ValueError) as error:
            messages.append(str(error))

    refuse(lambda: build(folder, adapter=None, last_save_in_hf=True, last_save_model_only=True))
    trainer = build(folder, adapter=None, last_save_in_hf=False, steps=4)
    trainer.train()
    checkpointer, seen = trainer.checkpointer, full(trainer)
    refuse(lambda: checkpointer.load(7))
    loaded = [checkpointer.load(4)]
    checkpointer.config.exclude_from_loading = ["optimiser"]
    refuse(lambda: checkpointer.load(4))
    for name in messages[-1].partition("expected names of ")[2].split(", "):
        checkpointer.config.exclude_from_loading = [name]
        loaded.append(checkpointer.load(4))
    report.write_text(json.dumps({"messages": messages, "loaded": loaded, "same": full(trainer) == seen}))
    trainer.close()
    torch.distributed.destroy_process_group()


def full(trainer: Any) -> dict[str, Any]:
    """Return the weights and the state of the optimizer, with whole tensors."""
    state = {**trainer.model_parts[0].state_dict(), **trainer.optimizers.state_dict()}
    return {
        name: value.full_tensor().tolist() if hasattr(value, "full_tensor") else value for name, value in state.items()
    }


def run(folder: Path, report: Path, managers: str = "CkptcoreManager", models: str = "Model", **options: Any) -> None:
    """Train. Write the data of each step and the final weights as JSON."""
    trainer = build(folder, globals()[managers], model=globals()[models], **options)
    for part in trainer.model_parts:
        getattr(part, "trainer", []).append(trainer)
    trainer.train()
    seen = {"seen": trainer.seen, "full": full(trainer), "rate": trainer.lr_schedulers.state_dict()}
    if torch.distributed.get_rank() == 0 or "per_rank" in report.name:
        report.with_suffix(f".{torch.distributed.get_rank()}").write_text(json.dumps(seen, default=repr))
    trainer.close()
    torch.distributed.destroy_process_group()


__all__ = [
    "CheckpointManager",
    "Killed",
    "build",
    "full",
    "run",
    "run_after_a_killed_job",
    "run_exports",
    "run_refused",
    "run_remedies",
]


def run_after_a_killed_job(folder: Path, report: Path) -> None:
    """Train in a directory that still has the lease of a killed job."""
    killed = leave_lease(folder / "checkpoint")
    run(folder, report, steps=4)
    del killed


def run_exports(report: Path) -> None:
    """Export the weights of a step twice to an object store on which a killed process has left its shards."""
    manager: Any = types.SimpleNamespace(
        folder="memory://exports/run",
        context=None,
        config=types.SimpleNamespace(export_dtype="float32", last_save_in_hf=True),
        sd_adapter=types.SimpleNamespace(to_hf=dict),
    )
    ckptcore.save("memory://exports/run/shards-of-step-4", {"w": torch.zeros(2)}, layout="dcp")
    for number in (1, 2):
        weights = {"w": torch.full((2,), float(number))}
        manager.states = {"model": types.SimpleNamespace(state_dict=lambda exported=weights: exported)}
        CkptcoreManager._save_weights(manager, None, 4)  # type: ignore[arg-type]  # the manager saves no steps
    report.write_text(json.dumps(ckptcore.load("memory://exports/run/step-4")["w"].tolist()))
