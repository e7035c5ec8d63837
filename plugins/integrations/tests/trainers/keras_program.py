"""Trains a model of Keras with `CkptcoreCheckpoint`. Each function prints JSON in its last line."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
from ckptcore_integrations.keras import CkptcoreCheckpoint, resume
from sklearn.datasets import load_digits

import ckptcore
from ckptcore import Context
from ckptcore.errors import UnsupportedLeafError
from ckptcore.events import Event
from ckptcore.policies import CustomSteps, EveryNSteps
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python

DIGITS = load_digits()


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # without types here
    """4 batches of images, in another order in each epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch, self.order = epoch, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        rows = np.random.default_rng(self.epoch).permutation(64)[number * 16 : number * 16 + 16]
        if number == 0:
            self.order.append(rows.tolist())
        return DIGITS.data[rows].astype("float32") / 16, DIGITS.target[rows]

    def on_epoch_end(self) -> None:
        """Use the next order."""
        self.epoch += 1


def make(seed: int = 0) -> Any:
    """Return a compiled model with dropout and batch normalization."""
    keras.utils.set_random_seed(seed)
    layers = [
        keras.Input((64,)),
        keras.layers.Dense(16, name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.5, seed=seed, name="drop"),
        keras.layers.Dense(10, name="out"),
    ]
    model = keras.Sequential(layers, name="model")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, name="adam"), loss, metrics=["accuracy"])
    return model


def digest(model: Any) -> dict[str, str]:
    """Return a digest of each variable."""
    return {
        variable.path: hashlib.sha256(keras.ops.convert_to_numpy(variable.value).tobytes()).hexdigest()
        for variable in (*model.variables, *model.optimizer.variables)
    }


def train(directory: Path, **options: Any) -> None:
    """Train 4 epochs, from the newest step if there is one."""
    model = make()
    step = resume(str(directory), model)
    began = 0 if step is None else step + 1
    batches = Batches(began)
    history = model.fit(
        batches,
        epochs=4,
        initial_epoch=began,
        shuffle=False,
        verbose=0,
        callbacks=[CkptcoreCheckpoint(str(directory), **options)],
    )
    print(
        json.dumps(
            {
                "began": began,
                "losses": history.history["loss"],
                "order": batches.order,
                "variables": digest(model),
            }
        )
    )


def kill_in_third_save(directory: Path) -> None:
    """Train, and kill this process when the files of the third save are written, before its commit."""

    def kill(event: Event) -> None:
        if event.phase == "write" and event.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    train(directory, context=Context(observers=[kill]))


def fit(directory: Path, **options: Any) -> list[str]:
    """Train 4 epochs, and return the steps."""
    model = make()
    model.fit(Batches(0), epochs=4, verbose=0, callbacks=[CkptcoreCheckpoint(str(directory), **options)])
    return sorted((path.name for path in directory.iterdir() if path.name.isdigit()), key=int)


def arguments(directory: Path) -> None:
    """Use every argument."""
    found: dict[str, Any] = {}
    found["latest"] = fit(directory / "latest", save_on_background=False)
    found["all"] = fit(directory / "all", max_to_keep=None)
    found["best"] = fit(
        directory / "best", monitor="loss", mode="max", save_best_only=True, max_to_keep=None, layout="dcp"
    )
    found["batches"] = fit(directory / "batches", save_freq=3, max_to_keep=None)
    found["policy"] = fit(directory / "policy", max_to_keep=None, preservation_policy=CustomSteps([1]))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fit(directory / "weights", save_weights_only=True, verbose=1)
    found["weights"] = sorted(ckptcore.load(directory / "weights" / "3" / "pytree"))
    found["printed"] = printed.getvalue().count("saved to")
    callback = CkptcoreCheckpoint(str(directory / "x"))
    callback.wait_until_finished()
    found["hosts"] = [callback.is_multihost_enabled(), callback.is_primary_host()]
    found["refused"] = []
    for wrong in ({"save_freq": "day"}, {"preservation_policy": EveryNSteps(2)}):
        try:
            CkptcoreCheckpoint(str(directory / "x"), **wrong)
        except ValueError as error:
            found["refused"].append(str(error))
    found["nothing"] = resume(str(directory / "x"), make())
    print(json.dumps(found))


def refused(directory: Path) -> None:
    """Train a model that cannot be saved, and then one that can, in the same directory."""

    class Model(keras.Sequential):  # type: ignore[misc]  # without types here
        """A model with a lock and a function in its state."""

        def get_state_tree(self, *args: Any) -> Any:
            """Add both."""
            return {**super().get_state_tree(*args), "lock": threading.Lock(), "deep": [print]}

    seen: list[int] = []
    batches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, _: seen.append(batch))
    model = make()
    wrong = Model(model.layers)
    wrong.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    message = ""
    try:
        wrong.fit(Batches(0), verbose=0, callbacks=[CkptcoreCheckpoint(str(directory)), batches])
    except UnsupportedLeafError as error:
        message = str(error)
    steps = len(seen)
    model.fit(Batches(0), verbose=0, callbacks=[CkptcoreCheckpoint(str(directory))])
    print(json.dumps({"steps": steps, "paths": [path in message for path in ("'pytree': lock", "'pytree': deep[0]")]}))


def keras_loads(directory: Path) -> None:
    """Load with Keras and Orbax what the callback saved in the layout of Orbax."""
    model = make()
    model.fit(Batches(0), epochs=2, verbose=0, callbacks=[CkptcoreCheckpoint(str(directory / "o"), layout="ocdbt")])
    loaded = make(1)
    loaded.load_weights(directory / "o")
    same = [np.array_equal(left, right) for left, right in zip(loaded.get_weights(), model.get_weights(), strict=True)]
    print(json.dumps({"same": all(same), "config": keras.saving.load_model(directory / "o").count_params()}))


def guide(directory: Path, page: Path) -> None:
    """Run the code blocks of the guide with this backend."""
    directory.mkdir(exist_ok=True)
    os.chdir(directory)
    module = page_module(page, "trainers")
    for block in code_blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            run_python(block, page, module)
    print(json.dumps("done"))
