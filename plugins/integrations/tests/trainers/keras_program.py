"""Programs that train a Keras model with `CkptcoreCheckpoint`. The last line that each function prints is JSON."""

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
from ckptcore import CheckpointReader, Context
from ckptcore.errors import CheckpointExistsError, DirectoryInUseError, UnsupportedLeafError
from ckptcore.events import Event
from ckptcore.policies import CustomSteps, EveryNSteps
from tests.docs.pages import code_blocks
from tests.docs.running import page_module, run_python
from tests.ownership.killed_owner import leave_lease

DIGITS = load_digits()


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # without types here
    """Four batches of images, in a different order in each epoch."""

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
        """Change to the order of the next epoch."""
        self.epoch += 1


def make(seed: int = 0) -> Any:
    """Return a compiled model with dropout and batch normalization."""
    keras.utils.clear_session()  # resets automatic names, for example those of seed generators
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
    """Train up to the 4th epoch. Start from the newest step, if one exists."""
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


def train_after_a_killed_job(directory: Path) -> None:
    """Train in a directory that still has the lease of a killed job."""
    killed = leave_lease(directory)
    train(directory)
    del killed


def train_with_callbacks(directory: Path, epochs: int = 10, **options: Any) -> None:
    """Train on shuffled arrays with callbacks that have counters. Start from the newest step, if one exists."""
    model = make()
    step = resume(str(directory), model)
    began = 0 if step is None else step + 1
    stop = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=1.0, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=1.0, verbose=0)
    best = keras.callbacks.ModelCheckpoint(str(directory) + ".weights.h5", "loss", save_best_only=True)
    best.save_weights_only = True
    history = model.fit(
        DIGITS.data[:64].astype("float32") / 16,
        DIGITS.target[:64],
        epochs=epochs,
        initial_epoch=began,
        shuffle=True,
        verbose=0,
        callbacks=[CkptcoreCheckpoint(str(directory), max_to_keep=None, **options), stop, plateau, best],
    )
    print(
        json.dumps(
            {
                "began": began,
                "losses": history.history["loss"],
                "rates": history.history["learning_rate"],
                "counters": [stop.wait, stop.best, stop.best_epoch, plateau.wait, plateau.best, best.best],
                "variables": digest(model),
            }
        )
    )


def train_with_averages(directory: Path) -> None:
    """Train with `SwapEMAWeights` without a break, and again with an interrupt and a resume. Compare the results."""

    def run(place: Path, *others: Any) -> dict[str, str]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, name="out")], name="model")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9, name="adam"), loss)
        step = resume(str(place), model)
        began = 0 if step is None else step + 1
        checkpoint = CkptcoreCheckpoint(str(place))
        callbacks = [checkpoint, keras.callbacks.SwapEMAWeights(swap_on_epoch=True), *others]
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(Batches(began), epochs=4, initial_epoch=began, shuffle=False, verbose=0, callbacks=callbacks)
        checkpoint.wait_until_finished()
        return digest(model)

    whole = run(directory / "whole")
    run(directory / "interrupted", _Interrupt())
    print(json.dumps(run(directory / "interrupted") == whole))


def kill_in_third_save(directory: Path) -> None:
    """Train, and kill this process in the third save, after its files are written and before its commit."""

    def kill(event: Event) -> None:
        if event.phase == "write" and event.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    train(directory, context=Context(observers=[kill]))


def kill_with_callbacks(directory: Path) -> None:
    """Train with callbacks that have counters, and kill this process in the third save."""

    def kill(event: Event) -> None:
        if event.phase == "write" and event.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    train_with_callbacks(directory, context=Context(observers=[kill]))


class _Interrupt(keras.callbacks.Callback):  # type: ignore[misc]  # without types here
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Interrupt the training in the second epoch."""
        if int(self.model.optimizer.iterations) == 6:
            raise KeyboardInterrupt


def interrupted(directory: Path) -> None:
    """Interrupt a training as with Ctrl-C, and train again in its directory, with and without a resume."""
    place = str(directory / "run")
    checkpoint = CkptcoreCheckpoint(place)
    with contextlib.suppress(KeyboardInterrupt):
        make().fit(Batches(0), epochs=4, verbose=0, callbacks=[checkpoint, _Interrupt()])
    checkpoint.wait_until_finished()
    ckptcore.Checkpointer(place).close()  # succeeds, because the directory has no owner
    seen: list[int] = []
    batches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, _: seen.append(batch))
    message = ""
    try:
        make().fit(Batches(0), epochs=4, verbose=0, callbacks=[CkptcoreCheckpoint(place), batches])
    except CheckpointExistsError as error:
        message = str(error)
    model = make()
    step = resume(place, model)
    model.fit(Batches(1), epochs=4, initial_epoch=1, verbose=0, callbacks=[checkpoint])
    newest = CheckpointReader(place).latest
    resume(place, model)  # to train the last epoch again
    model.fit(Batches(3), epochs=4, initial_epoch=3, verbose=0, callbacks=[checkpoint])
    print(json.dumps({"message": message, "batches": len(seen), "step": step, "newest": newest}))


def beside_another(directory: Path) -> None:
    """Train while another program saves into the same directory. Print the error."""
    model = make()
    message = ""

    class Other(keras.callbacks.Callback):  # type: ignore[misc]  # without types here
        """A callback that saves a step after the second epoch, as another program does."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Save."""
            if epoch == 1:
                with ckptcore.Checkpointer(str(directory)) as other:
                    other.save(7, {"x": 1})

    try:
        callbacks = [CkptcoreCheckpoint(str(directory), save_on_background=False), Other()]
        model.fit(Batches(0), epochs=4, verbose=0, callbacks=callbacks)
    except DirectoryInUseError as error:
        message = str(error)
    print(json.dumps(message))


def fit(directory: Path, **options: Any) -> list[str]:
    """Train 4 epochs, and return the saved steps."""
    model = make()
    model.fit(Batches(0), epochs=4, verbose=0, callbacks=[CkptcoreCheckpoint(str(directory), **options)])
    return sorted((path.name for path in directory.iterdir() if path.name.isdigit()), key=int)


def arguments(directory: Path) -> None:
    """Train with every argument of the callback, and print the saved steps."""
    results: dict[str, Any] = {}
    results["latest"] = fit(directory / "latest", save_on_background=False)
    results["all"] = fit(directory / "all", max_to_keep=None)
    results["best"] = fit(
        directory / "best", monitor="loss", mode="max", save_best_only=True, max_to_keep=None, layout="dcp"
    )
    results["batches"] = fit(directory / "batches", save_freq=3, max_to_keep=None)
    results["policy"] = fit(directory / "policy", max_to_keep=None, preservation_policy=CustomSteps([1]))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fit(directory / "weights", save_weights_only=True, verbose=1)
    results["weights"] = sorted(ckptcore.load(directory / "weights" / "3" / "pytree"))
    results["printed"] = printed.getvalue().count("saved to")
    callback = CkptcoreCheckpoint(str(directory / "x"))
    callback.wait_until_finished()
    results["hosts"] = [callback.is_multihost_enabled(), callback.is_primary_host()]
    results["refused"] = []
    for wrong in ({"save_freq": "day"}, {"preservation_policy": EveryNSteps(2)}):
        try:
            CkptcoreCheckpoint(str(directory / "x"), **wrong)
        except ValueError as error:
            results["refused"].append(str(error))
    results["nothing"] = resume(str(directory / "x"), make())
    print(json.dumps(results))


def refused(directory: Path) -> None:
    """Train a model that cannot be saved, and then a model that can be saved, in the same directory."""

    class Model(keras.Sequential):  # type: ignore[misc]  # without types here
        """A model with a lock and a function in its state."""

        def get_state_tree(self, *args: Any) -> Any:
            """Return the state with the lock and the function."""
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
    """Save with the callback in the layout of Orbax, and load the checkpoint with Keras and Orbax."""
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
