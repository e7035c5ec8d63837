"""The weight transfer for TRL, called by the trainer of TRL."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
import transformers
from ckptcore_integrations.engines import EngineError
from ckptcore_integrations.trl import VersionTransfer
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, WeightTransferProtocol

import ckptcore


class Engine:
    """A server that has every version at once, if it follows."""

    name = "http://engine"

    def __init__(self, location: Path) -> None:
        self.location = location
        self.follows = True

    def label(self) -> str:
        """Return the number of the newest version."""
        if not self.follows:
            return "default"
        return str(max(int(path.name[1:]) for path in self.location.glob("v*")))


def trainer(transfer: Any) -> Any:
    """Return a trainer of TRL, as far as the synchronisation of weights needs it."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    made = object.__new__(AsyncGRPOTrainer)
    made.model = transformers.LlamaForCausalLM(config)
    made.accelerator = accelerate.Accelerator(cpu=True)
    made.weight_transfer = transfer
    made.rollout_worker = SimpleNamespace(versions=[], start=lambda: None)
    made.rollout_worker.update_model_version = made.rollout_worker.versions.append
    made.model_version = 0
    made._lora_sync = False
    made._metrics = {"train": async_grpo_trainer.defaultdict(list)}
    return made


def test_the_trainer_publishes_its_weights_and_counts_versions_that_the_servers_have(tmp_path: Path) -> None:
    engine: Any = Engine(tmp_path)
    made = trainer(VersionTransfer(tmp_path, [engine], timeout=0.01))
    async_grpo_trainer._TrainBeginCallback(made).on_train_begin(None, None, None)
    with torch.no_grad():
        made.model.lm_head.weight += 1
    made._sync_weight()
    assert made.model_version == 2 and made.rollout_worker.versions == [1, 2]
    published = ckptcore.load(tmp_path / "v000002", framework="torch")
    assert set(published) == set(dict(made.model.named_parameters()))
    assert all(torch.equal(published[name], tensor) for name, tensor in made.model.named_parameters())
    engine.follows = False
    with pytest.raises(EngineError, match="after version 3 was published"):
        made._sync_weight()
    assert made.model_version == 2
    made.weight_transfer.destroy()


def test_the_transfer_has_the_methods_of_the_protocol() -> None:
    for name, method in inspect.getmembers(WeightTransferProtocol, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(VersionTransfer, name))
            assert list(own.parameters) == list(inspect.signature(method).parameters), name
