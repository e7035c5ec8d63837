"""Second saves of trainers on file systems without an exchange of directories, such as NFS and FUSE."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from ckptcore_integrations.accelerate import CheckpointMixin as AcceleratorMixin
from ckptcore_integrations.lightning import CkptcoreIO
from ckptcore_integrations.transformers import CheckpointMixin as TrainerMixin
from ckptcore_testing.faults import CrashAt, Fault, FaultPlan, SimulatedCrash
from ckptcore_testing.faulty_storage import with_faults
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import ckptcore
from ckptcore.builtin import local_calls
from ckptcore.builtin.memory import MemoryStorages
from ckptcore.commit.root import ROOT_KEY
from ckptcore.errors import AtomicityError, CorruptCheckpointError
from ckptcore.hookspecs import hookimpl
from ckptcore.protocols import StorageOpener, StorageOptions

pytestmark = pytest.mark.filterwarnings("ignore")  # trainers warn about CPUs and their own functions


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
    loaded = ckptcore.load(directory / "checkpoint-1/model")
    assert torch.equal(torch.tensor(loaded["classifier.weight"]), model.classifier.weight)
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
    monkeypatch.setattr(local_calls, "c_function", lambda *_: None)
    caplog.set_level(logging.WARNING, "ckptcore")
    saved = _TRAINERS[trainer](tmp_path)
    assert ckptcore.verify(saved).ok
    assert caplog.text.count("so a checkpoint is replaced by two renames") == 1
    with pytest.raises(AtomicityError):  # shows that the file system cannot exchange directories
        ckptcore.save(f"{saved}/", {"n": 1}, overwrite=True)


_LAST: Final = "kept://places/last.ckpt"


class _Plugin:
    """A storage for URLs ``kept://``. Lightning copies the Context, so `with_storage` has no effect."""

    def __init__(self, storages: MemoryStorages, plan: FaultPlan) -> None:
        self._storages, self._plan = storages, plan

    @hookimpl
    def ckpt_storages(self) -> Mapping[str, StorageOpener]:
        """Open a storage in memory with the faults of the plan."""
        return {"kept": lambda url, options: with_faults(self._storages.open(_kept(url), options), self._plan)}


def _kept(url: str) -> str:
    return url.replace("kept://", "memory://")


def _save_lightning(storages: MemoryStorages, number: int, *faults: Fault) -> FaultPlan:
    plan = FaultPlan(*faults)
    io = CkptcoreIO(context=_with_store(storages, plan))
    with contextlib.suppress(SimulatedCrash):
        io.save_checkpoint({"global_step": number, "w": torch.full((3,), number)}, _LAST)
    return plan


def _with_store(storages: MemoryStorages, plan: FaultPlan) -> ckptcore.Context:
    plugins = ckptcore.context.PluginOptions(extra=(_Plugin(storages, plan),))
    return ckptcore.Context(plugins=plugins, io=ckptcore.context.IOOptions(threads=1))


def _step_in(storages: MemoryStorages) -> int:
    loaded = CkptcoreIO(context=_with_store(storages, FaultPlan())).load_checkpoint(_LAST)
    assert loaded["w"].tolist() == [loaded["global_step"]] * 3
    return int(loaded["global_step"])


def test_lightning_has_a_checkpoint_at_each_moment_on_an_object_store() -> None:
    """Another process can load a checkpoint at each moment, and after a kill at any moment the next save succeeds."""
    storages = MemoryStorages()
    _save_lightning(storages, 1)
    changes = [operation.number for operation in _save_lightning(storages, 2).operations if operation.changes]
    assert len(changes) > 10
    for number in changes:
        storages = MemoryStorages()
        _save_lightning(storages, 1)
        assert _save_lightning(storages, 2, CrashAt(number)).crashed
        assert _step_in(storages) in (1, 2)
        assert not _save_lightning(storages, 3).crashed
        assert _step_in(storages) == 3
        names = storages.open("memory://places", StorageOptions()).list_names()
        assert [name for name in names if not name.startswith(".")] == ["last.ckpt/"]


def test_lightning_saves_after_a_first_save_that_was_killed_on_an_object_store() -> None:
    operations = _save_lightning(MemoryStorages(), 1).operations
    for operation in [candidate for candidate in operations if candidate.changes]:
        storages = MemoryStorages()
        assert _save_lightning(storages, 1, CrashAt(operation.number)).crashed
        assert not _save_lightning(storages, 2).crashed
        assert _step_in(storages) == 2


@pytest.mark.parametrize("kept", [0, 30])
def test_lightning_replaces_a_damaged_checkpoint_on_an_object_store(kept: int) -> None:
    storages = MemoryStorages()
    _save_lightning(storages, 1)
    store = storages.open(_kept(_LAST), StorageOptions())
    store.put(ROOT_KEY, store.get(ROOT_KEY)[:kept])
    with pytest.raises(CorruptCheckpointError):
        _step_in(storages)
    _save_lightning(storages, 2)
    assert _step_in(storages) == 2
