"""PyTorch Lightning: checkpoints of a Trainer that are saved and loaded with ckptcore.

`CkptcoreIO` is a `CheckpointIO` for `Trainer(plugins=[...])`. `FSDPStrategy` and `ModelParallelStrategy` do not use a
`CheckpointIO` for sharded state: replace them by the strategies of this module. Before the first step of `fit`, these
classes check that the state can be saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import ckptcore
from ckptcore import PLACEHOLDER, AbstractArray, Context, Matching
from ckptcore.context import JobOptions, SingleProcess
from ckptcore.errors import CheckpointError
from ckptcore.events import logger_named
from ckptcore.protocols import Layout
from ckptcore.results import SaveHandle
from ckptcore.training import expanded_location
from ckptcore_integrations.hyperparameters import Notes
from ckptcore_integrations.lightning_paths import (
    CommitsLater,
    as_directory,
    create_parent,
    delete,
    finish_replacement,
    install,
    is_directory,
    is_replaced_later,
    recover,
    replace_by_link,
    replacing_path,
    saver_of,
    step_of,
    to_load,
)
from ckptcore_integrations.own_options import own_options
from ckptcore_integrations.saving_threads import start

__all__ = ["CheckState", "CkptcoreFSDPStrategy", "CkptcoreIO", "CkptcoreModelParallelStrategy", "ShardedCheckpoints"]

logger = logger_named("ckptcore.integrations.lightning")

_Path: TypeAlias = str | Path
_T = TypeVar("_T")

_SHARDED: Final = ("state_dict", "optimizer_states")
"""Entries of a Lightning checkpoint that every rank saves. The leader saves the other entries."""

_NOTES: Final = frozenset(
    getattr(kind, f"CHECKPOINT_HYPER_PARAMS_{part}")
    for kind in (LightningModule, LightningDataModule)
    for part in ("KEY", "NAME", "TYPE")
)
"""Entries of a Lightning checkpoint with the hyperparameters of the module and of the data."""

_REQUEUED: Final = "hpc_ckpt_"
"""Prefix of the names of checkpoints that Lightning saves before SLURM requeues the job."""

_ALONE: Final = JobOptions(coordinator=SingleProcess())

_ONLY_SHARDED: Final = "checkpoints are saved by all ranks, as sharded state, which any number of ranks can load"


@own_options()
class CkptcoreIO(CommitsLater, CheckpointIO):
    """Saves and loads the checkpoints of a Lightning Trainer. Each is a directory.

    Lightning saves on rank 0 and loads on every rank, so each process works alone. A save replaces an existing
    checkpoint atomically. Files that Lightning wrote are also loaded, replaced and removed, so that existing runs can
    continue. Loading runs no code from a checkpoint, with any value of `weights_only`.
    """

    def __init__(
        self, *, layout: str | Layout = "safetensors", context: Context | None = None, asynchronous: bool = False
    ) -> None:
        """Choose how to save.

        Args:
            layout: the on-disk format of arrays.
            context: options, such as those of storages. Its job must not be set.
            asynchronous: True to write in the background, from a copy. Errors are raised by the next save or load, or
                at the end of the run. Links are created and checkpoints removed after the running save is
                committed. Functions of Lightning that read the disk wait for the running save. A save also waits for
                its own commit if it replaces a file of Lightning, or if SLURM ends the job after it.

        Raises:
            ValueError: the Context has options of a job.
        """
        self._layout = layout
        self._context = _alone(context)
        self._asynchronous = asynchronous
        self._notes = Notes(_NOTES, layout=layout, context=self._context)
        self._running: SaveHandle | None = None
        self._links: list[Future[None]] = []
        self._to_remove: list[_Path] = []

    def check(self, checkpoint: dict[str, Any]) -> None:
        """Check that a checkpoint can be saved. See `ckptcore.check`."""
        ckptcore.check(self._notes.plain(checkpoint), layout=self._layout, context=self._context)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint to a path or URL. See `ckptcore.save`.

        Hyperparameters of any type are saved. One warning names those that a load will return as text.

        Raises:
            TypeError: there are `storage_options`; give them to the Context.
        """
        _refuse_storage_options(storage_options)
        self.wait()
        path = expanded_location(path)
        checkpoint = self._notes.plain(checkpoint)
        recover(path, self._context)
        if is_replaced_later(path, self._context):
            self._save(ckptcore.save, replacing_path(path), checkpoint)
            finish_replacement(path, self._context)
        elif os.path.basename(path).startswith(_REQUEUED) and "://" not in os.fspath(path):
            # Lightning parses every name that contains this prefix, including hidden directories of a killed save.
            written = os.path.join(os.path.dirname(path), "requeued" + os.path.basename(path).removeprefix(_REQUEUED))
            self._save(ckptcore.save, written, checkpoint)
            os.rename(written, path)
        else:
            create_parent(path)
            self._running = self._save(ckptcore.save_async if self._asynchronous else ckptcore.save, path, checkpoint)

    def _save(
        self,
        save: Callable[..., SaveHandle | None],
        path: _Path,
        state: dict[str, Any],
    ) -> SaveHandle | None:
        return save(as_directory(path), state, layout=self._layout, overwrite="with-other-files", context=self._context)

    def load_checkpoint(
        self, path: _Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, with tensors on the CPU or on the device `map_location`. See `ckptcore.load`.

        Raises:
            TypeError: `map_location` is a function or a mapping of devices.
        """
        device = _device(map_location)
        self.wait()
        location = to_load(expanded_location(path), self._context)
        checkpoint: dict[str, Any] = ckptcore.load(location, framework="torch", context=self._context)
        self._notes.restore(checkpoint)
        if device is None:
            return checkpoint
        return {
            name: part if name in _NOTES else apply_to_collection(part, torch.Tensor, lambda tensor: tensor.to(device))
            for name, part in checkpoint.items()
        }

    def remove_checkpoint(self, path: _Path) -> None:
        """Delete a checkpoint, if it exists. After a save in the background, the next `wait` deletes the checkpoint."""
        path = expanded_location(path)
        if self._running is None:
            delete(path, self._context)
        else:
            self._to_remove.append(path)

    def teardown(self) -> None:
        """Wait for the running save."""
        self.wait()

    def wait(self) -> None:
        """Wait for the running save and its links, then do pending deletions. After a failed save, delete nothing."""
        if self._running is not None:
            self._running.exception()  # Ctrl-C can end this wait; then the next call waits for the same save
        running, self._running = self._running, None
        links, self._links = self._links, []
        paths, self._to_remove = self._to_remove, []
        if running is not None:
            running.result()
        for created in links:
            created.result()
        for path in paths:
            delete(path, self._context)

    def link(self, path: str, link: str) -> None:
        """Link to a checkpoint. After a save in the background, create the link once the save is committed."""
        running = self._running
        if running is None:
            replace_by_link(path, link, self._context)
            return

        def link_once_saved() -> None:
            running.result()
            replace_by_link(path, link, self._context)

        self._links.append(start(link_once_saved, "ckptcore-link"))

    def step(self, path: str) -> int | None:
        """Return the global step of a checkpoint, or None if it cannot be read."""
        return step_of(path, self._context)


class CheckState(Callback):
    """Checks that a `CkptcoreIO` can save the state, before the first step of a `fit`.

    A `CheckpointIO` has no hook for the start of a training. So an entry point of this distribution lets Lightning add
    this callback to each Trainer that is created after this module has been imported.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that the strategy of a training uses the `CkptcoreIO`.

        Raises:
            CheckpointError: the strategy does not use the `CkptcoreIO`, or cannot load checkpoints that it saves with
                the `CkptcoreIO`.
        """
        strategy = trainer.strategy
        if stage == TrainerFn.FITTING and isinstance(saver_of(strategy.checkpoint_io), CkptcoreIO):
            for kind, remedy in _STRATEGIES_WITHOUT_IO.items():
                if isinstance(strategy, kind):
                    raise CheckpointError(f"plugins=[CkptcoreIO()] with {type(strategy).__name__}: {remedy}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the state that Lightning would save now. Rank 0 checks, and all ranks raise an error if it fails.

        Raises:
            UnsupportedLeafError: raised on rank 0. Lists what cannot be saved.
            CheckpointError: raised on the other ranks, with the message of rank 0.
        """
        io = saver_of(trainer.strategy.checkpoint_io)
        if isinstance(io, CkptcoreIO):
            state = _state_of(trainer)
            _by_leader(trainer.strategy, lambda: io.check(state))


@own_options()
class ShardedCheckpoints(CommitsLater, Strategy):
    """Mixin for strategies with sharded state: all ranks save and load one checkpoint together.

    Each rank saves its shards of the state dicts of the model and of the optimizers. Rank 0 saves the other entries.
    Any number of ranks can load the checkpoint.
    """

    def __init__(self, *, layout: str | Layout = "dcp", context: Context | None = None, **options: Any) -> None:
        """Choose how to save.

        Args:
            layout: the on-disk format of arrays.
            context: options of saves and loads.
            options: the arguments of the strategy.
        """
        super().__init__(**options)
        self._checkpoint_layout = layout
        self._checkpoint_context = context or Context()
        self._alone = replace(self._checkpoint_context, job=_ALONE)
        self._notes = Notes(_NOTES, layout=layout, context=self._alone)

    def on_train_start(self) -> None:
        """Check that the state can be saved. Lightning calls this on all ranks before the first step.

        Raises:
            UnsupportedLeafError: lists what cannot be saved.
            RankFailedError: another rank has state that cannot be saved.
            CheckpointError: a callback saves sharded tensors.
        """
        super().on_train_start()
        assert self.lightning_module is not None
        state = _state_of(self.lightning_module.trainer)
        _refuse_other_shards(state)
        own = self._own(state)
        ckptcore.check(own, layout=self._checkpoint_layout, context=self._checkpoint_context)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint to a path or URL. All ranks call this. See `ckptcore.save`.

        Raises:
            TypeError: there are `storage_options`; give them to the Context.
        """
        _refuse_storage_options(storage_options)
        own, filepath = self._own(checkpoint), expanded_location(filepath)

        def prepare() -> tuple[_Path, bool]:
            recover(filepath, self._alone)
            return filepath, is_replaced_later(filepath, self._alone)

        path, replaces = _by_leader(self, prepare)
        ckptcore.save(
            as_directory(replacing_path(path) if replaces else path),
            own,
            layout=self._checkpoint_layout,
            overwrite="with-other-files",
            context=self._checkpoint_context,
        )
        if replaces:
            _by_leader(self, lambda: finish_replacement(path, self._alone))

    def load_checkpoint(self, checkpoint_path: _Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the state of the model, and of the optimizers when fitting. Return the other entries.

        All ranks call this. No code from the checkpoint runs, with any value of `weights_only`.

        Raises:
            TreeMismatchError: the checkpoint differs from the model or the optimizers, and loading is strict.
            CheckpointError: a fit needs the optimizers, and the checkpoint has none; or rank 0 failed.
        """
        path, stored = _by_leader(self, lambda: self._find(expanded_location(checkpoint_path)))
        model, module = self.model, self.lightning_module
        assert model is not None and module is not None
        optimizers = self.optimizers if module.trainer.state.fn == TrainerFn.FITTING else []
        state: dict[str, Any] = {"state_dict": get_model_state_dict(model)}
        if optimizers:
            states = [get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
            state["optimizer_states"] = _with_saved_parameters(states, stored, path)
        ckptcore.load_into(
            path,
            state,
            select=ckptcore.select.names(*state),
            matching=Matching() if module.strict_loading else Matching(unexpected="ignore", missing="keep"),
            context=self._checkpoint_context,
        )
        set_model_state_dict(model, state["state_dict"], options=StateDictOptions(strict=module.strict_loading))
        for optimizer, optimizer_state in zip(optimizers, state.get("optimizer_states", ()), strict=True):
            # Not strict, because a parameter that never had a gradient has no state.
            set_optimizer_state_dict(model, optimizer, optimizer_state, options=StateDictOptions(strict=False))
        others: dict[str, Any] = ckptcore.load(path, _others(stored), context=self._checkpoint_context)
        others = {name: part for name, part in others.items() if name not in _SHARDED}
        self._notes.restore(others)
        return others

    def _find(self, path: _Path) -> tuple[_Path, dict[str, Any]]:
        """Return the actual location of the checkpoint at a path, and its tree without arrays."""
        to_read = to_load(path, self._alone)
        return to_read, ckptcore.metadata(to_read, context=self._alone).abstract

    def remove_checkpoint(self, filepath: _Path) -> None:
        """Delete a checkpoint, if it exists. Only rank 0 deletes."""
        if self.is_global_zero:
            delete(expanded_location(filepath), self._alone)

    def wait(self) -> None:
        """Do nothing: no save runs in the background."""

    def link(self, path: str, link: str) -> None:
        """Link to a checkpoint."""
        replace_by_link(path, link, self._alone)

    def step(self, path: str) -> int | None:
        """Return the global step of a checkpoint, or None if it cannot be read."""
        return step_of(path, self._alone)

    def _own(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the entries that this rank saves."""
        own = {name: value for name, value in checkpoint.items() if self.is_global_zero or name in _SHARDED}
        return self._notes.plain(own)


class CkptcoreFSDPStrategy(ShardedCheckpoints, FSDPStrategy):
    """`FSDPStrategy` that saves sharded state with ckptcore. Arguments by keyword."""

    def __init__(self, *, state_dict_type: str = "sharded", **options: Any) -> None:
        """Create the strategy.

        Raises:
            ValueError: `state_dict_type` is not ``"sharded"``.
        """
        if state_dict_type != "sharded":
            raise ValueError(f"state_dict_type={state_dict_type!r}: {_ONLY_SHARDED}. Leave it 'sharded'")
        super().__init__(state_dict_type=state_dict_type, **options)


class CkptcoreModelParallelStrategy(ShardedCheckpoints, ModelParallelStrategy):
    """`ModelParallelStrategy` that saves sharded state with ckptcore. Arguments by keyword."""

    def __init__(self, *, save_distributed_checkpoint: bool = True, **options: Any) -> None:
        """Create the strategy.

        Raises:
            ValueError: `save_distributed_checkpoint` is False.
        """
        if not save_distributed_checkpoint:
            raise ValueError(f"save_distributed_checkpoint=False: {_ONLY_SHARDED}. Leave it True")
        super().__init__(save_distributed_checkpoint=True, **options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, with sharded tensors."""
        wrapped = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps optimizers in a class of its own
        is_new = not wrapped.state  # the same on all ranks: each has a shard of each parameter
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if is_new:  # PyTorch made a step only to create the state: drop this state
            wrapped.state.clear()
            state = {**state, "state": {}}
        return state


_STRATEGIES_WITHOUT_IO: Final[dict[type[Strategy], str]] = {
    ShardedCheckpoints: "this strategy saves by itself. Leave out the plugin, and give its options to the strategy",
    FSDPStrategy: "this strategy cannot load what a CheckpointIO saves. Use strategy=CkptcoreFSDPStrategy() instead",
    ModelParallelStrategy: (
        "this strategy cannot load what a CheckpointIO saves. Use strategy=CkptcoreModelParallelStrategy() instead"
    ),
    DeepSpeedStrategy: (
        "DeepSpeed saves by itself, and no CheckpointIO is used. Leave out the plugin, or shard the training by "
        "strategy=CkptcoreFSDPStrategy()"
    ),
}
"""Strategies that do not work with a `CkptcoreIO`, with the remedy for each."""


def _with_saved_parameters(states: list[Any], stored: dict[str, Any], path: _Path) -> list[Any]:
    """Return optimizer states that contain only the parameters with a state in the checkpoint.

    An optimizer has no state for a parameter that never had a gradient, but PyTorch creates such a state to load into.

    Raises:
        CheckpointError: the checkpoint has no optimizers.
    """
    saved = stored.get("optimizer_states")
    if saved is None:
        raise CheckpointError(
            f"{os.fspath(path)} has only the model, as save_weights_only=True saves it: the optimizers cannot be "
            "restored. Resume from another checkpoint, or load the weights into the module before fit()"
        )
    known = [set(part["state"]) for part in saved] + [set()] * len(states)
    return [
        {**state, "state": {name: part for name, part in state["state"].items() if name in names}}
        for state, names in zip(states, known, strict=False)
    ]


def _refuse_other_shards(checkpoint: dict[str, Any]) -> None:
    """Refuse sharded tensors in entries that rank 0 alone saves.

    Raises:
        CheckpointError: names the entry.
    """

    def refuse(_: object) -> None:
        raise CheckpointError(
            f"{name}: a callback or the module saves sharded tensors in this entry. Only those of the model and of the "
            "optimizers can be restored: leave the callback out, or train with DDP and CkptcoreIO"
        )

    for name, part in checkpoint.items():
        if name not in _SHARDED:
            apply_to_collection(part, (DTensor, ShardedTensor), refuse)


def _others(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the request for entries that all ranks load in full: tensors on the CPU. Omits the sharded state."""

    def leaf(array: AbstractArray) -> torch.Tensor | AbstractArray:
        dtype = getattr(torch, array.dtype.name, None)
        if array.framework == "numpy" or not isinstance(dtype, torch.dtype):
            return array
        return torch.empty(array.shape, dtype=dtype, device="meta")

    return {
        name: PLACEHOLDER if name in _SHARDED else apply_to_collection(part, AbstractArray, leaf)
        for name, part in stored.items()
    }


def _state_of(trainer: Any) -> dict[str, Any]:
    """Return the state that the Trainer would save now, with optimizers in place of their states.

    The result contains the optimizers, because sharded strategies make an optimizer step to create states that do not
    exist yet. The result is empty if a hook of the program fails, for example because the training has not started.
    """
    savers = trainer.checkpoint_callbacks
    only_weights = bool(savers) and all(getattr(saver, "save_weights_only", False) for saver in savers)
    trainer.strategy.optimizer_state = lambda optimizer: optimizer
    try:
        state: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(only_weights)  # as `save_checkpoint` does
    except Exception:  # any hook can fail, for example if it reads a metric of the training
        logger.warning("the state is not checked before the training: a hook cannot save it yet", exc_info=True)
        return {}
    finally:
        del trainer.strategy.optimizer_state
    return state


def _by_leader(strategy: Strategy, call: Callable[[], _T]) -> _T:
    """Call a function on rank 0, and return its result on all ranks.

    If the function raises, rank 0 raises the same error, and the other ranks raise a `CheckpointError`.
    """
    outcome: tuple[_T | None, str] = None, ""
    failure: Exception | None = None
    if strategy.is_global_zero:
        try:
            outcome = call(), ""
        except Exception as error:  # noqa: BLE001  # the other ranks wait for the outcome
            failure, outcome = error, (None, f"rank 0 failed: {type(error).__name__}: {error}")
    result, message = strategy.broadcast(outcome)
    if failure is not None:
        raise failure
    if message:
        raise CheckpointError(message)
    value: _T = result
    return value


def _alone(context: Context | None) -> Context:
    """Return a Context with which this process saves and loads without the other ranks."""
    context = context or Context()
    if context.job != JobOptions():
        raise ValueError(
            "CkptcoreIO(context=...): a job is not supported, because rank 0 saves alone; leave out Context(job=...)"
        )
    return replace(context, job=_ALONE)


def _refuse_storage_options(storage_options: object) -> None:
    if storage_options is not None:
        raise TypeError("storage_options are not supported: pass Context(storage={scheme: options}) as context instead")


def _device(map_location: object) -> torch.device | None:
    """Return the device to load to; None for the CPU."""
    if map_location is None or isinstance(map_location, torch.device):
        return map_location
    if isinstance(map_location, str):
        return torch.device(map_location)
    raise TypeError(
        f"map_location={map_location!r}: pass a device or its name. Checkpoints do not record devices, so functions "
        "and mappings of devices cannot be applied"
    )


install(lambda path, device: CkptcoreIO().load_checkpoint(path, device), is_directory)
