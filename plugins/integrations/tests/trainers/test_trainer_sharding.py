"""The Trainer of Transformers with FSDP 1 and 2: kills, resumes, and resumes with another number of processes.

The tests use PyTorch's FSDP on CPUs. `trainer_jobs.fsdp_on_cpus` makes this possible, and describes its changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from ckptcore_integrations.transformers import export_pretrained, newest_sound

import ckptcore
from ckptcore.errors import CheckpointError
from plugins.integrations.tests.trainers import test_transformers as plain
from plugins.integrations.tests.trainers.trainer_jobs import kill_before_commit, run_job

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT uses this property
]


class Classifier(transformers.BertForSequenceClassification):  # type: ignore[misc]  # without types here
    """A classifier that has a layer without a gradient, and a frozen layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.unused = torch.nn.Linear(7, 5)
        self.classifier.bias.requires_grad_(False)


def task(adapters: bool) -> Any:
    def make() -> tuple[Any, list[dict[str, Any]]]:
        _, rows = plain.tokens()
        transformers.set_seed(0)
        config = transformers.BertConfig(**plain.SIZES, vocab_size=17, num_labels=10)
        if not adapters:
            return Classifier(config), rows
        model = transformers.BertForSequenceClassification(config)
        return peft.get_peft_model(model, LORA), rows

    return make


LORA = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], lora_dropout=0.1)


def trainer(
    directory: Path, version: int, kind: Any = plain.Checkpointed, *, adapters: bool = False, **others: Any
) -> Any:
    """Return a trainer with 16 rows in a batch, for any number of processes. A single process does not use FSDP."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {"per_device_train_batch_size": 16 // size, "max_steps": 8}
    if size > 1:
        config = {"version": version, "sync_module_states": False, "state_dict_type": "SHARDED_STATE_DICT"}
        config["transformer_layer_cls_to_wrap"] = ["BertLayer"]
        options |= {"ddp_backend": "gloo", "fsdp": True, "fsdp_config": config}
    return plain.trainer(directory, kind, task(adapters), **options | others)


def be_killed(first: str, second: str, version: int, *, adapters: bool) -> None:
    """Train. Train again in another directory, and kill this process right before the commit of the second save."""
    train(first, version, adapters=adapters)
    kill_before_commit(Path(second, "checkpoint-4"))
    train(second, version, adapters=adapters)


def train(directory: str, version: int, *, adapters: bool, resume: bool = False) -> None:
    """Train 8 steps, and save at steps 4 and 8. Runs in each process of a job."""
    run = trainer(Path(directory), version, adapters=adapters)
    newest = newest_sound(directory)
    assert (newest is not None) == resume
    run.train(resume_from_checkpoint=newest)
    wrapped = run.model_wrapped
    assert isinstance(wrapped, torch.distributed.fsdp.FullyShardedDataParallel if version == 1 else torch.nn.Module)
    assert hasattr(next(wrapped.parameters()), "device_mesh") == (version == 2)
    Path(f"{directory}.{run.args.process_index}.json").write_text(json.dumps(run.seen))


def carry_over(source: str, directory: str, version: int, *, adapters: bool) -> None:
    """Resume, and save the same step elsewhere before any training. Runs in each process of a job."""
    run = trainer(Path(directory), version, adapters=adapters)

    class Save(transformers.TrainerCallback):  # type: ignore[misc]  # without types here
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            run._save_checkpoint(run.model, trial=None)
            raise _EnoughError

    run.add_callback(Save())
    with contextlib.suppress(_EnoughError):
        run.train(resume_from_checkpoint=source)


class _EnoughError(Exception):
    """Raised to end a training."""


def job(directory: Path, size: int, call: str) -> list[int]:
    program = f"import test_trainer_sharding as t, trainer_jobs\nwith trainer_jobs.fsdp_on_cpus(): t.{call}\n"
    ending = "import torch; torch.distributed.is_initialized() and torch.distributed.destroy_process_group()"
    return run_job(program + ending, size, directory)


@pytest.mark.brings("Trainer with FSDP 1 and adapters, which PEFT does not find", "peft", "refused")
def test_adapters_with_fsdp_1_are_refused_at_the_start(tmp_path: Path) -> None:
    assert job(tmp_path, 2, f"be_refused({str(tmp_path / 'run')!r})") == [0, 0]


def be_refused(directory: str) -> None:
    """Check that a training is refused. Runs in each process of a job."""
    with pytest.raises(NotImplementedError, match=r"adapters with FSDP 1.*Set fsdp_config=\{'version': 2\}"):
        trainer(Path(directory), 1, adapters=True).train()
    assert not Path(directory).exists() or os.listdir(directory) == []


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, Mapping):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_equal(value, right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for first, other in zip(left, right, strict=True):
            assert_equal(first, other)
    else:
        assert (left == right).all() if hasattr(left, "shape") else left == right


def assert_same_step(first: Path, other: Path) -> None:
    for name in ("model", "optimizer", "scheduler"):
        assert_equal(ckptcore.load(first / name), ckptcore.load(other / name))


@pytest.mark.brings("Trainer with FSDP 1 and 2, killed in a save; another number of processes", "transformers", "same")
@pytest.mark.brings("Trainer with FSDP 2 and LoRA", "peft", "same")
@pytest.mark.parametrize(
    ("version", "size", "others", "adapters"),
    [
        pytest.param(1, 2, [1], False),
        pytest.param(2, 2, [1], False),
        pytest.param(2, 2, [4], False, marks=pytest.mark.slow),
        pytest.param(2, 2, [1], True, marks=pytest.mark.slow),
        pytest.param(1, 4, [2, 1], False, marks=pytest.mark.slow),
        pytest.param(2, 4, [2, 1], False, marks=pytest.mark.slow),
    ],
)
def test_a_killed_job_resumes_bit_for_bit(
    tmp_path: Path, version: int, size: int, others: list[int], *, adapters: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    killed = job(tmp_path, size, f"be_killed({str(first)!r}, {str(second)!r}, {version}, adapters={adapters})")
    assert -signal.SIGKILL in killed
    assert newest_sound(second) == str(second / "checkpoint-4")
    assert_same_step(first / "checkpoint-4", second / "checkpoint-4")
    resumed = job(tmp_path, size, f"train({str(second)!r}, {version}, adapters={adapters}, resume=True)")
    assert resumed == [0] * size
    for rank in range(size):
        seen = [json.loads(Path(f"{run}.{rank}.json").read_text()) for run in (first, second)]
        assert seen[0][4:] == seen[1]
    assert_same_step(first / "checkpoint-8", second / "checkpoint-8")
    for other in others:
        third = tmp_path / f"by-{other}"
        arguments = (str(first / "checkpoint-8"), str(third), version)
        if other == 1:
            carry_over(*arguments, adapters=adapters)
        else:
            assert job(tmp_path, other, f"carry_over(*{arguments!r}, adapters={adapters})") == [0] * other
        moved, source = (path / "checkpoint-8" for path in (third, first))
        if not adapters:  # a single process saves only the adapters
            assert_equal(ckptcore.load(moved / "model"), ckptcore.load(source / "model"))
        if other > 1:
            assert_same_step(moved, source)
    names = ckptcore.load(first / "checkpoint-8" / "optimizer")["state"].keys()
    assert version == 1 or not [name for name in names if "unused" in name]  # FSDP 1 creates gradients of zero
    assert adapters or not [name for name in names if "classifier.bias" in name]  # frozen
    if adapters:
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(**plain.SIZES, vocab_size=17, num_labels=10)
        )
        found = peft.PeftModel.from_pretrained(model, first / "checkpoint-8")
        stored = ckptcore.load(first / "checkpoint-8" / "model", framework="torch")
        trained = {name: value for name, value in found.state_dict().items() if "lora_" in name or "modules_to" in name}
        assert trained
        assert all(torch.equal(value, stored[name]) for name, value in trained.items())
        with pytest.raises(CheckpointError, match="has an adapter of PEFT.*PeftModel.from_pretrained"):
            export_pretrained(first / "checkpoint-8", tmp_path / "exported")
    else:
        export_pretrained(first / "checkpoint-8", tmp_path / "exported")
        weights = Classifier.from_pretrained(tmp_path / "exported").state_dict()
        assert_equal(weights, ckptcore.load(first / "checkpoint-8" / "model", framework="torch"))
