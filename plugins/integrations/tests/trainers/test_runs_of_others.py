"""Opening of runs that Lightning, transformers, Accelerate and Keras wrote. Errors name a remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckptcore
from ckptcore.errors import InvalidLocationError
from ckptcore.step_names import StepNameFormat, StepNames

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore"),  # Lightning warns about CPUs, workers, loggers and its own functions
]


class _Model(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss["loss"])
        return loss


def by_lightning(directory: Path, **options: Any) -> None:
    checkpoints = ModelCheckpoint(directory, **options)
    trainer = lightning.Trainer(
        max_steps=10,
        limit_train_batches=5,
        limit_val_batches=0,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(_Model())


def by_transformers(directory: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    tokens = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 16
    arguments = TrainingArguments(str(directory), max_steps=10, save_steps=5, report_to=[], use_cpu=True)
    Trainer(model, arguments, train_dataset=tokens).train()


def by_accelerate(directory: Path, names: list[str]) -> None:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=str(directory)))
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for name in names:
        accelerator.save_state(str(directory / name))


NAMES = {"StepNames": StepNames, "StepNameFormat": StepNameFormat}
"""Names for evaluating the code in errors."""

EVERY_5 = {"save_top_k": -1, "every_n_train_steps": 5}

SEEN: dict[str, tuple[Callable[[Path], None], tuple[int, ...]]] = {
    "lightning": (lambda run: by_lightning(run, **EVERY_5), (5, 10)),
    "lightning-last": (lambda run: by_lightning(run, save_last=True, **EVERY_5), (5, 10)),
    "lightning-filename": (lambda run: by_lightning(run, filename="model-{step:06d}", **EVERY_5), (5, 10)),
    "transformers": (by_transformers, (5, 10)),
    "accelerate": (lambda run: by_accelerate(run, ["checkpoint_0", "checkpoint_1"]), (0, 1)),
    "accelerate-epochs": (lambda run: by_accelerate(run, ["epoch_2", "epoch_3"]), (2, 3)),
}


@pytest.mark.parametrize("writer", SEEN)
def test_a_run_is_opened(tmp_path: Path, writer: str) -> None:
    write, steps = SEEN[writer]
    write(tmp_path / "run")
    with ckptcore.Checkpointer(tmp_path / "run") as run:
        assert run.steps == steps
        assert run.load()


def test_names_by_a_metric_are_read_as_the_error_says(tmp_path: Path) -> None:
    by_lightning(
        tmp_path / "run", filename="{epoch:02d}-{train_loss:.2f}", monitor="train_loss", save_top_k=-1, every_n_epochs=1
    )
    with pytest.raises(InvalidLocationError, match="StepNames") as raised:
        ckptcore.Checkpointer(tmp_path / "run")
    (way,) = re.findall(r"step_names=(StepNames\(read=\[.*?\]\))", str(raised.value))
    assert ckptcore.CheckpointReader(tmp_path / "run", step_names=eval(way, NAMES)).steps == (0, 1)


def test_the_last_one_alone_is_loaded_as_the_error_says(tmp_path: Path) -> None:
    by_lightning(tmp_path / "run", save_top_k=0, every_n_train_steps=5, save_last=True)
    with pytest.raises(InvalidLocationError, match=r"last\.ckpt") as raised:
        ckptcore.Checkpointer(tmp_path / "run")
    (way,) = re.findall(r"ckptcore\.load\('(.*?)'\)", str(raised.value))
    assert ckptcore.load(way)["global_step"] == 10


_KERAS = """
import keras, numpy as np
from pathlib import Path
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
run = Path({directory!r})
run.mkdir()
callback = keras.callbacks.{callback}
model.fit(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), epochs=2, verbose=0, callbacks=[callback])
"""


def by_keras(directory: Path, callback: str) -> None:
    program = _KERAS.format(directory=str(directory), callback=callback)
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True)


def test_a_run_of_keras_with_orbax_is_opened(tmp_path: Path) -> None:
    by_keras(tmp_path / "run", "OrbaxCheckpoint(run, save_freq='epoch')")
    assert ckptcore.CheckpointReader(tmp_path / "run").latest == 1


@pytest.mark.parametrize(
    ("callback", "named", "remedy"),
    [
        ("ModelCheckpoint(run / 'model_{epoch:02d}.keras')", "model_02.keras", "pass step_names="),
        (
            "ModelCheckpoint(run / 'ckpt-{epoch:03d}.weights.h5', save_weights_only=True)",
            "ckpt-002.weights.h5",
            "pass step_names=",
        ),
        ("BackupAndRestore(run, delete_checkpoint=False)", "latest.weights.h5", "load it with ckptcore.load("),
    ],
)
def test_files_of_keras_are_named(tmp_path: Path, callback: str, named: str, remedy: str) -> None:
    by_keras(tmp_path / "run", callback)
    for opens in (ckptcore.Checkpointer, ckptcore.CheckpointReader):
        with pytest.raises(InvalidLocationError, match=f"the checkpoint {re.escape(named)}: .*{re.escape(remedy)}"):
            opens(tmp_path / "run")
    assert "layers" in ckptcore.load(tmp_path / "run" / named)
