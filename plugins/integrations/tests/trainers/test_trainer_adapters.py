"""The Trainer of Transformers with adapters of PEFT: kills and resumes, and files that PEFT opens."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ckptcore_integrations.adapters import adapter_tensors
from ckptcore_integrations.transformers import export_pretrained, newest_sound
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

import ckptcore
from ckptcore.errors import CheckpointError
from plugins.integrations.tests.trainers import test_transformers as plain
from plugins.integrations.tests.trainers.trainer_jobs import kill_before_commit, run_job

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses this property
CONFIGS: dict[str, Any] = {
    "lora": {"peft_type": "LORA", "r": 4, "target_modules": ["query", "value"], "lora_dropout": 0.1},
    "ia3": {"peft_type": "IA3", "target_modules": ["query", "dense"], "feedforward_modules": ["dense"]},
    "vera": {"peft_type": "VERA", "r": 4, "target_modules": ["query", "value"]},
    "adalora": {"peft_type": "ADALORA", "init_r": 4, "target_r": 2, "total_step": 20, "target_modules": ["query"]},
    "prompt tuning": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4},
    "p-tuning": {"peft_type": "P_TUNING", "num_virtual_tokens": 4, "encoder_hidden_size": 8},
}


def base() -> tuple[Any, Any]:
    transformers.set_seed(0)
    return plain.tokens()


def task(name: str) -> Callable[[], tuple[Any, Any]]:
    """Return a function that creates a model with an adapter, and the rows of its training."""

    def make() -> tuple[Any, Any]:
        model, rows = base()
        return peft.get_peft_model(model, peft.get_peft_config({**CONFIGS[name], "task_type": "SEQ_CLS"})), rows

    return make


def two_adapters() -> tuple[Any, Any]:
    model, rows = task("lora")()
    model.add_adapter("other", peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["key"]))
    return model, rows


def outside_of_adapters() -> tuple[Any, Any]:
    """Return a model with a trained bias and running statistics that PEFT does not write."""
    model, rows = base()
    model.bert.pooler.statistics = torch.nn.BatchNorm1d(32)
    model.bert.pooler.activation = torch.nn.Sequential(model.bert.pooler.statistics, torch.nn.Tanh())
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["key"]))
    model.base_model.model.bert.pooler.dense.bias.requires_grad_(True)
    return model, rows


def of_transformers() -> tuple[Any, Any]:
    """Return a model with an adapter of Transformers, without `PeftModel`."""
    model, rows = base()
    model.add_adapter(peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["key"]))
    return model, rows


TASKS = {**{name: task(name) for name in CONFIGS}, "two": two_adapters, "outside": outside_of_adapters}


def be_killed(directory: str) -> None:
    """Train with LoRA, and kill this process right before the commit of the second save."""
    kill_before_commit(Path(directory, "checkpoint-4"))
    plain.trainer(Path(directory), plain.Checkpointed, two_adapters, max_steps=8).train()


@pytest.mark.brings("Trainer with two adapters, killed in a save", "transformers", "same")
@pytest.mark.system
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    run = plain.trainer(tmp_path / "plain", plain.Observed, two_adapters, max_steps=8)
    run.train()
    program = f"import test_trainer_adapters as t; t.be_killed({str(tmp_path / 'killed')!r})"
    assert run_job(program, 1, tmp_path) == [-signal.SIGKILL]
    newest = newest_sound(tmp_path / "killed")
    assert newest == str(tmp_path / "killed" / "checkpoint-4")
    resumed = plain.trainer(tmp_path / "killed", plain.Checkpointed, two_adapters, max_steps=8)
    resumed.train(resume_from_checkpoint=newest)
    plain.assert_same(run, resumed, since=4)


@pytest.mark.brings("Trainer with adapters: LoRA, IA3, VeRA, AdaLoRA, prompt tuning, P-tuning, several", "peft", "same")
@pytest.mark.parametrize("name", TASKS)
def test_adapters_resume_and_open_with_peft(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make = TASKS[name]
    run = plain.trainer(tmp_path, plain.Checkpointed, make, max_steps=8)
    with caplog.at_level(logging.WARNING):
        run.train()
    assert ("in no adapter, such as base_model.model.bert.pooler" in caplog.text) == (name == "outside")
    resumed = plain.trainer(tmp_path, plain.Checkpointed, make, max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    plain.assert_same(run, resumed, since=4)
    checkpoint = tmp_path / "checkpoint-8"
    assert ckptcore.verify(checkpoint).ok and newest_sound(tmp_path) == str(checkpoint)
    frozen = [name for name, parameter in base()[0].named_parameters() if "query.weight" in name]
    assert not [name for name in ckptcore.load(checkpoint / "model") if frozen[0] in name]  # without the base model
    model_of_peft = peft.PeftModel.from_pretrained(base()[0], checkpoint)
    expected, stored = (peft.get_peft_model_state_dict(model) for model in (run.model, model_of_peft))
    assert expected.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[key]) for key, tensor in expected.items())
    with pytest.raises(CheckpointError, match="PeftModel.from_pretrained.*and call save_pretrained of the result"):
        export_pretrained(checkpoint, tmp_path / "exported")
    model_of_peft.save_pretrained(tmp_path / "exported")
    again = peft.PeftModel.from_pretrained(base()[0], tmp_path / "exported")
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in model_of_peft.state_dict().items())


@pytest.mark.brings("`model.add_adapter` of Transformers", "transformers", "same")
@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="this version of Transformers needs a newer PEFT"
)
def test_adapters_of_transformers(tmp_path: Path) -> None:
    run = plain.trainer(tmp_path, plain.Checkpointed, of_transformers, max_steps=8)
    run.train()
    resumed = plain.trainer(tmp_path, plain.Checkpointed, of_transformers, max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    plain.assert_same(run, resumed, since=4)
    assert "adapter_model.safetensors" in os.listdir(tmp_path / "checkpoint-8")


def test_a_compiled_model_has_the_same_names() -> None:
    model = task("lora")()[0]
    assert list(adapter_tensors(torch.compile(model, backend="eager"))) == list(adapter_tensors(model))


def test_a_run_of_the_plain_trainer_is_continued(tmp_path: Path) -> None:
    run = plain.trainer(tmp_path, plain.Observed, task("lora"), max_steps=8)
    run.train()
    resumed = plain.trainer(tmp_path, plain.Checkpointed, task("lora"), max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    plain.assert_same(run, resumed, since=4)


def test_the_best_adapter_is_loaded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    run: Any = plain.trainer(tmp_path, plain.Checkpointed, task("lora"), save_total_limit=1, **options)
    evaluate = run.evaluate
    at: dict[int, Any] = {}

    def evaluated(*arguments: Any, **others: Any) -> Any:
        at[run.state.global_step] = {key: value.clone() for key, value in adapter_tensors(run.model).items()}
        return {**evaluate(*arguments, **others), "eval_loss": abs(run.state.global_step - 8.0)}

    run.evaluate = evaluated
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-8")
    assert all(torch.equal(value, at[8][key]) for key, value in adapter_tensors(run.model).items())
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-12", "checkpoint-8"]  # the best and the last step


def test_an_adapter_with_the_name_of_another_part_is_refused(tmp_path: Path) -> None:
    run: Any = plain.trainer(tmp_path, plain.Checkpointed, task("lora"))
    run.model.add_adapter("optimizer", peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["key"]))
    with pytest.raises(NotImplementedError, match="'optimizer', which another part has: rename it"):
        run.train()
