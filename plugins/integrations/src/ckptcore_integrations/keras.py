"""Keras 3: a callback with the arguments of `keras.callbacks.OrbaxCheckpoint`, built on `ckptcore.Checkpointer`.

The names and contents of checkpoints are those of Keras: ``pytree``, ``model_config`` and ``assets``. In addition,
``callbacks`` has the counters of all callbacks, and ``random`` the global random generators of each process. The
callback works with the backends JAX and PyTorch, without copying variables to NumPy first. Orbax is not needed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Literal

import keras  # type: ignore[import-untyped]  # ships no types
from keras.callbacks import (  # type: ignore[import-untyped]
    OrbaxCheckpoint,
)
from keras.src.callbacks.monitor_callback import MonitorCallback  # type: ignore[import-untyped]
from keras.src.saving import saving_lib  # type: ignore[import-untyped]

from ckptcore import Checkpointer, CheckpointReader, Context, PerProcess
from ckptcore.errors import CheckpointExistsError, CheckpointNotFoundError, DirectoryInUseError, TreeMismatchError
from ckptcore.events import logger_named
from ckptcore.policies import LatestN, PreservationPolicy
from ckptcore.protocols import Layout
from ckptcore.redaction import redacted_location
from ckptcore.training import expanded_location
from ckptcore_integrations.keras_callbacks import RandomGenerators, load_counters, neighbours, state_of_counters
from ckptcore_integrations.own_options import own_options
from ckptcore_integrations.saving_threads import start

__all__ = ["CkptcoreCheckpoint", "resume"]

logger = logger_named("ckptcore.integrations.keras")

_RESUMED: Final = "_ckptcore_resumed"
"""Attribute of a model: the step that `resume` loaded, by directory. The next training restores the counters of that
step after `on_train_begin` of the callbacks has reset them."""


@own_options()
class CkptcoreCheckpoint(OrbaxCheckpoint):
    """Saves the state of a model at the end of epochs, or every few batches.

    Keras decides when to save, as in its `OrbaxCheckpoint`. The callback is called after all others, so a step contains
    their changes, such as the learning rate. It owns the directory only while it checks or saves, so that a training
    that ends with an exception leaves no owner behind.
    """

    def __init__(
        self,
        directory: str,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
        max_to_keep: int | None = 1,
        save_on_background: bool = True,
        save_weights_only: bool = False,
        *,
        layout: str | Layout = "safetensors",
        preservation_policy: PreservationPolicy | None = None,
        context: Context | None = None,
    ) -> None:
        """Choose when to save, and what to keep.

        Args:
            directory: a path or URL.
            monitor: the metric that `save_best_only` compares.
            verbose: 1 to print each save, else 0.
            save_best_only: True to save only if the metric is better than before.
            mode: ``"min"`` if lower values of the metric are better, ``"max"`` if higher values are.
            save_freq: ``"epoch"``, or a number of batches. The step is the epoch, or the number of batches since the
                beginning.
            initial_value_threshold: the best value of the metric so far.
            max_to_keep: number of the newest steps to keep; None to keep all.
            save_on_background: True to continue to train while a step is written.
            save_weights_only: True to save only the variables of the model, without the optimizer, the metrics and
                the configuration.
            layout: the on-disk format of arrays. Keras itself can load ``"ocdbt"``.
            preservation_policy: chooses the steps to keep. Needs ``max_to_keep=None``. `BestN` compares `monitor`.
            context: options.

        Raises:
            ValueError: `save_freq` is neither ``"epoch"`` nor a number; or both `max_to_keep` and a policy are given.
        """
        MonitorCallback.__init__(self, monitor, mode, initial_value_threshold)
        if save_freq != "epoch" and not isinstance(save_freq, int):
            raise ValueError(f"save_freq={save_freq!r}: expected 'epoch' or a number of batches")
        if preservation_policy is not None and max_to_keep is not None:
            raise ValueError("preservation_policy chooses what to keep: pass max_to_keep=None with it")
        self.directory = directory
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_freq = save_freq
        self.max_to_keep = max_to_keep
        self.save_on_background = save_on_background
        self.save_weights_only = save_weights_only
        self._batches_seen_since_last_saving = 0
        self._last_batch_seen: int | None = None
        self._total_batches_seen = 0
        self._policy = LatestN(max_to_keep) if max_to_keep is not None else preservation_policy
        self._layout = layout
        self._context = context
        self._neighbours: Sequence[Any] = [self]
        self._known_steps: set[int] = set()  # steps in the directory when a training or a save began
        self._last_saved: int | None = None
        self._saved_model: Callable[[], Any] = lambda: None  # the model of that step, if not deleted
        self._resumed: int | None = None
        self._is_first_epoch = True
        self._running: Future[None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the model, which Keras has built, can be saved into the directory.

        Raises:
            UnsupportedLeafError: lists what cannot be saved or restored.
            DirectoryInUseError: another program saves into the directory.
        """
        self.wait_until_finished()  # a save of a training that ended with an exception
        self._neighbours = neighbours(self, sys._getframe())
        self._resumed = vars(self.model).get(_RESUMED, {}).pop(_absolute(self.directory), None)
        if self._saved_model() is not self.model:
            self._last_saved = None
        self._is_first_epoch = True
        with self._open() as checkpointer:
            checkpointer.check_checkpointables(self._values())
            self._known_steps = set(checkpointer.steps)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Before the first epoch, restore counters, or refuse a directory with steps that would be saved again.

        Raises:
            CheckpointExistsError: the directory has such steps, and `resume` did not load one of them.
        """
        if not self._is_first_epoch:
            return
        self._is_first_epoch = False
        if self._resumed is not None:
            self._load_others(self._resumed, epoch)
            return
        last = max(self._known_steps, default=-1)
        first = epoch if self.save_freq == "epoch" else self._total_batches_seen + 1
        if last > first or (last == first and last != self._last_saved):
            raise CheckpointExistsError(
                f"{redacted_location(self.directory)} has steps up to {last}, and this training would save step "
                f"{first} and later ones. To go on, call resume(directory, model), and pass initial_epoch= of the next "
                "epoch to fit. To begin a new run, choose another directory"
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for the running save.

        Raises:
            CheckpointError: a save in the background failed.
        """
        self.wait_until_finished()

    def wait_until_finished(self) -> None:
        """Wait for the running save. See `on_train_end`."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def is_multihost_enabled(self) -> bool:
        """Return True in a job of several processes of JAX."""
        return _process()[1] > 1

    def is_primary_host(self) -> bool:
        """Return True in the first process of the job."""
        return _process()[0] == 0

    def _save_checkpoint(self, step: int, logs: Any = None) -> None:
        """Save a step. Keras calls this when a step is due."""
        self.wait_until_finished()
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        checkpointer = self._open()
        try:
            self._expect_known(checkpointer)
            # A training that resumed from an older step saves the later steps again.
            overwrite: Literal["best-effort", False] = (
                "best-effort" if self._resumed is not None or step == self._last_saved else False
            )
            checkpointer.save_checkpointables(step, self._values(), metrics=metrics, overwrite=overwrite)
        except BaseException:
            checkpointer.close()
            raise
        self._known_steps.add(step)
        self._last_saved, self._saved_model = step, weakref.ref(self.model)
        self._running = start(checkpointer.close, "ckptcore-keras")
        if not self.save_on_background:
            self.wait_until_finished()
        if self.verbose and self.is_primary_host():
            text = f"\nStep {step}: saved to {redacted_location(self.directory)}"
            try:
                print(text)
            except UnicodeEncodeError:  # the output is ASCII or Latin-1
                print(text.encode("ascii", "backslashreplace").decode("ascii"))

    def _open(self) -> Checkpointer:
        return Checkpointer(
            self.directory,
            preservation_policy=self._policy,
            layout=self._layout,
            if_in_use="take over",  # does not take the directory from a running job that renews its lease
            other_files=True,
            context=self._context,
        )

    def _expect_known(self, checkpointer: Checkpointer) -> None:
        """Refuse to save next to another training."""
        if others := sorted(set(checkpointer.steps) - self._known_steps):
            raise DirectoryInUseError(
                f"{redacted_location(self.directory)}: another program has saved step {others[-1]} since this training "
                "began. End one of them, or train in another directory"
            )

    def _load_others(self, step: int, epoch: int) -> None:
        """Load counters and random states. Called late, because the start of a training changes both."""
        with CheckpointReader(self.directory, context=self._context) as reader:
            stored = reader.metadata(step).checkpointables
            if "callbacks" in stored:
                load_counters(self._neighbours, reader.load_checkpointables(step, ["callbacks"])["callbacks"], epoch)
            if "random" in stored:
                try:
                    reader.load_checkpointables(step, into={"random": PerProcess(RandomGenerators())})
                except TreeMismatchError as error:
                    logger.warning("random numbers continue from the seed: %s", error)

    def _values(self) -> dict[str, Any]:
        """Return the objects to save in a step."""
        tree = self.model.get_state_tree()
        if self.save_weights_only:
            return {"pytree": {name: tree[name] for name in ("trainable_variables", "non_trainable_variables")}}
        values = {"pytree": tree, "model_config": {"config": saving_lib._serialize_model_as_json(self.model)[0]}}
        if (assets := saving_lib._save_assets_to_dict(self.model)) is not None:
            values["assets"] = assets
        values["callbacks"] = state_of_counters(self._neighbours)
        values["random"] = PerProcess(RandomGenerators())
        return values


@own_options()
def resume(directory: str, model: Any, *, context: Context | None = None) -> int | None:
    """Load the newest valid step into a compiled model, with its optimizer and metrics if they were saved.

    The next training of the model with `CkptcoreCheckpoint` in this directory also begins with the saved counters of
    its callbacks, such as `EarlyStopping`, and with the saved states of the global random generators.

    Args:
        directory: a path or URL.
        model: the model.
        context: options.

    Returns:
        The step; None if the directory has none. After ``save_freq="epoch"``, continue to train with
        ``model.fit(..., initial_epoch=step + 1)``.

    Raises:
        TreeMismatchError: the variables of the model differ from those that were saved.
    """
    with contextlib.suppress(CheckpointNotFoundError), CheckpointReader(directory, context=context) as reader:
        reader.load_checkpointables(into={"pytree": model})
        assert reader.restored_step is not None
        vars(model)[_RESUMED] = {_absolute(directory): reader.restored_step}  # with setattr, Keras would track it
        return reader.restored_step
    return None


def _absolute(directory: str) -> str:
    return directory if "://" in directory else os.path.abspath(expanded_location(directory))


def _process() -> tuple[int, int]:
    """Return the index of this process, and the number of processes. As in Keras, only JAX has several."""
    if keras.backend.backend() != "jax":
        return 0, 1
    import jax  # the backend PyTorch does not need it

    return jax.process_index(), jax.process_count()
