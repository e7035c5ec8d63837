"""Second saves of trainers where directories cannot be exchanged, as on NFS and FUSE: each replaces the first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from ckptcore_integrations.accelerate import CheckpointMixin as AcceleratorMixin
from ckptcore_integrations.lightning import CkptcoreIO
from ckptcore_integrations.transformers import CheckpointMixin as TrainerMixin
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ckptcore
from ckptcore.builtin import local_calls
from ckptcore.errors import AtomicityError

pytestmark = pytest.mark.filterwarnings("ignore")  # trainers warn of CPUs and of calls of their own


class _Accelerator(AcceleratorMixin, Accelerator):  # type: ignore[misc]  # without types here
    pass


class _Trainer(TrainerMixin, Trainer):  # type: ignore[misc]  # without types here
    pass


def _lightning(directory: Path) -> Path:
    for number in (1, 2):
        CkptcoreIO().save_checkpoint({"state_dict": {"w": torch.full((3,), number)}}, directory / "last.ckpt")
    loaded: dict[str, Any] = CkptcoreIO().load_checkpoint(directory / "last.ckpt")
    assert loaded["state_dict"]["w"].tolist() == [2] * 3
    return directory / "last.ckpt"


def _accelerate(directory: Path) -> Path:
    for reset in (AcceleratorState, PartialState, GradientState):
        reset._reset_state()
    accelerator = _Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    for number in (1, 2):
        torch.nn.init.constant_(model.weight, number)
        accelerator.save_state(str(directory / "state"))
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(str(directory / "state"))
    assert model.weight.tolist() == [[2, 2]] * 2
    return directory / "state"


def _transformers(directory: Path) -> Path:
    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=17, num_labels=2
    )
    rows = [{"input_ids": torch.arange(4), "labels": number % 2} for number in range(4)]
    arguments = TrainingArguments(str(directory), max_steps=1, save_steps=1, report_to=[], use_cpu=True)
    for _ in range(2):
        model = BertForSequenceClassification(config)
        _Trainer(model, arguments, train_dataset=rows).train()
    found = ckptcore.load(directory / "checkpoint-1/model")
    assert torch.equal(torch.tensor(found["classifier.weight"]), model.classifier.weight)
    return directory / "checkpoint-1"


_TRAINERS: Final[dict[str, Callable[[Path], Path]]] = {
    "lightning": _lightning,
    "accelerate": _accelerate,
    "transformers": _transformers,
}


@pytest.mark.parametrize("trainer", _TRAINERS)
def test_the_second_save_replaces_the_first(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_calls, "_exchange", lambda: None)
    caplog.set_level(logging.WARNING, "ckptcore")
    saved = _TRAINERS[trainer](tmp_path)
    assert ckptcore.verify(saved).ok
    assert caplog.text.count("so a checkpoint is replaced by two renames") == 1
    with pytest.raises(AtomicityError):  # what the call is patched for
        ckptcore.save(saved, {"n": 1}, overwrite=True)
