"""Keras 3: a callback with the arguments of `keras.callbacks.OrbaxCheckpoint`, built on `ckptcore.Checkpointer`.

The names and contents of checkpoints are those of Keras: ``pytree``, ``model_config`` and ``assets``. Works with the
backends JAX and PyTorch, without copying variables to NumPy first. Orbax is not needed.
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import keras  # type: ignore[import-untyped]  # ships no types
from keras.callbacks import OrbaxCheckpoint  # type: ignore[import-untyped]
from keras.src.callbacks.monitor_callback import MonitorCallback  # type: ignore[import-untyped]
from keras.src.saving import saving_lib  # type: ignore[import-untyped]

from ckptcore import Checkpointer, CheckpointReader, Context
from ckptcore.errors import CheckpointNotFoundError
from ckptcore.policies import LatestN, PreservationPolicy
from ckptcore.protocols import Layout
from ckptcore.redaction import redacted_location

__all__ = ["CkptcoreCheckpoint", "resume"]


class CkptcoreCheckpoint(OrbaxCheckpoint):
    """Saves the state of a model at the end of epochs, or every few batches.

    Keras decides when to save, as in its `OrbaxCheckpoint`. The callback owns the directory while the model trains.
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
            mode: whether the metric is better if it is lower (``"min"``) or higher (``"max"``).
            save_freq: ``"epoch"``, or a number of batches. The step is the epoch, or the number of batches since the
                beginning.
            initial_value_threshold: the best value of the metric so far.
            max_to_keep: number of newest steps to keep; None: all.
            save_on_background: True to continue to train while a step is written.
            save_weights_only: True to save only the variables of the model, without the optimizer, metrics and the
                configuration.
            layout: the on-disk format of arrays. Keras loads ``"ocdbt"``.
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
        self.checkpointer: Checkpointer | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Own the directory, and check that the model, which Keras has built, can be saved.

        Raises:
            UnsupportedLeafError: lists what cannot be saved or restored.
        """
        checkpointer = Checkpointer(
            self.directory, preservation_policy=self._policy, layout=self._layout, context=self._context
        )
        try:
            checkpointer.check_checkpointables(self._values())
        except BaseException:
            checkpointer.close()  # Keras does not call `on_train_end` after an error
            raise
        self.checkpointer = checkpointer

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for running saves, and release the directory.

        Raises:
            CheckpointError: a save in the background failed.
        """
        checkpointer, self.checkpointer = self.checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def wait_until_finished(self) -> None:
        """Wait for running saves. See `on_train_end`."""
        if self.checkpointer is not None:
            self.checkpointer.wait()

    def is_multihost_enabled(self) -> bool:
        """Return True in a job of several processes of JAX."""
        return _process()[1] > 1

    def is_primary_host(self) -> bool:
        """Return True in the first process of the job."""
        return _process()[0] == 0

    def _save_checkpoint(self, step: int, logs: Any = None) -> None:
        """Save a step. Keras calls this when a step is due."""
        assert self.checkpointer is not None
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        self.checkpointer.save_checkpointables(step, self._values(), metrics=metrics)
        if not self.save_on_background:
            self.checkpointer.wait()
        if self.verbose and self.is_primary_host():
            print(f"\nStep {step}: saved to {redacted_location(self.directory)}")

    def _values(self) -> dict[str, Any]:
        """Return the objects that a step has."""
        tree = self.model.get_state_tree()
        if self.save_weights_only:
            return {"pytree": {name: tree[name] for name in ("trainable_variables", "non_trainable_variables")}}
        values = {"pytree": tree, "model_config": {"config": saving_lib._serialize_model_as_json(self.model)[0]}}
        if (assets := saving_lib._save_assets_to_dict(self.model)) is not None:
            values["assets"] = assets
        return values


def resume(directory: str, model: Any, *, context: Context | None = None) -> int | None:
    """Load the newest valid step into a compiled model, with its optimizer and metrics if they were saved.

    Returns:
        The step; None if the directory has none. After ``save_freq="epoch"``, continue to train with
        ``model.fit(..., initial_epoch=step + 1)``.

    Raises:
        TreeMismatchError: the variables of the model differ from those that were saved.
    """
    with contextlib.suppress(CheckpointNotFoundError), CheckpointReader(directory, context=context) as reader:
        reader.load_checkpointables(into={"pytree": model})
        return reader.restored_step
    return None


def _process() -> tuple[int, int]:
    """Return the index of this process, and the number of processes. As in Keras, only JAX has several."""
    if keras.backend.backend() != "jax":
        return 0, 1
    import jax  # the backend PyTorch does not need it

    return jax.process_index(), jax.process_count()
